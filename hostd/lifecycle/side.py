"""A release of a container that does not run: clear what it left, then prove that its GPUs are free.

The same loop, judge and report as any release (`hostd/release.py`); what differs is that everything in the container's
cgroup may go, and that what it held before is known from the snapshot of pre-stop.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from hostd.cancel import Cancel
from hostd.case import Selection
from hostd.climb import LAST_LOOK_S, Subject
from hostd.clock import boot_ticks_now
from hostd.events import Listener
from hostd.ladder import Options, Resume
from hostd.lifecycle.clearing import SETTLE_S, Cleared, Running, Taken, clear, container_runs
from hostd.lifecycle.records import Snapshot, pairs
from hostd.model import Observation, Process, ProcessRef, RungRecord, Step
from hostd.release import Release
from hostd.sources import Sources, read_driver
from hostd.system.cgroupfs import ContainerCgroup, owner_of
from hostd.system.pidfd import Pinned, wait_any


@dataclass(slots=True)
class Plan:
    """What is known beside the subject."""

    taken: Taken
    snapshot: Snapshot | None = None
    baseline_mib: dict[int, int] = field(default_factory=dict)
    """GPU minor -> ghost memory without the container, from before it ran or stopped."""
    settle_s: float = SETTLE_S
    clears_monitor: bool = False
    on_cleared: Callable[[Cleared], None] = lambda cleared: None


class SideRelease(Release):
    """One release on the stop side or before a start. `run()` once, as its parent."""

    def __init__(
        self,
        sources: Sources,
        subject: Subject,
        options: Options,
        listener: Listener,
        plan: Plan,
        *,
        cancel: Cancel,
        resume: Resume | None = None,
    ) -> None:
        super().__init__(
            sources, subject, replace(options, now=True, stop=True), listener, cancel=cancel, resume=resume
        )
        self.plan = plan
        self.cleared: list[Cleared] = []
        self.last: Observation | None = None
        """The look that the verdict rests on."""
        self.runs: Running | None = None
        """The container runs (again): then nothing was touched."""
        self._used_before: dict[int, int] = {}
        self._inside = {h.ref for h in plan.snapshot.holders if h.inside} if plan.snapshot is not None else set()
        """Holders that are known to run in the PID namespace of the container's init or below it."""

    def _run(self) -> None:
        climb, snapshot = self.climb, self.plan.snapshot
        if snapshot is not None:
            climb.dealt = {h.ref: h.holder(climb.subject.vmid) for h in snapshot.holders}
            climb.baseline_mib = pairs(snapshot.baseline_mib) | climb.baseline_mib
        for minor, mib in self.plan.baseline_mib.items():
            climb.baseline_mib.setdefault(minor, mib)
        self._clear()
        self._end_strays()
        first = climb.look_first()
        self.runs = container_runs(climb.sources, climb.subject.vmid)
        if self.runs is not None:
            climb.selection = Selection(pids=frozenset())  # whatever holds a GPU now belongs to the new run
        self._begin(first)
        holders = climb.selected(first)
        self.report.was_held = bool(climb.dealt or holders) or bool(climb.resume and climb.resume.was_held)
        climb.listener.observed(self.report, first, holders)
        self.last = self._climb_all(first)
        self._conclude(self.last)

    def _begin(self, first: Observation) -> None:
        climb = self.climb
        climb.begin(first)
        climb.minors |= climb.subject.own_minors | climb.minors_of([*climb.selected(first), *climb.dealt.values()])
        if self.plan.snapshot is not None:
            climb.minors |= set(self.plan.snapshot.minors)
        if climb.resume is not None:
            climb.minors |= climb.resume.minors
        climb.stuck = [stuck for cleared in self.cleared for stuck in cleared.stuck]
        for gpu in first.gpus:
            # Nobody else is on it: whatever stays in use was the container's, and none of it is a baseline.
            if gpu.info.minor in climb.minors and not gpu.foreign_clients:
                climb.baseline_mib.setdefault(gpu.info.minor, 0)

    def _fill(self, last: Observation) -> None:
        """The report's "before" is the snapshot's: before the stop, not before our first look after it."""
        super()._fill(last)
        used = pairs(self.plan.snapshot.used_mib) if self.plan.snapshot is not None else {}
        used = self._used_before | used
        for gpu in self.report.gpus:
            gpu.used_mib_before = used.get(gpu.info.minor, gpu.used_mib_before)

    # --- leftovers ---

    def _clear(self) -> None:
        taken = self.plan.taken
        for cgroup in (taken.payload, taken.monitor if self.plan.clears_monitor else None):
            if cgroup is not None:
                self._clear_one(cgroup)

    def _clear_one(self, cgroup: ContainerCgroup) -> None:
        record = RungRecord(Step.CGROUP_KILL, self.climb.now_ms())
        seen: list[Observation] = []

        def begin(processes: list[Process]) -> None:
            self._note_before(seen[0], processes)
            record.at_ms = self.climb.now_ms()
            record.targets = [p.pid for p in processes]
            record.sent = len(processes)
            record.note = f"{cgroup.path}: " + ", ".join(f"{p.pid} ({p.comm})" for p in processes[:8])
            self.report.rungs.append(record)
            self.climb.listener.rung_begun(self.report, record, ())
            self.climb.killed |= {p.ref for p in processes}

        limits = self.climb.options.limits
        cleared = clear(
            self.climb.sources,
            cgroup,
            settle_s=self.plan.settle_s,
            grace_s=limits.kill_grace_s,
            deadline_s=self.climb.begun_s + limits.timeout_s,
            may_kill=lambda: container_runs(self.climb.sources, self.climb.subject.vmid) is None,
            look=lambda: seen.append(self.climb.observer.look(budget_s=LAST_LOOK_S)),
            before_kill=begin,
            check=self.climb.cancel.check,
        )
        if record.targets:
            left = {s.ref for s in cleared.stuck}
            record.gone = (
                sum(1 for p in cleared.processes if p.ref not in left) if not cleared.empty else len(record.targets)
            )
            record.waited_ms = self.climb.now_ms() - record.at_ms
            self.climb.listener.rung_done(self.report, record)
        if cleared.processes or cleared.stuck or cleared.blind_spots:
            self.cleared.append(cleared)
            self.report.blind_spots += cleared.blind_spots
            self.plan.on_cleared(cleared)

    def _note_before(self, before: Observation, processes: Iterable[Process]) -> None:
        """Who of those that are about to be killed holds a GPU, and what is in use without them."""
        refs = {p.ref for p in processes}
        for holder in before.holders:
            if holder.ref in refs or holder.targetable:
                self.climb.dealt.setdefault(holder.ref, holder)
            if self.climb.observer.view.is_inside(holder.process):
                self._inside.add(holder.ref)
        for gpu in before.gpus:
            if gpu.used_mib is not None:
                self._used_before.setdefault(gpu.info.minor, gpu.used_mib)
            if gpu.baseline_mib is not None:
                self.climb.baseline_mib.setdefault(gpu.info.minor, gpu.baseline_mib if gpu.foreign_clients else 0)

    def _end_strays(self) -> None:
        """Holders outside the container's cgroup that ran in the PID namespace of its init (nobody leaves that).

        They die with the init; one that is still there is stuck, or the init was not its own. Who was the container's by
        its cgroup alone, and has left that, is somebody else's now: left alone.
        """
        strays = [h for h in self.climb.dealt.values() if self._is_stray(h.ref)]
        if not strays or container_runs(self.climb.sources, self.climb.subject.vmid) is not None:
            return
        record = RungRecord(Step.KILL, self.climb.now_ms(), [h.process.pid for h in strays])
        self.report.rungs.append(record)
        self.climb.listener.rung_begun(self.report, record, strays)
        pins: list[Pinned] = []
        try:
            for holder in strays:
                self._end_stray(holder.ref, pins, record)
            end_s = time.monotonic() + self.climb.options.limits.kill_grace_s
            left = list(pins)
            while left and time.monotonic() < end_s:
                gone = wait_any(left, min(0.1, end_s - time.monotonic()))
                left = [pin for pin in left if pin not in gone]
            record.gone += len(pins) - len(left)
        finally:
            for pin in pins:
                pin.close()
        record.waited_ms = self.climb.now_ms() - record.at_ms
        self.climb.listener.rung_done(self.report, record)

    def _end_stray(self, ref: ProcessRef, pins: list[Pinned], record: RungRecord) -> None:
        """Pin, check, act, one after the other: nothing comes between the check and the signal. When in doubt, spared."""
        try:
            pin = Pinned.pin(ref, self._recheck_stray)
        except OSError as exc:
            record.note = f"cannot hold pid {ref.pid}: {exc.strerror or exc}"
            return
        if pin is not None and pin.send(signal.SIGKILL):
            pins.append(pin)
            record.sent += 1
            return
        if pin is not None:
            pin.close()
        if self.climb.lives(ref):
            record.note = f"pid {ref.pid} is not the container's any more"
        else:
            record.gone += 1

    def _is_stray(self, ref: ProcessRef) -> bool:
        if ref.start_time > boot_ticks_now() or self._recheck_stray(ref.pid) != ref:
            return False
        scan = self.climb.sources.scanner.scan([ref.pid], frozenset(read_driver([]).by_major))
        return bool(scan.open.get(ref.pid))

    def _recheck_stray(self, pid: int) -> ProcessRef | None:
        process = self.climb.sources.procfs.read_process(pid)
        if process is None or process.is_zombie or owner_of(process.cgroup) is not None:
            return None
        return process.ref if process.ref in self._inside else None


__all__ = ["Plan", "SideRelease"]
