"""Memory figures of a GPU against the baseline of a release, and against an earlier look. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from hostd.case import Handover
from hostd.model import GpuState, Observation

RESERVE_COUNTED = "memory-v1"
"""Code of a GPU of an old driver whose "used" has its own reserve in it: only a difference means anything then."""


def baseline_of(minor: int, before: Observation, earlier: dict[int, int]) -> int | None:
    """The baseline of a release on one GPU; None when the driver gave none."""
    if minor in earlier:
        return earlier[minor]
    state = before.gpu(minor)
    return state.baseline_mib if state else None


def lonely_ghost_mib(state: GpuState) -> int:
    """Ghost memory on a GPU that nobody else is attached to; 0 when it is within the tolerance or cannot be told."""
    ghost = state.ghost_mib
    if ghost is None or state.foreign_clients or state.error_code == RESERVE_COUNTED:
        return 0
    return ghost if ghost > state.tolerance_mib else 0


def old_ghost_mib(state: GpuState, before: Observation, earlier: dict[int, int]) -> int:
    """`lonely_ghost_mib` where there was ghost memory before, too; by the baseline when the driver was silent then."""
    was = before.gpu(state.info.minor)
    ghost = was.ghost_mib if was is not None and was.ghost_mib is not None else earlier.get(state.info.minor, 0)
    return lonely_ghost_mib(state) if ghost > state.tolerance_mib else 0


def excess_mib(state: GpuState, baseline: int | None) -> int:
    """Ghost memory above the baseline of this release and its tolerance; 0 when there is none or no figure.

    Without a baseline (the driver was silent before) it counts in full: the stricter reading.
    """
    ghost = state.ghost_mib
    if ghost is None:
        return 0
    over = ghost - (baseline or 0)
    return over if over > state.tolerance_mib else 0


def handovers(before: GpuState, after: GpuState, gone: Iterable[int]) -> list[Handover]:
    """What others gained on one GPU between two looks, where that is what `gone` (pids of ours) lost meanwhile.

    Only of clients that the driver listed before: who starts a job now has imported nothing from us.
    """
    lost = [mib for pid in gone if pid not in after.client_mib and (mib := before.client_mib.get(pid))]
    found = []
    for pid in after.foreign_clients:
        was, now = before.client_mib.get(pid), after.client_mib.get(pid)
        if not lost or was is None or now is None:
            continue
        if any(_moved(now - was, amount, after.tolerance_mib) for amount in (*lost, sum(lost))):
            found.append(Handover(after.info.minor, pid, now - was))
    return found


CONTEXT_MIB = 1024
"""At most this much of a charge is the process's own context, which goes with it (518 MiB on an H200)."""


def _moved(grown: int, lost: int, tolerance: int) -> bool:
    """True when what a foreign client gained is what ours lost, less the context that died with it."""
    return grown > tolerance and max(lost // 2, lost - CONTEXT_MIB) - tolerance <= grown <= lost + tolerance
