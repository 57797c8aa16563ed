"""One climb of the ladder for one container: observe, judge, act, wait, observe again, and prove it.

The same loop serves CLI, daemon and hook. Every effect goes through `Effects`; a dry run has none.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from hostd.cancel import Cancel
from hostd.errors import InterruptedRelease, NoSuchContainerError, PgrError, RefusedError
from hostd.events import Listener, Silent
from hostd.judge import (
    RESERVE_COUNTED,
    Case,
    Handover,
    Judgement,
    Selection,
    baseline_of,
    driver_silence,
    excess_mib,
    gpu_text,
    handovers,
    judge,
    of_new_run,
)
from hostd.ladder import Options, Resume, Rung, rungs_for
from hostd.lock import RUN_DIR
from hostd.model import (
    DeviceId,
    Fate,
    GpuReport,
    Holder,
    HolderReport,
    Observation,
    ProcessRef,
    Report,
    RungRecord,
    Step,
    Stuck,
    Verdict,
)
from hostd.observe import Observer
from hostd.resetplan import REBOOT
from hostd.selection import resolve_gpu, resolve_pid
from hostd.sources import Sources, read_driver
from hostd.stopunit import Lineage, Stopped, UnitStopper
from hostd.system.kmsg import PATH as KMSG
from hostd.system.kmsg import Xid
from hostd.system.pidfd import Pinned, wait_any
from hostd.triage import stuck_tasks
from hostd.verdicts import REASONS, say
from hostd.waiting import MemoryGauge, Patience, wait_for_exits, wait_readable
from hostd.xid import XidWatch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostd.reset import Resetter

SIGNALS = {Step.TERM: signal.SIGTERM, Step.KILL: signal.SIGKILL}


class Effects:
    """What a release does to the world. Replaced by a recorder in the safety tests."""

    def send(self, pin: Pinned, number: int) -> bool:
        """True when the kernel accepted the signal, False when the process is gone."""
        return pin.send(number)

    def ask_units(self, units: UnitStopper, holders: list[Holder], grace_s: float) -> Stopped:
        """Asks the holders' supervisors to stop their jobs."""
        return units.ask(holders, grace_s)

    def kill_units(self, units: UnitStopper, holders: list[Holder]) -> Stopped:
        """Kills everything in the holders' units."""
        return units.kill(holders)


@dataclass(slots=True)
class Subject:
    """Which container, and what its configuration says about GPUs (paths as it names them)."""

    vmid: int
    own_minors: frozenset[int] = frozenset()
    exists: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class _State:
    """What a climb remembers between looks."""

    first: Observation
    begun_s: float
    deadline_s: float
    minors: set[int] = field(default_factory=set)
    dealt: dict[ProcessRef, Holder] = field(default_factory=dict)
    asked: set[ProcessRef] = field(default_factory=set)
    """Holders whose supervisor has begun to stop them."""
    killed: set[ProcessRef] = field(default_factory=set)
    respawned: set[ProcessRef] = field(default_factory=set)
    stuck: list[Stuck] = field(default_factory=list)
    """Of the targets that SIGKILL did not end while nothing moved."""
    asked_last: Observation | None = None
    """The last look at which the driver answered."""
    silent: bool = False
    """It did not when it was asked last."""
    handovers: list[Handover] = field(default_factory=list)
    first_signal_ticks: int | None = None
    falling: bool = False
    restless: bool = False
    """Holders still came back after the last round, whatever the last look happens to show."""
    xid: Xid | None = None
    """The driver reported this in the middle: no further signal."""


class Release:
    """One release of one container. `run()` once; the report is complete whatever happens."""

    def __init__(
        self,
        sources: Sources,
        subject: Subject,
        options: Options,
        listener: Listener | None = None,
        *,
        effects: Effects | None = None,
        cancel: Cancel | None = None,
        release_id: str = "",
        resume: Resume | None = None,
        resetter: Resetter | None = None,
        kmsg: str = KMSG,
    ) -> None:
        self.sources = sources
        self.subject = subject
        self.options = options
        self.listener: Listener = listener or Silent()
        self.effects = effects or Effects()
        self.cancel = cancel or Cancel()
        self.observer = Observer(sources, subject.vmid)
        self.selection = Selection()
        self.report = Report(release_id or str(uuid.uuid4()), subject.vmid, options.trigger, dry_run=options.dry_run)
        self.report.started = _utc_now()
        self.resume = resume
        self.resetter = resetter
        self._kmsg = kmsg
        self.units = UnitStopper(sources, self.observer.view)
        self.lineage = Lineage(sources, self.observer.view)
        self.xids: XidWatch | None = None
        self._returned: dict[ProcessRef, Holder] = {}
        """Holders that came back."""
        self._termed = resume.termed if resume else frozenset[ProcessRef]()
        self._baseline = dict(resume.baseline_mib) if resume else {}
        if resume is not None:
            self.report.release_id = resume.release_id
            self.report.started = resume.started or self.report.started
            self.report.rungs += resume.rungs
        self._begun_s = time.monotonic()
        self._begun_ticks = boot_ticks_now()
        if resume is not None and resume.begun_ticks is not None:
            self._begun_ticks = resume.begun_ticks
        self._new_run_ticks: int | None = None
        """Start of an init that the container did not have when the release began: what is of its run is left alone."""
        self._climbing: tuple[_State, Observation] | None = None
        """What an interruption can report."""

    # --- the climb ---------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """Climbs and returns the report. Errors of policy, usage and interruption end in the report, too; only a bug raises."""
        self.listener.started(self.report)
        try:
            self._run()
        except KeyboardInterrupt:
            self._end_by_error(InterruptedRelease("interrupted"))
        except PgrError as exc:
            self._end_by_error(exc)
        finally:
            self.observer.close()
            self.units.close()
            if self.xids is not None:
                self.xids.close()
        self.report.duration_ms = self._now_ms()
        self.listener.finished(self.report)
        return self.report

    def _run(self) -> None:
        limits = self.options.limits
        # A driver that hangs may take a part of the time only: what comes after needs some, too.
        first = self.observer.look(nvml_deadline_s=min(limits.nvml_deadline_s, max(0.5, limits.timeout_s / 4)))
        state = _State(first, self._begun_s, self._begun_s + limits.timeout_s)
        state.silent = driver_silence(first) is not None
        state.asked_last = None if state.silent else first
        self._climbing = state, first
        self._note_new_run(state, first)  # one that goes on where another was cut off may come too late
        self._check_exists(first)
        self._select(first)
        holders = self._selected(first)
        state.minors |= self._minors_of(holders) | ((self.selection.minors or frozenset()) & self.subject.own_minors)
        if self.resume is not None:
            state.minors |= self.resume.minors
        self.report.was_held = bool(holders) or (self.resume is not None and self.resume.was_held)
        self.listener.observed(self.report, first, holders)
        work = self._targets(first) or self._dying(first) or (self.resume and self.resume.was_held)
        if self.options.dry_run:
            self._conclude(state, first)
            return
        self._refuse_init(first)
        if not work:
            self._conclude(state, self._probe_old_ghosts(state, first))
            return
        self.xids = XidWatch(self._kmsg)
        self.lineage.note(holders)
        last = self._climb(state, first)
        self._refuse_init(last)  # it may have opened a GPU meanwhile; everybody else has been dealt with
        self._conclude(state, last)

    def _climb(self, state: _State, observation: Observation) -> Observation:
        """All rungs, then rounds of KILL for what came after, until nothing is left or nothing helps."""
        for round_number in range(self.options.limits.respawn_rounds + 1):
            for rung in self._rungs(round_number, state, observation):
                targets = self._targets_of(rung, state, observation)
                if not targets:
                    continue
                last = rung.step is Step.KILL and round_number == 0 and state.first_signal_ticks is not None
                if (self._time_is_up(state) and not last) or self._is_told_to_stop(state, observation):
                    break
                self._rung(state, rung, targets, observation)
                observation = self._look(state, nvml=self._is_driver_answering(state))
            if self._targets(observation):
                fresh = any(h.ref not in state.killed for h in self._targets(observation))
                if fresh and not self._time_is_up(state) and state.xid is None:
                    continue
                break
            observation = self._drain(state, observation)
            settled = self._settle(state, observation)
            if settled is not observation:  # others may have allocated between the driver's lists and its figures
                observation = self._drain(state, settled)
            if not self._targets(observation) or self._time_is_up(state):
                return self._probe_old_ghosts(state, observation)
        else:
            state.restless = True
        return self._look(state, nvml=True)

    def _rungs(self, round_number: int, state: _State, observation: Observation) -> Sequence[Rung]:
        """The ladder at first; later SIGKILL, and before it what brings the holders back, where that is allowed."""
        if round_number == 0:
            return rungs_for(self.options)
        kill = Rung(Step.KILL, self.options.limits.kill_grace_s)
        if not self.options.stop_units:
            return (kill,)
        self._end_restarters(state, observation)
        return (Rung(Step.CGROUP_KILL, kill.grace_s), kill)

    def _targets_of(self, rung: Rung, state: _State, observation: Observation) -> list[Holder]:
        found = [h for h in self._targets(observation) if h.ref not in state.killed]
        if rung.step is Step.STOP_UNIT:  # in a frozen container nobody can answer
            return [] if observation.frozen else [h for h in found if self.units.may_kill(h)]
        if rung.step is Step.CGROUP_KILL:
            return [h for h in found if h.ref in state.respawned and self.units.may_kill(h)]
        if rung.step is Step.TERM:  # its supervisor has sent it one by now: a second means "at once" to many programs
            return [h for h in found if h.ref not in state.asked]
        return found

    def _is_told_to_stop(self, state: _State, observation: Observation) -> bool:
        """True when the driver has reported an error that more signals would only make worse (CASES, Xid 119)."""
        if state.xid is None and self.xids is not None:
            gpus = [g.info.pci_bus_id for g in observation.gpus or state.first.gpus if g.info.minor in state.minors]
            state.xid = self.xids.fatal(gpus)
        return state.xid is not None

    def _end_restarters(self, state: _State, observation: Observation) -> None:
        """SIGTERM, then SIGKILL, to a process outside any unit that has been seen to start holders again."""
        loose = [h for h in self._targets(observation) if not self.units.may_kill(h)]
        for process in self.lineage.restarters(loose, state.first.init):
            if process.ns_pids == (1,) or self._time_is_up(state) or self._is_told_to_stop(state, observation):
                continue
            try:
                pin = Pinned.pin(process.ref, self.observer.recheck)
            except OSError:
                continue  # then it goes on, and is named in the verdict
            if pin is None:
                continue
            record = RungRecord(Step.STOP_UNIT, self._now_ms(), [process.pid])
            record.note = f"pid {process.pid} ({process.comm}) starts the job again and again"
            self.report.rungs.append(record)
            self.listener.rung_begun(self.report, record, ())
            begun_s = time.monotonic()
            with pin:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    record.sent += self.effects.send(pin, number)
                    if wait_any((pin,), RESTARTER_GRACE_S):
                        break
                record.gone = int(pin.gone())
            record.waited_ms = round((time.monotonic() - begun_s) * 1000)
            self.listener.rung_done(self.report, record)

    def _rung(self, state: _State, rung: Rung, targets: list[Holder], observation: Observation) -> None:
        """Signals, waits and records one rung."""
        self.cancel.check()  # not after the intent is written: whoever goes on would take the signals for sent
        record = RungRecord(rung.step, self._now_ms(), [h.process.pid for h in targets])
        self.report.rungs.append(record)
        self.listener.rung_begun(self.report, record, targets)
        if state.first_signal_ticks is None:
            state.first_signal_ticks = boot_ticks_now()
        if rung.step in (Step.STOP_UNIT, Step.CGROUP_KILL):
            pins = self._deal_with_units(state, rung, record, targets)
        else:
            pins = self._signal(state, rung, record, targets)
        begun_s, since = time.monotonic(), _utc_now()
        gauge = MemoryGauge(self.sources, self._uuids(state), lambda: self._driver_limit_s(state))
        patience = self._patience(state, rung)
        try:
            alive = self._wait(rung, pins, patience, gauge, observation, record)
        finally:
            record.waited_ms = round((time.monotonic() - begun_s) * 1000)
            gauge.settle()
            record.gone += sum(1 for pin in pins if pin.gone())
            for pin in pins:
                pin.close()
        if rung.step in (Step.KILL, Step.CGROUP_KILL) and not patience.moving:
            state.stuck += stuck_tasks(self.sources.procfs, [pin.ref for pin in alive], since)
        self.listener.rung_done(self.report, record)

    def _patience(self, state: _State, rung: Rung) -> Patience:
        deadline_s = state.deadline_s
        if rung.step in (Step.TERM, Step.STOP_UNIT):  # leave time for KILL and the driver, however busy they look
            deadline_s = min(deadline_s, state.begun_s + self.options.limits.timeout_s / 2)
        elif rung.step is Step.KILL:
            deadline_s = max(deadline_s, time.monotonic() + LAST_KILL_S)  # whoever got TERM gets KILL, too
        return Patience(rung.grace_s, deadline_s)

    def _deal_with_units(
        self, state: _State, rung: Rung, record: RungRecord, targets: Iterable[Holder]
    ) -> list[Pinned]:
        """Asks the supervisors of the targets, or kills their units; the pins of those that this has reached."""
        targets = list(targets)
        ask = rung.step is Step.STOP_UNIT
        done = (
            self.effects.ask_units(self.units, targets, rung.grace_s)
            if ask
            else self.effects.kill_units(self.units, targets)
        )
        record.note = "; ".join(done.notes)
        pins: list[Pinned] = []
        for holder in targets:
            if holder.ref not in done.reached:
                continue
            record.sent += 1
            state.dealt[holder.ref] = holder
            if ask:
                state.asked.add(holder.ref)
            pin = self._pin(holder, record)
            if pin is not None:
                pins.append(pin)
        return pins

    def _pin(self, holder: Holder, record: RungRecord) -> Pinned | None:
        """None: it is gone, or its pid is another's, or the container's no more; or it cannot be held (noted)."""
        try:
            pin = Pinned.pin(holder.ref, self.observer.recheck)
        except OSError as exc:
            record.note = f"cannot hold pid {holder.process.pid}: {exc.strerror or exc}"
            return None
        if pin is None:
            record.gone += 1
        return pin

    def _signal(self, state: _State, rung: Rung, record: RungRecord, targets: Iterable[Holder]) -> list[Pinned]:
        """Pin, check, act: a target whose identity or owner has changed since the look is left alone."""
        pins: list[tuple[Pinned, Holder]] = []
        room = spare_descriptors()
        for holder in targets:
            if len(pins) >= room:
                record.note = f"only {room} processes can be held at a time, the rest follows"
                break
            pin = self._pin(holder, record)
            if pin is not None:
                pins.append((pin, holder))
        for pin, holder in pins:
            state.dealt[holder.ref] = holder
            if rung.step is Step.KILL:
                state.killed.add(holder.ref)
            if rung.step is Step.TERM and holder.ref in self._termed:
                continue  # an attempt that was cut off has sent it: a second TERM means "at once" to many programs
            try:
                record.sent += self.effects.send(pin, SIGNALS[rung.step])
            except OSError as exc:
                record.note = f"cannot signal pid {holder.process.pid}: {exc.strerror or exc}"
        return [pin for pin, _ in pins]

    def _wait(
        self,
        rung: Rung,
        pins: list[Pinned],
        patience: Patience,
        gauge: MemoryGauge,
        observation: Observation,
        record: RungRecord,
    ) -> list[Pinned]:
        def tell(alive: Sequence[Pinned], used_mib: int | None) -> None:
            memory = f", {used_mib:,} MiB still in use" if used_mib is not None else ""
            names = ", ".join(str(pin.ref.pid) for pin in alive[:4]) + (" ..." if len(alive) > 4 else "")
            self.listener.waiting(
                self.report, f"{rung.step}: waiting for pid {names}{memory}", time.monotonic() - self._begun_s
            )

        def cannot_act(alive: Sequence[Pinned]) -> bool:
            """SIGTERM reaches no handler in a stopped process or a frozen cgroup (a backup's container, a paused one
            inside); waiting would be for nothing."""
            if observation.frozen or all(self._is_stopped(pin.ref) for pin in alive):
                record.note = "frozen" if observation.frozen else "stopped"
                return True
            return False

        return wait_for_exits(
            pins,
            patience,
            gauge,
            self.cancel,
            cpu_ticks=self.sources.procfs.cpu_ticks if rung.step in (Step.KILL, Step.CGROUP_KILL) else None,
            hopeless=cannot_act if rung.step in (Step.TERM, Step.STOP_UNIT) else None,
            tell=tell,
        )

    def _is_stopped(self, ref: ProcessRef) -> bool:
        process = self.sources.procfs.read_process(ref.pid)
        if process is None or process.ref != ref:
            return False
        return process.state in "Tt" or self.sources.cgroups.is_frozen(process.cgroup)

    # --- proof -------------------------------------------------------------------------------------------------------

    def _drain(self, state: _State, observation: Observation) -> Observation:
        """Looks until every GPU is back at its baseline, or memory has stopped falling, or the time is up."""
        if not observation.nvml_asked:
            observation = self._look(state, nvml=True)
        patience = Patience(self.options.limits.drain_grace_s, state.deadline_s)
        gauge = MemoryGauge(self.sources, self._uuids(state), lambda: self._driver_limit_s(state))
        ticks: dict[int, int] = {}
        told_s = pause_s = 0.0
        while not self._targets(observation):
            dying = self._dying(observation)
            state.dealt |= {h.ref: h for h in dying if h.ref not in state.dealt}
            over = self._over(state, observation)
            if not over and not dying:
                break
            self.cancel.check()
            if any(self._burns(h.process.pid, ticks) for h in dying):
                patience.progressed()
            if patience.stalled:
                state.falling = patience.moving
                if not patience.moving:
                    state.stuck += stuck_tasks(self.sources.procfs, [h.ref for h in dying], self.report.started)
                break
            if time.monotonic() - told_s >= 1.0:
                told_s = time.monotonic()
                text = ", ".join(self._to_go(observation, over, dying))
                self.listener.waiting(self.report, f"memory is falling: {text} to go", told_s - self._begun_s)
            pause_s = min(PAUSE_MAX_S, max(0.005, pause_s * 1.5))
            if self._sample(gauge, pause_s):
                patience.progressed()
            observation = self._look(state, nvml=True)
        return observation

    def _probe_old_ghosts(self, state: _State, observation: Observation) -> Observation:
        """Waits for ghost memory from before on a GPU that nobody else is on, as long as it falls: whoever held it may
        have been ended a moment before us."""
        patience = Patience(min(OLD_GHOST_GRACE_S, self.options.limits.drain_grace_s), state.deadline_s)
        gauge = MemoryGauge(self.sources, self._uuids(state), lambda: self._driver_limit_s(state))
        lowest: int | None = None
        while self._old_ghost_mib(state, observation) and not self._targets(observation):
            self.cancel.check()
            total = self._old_ghost_mib(state, observation)
            if lowest is not None and total < lowest:
                patience.progressed()
            lowest = total if lowest is None else min(lowest, total)
            if patience.stalled:
                state.falling = state.falling or patience.moving
                break
            if self._sample(gauge, PAUSE_MAX_S):
                patience.progressed()
            observation = self._look(state, nvml=True)
        return observation

    def _old_ghost_mib(self, state: _State, observation: Observation) -> int:
        """MiB of ghost memory that is no more than it was before, on the GPUs that nobody else is attached to."""
        total = 0
        for gpu in observation.gpus:
            minor = gpu.info.minor
            ghost, baseline = gpu.ghost_mib, baseline_of(minor, state.first, self._baseline)
            wanted = minor in state.minors | self._own_minors() and gpu.error_code != RESERVE_COUNTED
            if not wanted or gpu.foreign_clients or not ghost or not baseline:
                continue
            if min(ghost, baseline) > gpu.tolerance_mib:
                total += ghost
        return total

    def _own_minors(self) -> frozenset[int]:
        """The GPUs of the configuration, as far as they are selected."""
        wanted = self.selection.minors
        return self.subject.own_minors if wanted is None else self.subject.own_minors & wanted

    def _burns(self, pid: int, ticks: dict[int, int]) -> bool:
        now = self.sources.procfs.cpu_ticks(pid) or 0
        before, ticks[pid] = ticks.get(pid, now), now
        return now > before

    def _to_go(self, observation: Observation, over: dict[int, int], dying: list[Holder]) -> list[str]:
        """What is still to be given back, by GPU as people count them, for the line that is shown meanwhile."""
        left = dict(over)
        for holder in dying:
            for gpu in observation.gpus:
                if gpu.info.minor in holder.gpus:
                    charge = gpu.client_mib.get(holder.process.pid) or 0
                    left[gpu.info.minor] = left.get(gpu.info.minor, 0) + charge
        return [f"{left[g.info.minor]:,} MiB on {gpu_text(g)}" for g in observation.gpus if g.info.minor in left]

    def _sample(self, gauge: MemoryGauge, pause_s: float) -> bool:
        """Waits a moment and samples memory; True when it has fallen."""
        wait_readable(self.cancel.fileno(), pause_s)
        gauge.ask()
        fd = gauge.fileno()
        if fd is None:
            return False
        return gauge.take()

    def _over(self, state: _State, observation: Observation) -> dict[int, int]:
        """GPU minor -> MiB above the baseline, of the GPUs that this release verifies."""
        if driver_silence(observation):
            return {}
        over = {
            m: excess_mib(s, baseline_of(m, state.first, self._baseline))
            for m in state.minors
            if (s := observation.gpu(m))
        }
        return {minor: mib for minor, mib in over.items() if mib}

    def _settle(self, state: _State, observation: Observation) -> Observation:
        """Looks again for a moment when something alive would start a killed job again (CASES, "It comes back")."""
        settle_s = self.options.limits.settle_s
        if self._targets(observation) or not self._restarters(state) or settle_s <= 0:
            return observation
        end_s = min(time.monotonic() + settle_s, state.deadline_s)
        while time.monotonic() < end_s and not self.cancel.requested:
            wait_readable(self.cancel.fileno(), 0.05)
            looked = self._look(state, nvml=False)
            if self._targets(looked):
                return looked
        return self._look(state, nvml=True)

    def _restarters(self, state: _State) -> bool:
        """True when a killed holder had a supervisor, or a living parent in the container that is not its init."""
        for holder in state.dealt.values():
            if holder.supervisor is not None and holder.supervisor.kind != "session":
                return True
            if holder.process.ppid > 1:
                parent = self.sources.procfs.read_process(holder.process.ppid)
                init = state.first.init
                if (
                    parent is not None
                    and not parent.is_zombie
                    and parent.start_time <= holder.process.start_time
                    and (init is None or parent.ref != init)
                    and self.observer.view.owns(parent)
                ):
                    return True
        return False

    # --- looking and choosing ----------------------------------------------------------------------------------------

    def _look(self, state: _State, *, nvml: bool) -> Observation:
        observation = self.observer.look(nvml=nvml, nvml_deadline_s=self._driver_limit_s(state))
        self._climbing = state, observation
        self._note_new_run(state, observation)
        self._note_handovers(state, observation)
        holders = self._selected(observation)
        state.minors |= self._minors_of(h for h in holders if not of_new_run(h, self._new_run_ticks))
        fresh = [h for h in self._targets(observation) if h.ref not in state.dealt]
        since = state.first_signal_ticks
        state.respawned |= {h.ref for h in fresh if since is not None and h.process.start_time >= since}
        self.lineage.note(fresh)
        self._returned |= {h.ref: h for h in fresh if h.ref in state.respawned}
        if fresh or nvml:
            self.listener.observed(self.report, observation, holders)
        return observation

    def _note_new_run(self, state: _State, observation: Observation) -> None:
        """The container was started again: an init that is younger than this release, or a cgroup that is another one
        (DESIGN 4, "Killing by cgroup never hits a new incarnation"; no signal does)."""
        old = state.first.inits if self.resume is None else frozenset[ProcessRef]()
        young = [i.start_time for i in observation.inits - old if i.start_time >= self._begun_ticks]
        if not young and observation.incarnation not in (None, state.first.incarnation):
            young = [self._begun_ticks]  # its cgroup was made anew, its init was not met
        if young:
            self._new_run_ticks = min([*young, *([self._new_run_ticks] if self._new_run_ticks is not None else [])])

    def _note_handovers(self, state: _State, observation: Observation) -> None:
        before = state.asked_last
        if observation.nvml_asked:
            state.silent = driver_silence(observation) is not None
        if not observation.nvml_asked or state.silent:
            return
        state.asked_last = observation
        if before is None:
            return
        for gpu in observation.gpus:
            was = before.gpu(gpu.info.minor)
            if was is not None and gpu.info.minor in state.minors:
                gone = [ref.pid for ref in state.dealt if ref.pid in was.own_clients]
                state.handovers += handovers(was, gpu, gone)

    def _driver_limit_s(self, state: _State) -> float:
        """How long one answer of the driver may take now: a part of the time as long as KILL may still be needed, then
        what is left of it, and never less than the last look needs."""
        left_s = state.deadline_s - time.monotonic()
        limit_s = max(LAST_LOOK_S, left_s) if state.killed else max(0.5, left_s / 4)
        return min(self.options.limits.nvml_deadline_s, limit_s)

    def _is_driver_answering(self, state: _State) -> bool:
        """False when the driver was silent when it was asked last: it is asked again at the end, not after each rung."""
        return not state.silent

    def _minors_of(self, holders: Iterable[Holder]) -> set[int]:
        """The GPUs that are verified for holders: every one that they had open (DESIGN 4, Verify).

        With `--gpu` those whose memory they held: a CUDA process opens every node that it can see (FACTS).
        """
        if self.selection.minors is not None:
            return {m for h in holders for m in h.gpus}
        return {m for h in holders for m in (*h.gpus, *h.open_gpus)}

    def _selected(self, observation: Observation) -> list[Holder]:
        return [h for h in observation.holders if self.selection.takes(h)]

    def _targets(self, observation: Observation) -> list[Holder]:
        """Who may be signalled: not what belongs to a new run, never the init unless that is allowed."""
        return [
            h
            for h in self._selected(observation)
            if h.targetable and not of_new_run(h, self._new_run_ticks) and (self.options.stop or not h.is_init)
        ]

    def _dying(self, observation: Observation) -> list[Holder]:
        return [h for h in self._selected(observation) if h.dying]

    def _uuids(self, state: _State) -> list[str]:
        return [g.info.uuid for g in state.first.gpus if g.info.minor in state.minors]

    def _select(self, first: Observation) -> None:
        infos = tuple(g.info for g in first.gpus)
        minors = pids = None
        if self.options.gpu is not None:
            silent = driver_silence(first) is not None
            minors = frozenset({resolve_gpu(self.options.gpu, infos, driver_silent=silent).minor})
        if self.options.pid is not None:
            pids = resolve_pid(self.options.pid, first, self.observer.find)
        nodes: frozenset[DeviceId] = frozenset()
        if minors and self.options.open_nodes:
            nodes = frozenset(DeviceId(major, m) for major in read_driver([]).gpu_majors for m in minors)
        self.selection = Selection(minors, pids, nodes)

    def _check_exists(self, first: Observation) -> None:
        if first.running or first.processes or self.subject.exists():
            return
        message, step = say("no-such-container", vmid=self.subject.vmid)
        raise NoSuchContainerError(message, next_step=step, vmid=self.subject.vmid)

    def _refuse_init(self, first: Observation) -> None:
        init = next(
            (
                h
                for h in self._selected(first)
                if h.is_init and h.targetable and not of_new_run(h, self._new_run_ticks)
            ),
            None,
        )
        if init is None or self.options.stop:
            return
        message, step = say(
            "would-stop-container", vmid=self.subject.vmid, pid=init.process.pid, comm=init.process.comm
        )
        raise RefusedError(message, next_step=step, reason="would-stop-container", vmid=self.subject.vmid)

    def _time_is_up(self, state: _State) -> bool:
        return time.monotonic() >= state.deadline_s

    def _now_ms(self) -> int:
        return round((time.monotonic() - self._begun_s) * 1000)

    # --- the report --------------------------------------------------------------------------------------------------

    def _conclude(self, state: _State, last: Observation) -> None:
        judgement = judge(self._case(state, last))
        if self._may_reset(judgement):
            judgement, last = self._reset(state, last, judgement)
        self._fill(state, last)
        self._verdict(self._explained(judgement, state, last))

    def _may_reset(self, judgement: Judgement) -> bool:
        asked = self.options.reset or self.options.auto_reset
        return asked and judgement.reason in RESETTABLE and not self.options.dry_run and self.resetter is not None

    def _reset(self, state: _State, last: Observation, judgement: Judgement) -> tuple[Judgement, Observation]:
        """The last rung. Refused: the end, if it was asked for (`--reset`); else the verdict stays as it was."""
        assert self.resetter is not None
        wanted = reset_targets(last, state.minors | self.subject.own_minors, state.stuck)
        if not wanted:
            return judgement, last
        record = RungRecord(Step.RESET, self._now_ms())
        self.report.rungs.append(record)
        self.listener.rung_begun(self.report, record, ())
        begun_s = time.monotonic()

        def tell(what: str) -> None:
            self.listener.waiting(self.report, f"reset: {what}", time.monotonic() - self._begun_s)

        try:
            outcome = self.resetter.reset(self.sources, self.report.release_id, self.subject.vmid, wanted, tell)
            record.note, record.sent, record.gone = outcome.text, 1, int(outcome.done)
        except RefusedError as exc:
            record.note = exc.message
            if self.options.reset:
                self._fill(state, last)
                raise
            return judgement, last
        finally:
            record.waited_ms = round((time.monotonic() - begun_s) * 1000)
            self.listener.rung_done(self.report, record)
        last = self._look(state, nvml=True)
        judgement = judge(self._case(state, last))
        step = REBOOT_STEP if outcome.reboot else judgement.next_step
        return replace(judgement, message=f"{judgement.message}; {outcome.text}", next_step=step), last

    def _explained(self, judgement: Judgement, state: _State, last: Observation) -> Judgement:
        """Adds to the report what an administrator needs to know of memory that does not come back."""
        run_dir = self.resetter.run_dir if self.resetter is not None else RUN_DIR
        if self.xids is not None and (spot := self.xids.blind_spot()):
            self.report.details.append(f"the kernel log was not read: {spot.error}")
        quiet = judgement.verdict is Verdict.RELEASED and not (self.xids is not None and self.xids.look())
        if quiet and not os.path.exists(os.path.join(run_dir, "ghosts.json")):
            return judgement
        from hostd.ghosts import FirstSeen, describe, haunted

        states = haunted(last, state.minors | self.subject.own_minors)
        since = FirstSeen(run_dir).update(last.gpus)
        xids = self.xids.look() if self.xids is not None else []
        if judgement.reason in RESETTABLE or xids:
            self.report.details += describe(self.sources, states, since, xids)
        if judgement.reason in RESETTABLE and any(g.recovery_action == REBOOT for g in states):
            return replace(judgement, next_step=REBOOT_STEP)
        return judgement

    def _verdict(self, judgement: Judgement) -> None:
        self.report.verdict = judgement.verdict
        self.report.reason = judgement.reason
        self.report.message = judgement.message
        self.report.next_step = judgement.next_step

    def _case(self, state: _State, last: Observation) -> Case:
        lasting = [s for s in state.stuck if self._lives(s.ref)]
        seen = {h.ref for h in last.holders}
        undead = [h for s in lasting if s.ref not in seen and (h := state.dealt.get(s.ref)) is not None]
        return Case(
            before=state.first,
            after=last,
            minors=frozenset(state.minors),
            own_minors=self._own_minors(),
            selection=self.selection,
            acted=bool(state.dealt),
            dry_run=self.options.dry_run,
            verify_memory=self.options.verify_memory,
            stuck=tuple(lasting),
            undead=tuple(undead),
            respawned=frozenset(state.respawned),
            known=frozenset(state.dealt),
            openers=frozenset({h.process.pid for h in state.dealt.values()})
            | {h.inherited_from for h in state.dealt.values() if h.inherited_from is not None},
            handovers=tuple(state.handovers),
            new_run_ticks=self._new_run_ticks,
            time_is_up=self._time_is_up(state),
            had=sum(1 for h in self._selected(state.first) if h.targetable),
            resumed=self.resume.termed | self.resume.killed if self.resume else frozenset(),
            baseline_mib=self._baseline,
            falling=state.falling,
            restless=state.restless,
            returned=tuple(h for ref in state.respawned if (h := self._returned.get(ref))),
            restarters=tuple(self.lineage.restarters(self._returned.values(), state.first.init)),
            xid=str(state.xid) if state.xid else "",
            xid_advice=state.xid.advice if state.xid else "",
            waited_s=time.monotonic() - self._begun_s,
        )

    def _fill(self, state: _State, last: Observation) -> None:
        alive = {h.ref: h for h in self._selected(last)}
        stuck = {s.ref: s for s in state.stuck}
        everyone = {h.ref: h for h in self._selected(state.first)} | alive | state.dealt
        for ref, holder in everyone.items():
            fate = self._fate(ref, state, alive, stuck)
            report = HolderReport(holder, fate, stuck.get(ref))
            self.report.holders.append(report)
            self.listener.fate(self.report, report)
        for gpu in last.gpus:
            minor = gpu.info.minor
            before = state.first.gpu(minor)
            if minor in state.minors | self.subject.own_minors:
                others = [h for h in last.foreign if minor in h.gpus]
                self.report.gpus.append(
                    GpuReport(
                        info=gpu.info,
                        used_mib_before=before.used_mib if before else None,
                        used_mib_after=gpu.used_mib,
                        reserved_mib=gpu.reserved_mib,
                        ghost_mib=gpu.ghost_mib,
                        bar1_used_mib_after=gpu.bar1_used_mib,
                        other_holders=others,
                        recovery_action=gpu.recovery_action,
                    )
                )
        self.report.blind_spots = list(last.blind_spots)

    def _fate(
        self, ref: ProcessRef, state: _State, alive: dict[ProcessRef, Holder], stuck: dict[ProcessRef, Stuck]
    ) -> Fate:
        if ref in stuck and self._lives(ref):
            return Fate.UNKILLABLE
        if not self._lives(ref) or self.sources.procfs.is_dying(ref.pid):
            return Fate.EXITED
        if ref not in state.dealt and ref not in state.respawned:
            return Fate.SPARED
        return Fate.RESPAWNED if ref in state.respawned and ref in alive else Fate.SURVIVED

    def _lives(self, ref: ProcessRef) -> bool:
        """The process exists, whatever it holds: who has let go of the GPU and goes on has not exited."""
        process = self.sources.procfs.read_process(ref.pid)
        return process is not None and process.ref == ref and not process.is_zombie

    def _end_by_error(self, exc: PgrError) -> None:
        self.report.verdict = REASONS[exc.reason].verdict if exc.reason in REASONS else None
        self.report.reason = exc.reason
        self.report.message = exc.message
        self.report.next_step = exc.next_step
        if self._climbing is not None and not self.report.holders:
            self._fill(*self._climbing)
        if isinstance(exc, InterruptedRelease):
            signalled = [f"{r.step} to pid {', '.join(map(str, r.targets))}" for r in self.report.rungs if r.sent]
            detail = f"already sent: {'; '.join(signalled)}" if signalled else "nothing had been signalled"
            if self.cancel.handed_over:
                detail += "; the daemon is being stopped, whoever asked goes on, or the next daemon"
            self.report.message, self.report.next_step = say("interrupted", vmid=self.subject.vmid, detail=detail)


RESETTABLE = ("ghost-memory", "ghost-memory-before", "unkillable", "gpu-lost")
"""Reasons after which a reset may help: nothing is left that a signal could end."""
REBOOT_STEP = "reboot the node: the driver says that nothing less helps (journalctl -k -g NVRM)"
RESTARTER_GRACE_S = 1.0
"""After SIGTERM to a process that starts a job again, before SIGKILL: it holds no GPU, nothing has to drain."""
OLD_GHOST_GRACE_S = 1.0
"""Ghost memory from before that has not fallen for this long is not on its way out."""
LAST_KILL_S = 0.5
"""A SIGKILL that comes at the time limit gets this to take effect: an exit takes some 100 ms (FACTS)."""
LAST_LOOK_S = 2.0
"""The driver gets at least this for an answer, also when the time is up: the verdict rests on the last look."""
SPARE_DESCRIPTORS = 48
"""Kept free for helpers, pipes and files while processes are held."""
PAUSE_MAX_S = 0.1
"""Between two memory samples while nothing but the driver's figures can tell us anything."""
_CLK_TCK = os.sysconf("SC_CLK_TCK")


def reset_targets(observation: Observation, minors: Iterable[int], stuck: Iterable[Stuck]) -> tuple[str, ...]:
    """PCI addresses of the GPUs that only a reset can free: ghost memory, lost, or a task stuck in the driver."""
    wanted = set(minors)
    in_driver = {s.ref for s in stuck if "[nvidia" in s.stack or s.wchan.startswith(("nv", "_nv", "os_", "rm_"))}
    held = {m for h in observation.holders if h.ref in in_driver for m in h.gpus}
    return tuple(
        g.info.pci_bus_id
        for g in observation.gpus
        if g.info.minor in wanted
        and g.info.pci_bus_id
        and (excess_mib(g, None) or g.error_code == "gpu-lost" or g.info.minor in held)
    )


def spare_descriptors() -> int:
    """How many processes may be held at a time: what the limit leaves (`ulimit -n`), at least one."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, limit - len(os.listdir("/proc/self/fd")) - SPARE_DESCRIPTORS)


def boot_ticks_now() -> int:
    """Now in clock ticks since boot, the unit of a process's start time (proc_pid_stat(5), field 22)."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _CLK_TCK)


def _utc_now() -> str:
    now = time.time()
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"


__all__ = ["Effects", "Release", "Subject", "Verdict", "boot_ticks_now", "replace"]
