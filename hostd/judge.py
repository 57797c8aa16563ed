"""From observations to a verdict: pure, one small function per way of not being released, the worst one wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hostd.model import (
    BlindSpot,
    DeviceId,
    Evidence,
    GpuState,
    Heir,
    Holder,
    Observation,
    Process,
    ProcessRef,
    Stuck,
    Verdict,
)
from hostd.supervisor import how_to_stop
from hostd.verdicts import EXIT_PRECEDENCE, REASONS, say

DETAIL_ONLY = "detail-unreadable"
"""Code of a blind spot that takes nothing away from the look (a command line, the mappings of a known holder)."""

RESERVE_COUNTED = "memory-v1"
"""Code of a GPU of an old driver whose "used" has its own reserve in it: only a difference means anything then."""

_DRIVER_CODES = ("nvml-missing", "driver-mismatch", "driver-not-loaded", "driver-silent")


@dataclass(frozen=True, slots=True)
class Selection:
    """What `--gpu` and `--pid` leave of a container. None = everything."""

    minors: frozenset[int] | None = None
    pids: frozenset[ProcessRef] | None = None
    nodes: frozenset[DeviceId] = frozenset()
    """For a hand-over: also whoever merely has one of these open, wherever its memory is."""

    def takes(self, holder: Holder) -> bool:
        if self.pids is not None and holder.ref not in self.pids:
            return False
        return self.minors is None or bool(self.minors & set(holder.gpus)) or bool(self.nodes & holder.nodes)


@dataclass(frozen=True, slots=True)
class Handover:
    """Between two looks at the driver a client of somebody else grew by what one of ours, gone between them, had."""

    minor: int
    pid: int
    mib: int


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a verdict may depend on."""

    before: Observation
    """The look before the first rung."""
    after: Observation
    """The last look."""
    minors: frozenset[int]
    """The GPUs that are verified: every one that a selected holder had."""
    own_minors: frozenset[int] = frozenset()
    """GPUs of the container's configuration: looked at for ghost memory even when it holds nothing."""
    selection: Selection = Selection()
    acted: bool = False
    dry_run: bool = False
    verify_memory: bool = True
    stuck: tuple[Stuck, ...] = ()
    undead: tuple[Holder, ...] = ()
    """Those of them that show no descriptor any more: they hang in exit(), in the driver's release of it."""
    respawned: frozenset[ProcessRef] = frozenset()
    known: frozenset[ProcessRef] = frozenset()
    """Holders that a rung has dealt with."""
    openers: frozenset[int] = frozenset()
    """Pids of the holders that were dealt with, and of the dead openers that they had inherited from."""
    handovers: tuple[Handover, ...] = ()
    """Charges of others that grew when one of ours went."""
    new_run_ticks: int | None = None
    """Start of the container's new init, when it was started again during this release."""
    time_is_up: bool = False
    had: int = 0
    """Selected holders at the first look."""
    resumed: frozenset[ProcessRef] = frozenset()
    """What an earlier attempt of this release, which was cut off, had signalled."""
    baseline_mib: dict[int, int] = field(default_factory=dict)
    """GPU minor -> baseline of that earlier attempt; it wins over `before`."""
    falling: bool = False
    """Memory was still falling when the time was up."""
    waited_s: float = 0.0
    restless: bool = False
    """Holders came back after the last round, though the last look may not have met one."""
    returned: tuple[Holder, ...] = ()
    """Every holder that started after the first signal."""
    restarters: tuple[Process, ...] = ()
    """The container's processes that were seen to start a holder more than once."""
    xid: str = ""
    xid_advice: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict | None
    reason: str
    message: str
    next_step: str

    @property
    def exit_status(self) -> int:
        return REASONS[self.reason].exit_status


def judge(case: Case) -> Judgement:
    """The verdict on a case. Released only if no check objects."""
    objections = [
        found
        for check in (_living, _restless, _dying, _driver_only, _not_seen, _driver_silent, *_MEMORY_CHECKS)
        if (found := check(case)) is not None
    ]
    if objections:
        return min(objections, key=lambda j: EXIT_PRECEDENCE.index(j.exit_status))
    return _released(case)


def judgement(case: Case, reason: str, **facts: object) -> Judgement:
    message, next_step = say(reason, vmid=case.after.vmid, **facts)
    return Judgement(REASONS[reason].verdict, reason, message, next_step)


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
    if not case.acted and not case.time_is_up:
        return judgement(case, "holders-present", holders=who, gpus=where)
    if case.xid:
        return judgement(case, "new-xid", holders=who, detail=case.xid, advice=case.xid_advice)
    returned = [h for h in living if h.ref in case.respawned]
    if returned:
        return _respawned(case, returned)
    if case.known and not any(h.ref in case.known for h in living):
        return judgement(case, "holder-appeared", holders=who, gpus=where)
    return judgement(case, "holders-survive", holders=who, gpus=where, waited=f"{case.waited_s:.0f} s")


def of_new_run(holder: Holder, new_run_ticks: int | None) -> bool:
    """True when it cannot be of the run that the release began with: nothing of the new one is older than its init."""
    return new_run_ticks is not None and holder.process.start_time >= new_run_ticks


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


def driver_silence(observation: Observation) -> tuple[str, str] | None:
    """(reason, detail) when the driver as a whole gave no answer at this look."""
    for spot in observation.blind_spots:
        if spot.source == "nvml" and spot.code != DETAIL_ONLY:
            code = spot.code if spot.code in _DRIVER_CODES else "driver-silent"
            return ("driver-silent" if code == "driver-not-loaded" else code), f"{spot.what}: {spot.error}"
    return None


def _driver_silent(case: Case) -> Judgement | None:
    if not case.after.driver_present or not case.verify_memory:
        return None
    silence = driver_silence(case.after)
    return judgement(case, silence[0], detail=silence[1]) if silence else None


# --- memory, GPU by GPU ----------------------------------------------------------------------------------------------


def _states(case: Case) -> list[tuple[GpuState, GpuState | None]]:
    """(after, before) of every GPU that is verified."""
    wanted = case.minors | case.own_minors
    return [(g, case.before.gpu(g.info.minor)) for g in case.after.gpus if g.info.minor in wanted]


def _gpu_lost(case: Case) -> Judgement | None:
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


def baseline_of(minor: int, before: Observation, earlier: dict[int, int]) -> int | None:
    """The baseline of a release on one GPU; None when the driver gave none."""
    if minor in earlier:
        return earlier[minor]
    state = before.gpu(minor)
    return state.baseline_mib if state else None


def excess_mib(state: GpuState, baseline: int | None) -> int:
    """Ghost memory above the baseline of this release and its tolerance; 0 when there is none or no figure.

    Without a baseline (the driver was silent before) it counts in full: the stricter reading.
    """
    ghost = state.ghost_mib
    if ghost is None:
        return 0
    over = ghost - (baseline or 0)
    return over if over > state.tolerance_mib else 0


def _ghost(case: Case) -> Judgement | None:
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


def _ghost_before(case: Case) -> Judgement | None:
    """Ghost memory that was there before: held only on a GPU that nobody else is attached to (DESIGN 4, Verify)."""
    for state, _ in _states(case):
        ghost, baseline = state.ghost_mib, baseline_of(state.info.minor, case.before, case.baseline_mib)
        if ghost is None or baseline is None or state.foreign_clients or state.error_code == RESERVE_COUNTED:
            continue
        if min(ghost, baseline) > state.tolerance_mib:
            text = f"{ghost:,} MiB on {gpu_text(state)}"
            return judgement(case, "draining" if case.falling else "ghost-memory-before", ghost=text)
    return None


def _passed_on(case: Case) -> Judgement | None:
    """A dead client's memory lives on in a descriptor that was opened in this container and is another's now."""
    kept = {s.info.minor for s, _ in _states(case) if (s.dead_mib(Heir.PASSED) or 0) > 0}
    others = [h for h in case.after.foreign if h.passed_on and kept & set(h.gpus)]
    if not kept or not others:
        return None
    return judgement(case, "held-by-other", gpus=gpus_text(case, kept), others=others_text(others))


def _kept_by_rest(case: Case) -> Judgement | None:
    """Of a selection: a process of the container that was not selected inherited what a selected one had."""
    if case.selection == Selection():
        return None
    for state, _ in _states(case):
        if any(c.heir is Heir.OWN and c.pid in case.openers and c.used_mib for c in state.dead_clients):
            rest = [h for h in case.after.holders if h.targetable and state.info.minor in h.gpus]
            return judgement(case, "held-by-rest", gpus=gpu_text(state), holders=holders_text(rest))
    return None


def _taken_over(case: Case) -> Judgement | None:
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


_MEMORY_CHECKS = (_gpu_lost, _ghost, _ghost_before, _passed_on, _kept_by_rest, _taken_over)


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


# --- words -----------------------------------------------------------------------------------------------------------


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


def inherited_text(state: GpuState) -> str:
    dead = [c for c in state.dead_clients if c.heir is Heir.OWN]
    return ", ".join(f"dead pid {c.pid}" for c in dead)
