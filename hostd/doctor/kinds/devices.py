"""What `hostd/doctor/devices.py` can find: device nodes and device rules."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity
from hostd.doctor.mends import NODES

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE

ROWS = (
    Kind(
        "device-missing", E, "device-nodes",
        "{path} does not exist ({key} of container {vmid}): the container does not start",
        "{make}",
        "Nodes appear only after nvidia-modprobe or first use; after a boot nobody has made them yet. What makes a node depends on "
        f"which it is: mostly `{NODES}`.",
        "stat of the host's node",
    ),
    Kind(
        "optional-mount-hides-loss", E, "device-nodes",
        "{path} does not exist and its mount is `optional`: container {vmid} starts without it and says nothing",
        "{make}",
        "The container runs without its GPU, and jobs fail later with \"no CUDA-capable device\".",
        "stat of the host's node; lxc.mount.entry",
    ),
    Kind(
        "optional-mount", N, "device-nodes",
        "container {vmid} gets {paths} by `optional` mounts: if a node is missing, it starts without the GPU and says "
        "nothing",
        "{mend}  # a missing node is an error then",
        "Without `optional` a missing node is an error that names it; so it is with devN instead of a mount.",
        "lxc.mount.entry",
    ),
    Kind(
        "device-wrong-type", E, "device-nodes",
        "{path} is {kind}, not a device node ({key} of container {vmid})",
        "{mend}",
        "A bind mount with create=file or a `touch` left a plain file where the driver's node should be.",
        "stat of the host's node",
    ),
    Kind(
        "device-stale", E, "device-nodes",
        "{path} has major {major}, which belongs to {whose} ({key} of container {vmid})",
        "{mend}",
        "All majors but 195 are dynamic and move between boots; an old node leads nowhere, or to another device. The node is "
        "removed and made anew; a container that runs has a finding of its own.",
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
        "pct exec {vmid} -- rm {recursive}{path}; pct reboot {vmid}",
        "Jobs in the container open a file instead of the GPU.",
        "fstat of the node in the container's own /dev, opened with openat2(RESOLVE_IN_ROOT)",
    ),
    Kind(
        "uvm-not-given", W, "device-rules",
        "container {vmid} is given a GPU but not /dev/nvidia-uvm: CUDA does not work in it",
        "{mend}  # a running container has it after pct reboot {vmid}",
        "nvidia-smi works without it, which hides the mistake.",
        "devN and lxc.mount.entry of the configuration",
    ),
    Kind(
        "caps-not-given", N, "device-rules",
        "MIG is on, but container {vmid} is given nothing below /dev/nvidia-caps",
        "cat /proc/driver/nvidia-caps/mig-minors  # then for both capabilities of its MIG instance: pct set {vmid} -{key} "
        "/dev/nvidia-caps/nvidia-capN",
        "Without its capability node a MIG instance cannot be opened.",
        "NVML: MIG mode; devN and lxc.mount.entry",
    ),
    Kind(
        "allow-stale-major", W, "device-rules",
        "lxc.cgroup2.devices.allow: {rule} of container {vmid} names major {major}, which belongs to {whose}",
        "{mend}  # NVIDIA's majors now: {now}",
        "Majors move between boots: the rule gives no GPU, and may give another device.",
        "lxc.cgroup2.devices.allow; /proc/devices",
    ),
    Kind(
        "allow-missing-major", E, "device-rules",
        "container {vmid} gets {path} by a mount, but no lxc.cgroup2.devices.allow covers c {device}",
        "sed -i '1i lxc.cgroup2.devices.allow: c '{major}':* rwm' /etc/pve/lxc/{vmid}.conf"
        "  # in force when the container starts again",
        "The node is there and opening it says \"Operation not permitted\".",
        "lxc.cgroup2.devices.allow; stat of the host's node",
    ),
)  # fmt: skip
