"""Everything that `doctor` can find, as data: code, severity, what is said, the command that mends it.

A row is added here before a check can report it. docs/doctor.md is made from this table.
"""

from __future__ import annotations

from hostd.doctor.finding import Finding, Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
REINSTALL = "apt install --reinstall pve-gpu-release && systemctl daemon-reload"

_ROWS = (
    # --- node ---
    Kind(
        "pid-namespace", W, "pid-namespace",
        "we run in a PID namespace that is not the machine's first one: the driver shortens its client lists here",
        "run pve-gpu-release on the host itself, not in a container",
        "NVML leaves out processes of outer namespaces without a word, so memory may seem to be nobody's.",
        "inode of /proc/self/ns/pid; the first one is 4026531836 on every kernel",
    ),
    Kind(
        "cgroup-v2-missing", E, "cgroup-v2",
        "no cgroup v2 tree is mounted: which processes a container has cannot be told",
        "take systemd.unified_cgroup_hierarchy=0 off the kernel command line (/etc/kernel/cmdline or "
        "/etc/default/grub), then reboot",
        "Ownership is decided by the v2 cgroup tree. Without it every verdict is `unknown`.",
        "/proc/self/mountinfo",
    ),
    Kind(
        "cgroup-hybrid", W, "cgroup-v2",
        "cgroup v1 and v2 are both in use (v2 at {mount})",
        "take systemd.unified_cgroup_hierarchy=0 off the kernel command line, then reboot",
        "Releases work, but Proxmox's units and drop-ins are made for the unified layout, and devices rules are v1's.",
        "/proc/self/mountinfo",
    ),
    Kind(
        "kernel-old", N, "kernel",
        "kernel {release} is older than 6.11: members of a container's PID namespace are found by a walk over the host",
        "apt install proxmox-kernel-6.11 or newer, then reboot (optional: it is slower, not wrong)",
        "Each look costs about 13 us per process of the host.",
        "uname -r",
    ),
    Kind(
        "no-systemd", N, "systemd",
        "this machine does not run systemd: units were looked at as files only",
        "on a Proxmox node: boot it normally",
        "Whether units are active cannot be told.",
        "/run/systemd/system",
    ),
    Kind(
        "no-proxmox", N, "container-units",
        "there is no pve-container@.service: this is no Proxmox VE node, nothing starts or stops containers here",
        "apt install pve-container (on a Proxmox VE node)",
        "The hookscript and the drop-in have nothing to hook into; releases by hand work.",
        "unit files of systemd",
    ),
    Kind(
        "journal-not-persistent", W, "journal",
        "the journal does not survive a reboot ({why})",
        "mkdir -p /var/log/journal && systemd-tmpfiles --create --prefix /var/log/journal && "
        "systemctl restart systemd-journald (and Storage=persistent in /etc/systemd/journald.conf)",
        "The audit trail (`log`, `explain`) is the journal: after a reboot it would be gone.",
        "Storage= of journald.conf and its drop-ins, /var/log/journal",
    ),
    Kind(
        "journal-unreachable", W, "journal",
        "journald cannot be reached: decisions are not recorded",
        "systemctl restart systemd-journald.socket systemd-journald",
        "Releases work, but leave no audit trail.",
        "/run/systemd/journal/socket, connected to",
    ),
    # --- python ---
    Kind(
        "pynvml-missing", E, "modules",
        "the Python module pynvml cannot be used: the driver cannot be asked, every verdict without holders is "
        "`unknown`",
        "apt install python3-pynvml (Debian section contrib)",
        "Holders are still found and ended; that the memory came back cannot be proven.",
        "import pynvml in a helper process",
    ),
    Kind(
        "yaml-missing", W, "modules",
        "the Python module yaml cannot be used: /etc/pve-gpu-release/config.yaml is ignored",
        "apt install python3-yaml",
        "The built-in defaults are in force, whatever the file says (on_dirty: block included).",
        "import yaml in a helper process",
    ),
    Kind(
        "systemd-python-missing", W, "modules",
        "the Python module systemd cannot be used: the daemon cannot be socket-activated or notify systemd",
        "apt install python3-systemd",
        "The command line and the hook do the work themselves; entries go to the journal by its own protocol.",
        "import systemd.journal, systemd.daemon in a helper process",
    ),
    Kind(
        "psutil-missing", N, "modules",
        "the Python module psutil cannot be used: processes are described with less detail",
        "apt install python3-psutil",
        "Holders, verdicts and signals do not depend on it.",
        "import psutil in a helper process",
    ),
    Kind(
        "proxmoxer-missing", N, "modules",
        "the Python module proxmoxer cannot be used: `hook enable` and `hook disable` do not work",
        "apt install python3-proxmoxer",
        "Hookscripts can be set by hand: pct set VMID -hookscript local:snippets/pve-gpu-release.",
        "import proxmoxer in a helper process",
    ),
    # --- driver ---
    Kind(
        "no-driver", N, "driver",
        "no NVIDIA driver is loaded, and no container asks for a GPU",
        "nothing to do unless this node should have GPUs",
        "There is nothing to release.",
        "/proc/devices",
    ),
    Kind(
        "driver-not-loaded", E, "driver",
        "no NVIDIA driver is loaded, but {containers} are given GPUs",
        "modprobe nvidia && nvidia-modprobe -c 0 -u; if that fails: dkms status, journalctl -k -g nvidia",
        "After a kernel update without matching module the containers start without a GPU, or not at all.",
        "/proc/devices, configurations of containers",
    ),
    Kind(
        "driver-mismatch", E, "nvml",
        "the driver's library and its kernel module are of different versions",
        "stop everything on the GPUs (pve-gpu-release ps), then: modprobe -r nvidia_uvm nvidia_drm nvidia_modeset "
        "nvidia && modprobe nvidia; or reboot the node",
        "NVML refuses to answer (\"Driver/library version mismatch\"): verdicts are `unknown`, never `released`.",
        "nvmlInit, /proc/driver/nvidia/version",
    ),
    Kind(
        "nvml-missing", E, "nvml",
        "NVML cannot be used: the driver cannot be asked",
        "install the driver's library libnvidia-ml.so.1 of the same version as the kernel module, and python3-pynvml",
        "Holders are found, but that the memory came back cannot be proven: verdicts are `unknown`.",
        "nvmlInit",
    ),
    Kind(
        "nvml-silent", E, "nvml",
        "the driver does not answer, or not completely",
        "journalctl -k -g NVRM; if nvidia-smi hangs too, the GPU needs a reset or the node a reboot",
        "Nothing can be verified; releases still find and end holders, the verdict is `unknown`.",
        "one snapshot through NVML within nvml.deadline",
    ),
    Kind(
        "nvml-wedged", E, "nvml",
        "a call into the driver has not come back: pid {pid} has been in {call} for {age}",
        "cat /proc/{pid}/stack; journalctl -k -g NVRM; reset the GPU or reboot the node",
        "Every further call would hang as well, so none is made: verdicts are `unknown` until it returns.",
        "the lock /run/pve-gpu-release/nvml.lock; the driver was not asked",
    ),
    Kind(
        "nvml-slow", W, "nvml",
        "the driver took {took} to answer for the first time",
        "systemctl enable --now nvidia-persistenced (or: nvidia-smi -pm 1)",
        "Each look at the driver costs that much; hooks have a budget.",
        "time from starting the child to the first answer",
    ),
    Kind(
        "persistence-off", W, "persistence",
        "persistence mode is off on {gpu}: each look initialises the GPU anew, which takes seconds",
        "systemctl enable --now nvidia-persistenced (or: nvidia-smi -i {uuid} -pm 1)",
        "Verification is slow, and hooks may run out of their budget.",
        "nvmlDeviceGetPersistenceMode",
    ),
    Kind(
        "persistenced-absent", N, "persistence",
        "nvidia-persistenced does not run",
        "apt install nvidia-persistenced && systemctl enable --now nvidia-persistenced",
        "Persistence mode set by hand is gone after a reboot.",
        "names of processes",
    ),
    Kind(
        "gpu-lost", E, "gpu-health",
        "{gpu} cannot be asked: {error}",
        "journalctl -k -g Xid; reset the GPU or reboot the node",
        "A lost GPU is `unknown`, never free.",
        "NVML",
    ),
    Kind(
        "recovery-needed", E, "gpu-health",
        "{gpu} asks for recovery: {action}",
        "{advice}",
        "The driver says that this GPU does not work properly until that is done.",
        "NVML field value 230",
    ),
    Kind(
        "ghost-memory", W, "gpu-health",
        "{ghost} MiB of {gpu} are in use, and nobody alive is on it",
        "pve-gpu-release ps; then nvidia-smi --gpu-reset -i {uuid} when nobody is on it, or reboot the node",
        "A leak in the driver: the memory is missing to everybody until a reset.",
        "NVML: used (v2) minus the listed clients that live; /proc of all processes",
    ),
    Kind(
        "xid-needs-reset", E, "kernel-log",
        "the driver reported {xid} since boot: {advice}",
        "journalctl -k -g Xid; {mend}",
        "An Xid of this kind leaves the GPU unusable until a reset or a reboot.",
        "/dev/kmsg, records of the kernel only",
    ),
    Kind(
        "xid-past", N, "kernel-log",
        "the driver reported {xid} since boot, but says now that the GPU needs nothing",
        "journalctl -k -g Xid",
        "The GPU was reset since, or recovered.",
        "/dev/kmsg; NVML field value 230",
    ),
    # --- device nodes ---
    Kind(
        "device-missing", E, "device-nodes",
        "{path} does not exist ({key} of container {vmid}): the container does not start",
        "systemctl start pve-gpu-release-nodes.service (or: modprobe nvidia-uvm && nvidia-modprobe -c 0 -u)",
        "Nodes appear only after nvidia-modprobe or first use; after a boot nobody has made them yet.",
        "stat of the host's node",
    ),
    Kind(
        "optional-mount-hides-loss", E, "device-nodes",
        "{path} does not exist and its mount is `optional`: container {vmid} starts without it and says nothing",
        "systemctl start pve-gpu-release-nodes.service; better than a mount: pct set {vmid} -dev0 {path}",
        "The container runs without its GPU, and jobs fail later with \"no CUDA-capable device\".",
        "stat of the host's node; lxc.mount.entry",
    ),
    Kind(
        "optional-mount", N, "device-nodes",
        "container {vmid} gets {paths} by `optional` mounts: if a node is missing, it starts without the GPU and says "
        "nothing",
        "use devN instead: pct set {vmid} -dev0 {first}",
        "With devN a missing node is an error that names it.",
        "lxc.mount.entry",
    ),
    Kind(
        "device-wrong-type", E, "device-nodes",
        "{path} is {kind}, not a device node ({key} of container {vmid})",
        "rm {path} && nvidia-modprobe -c 0 -u",
        "A bind mount with create=file or a `touch` left a plain file where the driver's node should be.",
        "stat of the host's node",
    ),
    Kind(
        "device-stale", E, "device-nodes",
        "{path} has major {major}, which belongs to {whose} ({key} of container {vmid})",
        "rm {path} && nvidia-modprobe -c 0 -u, then pct reboot {vmid}",
        "All majors but 195 are dynamic and move between boots; an old node leads nowhere, or to another device.",
        "stat of the host's node; /proc/devices",
    ),
    Kind(
        "container-node-stale", E, "nodes-inside",
        "{path} inside container {vmid} has major {major}, which belongs to {whose}",
        "pct reboot {vmid}",
        "The driver was reloaded since the container started: its nodes still have the old number.",
        "fstat of the node in the container's own /dev, opened with openat2(RESOLVE_IN_ROOT)",
    ),
    Kind(
        "container-node-wrong-type", E, "nodes-inside",
        "{path} inside container {vmid} is {kind}, not a device node",
        "rm {path} inside the container, then pct reboot {vmid}",
        "Jobs in the container open a file instead of the GPU.",
        "fstat of the node in the container's own /dev, opened with openat2(RESOLVE_IN_ROOT)",
    ),
    Kind(
        "uvm-not-given", W, "device-rules",
        "container {vmid} is given a GPU but not /dev/nvidia-uvm: CUDA does not work in it",
        "pct set {vmid} -{key} /dev/nvidia-uvm",
        "nvidia-smi works without it, which hides the mistake.",
        "devN and lxc.mount.entry of the configuration",
    ),
    Kind(
        "caps-not-given", N, "device-rules",
        "MIG is on, but container {vmid} is given nothing below /dev/nvidia-caps",
        "pct set {vmid} -{key} /dev/nvidia-caps/nvidia-capN (the capability of its MIG instance)",
        "Without its capability node a MIG instance cannot be opened.",
        "NVML: MIG mode; devN and lxc.mount.entry",
    ),
    Kind(
        "allow-stale-major", W, "device-rules",
        "lxc.cgroup2.devices.allow: {rule} of container {vmid} names major {major}, which belongs to {whose}",
        "edit /etc/pve/lxc/{vmid}.conf: take out `{rule}`, or put the driver's major there ({now}); or use devN "
        "instead",
        "Majors move between boots: the rule gives no GPU, and may give another device.",
        "lxc.cgroup2.devices.allow; /proc/devices",
    ),
    Kind(
        "allow-missing-major", E, "device-rules",
        "container {vmid} gets {path} by a mount, but no lxc.cgroup2.devices.allow covers c {device}",
        "add to /etc/pve/lxc/{vmid}.conf: lxc.cgroup2.devices.allow: c {major}:* rwm; or use devN instead",
        "The node is there and opening it says \"Operation not permitted\".",
        "lxc.cgroup2.devices.allow; stat of the host's node",
    ),
    # --- containers ---
    Kind(
        "frozen", W, "frozen",
        "container {vmid} has GPUs and is frozen: handlers of SIGTERM cannot run, memory stays until it thaws or is "
        "killed",
        "pct config {vmid} shows a backup's lock; when none runs: lxc-unfreeze -n {vmid}",
        "A suspend-mode backup freezes a container. pve-gpu-release never thaws it.",
        "cgroup.events",
    ),
    Kind(
        "leftovers", W, "leftovers",
        "container {vmid} is not running, but {count} live on in /lxc/{vmid}",
        "pve-gpu-release {vmid}; what is left then: echo 1 > {cgroup}/cgroup.kill",
        "The next start fails with \"Script exited with status 16\" unless our hook clears them first.",
        "cgroup tree: no init, no monitor",
    ),
    Kind(
        "monitor-gone", E, "leftovers",
        "container {vmid} lives on without its monitor: Proxmox says that it is stopped",
        "pve-gpu-release {vmid}; then end it: echo 1 > {cgroup}/cgroup.kill, pct start {vmid}",
        "The monitor was killed; pct can neither stop nor start the container.",
        "cgroup tree: an init in /lxc/{vmid}, nobody in /lxc.monitor/{vmid}",
    ),
    Kind(
        "monitor-leftovers", W, "leftovers",
        "container {vmid} is not running, but {count} are left in /lxc.monitor/{vmid}",
        "look at them: cat {cgroup}/cgroup.procs; then echo 1 > {cgroup}/cgroup.kill",
        "The next start fails with \"Script exited with status 16\" unless our hook clears them first.",
        "cgroup tree",
    ),
    Kind(
        "outside-unit", W, "outside-unit",
        "container {vmid} runs outside its unit (pve-container@{vmid} is {state}): it was started by hand",
        "pct shutdown {vmid} && pct start {vmid}",
        "Neither hookscript nor drop-in covers it: after a stop nothing checks its GPUs.",
        "cgroup tree; systemctl show",
    ),
    Kind(
        "host-holder", N, "host-holders",
        "{who} of the host holds {gpus}",
        "none needed; if it should not be there: systemctl status {pid}",
        "Never signalled. It keeps a GPU from being reset, unbound or passed through.",
        "descriptors and mappings of every process, the driver's lists",
    ),
    Kind(
        "mps-on-host", W, "mps",
        "the MPS control daemon or server runs on the host ({who})",
        "when no job needs it: echo quit | nvidia-cuda-mps-control",
        "Clients of containers share one server: its memory is nobody's, and a client's death may hit others.",
        "names of processes of the host",
    ),
    Kind(
        "vm-uses-gpu", E, "passthrough",
        "VM {vm} has {gpu} passed through ({how}), and container {vmid} is given the same GPU",
        "qm set {vm} -delete hostpciN, or take the GPU out of container {vmid}",
        "Starting the VM hangs in the driver's unbind as long as a container holds the GPU.",
        "qemu-server/*.conf, mapping/pci.cfg, PCI addresses of the driver's GPUs",
    ),
    Kind(
        "gpu-on-vfio", N, "passthrough",
        "the NVIDIA GPU {pci} is bound to {driver}: containers cannot use it",
        "none needed if a VM uses it; else: take it out of vfio-pci's ids= in /etc/modprobe.d, then reboot",
        "It is missing from nvidia-smi and from every container.",
        "/sys/bus/pci/devices/*/driver",
    ),
    Kind(
        "fuser-blind", N, "fuser",
        "fuser on the host's nodes sees {seen} of {total} holders in containers ({missed} missed)",
        "use pve-gpu-release ps instead of fuser",
        "fuser compares inodes; Proxmox's devN makes nodes of their own, which it cannot see.",
        "fuser /dev/nvidia* beside our own look",
    ),
    # --- hooks ---
    Kind(
        "no-hookscript", W, "hookscripts",
        "container {vmid} is given GPUs but has no hookscript",
        "pve-gpu-release hook enable {vmid}",
        "No snapshot before a stop, no gate before a start; the drop-in alone checks after a stop.",
        "hookscript: of the configuration",
    ),
    Kind(
        "foreign-hookscript", W, "hookscripts",
        "container {vmid} has another hookscript ({volume})",
        "pve-gpu-release hook enable --chain {vmid}",
        "One hookscript per guest: ours can call the other one.",
        "hookscript: of the configuration, content of the snippet",
    ),
    Kind(
        "snippet-missing", E, "hookscripts",
        "the hookscript {volume} of container {vmid} does not exist ({path}): the container does not start",
        "pve-gpu-release hook enable {vmid}, or pct set {vmid} -delete hookscript",
        "Proxmox refuses a start when the snippet is not there.",
        "storage.cfg, stat of the file",
    ),
    Kind(
        "snippet-not-executable", E, "hookscripts",
        "the hookscript {volume} of container {vmid} is not executable ({path}): the container does not start",
        "chmod 755 {path}",
        "Proxmox refuses a start with \"script is not executable\".",
        "storage.cfg, stat of the file",
    ),
    Kind(
        "snippet-storage", E, "hookscripts",
        "the hookscript {volume} of container {vmid} cannot be on node {node}: {why}",
        "pvesm status --content snippets; pvesm set STORAGE --content ...,snippets; or pve-gpu-release hook "
        "enable {vmid}",
        "The container does not start there.",
        "storage.cfg",
    ),
    Kind(
        "snippet-other-nodes", N, "hookscripts",
        "the hookscript {volume} is on a storage that is not shared: it has to be on {nodes} too, which cannot be seen "
        "from here",
        "pve-gpu-release doctor on each node; apt install pve-gpu-release there",
        "After a migration or by HA the container starts there, and does not if the snippet is missing.",
        "storage.cfg, nodes of the cluster",
    ),
    Kind(
        "dropin-missing", E, "container-units",
        "{unit} lacks our drop-in: a reboot inside, a killed monitor and a busy rootfs are not covered",
        REINSTALL,
        "On these paths Proxmox runs no hookscript.",
        "*.service.d directories of systemd",
    ),
    Kind(
        "dropin-masked", E, "container-units",
        "our drop-in of {unit} is masked",
        "rm {path} && systemctl daemon-reload",
        "An empty file or a link to /dev/null of the same name hides it.",
        "*.service.d directories of systemd",
    ),
    Kind(
        "dropin-overridden", E, "container-units",
        "our drop-in of {unit} has no effect: {why}",
        "mend or remove {path}, then systemctl daemon-reload",
        "An empty ExecStartPre= or ExecStopPost= that is read after ours takes our lines away.",
        "content of the drop-ins, in systemd's order",
    ),
    Kind(
        "dropin-not-loaded", E, "units-loaded",
        "systemd has not read our drop-in of {unit}",
        "systemctl daemon-reload",
        "A file that systemd has not loaded does nothing.",
        "systemctl show -p DropInPaths,NeedDaemonReload",
    ),
    Kind(
        "container-unit-overridden", W, "container-units",
        "{unit} is not as Proxmox ships it: {why}",
        "systemctl revert {unit} (or check that {path} is meant to be so)",
        "Start, stop and the order of our steps rest on Proxmox's unit.",
        "unit files and drop-ins of systemd",
    ),
    Kind(
        "boot-unit-missing", W, "boot-unit",
        "the unit that makes the device nodes before the guests start is missing",
        REINSTALL,
        "After a boot /dev/nvidia-uvm may be missing when containers start.",
        "unit files of systemd: pve-gpu-*.service, Before=pve-guests.service",
    ),
    Kind(
        "boot-unit-disabled", W, "boot-unit",
        "{unit}, which makes the device nodes before the guests start, is {state}",
        "systemctl unmask {unit}; systemctl enable {unit}",
        "After a boot /dev/nvidia-uvm may be missing when containers start.",
        "links in *.wants of systemd",
    ),
    # --- our own state ---
    Kind(
        "socket-not-enabled", W, "daemon",
        "pve-gpu-hostd.socket is {state}",
        "systemctl unmask pve-gpu-hostd.socket; systemctl enable --now pve-gpu-hostd.socket",
        "Without the daemon releases are done by the command line and the hook: no stop watchdog, no work in the "
        "background.",
        "unit files of systemd",
    ),
    Kind(
        "socket-not-active", W, "daemon",
        "nobody listens for pve-gpu-hostd ({state})",
        "systemctl start pve-gpu-hostd.socket",
        "Without the daemon the stop watchdog cannot be armed.",
        "systemctl show; /run/pve-gpu-release/io.pve.GpuRelease",
    ),
    Kind(
        "daemon-silent", W, "daemon",
        "pve-gpu-hostd does not answer on its socket",
        "systemctl restart pve-gpu-hostd; journalctl -u pve-gpu-hostd",
        "Releases are then done by the command line and the hook themselves.",
        "org.varlink.service.GetInfo",
    ),
    Kind(
        "config-broken", E, "configuration",
        "the configuration is broken: {problem}",
        "pve-gpu-release check-config",
        "A running daemon keeps its last good one, a fresh start refuses, the hook uses the built-in defaults.",
        "/etc/pve-gpu-release/config.yaml",
    ),
    Kind(
        "config-ignored", W, "configuration",
        "{problem}",
        "pve-gpu-release check-config",
        "What the file says is not in force.",
        "/etc/pve-gpu-release/config.yaml",
    ),
    Kind(
        "start-refused", W, "records",
        "the last start of container {vmid} was refused (on_dirty: block): {reason}",
        "pve-gpu-release {vmid}; pve-gpu-release explain {release_id} tells why; then pct start {vmid}",
        "A reboot inside the container that is refused leaves it down without a message to anyone.",
        "/run/pve-gpu-release/starts",
    ),
    Kind(
        "stop-hangs", W, "records",
        "the stop of container {vmid} that began {since} does not end",
        "{mend}",
        "pct stop waits for ever, without a word, for a task that cannot die.",
        "/run/pve-gpu-release/watch, written by the daemon's stop watchdog",
    ),
    Kind(
        "release-cut-off", W, "records",
        "a release of container {vmid} was cut off (at {step}; pid {pid} is gone)",
        "systemctl restart pve-gpu-hostd finishes it; or pve-gpu-release {vmid}",
        "Whoever did it was killed; what it had signalled is in the record.",
        "/run/pve-gpu-release/releases",
    ),
    Kind(
        "run-dir", E, "run-dir",
        "/run/pve-gpu-release is not as it must be: {why}",
        "{mend}",
        "It holds the locks and the daemon's socket: nobody but root may write or read there.",
        "lstat of /run/pve-gpu-release",
    ),
    Kind(
        "run-dir-missing", N, "run-dir",
        "/run/pve-gpu-release does not exist yet",
        "systemd-tmpfiles --create",
        "The first release makes it.",
        "lstat of /run/pve-gpu-release",
    ),
)  # fmt: skip

KINDS: dict[str, Kind] = {row.code: row for row in _ROWS}


class _Blank(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


def found(code: str, evidence: str, *, vmid: int | None = None, **facts: object) -> Finding:
    """A finding of that kind with its facts filled in."""
    kind = KINDS[code]
    values = _Blank(facts)
    if vmid is not None:
        values["vmid"] = vmid
    return Finding(
        code, kind.severity, kind.what.format_map(values), evidence, kind.mend.format_map(values), vmid
    )
