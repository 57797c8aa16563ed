"""GPUs and holders as people are told of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hostd.case import Case
from hostd.model import GpuState, Holder


def gpu_text(state: GpuState) -> str:
    info = state.info
    if info.index is not None:
        return f"GPU {info.index}"
    return f"GPU {info.pci_bus_id or f'minor {info.minor}'}"


def gpus_text(case: Case, minors: Iterable[int]) -> str:
    wanted = sorted(set(minors))
    names = [gpu_text(state) if (state := case.after.gpu(m)) else f"GPU minor {m}" for m in wanted]
    return ", ".join(names) or "the GPU control nodes"


def holders_text(holders: Iterable[Holder]) -> str:
    """`pid 4711 (python3), pid 4712 (VLLM::EngineCor)`, at most four by name."""
    return _people(holders, with_owner=False)


def others_text(holders: Iterable[Holder]) -> str:
    return _people(holders, with_owner=True)


def _people(holders: Iterable[Holder], *, with_owner: bool) -> str:
    found = list(holders)
    names = []
    for h in found[:4]:
        owner = f" of {owner_text(h)}" if with_owner else ""
        names.append(f"pid {h.process.pid} ({h.process.comm}){owner}")
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return ", ".join(names) + more


def owner_text(holder: Holder) -> str:
    return "the host" if holder.vmid is None else f"container {holder.vmid}"


def bar1_text(case: Case, minors: Iterable[int]) -> str:
    """High BAR1 use without a holder goes into the reason, the verdict stays (DESIGN 4)."""
    high = [
        f"{gpu_text(s)} has {s.bar1_used_mib:,} MiB of BAR1 in use"
        for m in sorted(minors)
        if (s := case.after.gpu(m)) and s.bar1_used_mib and s.bar1_used_mib > 256
    ]
    return f" ({'; '.join(high)})" if high else ""
