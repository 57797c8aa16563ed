"""One rung: pin, check, signal, wait, and write down what came of it. What it does to the world goes through `Effects`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hostd.climb import Climb
from hostd.clock import boot_ticks_now, utc_now
from hostd.ladder import Rung
from hostd.model import Holder, Observation, Process, ProcessRef, RungRecord, Step
from hostd.stopunit import Stopped, UnitStopper, protected_service
from hostd.system.pidfd import Pinned, wait_any
from hostd.triage import stuck_tasks
from hostd.waiting import MemoryGauge, Patience, wait_for_exits

SIGNALS = {Step.TERM: signal.SIGTERM, Step.KILL: signal.SIGKILL}
RESTARTER_GRACE_S = 1.0
"""After SIGTERM to a process that starts a job again, before SIGKILL: it holds no GPU, nothing has to drain."""
LAST_KILL_S = 0.5
"""A SIGKILL that comes at the time limit gets this to take effect: an exit takes some 100 ms (FACTS)."""
SPARE_DESCRIPTORS = 48
"""Kept free for helpers, pipes and files while processes are held."""


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
class Reached:
    """Whom a rung has reached: some are held by a pidfd, the rest is known by pid and start time until there is room."""

    pins: list[Pinned] = field(default_factory=list)
    rest: list[ProcessRef] = field(default_factory=list)


class Rungs:
    """Does what a rung says to the targets that the last look found."""

    def __init__(self, climb: Climb, effects: Effects) -> None:
        self._climb = climb
        self._effects = effects
        self._units = UnitStopper(climb.sources, climb.observer.view)
        self._termed = climb.resume.termed if climb.resume else frozenset[ProcessRef]()

    def close(self) -> None:
        """Requests to supervisors that are under way are given up."""
        self._units.close()

    def targets_of(self, rung: Rung, observation: Observation) -> list[Holder]:
        """Who gets this rung."""
        climb = self._climb
        found = [h for h in climb.targets(observation) if h.ref not in climb.killed]
        if rung.step is Step.STOP_UNIT:  # in a frozen container nobody can answer
            return [] if observation.frozen else [h for h in found if self._units.may_kill(h)]
        if rung.step is Step.CGROUP_KILL:
            return [h for h in found if h.ref in climb.returned and self._units.may_kill(h)]
        if rung.step is Step.TERM:  # its supervisor has sent it one by now: a second means "at once" to many programs
            return [h for h in found if h.ref not in climb.asked]
        return found

    def run(self, rung: Rung, targets: list[Holder], observation: Observation) -> None:
        """Signals, waits and records one rung."""
        climb = self._climb
        climb.cancel.check()  # not after the intent is written: whoever goes on would take the signals for sent
        record = RungRecord(rung.step, climb.now_ms(), [h.process.pid for h in targets])
        climb.report.rungs.append(record)
        climb.listener.rung_begun(climb.report, record, targets)
        if climb.first_signal_ticks is None:
            climb.first_signal_ticks = boot_ticks_now()
        if rung.step in (Step.STOP_UNIT, Step.CGROUP_KILL):
            reached = self._deal_with_units(rung, record, targets)
        else:
            reached = self._signal(rung, record, targets)
        begun_s, since = time.monotonic(), utc_now()
        gauge = MemoryGauge(climb.sources, climb.uuids(), climb.driver_limit_s)
        patience = self._patience(rung)
        try:
            alive = self._wait_for_all(rung, reached, patience, gauge, observation, record)
        finally:
            record.waited_ms = round((time.monotonic() - begun_s) * 1000)
            gauge.settle()
        if rung.step in (Step.KILL, Step.CGROUP_KILL) and not patience.moving:
            climb.stuck += stuck_tasks(climb.sources.procfs, alive, since)
        climb.listener.rung_done(climb.report, record)

    def end_restarters(self, observation: Observation) -> None:
        """SIGTERM, then SIGKILL, to a process outside any unit that has been seen to start holders again."""
        climb = self._climb
        loose = [h for h in climb.targets(observation) if not self._units.may_kill(h)]
        for process in climb.lineage.restarters(loose, climb.first.init):
            if process.ns_pids == (1,) or climb.time_is_up() or climb.is_told_to_stop(observation):
                continue
            if (service := protected_service(process.cgroup)) and self._is_on_top(process):
                text = f"pid {process.pid} ({process.comm}) starts the job again; left alone, {service} serves more than this job"
                if text not in climb.report.details:
                    climb.report.details.append(text)
                continue
            try:
                pin = Pinned.pin(process.ref, climb.recheck)
            except OSError:
                continue  # then it goes on, and is named in the verdict
            if pin is None:
                continue
            record = RungRecord(Step.STOP_UNIT, climb.now_ms(), [process.pid])
            record.note = f"pid {process.pid} ({process.comm}) starts the job again and again"
            climb.report.rungs.append(record)
            climb.listener.rung_begun(climb.report, record, ())
            begun_s = time.monotonic()
            with pin:
                for number in (signal.SIGTERM, signal.SIGKILL):
                    if not self._is_ours(pin, record):
                        break
                    record.sent += self._send(pin, number, record)
                    if wait_any((pin,), RESTARTER_GRACE_S):
                        break
                record.gone = int(pin.gone())
            record.waited_ms = round((time.monotonic() - begun_s) * 1000)
            climb.listener.rung_done(climb.report, record)

    def _is_on_top(self, process: Process) -> bool:
        """Its parent is in another cgroup, so systemd has started it: no cron job, no login."""
        try:
            parent = self._climb.sources.procfs.read_process(process.ppid)
        except OSError:
            return True
        return parent is None or parent.cgroup != process.cgroup

    # --- acting ---

    def _deal_with_units(self, rung: Rung, record: RungRecord, targets: list[Holder]) -> Reached:
        """Asks the supervisors of the targets, or kills their units."""
        ask = rung.step is Step.STOP_UNIT
        done = (
            self._effects.ask_units(self._units, targets, rung.grace_s)
            if ask
            else self._effects.kill_units(self._units, targets)
        )
        record.note = "; ".join(done.notes)
        reached = Reached()
        for holder in targets:
            if holder.ref not in done.reached:
                continue
            record.sent += 1
            self._climb.dealt[holder.ref] = holder
            if ask:
                self._climb.asked.add(holder.ref)
            reached.rest.append(holder.ref)
        return reached

    def _signal(self, rung: Rung, record: RungRecord, targets: list[Holder]) -> Reached:
        """Pin, check, act: a target whose identity or owner has changed since the look is left alone."""
        reached = Reached()
        room = spare_descriptors()
        recheck = self._climb.recheck
        pinned = [(pin, h) for h in targets[:room] if (pin := self._pin(h.ref, record, recheck)) is not None]
        for pin, holder in pinned:
            if self._act(rung, pin, holder, record):
                reached.pins.append(pin)
            else:
                pin.close()
        for holder in targets[room:]:
            pin = self._pin(holder.ref, record, recheck)
            if pin is not None:
                with pin:
                    if self._act(rung, pin, holder, record):
                        reached.rest.append(holder.ref)
        return reached

    def _act(self, rung: Rung, pin: Pinned, holder: Holder, record: RungRecord) -> bool:
        """Checks and signals one that is pinned; False when it is left alone."""
        if not self._is_ours(pin, record):
            return False
        self._climb.dealt[holder.ref] = holder
        if rung.step is Step.KILL:
            self._climb.killed.add(holder.ref)
        if rung.step is Step.TERM and holder.ref in self._termed:
            return True  # an attempt that was cut off has sent it: a second TERM means "at once" to many programs
        record.sent += self._send(pin, SIGNALS[rung.step], record)
        return True

    def _is_ours(self, pin: Pinned, record: RungRecord) -> bool:
        """Identity and owner once more, right before the signal: while many are pinned one can be moved away."""
        if pin.gone():
            return True
        try:
            ours = self._climb.recheck(pin.ref.pid) == pin.ref or pin.gone()
        except OSError as exc:
            record.note = f"cannot read pid {pin.ref.pid} again: {exc.strerror or exc}"
            return False
        if not ours:
            record.note = f"pid {pin.ref.pid} is not the container's any more"
        return ours

    def _send(self, pin: Pinned, number: int, record: RungRecord) -> bool:
        try:
            return self._effects.send(pin, number)
        except OSError as exc:
            record.note = f"cannot signal pid {pin.ref.pid}: {exc.strerror or exc}"
            return False

    def _pin(self, ref: ProcessRef, record: RungRecord, recheck: Callable[[int], ProcessRef | None]) -> Pinned | None:
        """None: it is gone, or its pid is another's, or `recheck` says no more; or it cannot be held (noted)."""
        try:
            pin = Pinned.pin(ref, recheck)
        except OSError as exc:
            record.note = f"cannot hold pid {ref.pid}: {exc.strerror or exc}"
            return None
        if pin is None:
            record.gone += 1
        return pin

    # --- waiting ---

    def _wait_for_all(
        self,
        rung: Rung,
        reached: Reached,
        patience: Patience,
        gauge: MemoryGauge,
        observation: Observation,
        record: RungRecord,
    ) -> list[ProcessRef]:
        """Waits for those that are held, then for as many of the rest as can be held; who lives on in the end."""
        alive: list[ProcessRef] = []
        pins = reached.pins
        while pins or reached.rest:
            try:
                self._wait(rung, pins, patience, gauge, observation, record)
            finally:
                alive += [pin.ref for pin in pins if not pin.gone()]
                record.gone += sum(1 for pin in pins if pin.gone())
                for pin in pins:
                    pin.close()
            pins = self._hold(reached, record)
        return alive

    def _hold(self, reached: Reached, record: RungRecord) -> list[Pinned]:
        """Takes as many of the rest as can be held. They have been signalled: only who they are is asked."""
        room = spare_descriptors()
        now, reached.rest = reached.rest[:room], reached.rest[room:]
        read_ref = self._climb.sources.procfs.read_ref
        return [pin for ref in now if (pin := self._pin(ref, record, read_ref)) is not None]

    def _patience(self, rung: Rung) -> Patience:
        climb = self._climb
        deadline_s = climb.deadline_s
        if rung.step in (Step.TERM, Step.STOP_UNIT):  # leave time for KILL and the driver, however busy they look
            deadline_s = min(deadline_s, climb.begun_s + climb.options.limits.timeout_s / 2)
        elif rung.step is Step.KILL:
            deadline_s = max(deadline_s, time.monotonic() + LAST_KILL_S)  # whoever got TERM gets KILL, too
        return Patience(rung.grace_s, deadline_s)

    def _wait(
        self,
        rung: Rung,
        pins: list[Pinned],
        patience: Patience,
        gauge: MemoryGauge,
        observation: Observation,
        record: RungRecord,
    ) -> list[Pinned]:
        climb = self._climb

        def tell(alive: Sequence[Pinned], used_mib: int | None) -> None:
            memory = f", {used_mib:,} MiB still in use" if used_mib is not None else ""
            names = ", ".join(str(pin.ref.pid) for pin in alive[:4]) + (" ..." if len(alive) > 4 else "")
            climb.listener.waiting(climb.report, f"{rung.step}: waiting for pid {names}{memory}", climb.elapsed_s())

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
            climb.cancel,
            cpu_ticks=climb.sources.procfs.cpu_ticks if rung.step in (Step.KILL, Step.CGROUP_KILL) else None,
            hopeless=cannot_act if rung.step in (Step.TERM, Step.STOP_UNIT) else None,
            tell=tell,
        )

    def _is_stopped(self, ref: ProcessRef) -> bool:
        sources = self._climb.sources
        process = sources.procfs.read_process(ref.pid)
        if process is None or process.ref != ref:
            return False
        return process.state in "Tt" or sources.cgroups.is_frozen(process.cgroup)


def spare_descriptors() -> int:
    """How many processes may be held at a time: what the limit leaves (`ulimit -n`), at least one."""
    import resource

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, limit - len(os.listdir("/proc/self/fd")) - SPARE_DESCRIPTORS)
