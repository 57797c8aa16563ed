"""What `hostd/doctor/node.py` can find: the machine and Python's modules."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
UNIFIED = (
    "sed -i -E 's/ ?systemd[.]unified_cgroup_hierarchy=[^ \"]*//' /etc/kernel/cmdline /etc/default/grub; "
    "proxmox-boot-tool refresh; update-grub  # then reboot the node"
)
"""systemd-boot reads the one file, GRUB the other."""

ROWS = (
    Kind(
        "pid-namespace", W, "pid-namespace",
        "we run in a PID namespace that is not the machine's first one: the driver shortens its client lists here",
        "pve-gpu-release doctor  # on the host itself, in no container and no PID namespace of its own",
        "NVML leaves out processes of outer namespaces without a word, so memory may seem to be nobody's.",
        "inode of /proc/self/ns/pid; the first one is 4026531836 on every kernel",
    ),
    Kind(
        "cgroup-v2-missing", E, "cgroup-v2",
        "no cgroup v2 tree is mounted: which processes a container has cannot be told",
        UNIFIED,
        "Ownership is decided by the v2 cgroup tree. Without it every verdict is `unknown`.",
        "/proc/self/mountinfo",
    ),
    Kind(
        "cgroup-hybrid", W, "cgroup-v2",
        "cgroup v1 and v2 are both in use (v2 at {mount})",
        UNIFIED,
        "Releases work, but Proxmox's units and drop-ins are made for the unified layout, and devices rules are v1's.",
        "/proc/self/mountinfo",
    ),
    Kind(
        "kernel-old", N, "kernel",
        "kernel {release} is older than 6.11: members of a container's PID namespace are found by a walk over the host",
        "apt install proxmox-kernel-6.14  # then reboot the node; optional: the older one is slower, not wrong",
        "Each look costs about 13 us per process of the host.",
        "uname -r",
    ),
    Kind(
        "no-systemd", N, "systemd",
        "this machine does not run systemd: units were looked at as files only",
        "cat /proc/1/comm  # what runs as pid 1 instead: a Proxmox VE node boots with systemd",
        "Whether units are active cannot be told.",
        "/run/systemd/system",
    ),
    Kind(
        "no-proxmox", N, "container-units",
        "there is no pve-container@.service: this is no Proxmox VE node, nothing starts or stops containers here",
        "apt install pve-container  # on a Proxmox VE node",
        "The hookscript and the drop-in have nothing to hook into; releases by hand work.",
        "unit files of systemd",
    ),
    Kind(
        "pve-missing", E, "pve",
        "/etc/pve is empty: pmxcfs does not run, and what containers are given cannot be seen",
        "systemctl restart pve-cluster",
        "No container can be started, and a stop or a start is handled without the container's configuration.",
        "/etc/pve/local, on a node with pve-container@.service",
    ),
    Kind(
        "journal-not-persistent", W, "journal",
        "the journal does not survive a reboot ({why})",
        "{setting}mkdir -p /var/log/journal && systemd-tmpfiles --create --prefix /var/log/journal && "
        "systemctl restart systemd-journald",
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
    Kind(
        "pynvml-missing", E, "modules",
        "the Python module pynvml cannot be used: the driver cannot be asked, every verdict without holders is "
        "`unknown`",
        "{command}",
        "Holders are still found and ended; that the memory came back cannot be proven. The command depends on where the "
        "driver came from: [nvml-missing](operations.md#nvml-missing).",
        "import pynvml in a helper process; dpkg-query, /usr/bin/nvidia-installer, libnvidia-ml.so.1",
    ),
    Kind(
        "yaml-missing", W, "modules",
        "the Python module yaml cannot be used: /etc/pve-gpu-release/config.yaml is ignored",
        "apt install python3-yaml",
        "The built-in defaults are in force, whatever the file says (on_dirty: block included).",
        "import yaml in a helper process",
    ),
    Kind(
        "systemd-python-missing", N, "modules",
        "the Python module systemd cannot be used: systemd and the journal are spoken to by our own code",
        "apt install python3-systemd",
        "Socket activation, the watchdog, entries and `log` do not depend on it.",
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
)  # fmt: skip
