"""Which device numbers are NVIDIA's and which GPUs the kernel side knows: /proc/devices and /proc/driver/nvidia.

Device numbers are read at every scan: all majors but 195 are dynamic and move between boots (FACTS, NVIDIA driver).
"""

from __future__ import annotations

import errno
import marshal
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import replace

from hostd.disposable import Outcome, call_with_deadline
from hostd.errors import is_gone
from hostd.model import DeviceId, DriverNumbers, GpuInfo

PROC_DEVICES = "/proc/devices"
PROC_NVIDIA = "/proc/driver/nvidia"

CONTROL_MINORS = frozenset({254, 255})
"""On the GPUs' major: 255 is nvidiactl, 254 nvidia-modeset (nv-linux.h, NV_MINOR_DEVICE_NUMBER_CONTROL_DEVICE)."""

_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.([0-7]))?", re.IGNORECASE | re.ASCII)
_GPU_NODE = re.compile(r"nvidia[0-9]+", re.ASCII)
_VERSION = re.compile(r"NVRM version:.*?\s(\d+\.\d+(?:\.\d+)*)\s")


def read_driver_numbers(path: str = PROC_DEVICES) -> DriverNumbers:
    """Majors of NVIDIA's character devices now. Raises OSError: then nothing is known, which is a blind spot."""
    return parse_proc_devices(_read_text(path))


def parse_proc_devices(text: str) -> DriverNumbers:
    """Every major of the section "Character devices:" one of whose names begins with `nvidia`."""
    found: dict[int, set[str]] = {}
    character = False
    for line in text.splitlines():
        number, _, name = line.strip().partition(" ")
        if line.rstrip().endswith("devices:"):
            character = line.startswith("Character")
        elif character and number.isascii() and number.isdigit() and name.strip().startswith("nvidia"):
            found.setdefault(int(number), set()).add(name.strip())
    return DriverNumbers({major: frozenset(names) for major, names in found.items()})


def read_proc_gpus(
    root: str = PROC_NVIDIA, *, known: Iterable[GpuInfo] = (), deadline_s: float = 1.0
) -> tuple[GpuInfo, ...]:
    """GPUs of /proc/driver/nvidia/gpus that are not in `known` (by PCI address); none without that directory.

    Listing the directory asks nobody. Reading `information` goes through the driver (nv-procfs.c: rm_ref_dynamic_power,
    and rm_get_vbios_version under RM's API lock), so it can hang like every call into it: it is done in a helper,
    and only for what `known` leaves open. Raises OSError, TimeoutError included.
    """
    directory = os.path.join(root, "gpus")
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return ()
    addresses = {gpu.pci_bus_id for gpu in known}
    wanted = [name for name in names if _canonical_or_same(name) not in addresses]
    if not wanted:
        return ()
    answer = call_with_deadline(lambda: _read_information(directory, wanted), deadline_s)
    if answer.outcome is not Outcome.ANSWER:
        code = errno.ETIMEDOUT if answer.outcome is Outcome.TIMEOUT else answer.errno or errno.EIO
        raise OSError(code, answer.error, directory)
    return tuple(parse_information(text, name) for name, text in marshal.loads(answer.data))


def _read_information(directory: str, names: Iterable[str]) -> bytes:
    found = []
    for name in names:
        try:
            found.append((name, _read_text(os.path.join(directory, name, "information"))))
        except OSError as exc:
            if not is_gone(exc):
                raise
    return marshal.dumps(found)


def parse_information(text: str, directory_name: str = "") -> GpuInfo:
    """One `information` file. Minor -1 and an empty UUID where the driver does not say (not initialised:
    `GPU-????…`).
    """
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip(), value.strip())
    uuid = fields.get("GPU UUID", "")
    minor = fields.get("Device Minor", "")
    return GpuInfo(
        minor=int(minor) if minor.isascii() and minor.isdigit() else -1,
        uuid="" if "?" in uuid else uuid,
        pci_bus_id=_canonical_or_same(fields.get("Bus Location") or directory_name),
        name=fields.get("Model", ""),
    )


def read_driver_version(root: str = PROC_NVIDIA) -> str | None:
    """Version of the loaded kernel module; None when none is loaded. Raises OSError. Does not ask the GPU."""
    try:
        return parse_driver_version(_read_text(os.path.join(root, "version")))
    except FileNotFoundError:
        return None


def parse_driver_version(text: str) -> str | None:
    """From "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.03  Tue …" (or "Open Kernel Module for x86_64")."""
    match = _VERSION.search(text)
    return match.group(1) if match else None


def canonical_pci(text: str) -> str:
    """`00000000:3B:00.0`, `3b:00`, `0000:3b:00.0` -> `0000:3b:00.0`, as sysfs has it. Raises ValueError."""
    match = _PCI.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"not a PCI address: {text!r}")
    domain, bus, device, function = match.groups()
    return f"{int(domain or '0', 16):04x}:{int(bus, 16):02x}:{int(device, 16):02x}.{function or 0}"


def _canonical_or_same(text: str) -> str:
    try:
        return canonical_pci(text)
    except ValueError:
        return text


def merge_gpus(proc: Iterable[GpuInfo], nvml: Iterable[GpuInfo]) -> tuple[GpuInfo, ...]:
    """One entry per GPU, ordered by minor, joined by UUID, then by PCI address; NVML's `index` is kept.

    A GPU lost before nvmlInit has no identity in NVML: when it is the only such one, and only one of the kernel's
    GPUs is left over, they are the same.
    """
    kernel = list(proc)
    merged: list[GpuInfo] = []
    nameless: list[GpuInfo] = []
    for gpu in nvml:
        if not gpu.uuid and not gpu.pci_bus_id:
            nameless.append(gpu)
            continue
        match = next((k for k in kernel if gpu.uuid and k.uuid == gpu.uuid), None) or next(
            (k for k in kernel if gpu.pci_bus_id and k.pci_bus_id == gpu.pci_bus_id), None
        )
        if match is not None:
            kernel.remove(match)
        merged.append(_join(gpu, match))
    if len(nameless) == 1 and len(kernel) == 1:
        merged.append(_join(nameless.pop(), kernel.pop()))
    merged += kernel + nameless
    return tuple(sorted(merged, key=lambda g: (g.minor < 0, g.minor, g.pci_bus_id)))


def _join(gpu: GpuInfo, kernel: GpuInfo | None) -> GpuInfo:
    if kernel is None:
        return gpu
    return replace(
        gpu,
        minor=gpu.minor if gpu.minor >= 0 else kernel.minor,
        uuid=gpu.uuid or kernel.uuid,
        pci_bus_id=gpu.pci_bus_id or kernel.pci_bus_id,
        name=gpu.name or kernel.name,
    )


def read_host_minors(driver: DriverNumbers, dev: str = "/dev") -> frozenset[int]:
    """Minors of the `nvidiaN` nodes that the host has, also of a GPU that neither driver nor /proc knows any more."""
    found = set()
    try:
        names = [name for name in os.listdir(dev) if _GPU_NODE.fullmatch(name)]
    except OSError:
        return frozenset()
    for name in names:
        try:
            info = os.stat(os.path.join(dev, name), follow_symlinks=False)
        except OSError:
            continue
        if stat.S_ISCHR(info.st_mode) and os.major(info.st_rdev) in driver.gpu_majors:
            found.add(os.minor(info.st_rdev))
    return frozenset(found)


def is_gpu(node: DeviceId, driver: DriverNumbers, gpus: Iterable[GpuInfo]) -> bool:
    """True when this device node is a GPU: its minor is known, or nobody knows any and it is no control node."""
    if node.major not in driver.gpu_majors or node.minor in CONTROL_MINORS:
        return False
    known = {gpu.minor for gpu in gpus if gpu.minor >= 0}
    return node.minor in known if known else True


def gpu_minors(nodes: Iterable[DeviceId], driver: DriverNumbers, gpus: Iterable[GpuInfo]) -> frozenset[int]:
    """Minors of those of the nodes that are GPUs (`is_gpu`)."""
    known = tuple(gpus)
    return frozenset(node.minor for node in nodes if is_gpu(node, driver, known))


def _read_text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
