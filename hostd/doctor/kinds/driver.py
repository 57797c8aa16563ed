"""What `hostd/doctor/driver.py` can find: the driver."""

from __future__ import annotations

from hostd.doctor.finding import Kind, Severity
from hostd.doctor.mends import NODES

E, W, N = Severity.ERROR, Severity.WARNING, Severity.NOTE
AGAIN = "systemctl try-restart pve-gpu-hostd"
"""The daemon's device filter has the majors of the driver that was loaded when it started."""

ROWS = (
    Kind(
        "no-driver", N, "driver",
        "no NVIDIA driver is loaded, and no container asks for a GPU",
        "lspci -d 10de:  # nothing is needed unless this node should have the GPUs that it lists: then install the driver",
        "There is nothing to release.",
        "/proc/devices",
    ),
    Kind(
        "driver-not-loaded", E, "driver",
        "no NVIDIA driver is loaded, but {containers} are given GPUs",
        f"modprobe nvidia && {NODES} && {AGAIN}  # if that fails: dkms status; journalctl -k -g nvidia",
        "After a kernel update without matching module the containers start without a GPU, or not at all.",
        "/proc/devices, configurations of containers",
    ),
    Kind(
        "driver-mismatch", E, "nvml",
        "the driver's library and its kernel module are of different versions",
        "systemctl stop nvidia-persistenced; modprobe -r nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia && "
        f"{NODES} && {AGAIN}; systemctl start nvidia-persistenced"
        "  # when nothing is on the GPUs (pve-gpu-release ps); else reboot the node",
        "NVML refuses to answer (\"Driver/library version mismatch\"): verdicts are `unknown`, never `released`.",
        "nvmlInit, /proc/driver/nvidia/version",
    ),
    Kind(
        "nvml-missing", E, "nvml",
        "NVML cannot be used: the driver cannot be asked",
        "{command}",
        "Holders are found, but that the memory came back cannot be proven: verdicts are `unknown`.",
        "nvmlInit",
    ),
    Kind(
        "nvml-silent", E, "nvml",
        "the driver does not answer, or not completely",
        "journalctl --no-pager -k -g NVRM  # then reset the GPU or reboot the node",
        "Nothing can be verified; releases still find and end holders, the verdict is `unknown`.",
        "one snapshot through NVML within nvml.deadline",
    ),
    Kind(
        "nvml-wedged", E, "nvml",
        "a call into the driver has not come back: pid {pid} has been in {call} for {age}",
        "cat /proc/{pid}/stack; journalctl --no-pager -k -g NVRM  # then reset the GPU or reboot the node",
        "Every further call would hang as well, so none is made: verdicts are `unknown` until it returns.",
        "the lock /run/pve-gpu-release/nvml.lock; the driver was not asked",
    ),
    Kind(
        "nvml-slow", W, "nvml",
        "the driver took {took} to answer for the first time",
        "nvidia-smi -pm 1  # until the next boot; for good: nvidia-persistenced",
        "Each look at the driver costs that much; hooks have a budget.",
        "time from starting the child to the first answer",
    ),
    Kind(
        "persistence-off", W, "persistence",
        "persistence mode is off on {gpu}: each look initialises the GPU anew, which takes seconds",
        "nvidia-smi -i {uuid} -pm 1  # until the next boot; for good: nvidia-persistenced",
        "Verification is slow, and hooks may run out of their budget.",
        "nvmlDeviceGetPersistenceMode",
    ),
    Kind(
        "persistenced-absent", N, "persistence",
        "nvidia-persistenced does not run",
        "{command}",
        "Persistence mode set by hand is gone after a reboot.",
        "names of processes; where the driver came from, as for pynvml-missing",
    ),
    Kind(
        "gpu-lost", E, "gpu-health",
        "{gpu} cannot be asked: {error}",
        "journalctl --no-pager -k -g Xid  # then reset the GPU or reboot the node",
        "A lost GPU is `unknown`, never free.",
        "NVML",
    ),
    Kind(
        "figures-unavailable", N, "gpu-health",
        "the driver gives no memory figures for {gpu}: {error}",
        "pve-gpu-release ps  # nothing is needed; --no-verify-memory accepts a release without figures",
        "MIG or vGPU: holders are found and ended; that the memory came back cannot be proven, the verdict is `unknown`.",
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
        "nvidia-smi --gpu-reset -i {uuid}  # when nobody is on it (pve-gpu-release ps); else reboot the node",
        "A leak in the driver: the memory is missing to everybody until a reset.",
        "NVML: used (v2) minus the listed clients that live; /proc of all processes",
    ),
    Kind(
        "xid-needs-reset", E, "kernel-log",
        "the driver reported {xid} since boot: {advice}",
        "{mend}",
        "An Xid of this kind leaves the GPU unusable until a reset or a reboot. After a reset this is `xid-past`, with a "
        "driver that has field 230; an older one says nothing, and the finding stays until a reboot.",
        "/dev/kmsg, records of the kernel only",
    ),
    Kind(
        "xid-past", N, "kernel-log",
        "the driver reported {xid} since boot, but says now that the GPU needs nothing",
        "journalctl --no-pager -k -g Xid  # nothing is needed",
        "The GPU was reset since, or recovered.",
        "/dev/kmsg; NVML field value 230",
    ),
)  # fmt: skip
