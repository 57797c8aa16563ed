"""Whom a GPU reset would hit: the blast radius, computed before anything is touched. Pure, but for sysfs in `vfio_pci`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hostd.model import DeviceId, GpuInfo, Holder, NvmlGpu, NvmlSnapshot, ProcessRef

PCI_DEVICES = "/sys/bus/pci/devices"
NVIDIA_VENDOR = "0x10de"
RECOVERY = {
    0: "nothing",
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "to drain peer-to-peer traffic",
    4: "to drain it and then a reset",
}
"""Field value 230 (FACTS): what the driver recommends."""
REBOOT = 2


@dataclass(frozen=True, slots=True)
class Radius:
    """What one reset reaches."""

    gpus: tuple[GpuInfo, ...]
    """The GPUs that are reset together: those asked for and every one that is linked with them."""
    others: tuple[str, ...]
    """Whom it would hit beside those it is for, each by name; empty: the reset is allowed."""
    persistence: Mapping[str, bool]
    """UUID -> persistence mode now."""
    reboot: tuple[str, ...] = ()
    """GPUs of which the driver says that only a reboot of the node helps."""


def radius_of(
    snapshot: NvmlSnapshot,
    wanted: Iterable[str],
    holders: Iterable[Holder],
    dealt: Iterable[ProcessRef],
    services: Iterable[str] = (),
    vfio: Iterable[str] = (),
    gpu_majors: Iterable[int] = (),
) -> Radius:
    """The radius of a reset of the GPUs `wanted` (PCI addresses).

    `holders`: every holder of the node, with its owner. `dealt`: those of the container that the release dealt with, and
    that could not be ended: the reset is for them, and for nobody else of the container either. `services`: units of the
    host that a reset may stop. `vfio`: addresses that are bound to vfio-pci. `gpu_majors`: of the GPUs' device nodes: who
    merely has one open is hit, too.
    """
    by_pci = {g.info.pci_bus_id: g for g in snapshot.gpus}
    reached = linked(by_pci, wanted)
    gpus = [by_pci[pci] for pci in sorted(reached) if pci in by_pci]
    others = [f"GPU {pci}, which is linked and belongs to a VM (vfio-pci)" for pci in sorted(reached & set(vfio))]
    others += [
        f"GPU {pci}, which is linked and unknown to the driver's library"
        for pci in sorted(reached - by_pci.keys() - set(vfio) - set(wanted))
    ]
    others += [f"the MIG instances of {name_of(g)}" for g in gpus if g.mig]
    declared = {f"/system.slice/{name}" for name in services}
    minors = {g.info.minor for g in gpus}
    nodes = {DeviceId(major, minor) for major in gpu_majors for minor in minors}
    excused = set(dealt)
    seen: set[int] = set()
    for holder in holders:
        if not (minors & set(holder.gpus) or nodes & holder.nodes) or holder.ref in excused:
            continue
        if holder.vmid is None and holder.process.cgroup in declared:
            continue
        if holder.process.pid not in seen:
            seen.add(holder.process.pid)
            owner = "the host" if holder.vmid is None else f"container {holder.vmid}"
            others.append(f"pid {holder.process.pid} ({holder.process.comm}) of {owner}")
    return Radius(
        tuple(g.info for g in gpus),
        tuple(others),
        {g.info.uuid: bool(g.persistence_mode) for g in gpus if g.info.uuid},
        tuple(name_of(g) for g in gpus if g.recovery_action == REBOOT),
    )


def linked(by_pci: Mapping[str, NvmlGpu], wanted: Iterable[str]) -> set[str]:
    """`wanted` and everything that NVLink joins with it, however far."""
    reached: set[str] = set()
    todo = list(wanted)
    while todo:
        pci = todo.pop()
        if pci in reached:
            continue
        reached.add(pci)
        if pci in by_pci:
            todo += by_pci[pci].nvlink_peers
    return reached


def name_of(gpu: NvmlGpu) -> str:
    return f"GPU {gpu.info.index}" if gpu.info.index is not None else f"GPU {gpu.info.pci_bus_id}"


def vfio_pci(root: str = PCI_DEVICES) -> dict[str, str]:
    """PCI address -> driver (empty: none), of NVIDIA display devices that the NVIDIA driver has not got (a VM's)."""
    found: dict[str, str] = {}
    try:
        names = os.listdir(root)
    except OSError:
        return found
    for name in names:
        try:
            with open(f"{root}/{name}/vendor", encoding="ascii") as file:
                vendor = file.read().strip()
            with open(f"{root}/{name}/class", encoding="ascii") as file:
                display = file.read().startswith("0x03")
        except (OSError, ValueError):
            continue
        try:
            driver = os.path.basename(os.readlink(f"{root}/{name}/driver"))
        except OSError:
            driver = ""
        if vendor == NVIDIA_VENDOR and display and driver != "nvidia":
            found[name] = driver
    return found


__all__ = ["RECOVERY", "Radius", "linked", "name_of", "radius_of", "vfio_pci"]
