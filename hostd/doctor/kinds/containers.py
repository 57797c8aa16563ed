"""What `hostd/doctor/containers.py` can find: what runs: containers, the host's holders, VMs."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE

ROWS = (
    Kind(
        "frozen", W, "frozen",
        "container {vmid} has GPUs and is frozen: handlers of SIGTERM cannot run, memory stays until it thaws or is "
        "killed",
        "lxc-unfreeze -n {vmid}  # unless a backup runs: pct config {vmid} shows its lock",
        "A suspend-mode backup freezes a container. pve-gpu-release never thaws it.",
        "cgroup.events",
    ),
    Kind(
        "leftovers", W, "leftovers",
        "container {vmid} is not running, but {count} live on in /lxc/{vmid}",
        "pve-gpu-release {vmid}; pct status {vmid} | grep -q running || echo 1 > {cgroup}/cgroup.kill",
        "The next start fails with \"Script exited with status 16\" unless our hook clears them first.",
        "cgroup tree: no init, no monitor",
    ),
    Kind(
        "monitor-gone", E, "leftovers",
        "container {vmid} lives on without its monitor: Proxmox says that it is stopped",
        "pve-gpu-release {vmid}; pct status {vmid} | grep -q running || echo 1 > {cgroup}/cgroup.kill  # then: pct start {vmid}",
        "The monitor was killed; pct can neither stop nor start the container.",
        "cgroup tree: an init in /lxc/{vmid}, nobody in /lxc.monitor/{vmid}",
    ),
    Kind(
        "monitor-leftovers", W, "leftovers",
        "container {vmid} is not running, but {count} are left in /lxc.monitor/{vmid}",
        "pct status {vmid} | grep -q running || echo 1 > {cgroup}/cgroup.kill  # who they are: cat {cgroup}/cgroup.procs",
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
        "systemctl --no-pager status {pid}  # nothing is needed unless it should not be there",
        "Never signalled. It keeps a GPU from being reset, unbound or passed through.",
        "descriptors and mappings of every process, the driver's lists",
    ),
    Kind(
        "mps-on-host", W, "mps",
        "the MPS control daemon or server runs on the host ({who})",
        "echo quit | nvidia-cuda-mps-control  # when no job needs it",
        "Clients of containers share one server: its memory is nobody's, and a client's death may hit others.",
        "names of processes of the host",
    ),
    Kind(
        "vm-uses-gpu", E, "passthrough",
        "VM {vm} has {gpu} passed through ({how}), and container {vmid} is given the same GPU",
        "qm set {vm} -delete {key}  # or take the GPU out of container {vmid}",
        "Starting the VM hangs in the driver's unbind as long as a container holds the GPU.",
        "qemu-server/*.conf, mapping/pci.cfg, PCI addresses of the driver's GPUs",
    ),
    Kind(
        "gpu-on-vfio", N, "passthrough",
        "the NVIDIA GPU {pci} is bound to {driver}: containers cannot use it",
        "grep -rs -e vfio-pci -e pci-stub /etc/modprobe.d /etc/modules-load.d /etc/kernel/cmdline /etc/default/grub  # nothing is "
        "needed if a VM uses it; else take it out there, update-initramfs -u and reboot the node",
        "It is missing from nvidia-smi and from every container.",
        "/sys/bus/pci/devices/*/driver",
    ),
    Kind(
        "fuser-blind", N, "fuser",
        "fuser on the host's nodes sees {seen} of {total} holders in containers ({missed} missed)",
        "pve-gpu-release ps  # instead of fuser",
        "fuser compares inodes; Proxmox's devN makes nodes of their own, which it cannot see.",
        "fuser /dev/nvidia* beside our own look",
    ),
)  # fmt: skip
