"""What the memory of each GPU has against a verdict of released: one small function per objection. Pure."""

from __future__ import annotations

from hostd.case import Case, Judgement, Selection, driver_silence, judgement
from hostd.figures import baseline_of, excess_mib, lonely_ghost_mib, old_ghost_mib
from hostd.model import GpuState, Heir
from hostd.words import bar1_text, gpu_text, gpus_text, holders_text, others_text


def _states(case: Case) -> list[tuple[GpuState, GpuState | None]]:
    """(after, before) of every GPU that is verified."""
    wanted = case.minors | case.own_minors
    return [(g, case.before.gpu(g.info.minor)) for g in case.after.gpus if g.info.minor in wanted]


def gpu_lost(case: Case) -> Judgement | None:
    if not case.verify_memory or driver_silence(case.after):
        return None
    for state, _ in _states(case):
        if state.error:
            reason = "figures-unavailable" if state.error_code == "figures-unavailable" else "gpu-lost"
            return judgement(case, reason, gpus=gpu_text(state), detail=state.error)
    unanswered = {g.info.minor: g for g, _ in _states(case) if g.ghost_mib is None}
    missing = case.minors - {g.info.minor for g in case.after.gpus}
    if unanswered and case.after.driver_present:
        state = next(iter(unanswered.values()))
        listed = state.used_mib is not None
        reason = "figures-unavailable" if listed else "gpu-lost"
        return judgement(case, reason, gpus=gpu_text(state), detail="not in the driver's answer")
    if missing and case.after.driver_present:
        return judgement(
            case, "gpu-lost", gpus=", ".join(f"GPU minor {m}" for m in sorted(missing)), detail="no longer listed"
        )
    return None


def ghost(case: Case) -> Judgement | None:
    over = {
        g.info.minor: excess_mib(g, baseline_of(g.info.minor, case.before, case.baseline_mib))
        for g, _ in _states(case)
        if g.info.minor in case.minors
    }
    over = {minor: mib for minor, mib in over.items() if mib}
    if not over:
        return None
    ghost = ", ".join(
        f"{mib:,} MiB on {gpu_text(state)}" for minor, mib in over.items() if (state := case.after.gpu(minor))
    )
    if case.falling:
        return judgement(case, "draining", ghost=ghost)
    return judgement(case, "ghost-memory", ghost=ghost + bar1_text(case, over))


def ghost_before(case: Case) -> Judgement | None:
    """Ghost memory that was there before: held only on a GPU that nobody else is attached to (DESIGN 4, Verify)."""
    for state, _ in _states(case):
        if mib := old_ghost_mib(state, case.before, case.baseline_mib):
            text = f"{mib:,} MiB on {gpu_text(state)}"
            return judgement(case, "draining" if case.falling else "ghost-memory-before", ghost=text)
    return None


def ghost_of_whom(case: Case) -> Judgement | None:
    """Ghost memory on a GPU that may be the container's own: its configuration, which would tell, could not be read."""
    if case.selection.minors is not None:
        return None
    for spot in (s for s in case.after.blind_spots if s.source == "pve"):
        for state in case.after.gpus:
            if mib := lonely_ghost_mib(state):
                detail = f"{spot.what}: {spot.error}; {mib:,} MiB on {gpu_text(state)} that nobody holds may be its own"
                return judgement(case, "blind-spots", detail=detail)
    return None


def passed_on(case: Case) -> Judgement | None:
    """A dead client's memory lives on in a descriptor that was opened in this container and is another's now."""
    kept = {s.info.minor for s, _ in _states(case) if (s.dead_mib(Heir.PASSED) or 0) > 0}
    others = [h for h in case.after.foreign if h.passed_on and kept & set(h.gpus)]
    if not kept or not others:
        return None
    return judgement(case, "held-by-other", gpus=gpus_text(case, kept), others=others_text(others))


def kept_by_rest(case: Case) -> Judgement | None:
    """Of a selection: a process of the container that was not selected inherited what a selected one had."""
    if case.selection == Selection():
        return None
    for state, _ in _states(case):
        if any(c.heir is Heir.OWN and c.pid in case.openers and c.used_mib for c in state.dead_clients):
            rest = [h for h in case.after.holders if h.targetable and state.info.minor in h.gpus]
            return judgement(case, "held-by-rest", gpus=gpu_text(state), holders=holders_text(rest))
    return None


def taken_over(case: Case) -> Judgement | None:
    """A foreign client's charge grew by what one of ours lost: the importer of a CUDA IPC handle (FACTS)."""
    for state, _ in _states(case):
        for taken in case.handovers:
            left = state.client_mib.get(taken.pid) or 0
            if taken.minor != state.info.minor or taken.pid not in state.foreign_clients or left < taken.mib:
                continue
            others = [h for h in case.after.foreign if h.process.pid == taken.pid]
            who = others_text(others) or f"pid {taken.pid}"
            return judgement(case, "taken-over", gpus=gpu_text(state), others=who)
    return None


CHECKS = (gpu_lost, ghost, ghost_before, ghost_of_whom, passed_on, kept_by_rest, taken_over)
