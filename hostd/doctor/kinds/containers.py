"""What `hostd/doctor/containers.py` can find: what runs: containers, the host's holders, VMs."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE

ROWS = (
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
)  # fmt: skip
