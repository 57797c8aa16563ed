"""What became of a climb: the case that is judged, each holder's fate and each GPU's figures in the report."""

from __future__ import annotations

from hostd.case import Case
from hostd.climb import Climb
from hostd.model import Fate, GpuReport, GpuState, Holder, HolderReport, Observation, ProcessRef, Stuck


def case_of(climb: Climb, last: Observation) -> Case:
    """Everything the verdict may depend on, at the last look."""
    lasting = [s for s in climb.stuck if climb.lives(s.ref)]
    seen = {h.ref for h in last.holders}
    undead = [h for s in lasting if s.ref not in seen and (h := climb.dealt.get(s.ref)) is not None]
    dealt, resume = climb.dealt, climb.resume
    inherited = {h.inherited_from for h in dealt.values() if h.inherited_from is not None}
    return Case(
        before=climb.first,
        after=last,
        minors=frozenset(climb.minors),
        own_minors=climb.own_minors(),
        selection=climb.selection,
        acted=bool(dealt),
        dry_run=climb.options.dry_run,
        verify_memory=climb.options.verify_memory,
        stuck=tuple(lasting),
        undead=tuple(undead),
        respawned=frozenset(climb.returned),
        known=frozenset(dealt),
        openers=frozenset({h.process.pid for h in dealt.values()} | inherited),
        handovers=tuple(climb.handovers),
        new_run_ticks=climb.new_run_ticks,
        time_is_up=climb.time_is_up(),
        had=sum(1 for h in climb.selected(climb.first) if h.targetable),
        resumed=resume.termed | resume.killed if resume else frozenset(),
        baseline_mib=climb.baseline_mib,
        falling=climb.falling,
        restless=climb.restless,
        returned=tuple(climb.returned.values()),
        restarters=tuple(climb.lineage.restarters(climb.returned.values(), climb.first.init)),
        xid=str(climb.xid) if climb.xid else "",
        xid_advice=climb.xid.advice if climb.xid else "",
        waited_s=climb.elapsed_s(),
    )


def fill(climb: Climb, last: Observation) -> None:
    """Puts fates and figures into the report."""
    report = climb.report
    alive = {h.ref: h for h in climb.selected(last)}
    stuck = {s.ref: s for s in climb.stuck}
    everyone = {h.ref: h for h in climb.selected(climb.first)} | alive | climb.dealt
    for ref, holder in everyone.items():
        one = HolderReport(holder, _fate(climb, ref, alive, stuck), stuck.get(ref))
        report.holders.append(one)
        if one.fate in (Fate.SURVIVED, Fate.UNKILLABLE):
            report.details += _traced(climb, holder)
        climb.listener.fate(report, one)
    report.gpus += [
        _gpu_report(climb.first.gpu(gpu.info.minor), gpu, [h for h in last.foreign if gpu.info.minor in h.gpus])
        for gpu in last.gpus
        if gpu.info.minor in climb.minors | climb.own_minors()
    ]
    report.blind_spots = list(last.blind_spots)


def _traced(climb: Climb, holder: Holder) -> list[str]:
    """Who holds a survivor back by tracing it: the one thing that helps then."""
    procfs = climb.sources.procfs
    try:
        pid = procfs.tracer(holder.process.pid)
        tracer = procfs.read_process(pid) if pid else None
    except OSError:
        return []
    if tracer is None:
        return []
    who = f"pid {holder.process.pid} ({holder.process.comm})"
    return [f"{who} is traced by pid {pid} ({tracer.comm}): it cannot end before that one lets it go or ends itself"]


def _gpu_report(before: GpuState | None, after: GpuState, others: list[Holder]) -> GpuReport:
    return GpuReport(
        info=after.info,
        used_mib_before=before.used_mib if before else None,
        used_mib_after=after.used_mib,
        reserved_mib=after.reserved_mib,
        ghost_mib=after.ghost_mib,
        bar1_used_mib_after=after.bar1_used_mib,
        other_holders=others,
        recovery_action=after.recovery_action,
    )


def _fate(climb: Climb, ref: ProcessRef, alive: dict[ProcessRef, Holder], stuck: dict[ProcessRef, Stuck]) -> Fate:
    lives = climb.lives(ref)
    if lives and ref in stuck:
        return Fate.UNKILLABLE
    if not lives or climb.sources.procfs.is_dying(ref.pid):
        return Fate.EXITED
    if ref not in climb.dealt and ref not in climb.returned:
        return Fate.SPARED
    return Fate.RESPAWNED if ref in climb.returned and ref in alive else Fate.SURVIVED
