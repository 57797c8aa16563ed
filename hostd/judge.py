"""From observations to a verdict: pure, one small function per way of not being released, the worst one wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hostd.case import DETAIL_ONLY, Case, Judgement, Selection, driver_silence, judgement, of_new_run
from hostd.memorycheck import CHECKS as MEMORY_CHECKS
from hostd.model import BlindSpot, Evidence, Holder
from hostd.supervisor import how_to_stop
from hostd.verdicts import EXIT_PRECEDENCE
from hostd.words import bar1_text, gpus_text, holders_text


def judge(case: Case) -> Judgement:
    """The verdict on a case. Released only if no check objects."""
    objections = [
        found
        for check in (_living, _restless, _dying, _not_placed, _driver_only, _not_seen, _driver_silent, *MEMORY_CHECKS)
        if (found := check(case)) is not None
    ]
    if objections:
        return min(objections, key=lambda j: EXIT_PRECEDENCE.index(j.exit_status))
    return _released(case)


# --- holders ---------------------------------------------------------------------------------------------------------


def _living(case: Case) -> Judgement | None:
    hung = {s.ref for s in case.stuck}
    living = [h for h in case.after.holders if (h.targetable or h.ref in hung) and case.selection.takes(h)]
    living += case.undead
    if not living:
        return None
    who, where = holders_text(living), gpus_text(case, {m for h in living for m in h.gpus})
    stuck = [s for s in case.stuck if any(h.ref == s.ref for h in living)]
    if stuck:
        return judgement(
            case,
            "unkillable",
            holders=holders_text([h for h in living if any(s.ref == h.ref for s in stuck)]),
            state=stuck[0].state,
            wchan=stuck[0].wchan or "(unknown)",
        )
    if case.dry_run:
        return judgement(case, "holders-present", holders=who, gpus=where)
    if all(of_new_run(h, case.new_run_ticks) for h in living):
        return judgement(case, "container-restarted", holders=who, gpus=where)
    if case.xid:
        return judgement(case, "new-xid", holders=who, detail=case.xid, advice=case.xid_advice)
    returned = [h for h in living if h.ref in case.respawned]
    if returned:
        return _respawned(case, returned)
    if not case.acted and not case.time_is_up:
        return judgement(case, "holders-present", holders=who, gpus=where)
    if case.known and not any(h.ref in case.known for h in living):
        return judgement(case, "holder-appeared", holders=who, gpus=where)
    return judgement(case, "holders-survive", holders=who, gpus=where, waited=f"{case.waited_s:.0f} s")


def _respawned(case: Case, returned: Iterable[Holder]) -> Judgement:
    """Names what brings the holders back: their unit, else the process that was seen to start them."""
    units = {h.supervisor.cgroup: h.supervisor for h in returned if h.supervisor and h.supervisor.kind != "session"}
    names = sorted({u.name for u in units.values()})
    if not names:
        names = [f"pid {p.pid} ({p.comm})" for p in case.restarters[:3]]
    how = how_to_stop(case.after.vmid, units.values(), () if units else case.restarters)
    who = ", ".join(names) or "a process of the container"
    return judgement(case, "respawned", supervisor=who, how=how or f"stop {who}")


def _restless(case: Case) -> Judgement | None:
    """Shorter-lived than our looks: the last one met nobody, every one before it did."""
    return _respawned(case, case.returned) if case.restless and case.returned else None


def _driver_only(case: Case) -> Judgement | None:
    listed = [
        h for h in case.after.holders if h.evidence == {Evidence.NVML} and not h.dying and case.selection.takes(h)
    ]
    return judgement(case, "driver-only-holder", holders=holders_text(listed)) if listed else None


def _not_placed(case: Case) -> Judgement | None:
    """With `--gpu`: who may be on that GPU or on another one, while the lists that would tell could not be read."""
    found = [h for h in case.after.holders if h.targetable and case.selection.cannot_tell(h)]
    if not found:
        return None
    where = gpus_text(case, case.selection.minors or ())
    return judgement(case, "placement-unknown", holders=holders_text(found), gpus=where)


def _dying(case: Case) -> Judgement | None:
    """Past exit(), but the driver has not given everything back yet: that is draining, not a holder."""
    dying = [h for h in case.after.holders if h.dying and case.selection.takes(h)]
    if not dying:
        return None
    if case.dry_run:
        return judgement(case, "holders-present", holders=holders_text(dying), gpus=gpus_text(case, case.minors))
    ghost = f"{sum(h.memory_mib or 0 for h in dying):,} MiB of {holders_text(dying)}"
    return judgement(case, "draining", ghost=ghost)


# --- blindness -------------------------------------------------------------------------------------------------------


def incomplete(spots: Iterable[BlindSpot]) -> list[BlindSpot]:
    """The blind spots in which a holder could hide; the driver's silence is judged apart."""
    return [s for s in spots if s.code != DETAIL_ONLY and s.source != "nvml"]


def _not_seen(case: Case) -> Judgement | None:
    spots = incomplete(case.after.blind_spots)
    if not spots:
        return None
    first = f"{spots[0].what}: {spots[0].error}"
    more = f" and {len(spots) - 1} more" if len(spots) > 1 else ""
    return judgement(case, "blind-spots", detail=first + more)


def _driver_silent(case: Case) -> Judgement | None:
    if not case.after.driver_present or not case.verify_memory:
        return None
    silence = driver_silence(case.after)
    return judgement(case, silence[0], detail=silence[1]) if silence else None


# --- nothing objects ---------------------------------------------------------------------------------------------------


def _released(case: Case) -> Judgement:
    after = case.after
    if case.acted or case.resumed or case.had:
        if not case.verify_memory and (silence := driver_silence(after)):
            return judgement(case, "memory-not-verified", detail=silence[1])
        count = len(case.known | case.resumed) or case.had
        gone = f"{count} holder{'s' if count != 1 else ''}"
        quiet = {m for m in case.minors if (s := after.gpu(m)) and not s.live_clients}
        return judgement(case, "released", gone=gone, gpus=gpus_text(case, case.minors) + bar1_text(case, quiet))
    if not after.driver_present:
        return judgement(case, "no-driver")
    if not case.verify_memory and (silence := driver_silence(after)):
        return judgement(case, "memory-not-verified", detail=silence[1])
    found = judgement(case, "nothing-held" if after.running or after.processes else "not-running")
    if case.selection != Selection() and after.holders:
        return replace(found, message=f"nothing that was selected of container {after.vmid} holds a GPU")
    return found
