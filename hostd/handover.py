"""Handing a GPU over to a VM: who has it open, container by container, and whether it is ours to free at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hostd.case import DETAIL_ONLY
from hostd.model import BlindSpot, DeviceId, GpuInfo, Holder
from hostd.nodeview import look_at_node
from hostd.observe import Observer
from hostd.resetplan import vfio_pci
from hostd.selection import resolve_gpu
from hostd.sources import Sources, read_driver
from hostd.system.devices import canonical_pci
from hostd.words import gpu_text

LOOKS = 3
"""At each container before it is said that nobody there has the GPU open."""


@dataclass(frozen=True, slots=True)
class OpenGpu:
    """One GPU and everybody who has it open, memory or not: a descriptor alone makes the driver's unbind hang (CASES)."""

    name: str
    info: GpuInfo | None
    """None: it is bound to another driver, and not ours."""
    driver: str = ""
    containers: dict[int, list[Holder]] = field(default_factory=dict)
    host: list[Holder] = field(default_factory=list)
    blind_spots: tuple[BlindSpot, ...] = ()


def look_at_gpu(sources: Sources, selector: str) -> OpenGpu:
    """Who has the GPU open now. Raises UsageError when there is no such GPU."""
    foreign = _foreign_driver(selector)
    if foreign is not None:
        return foreign
    view = look_at_node(sources)
    silent = any(s.source == "nvml" for s in view.blind_spots)
    info = resolve_gpu(selector, tuple(g.info for g in view.gpus), driver_silent=silent)
    nodes = frozenset(DeviceId(major, info.minor) for major in read_driver([]).gpu_majors)
    found = OpenGpu(
        next(gpu_text(g) for g in view.gpus if g.info == info),
        info,
        blind_spots=tuple(s for s in view.blind_spots if s.code != DETAIL_ONLY),
    )
    for holder in view.holders:
        if holder.process.pid == sources.nvml.pid or not (info.minor in holder.gpus or nodes & holder.nodes):
            continue
        if holder.vmid is None:
            found.host.append(holder)
        else:
            found.containers.setdefault(holder.vmid, []).append(holder)
    return found if found.containers else _looked_at_again(sources, found, info, nodes)


def _looked_at_again(sources: Sources, found: OpenGpu, info: GpuInfo, nodes: frozenset[DeviceId]) -> OpenGpu:
    """Nobody was met in one walk over the host: each container by itself, where one that moves fast is met, too."""
    with sources.scanner.within():
        return _look_at_each(sources, found, info, nodes)


def _look_at_each(sources: Sources, found: OpenGpu, info: GpuInfo, nodes: frozenset[DeviceId]) -> OpenGpu:
    vmids, blind = sources.cgroups.containers()
    for vmid in vmids:
        observer = Observer(sources, vmid)
        try:
            for _ in range(LOOKS):
                seen = observer.look()
                there = [h for h in seen.holders if info.minor in h.gpus or nodes & h.nodes]
                if there:
                    found.containers[vmid] = there
                    break
            blind += [s for s in seen.blind_spots if s.code != DETAIL_ONLY]
        finally:
            observer.close()
    return replace(found, blind_spots=tuple(dict.fromkeys((*found.blind_spots, *blind))))


def _foreign_driver(selector: str) -> OpenGpu | None:
    try:
        pci = canonical_pci(selector)
    except ValueError:
        return None
    drivers = vfio_pci()
    return OpenGpu(f"GPU {pci}", None, drivers[pci] or "no driver") if pci in drivers else None


def people(holders: Iterable[Holder]) -> str:
    """`pid 4711 (python3, 42,759 MiB), ...`, at most six by name."""
    found = list(holders)
    names = [
        f"pid {h.process.pid} ({h.process.comm}{f', {h.memory_mib:,} MiB' if h.memory_mib else ''})" for h in found[:6]
    ]
    return ", ".join(names) + (f" and {len(found) - 6} more" if len(found) > 6 else "")


__all__ = ["OpenGpu", "look_at_gpu", "people"]
