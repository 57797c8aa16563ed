"""A stop: announced at pre-stop, dealt with once at post-stop or ExecStopPost=, whichever comes first."""

from __future__ import annotations

import os

from hostd import audit
from hostd.climb import Subject
from hostd.clock import boot_s
from hostd.lifecycle.clearing import Taken, container_runs
from hostd.lifecycle.event import stop_key
from hostd.lifecycle.handling import Handling, Known
from hostd.lifecycle.invocation import unit_invocation
from hostd.lifecycle.records import Pending, Snapshot, Started, Stopped, pairs
from hostd.lifecycle.releasing import release_for
from hostd.lifecycle.side import Plan
from hostd.lifecycle.snapshot import take_snapshot
from hostd.lock import ReleaseLock
from hostd.model import Holder
from hostd.observe import Observer


class Stopping:
    """`announced`, then `over`; each may be missing, late or told twice (PCT_FLOWS 7)."""

    def __init__(self, on: Handling) -> None:
        self._on = on

    def announced(self, taken: Taken) -> None:
        """pre-stop: remembers who holds what. Kills nothing: services are about to be stopped by the container's init."""
        on = self._on
        known = on.known()
        if not on.concerns_us(known, taken):
            on.outcome.silent = True
            return
        vmid = on.event.vmid
        observer = Observer(on.sources, vmid)
        try:
            seen = observer.look(budget_s=on.look_s())
        finally:
            observer.close()
        snapshot = take_snapshot(seen, unit_invocation(vmid), on.records.read(Snapshot, vmid))
        snapshot.minors = sorted({*snapshot.minors, *known.minors})
        on.write(snapshot)
        on.send(audit.snapshot(on.context(), seen))
        self._tell_watch()
        if seen.holders:
            on.say(f"{_names(seen.holders)} of container {vmid} hold GPUs; they are checked once it has stopped")
        on.done("noted")

    def _tell_watch(self) -> None:
        on = self._on
        if on.around.watched:
            on.send(audit.watchdog_armed(on.context(), on.settings.hook.watchdog_delay_s))
            return
        why = "pve-gpu-hostd does not run"
        on.send(audit.watchdog_unarmed(on.context(), why))
        on.say(f"nobody watches this stop: {why}; a stop that hangs will not be explained")

    def over(self, taken: Taken) -> None:
        """post-stop, ExecStopPost=: clears what is left and proves that the GPUs are free; one record per stop."""
        on = self._on
        known = on.known()
        if not on.concerns_us(known, taken):
            on.outcome.silent = True
            return
        if self._runs():
            return
        key = stop_key(on.event, unit_invocation(on.event.vmid))
        lock = on.lock(0)
        if lock is None and self._somebody_waits(key):
            on.done("busy", "another call of this stop waits until the release in flight has ended")
            return
        try:
            lock = lock or self._wait_for_lock(key)
            if lock is None:
                on.clear_again(taken)
                on.done("busy", "another release of this container is in flight and did not end in time")
                return
            if self._runs():
                return
            before = on.records.read(Stopped, on.event.vmid)
            if before is not None and self._is_same_stop(before, key):
                on.clear_again(taken)
                on.drop_stop()
                on.done("known", f"dealt with as release {before.release_id[:8]}")
                return
            self._release(taken, known, key)
        finally:
            if lock is not None:
                lock.close()

    def _runs(self) -> bool:
        """A post-stop that comes late, or by hand: the container runs (again), so there is no stop to deal with, nothing
        to prove and nothing of an announced stop to use up."""
        on = self._on
        running = container_runs(on.sources, on.event.vmid)
        if running is not None:
            on.say(f"{running.words}: no stop to deal with, nothing was touched")
            on.done("runs-again", f"the container {running.words}; nothing was touched")
        return running is not None

    def _is_same_stop(self, before: Stopped, key: str) -> bool:
        """Dealt with already. A hookscript may outlive unit and monitor: systemd has no invocation to compare then, but
        the one in its environment is that of the stop that ExecStopPost= dealt with."""
        invocation = self._on.event.context.get("INVOCATION_ID", "")
        return (bool(key) and before.key == key) or (bool(invocation) and before.key == f"unit-{invocation}")

    def _somebody_waits(self, key: str) -> bool:
        on = self._on
        pending = on.records.read(Pending, on.event.vmid)
        if pending is None or not key or pending.key != key or pending.pid <= 1:
            return False
        return on.sources.procfs.read_ref(pending.pid) == pending.by

    def _wait_for_lock(self, key: str) -> ReleaseLock | None:
        """In the daemon this goes on when the hook has returned; whoever comes for the same stop need not wait, too."""
        on, vmid = self._on, self._on.event.vmid
        me = on.sources.procfs.read_ref(os.getpid())
        if key and me is not None:
            on.write(Pending(vmid, boot_s(), key, me.pid, me.start_time))
        try:
            return on.lock(self._budget_s() / 2)
        finally:
            on.records.drop(Pending, vmid)

    def _release(self, taken: Taken, known: Known, key: str) -> None:
        on, vmid = self._on, self._on.event.vmid
        started = on.records.read(Started, vmid)
        minors = known.minors
        if started is not None and known.config is None:
            minors |= frozenset(started.minors)
        baseline = pairs(started.baseline_mib) if started is not None else {}
        plan = Plan(taken, self._snapshot(key), baseline, on_cleared=on.on_cleared)
        left_s = max(1.0, self._budget_s() - on.elapsed_s())
        report, release = release_for(on, Subject(vmid, minors), plan, left_s)
        on.write(Stopped(vmid, boot_s(), key, report["release_id"], report["verdict"] or ""))
        on.outcome.report = report
        on.outcome.next_step = report["next_step"]
        on.say(report["message"])
        if release.runs is not None:
            on.done("runs-again", f"container {vmid} {release.runs.words} again; nothing was touched")
            return
        on.drop_stop()
        on.done(report["verdict"] or report["reason"], report["message"])

    def _snapshot(self, key: str) -> Snapshot | None:
        """What pre-stop left for this stop; not that of an earlier run whose end nobody told us."""
        snapshot = self._on.records.read(Snapshot, self._on.event.vmid)
        if snapshot is None or not snapshot.invocation or not key.startswith("unit-"):
            return snapshot
        return snapshot if key[5:] == snapshot.invocation else None

    def _budget_s(self) -> float:
        """In the daemon a release goes on behind the caller's back; in the hook itself the budget is the limit."""
        hook, limits = self._on.settings.hook, self._on.settings.limits
        return max(hook.budget_s, limits.timeout_s) if self._on.around.owner == "daemon" else hook.budget_s


def _names(holders: tuple[Holder, ...]) -> str:
    names = ", ".join(f"{h.process.pid} ({h.process.comm})" for h in holders[:4])
    return names + (f" and {len(holders) - 4} more" if len(holders) > 4 else "")
