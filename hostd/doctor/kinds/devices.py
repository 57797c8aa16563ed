"""What `hostd/doctor/devices.py` can find: device nodes and device rules."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE

ROWS = (
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
)  # fmt: skip
