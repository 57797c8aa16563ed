"""Which event does what. `Lifecycle.handle` is called by the daemon's worker and, without one, by the hook itself."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from hostd import audit
from hostd.cancel import Cancel
from hostd.climb import Subject
from hostd.config import Config, ContainerSettings
from hostd.engine import configured_minors
from hostd.errors import BusyError, InterruptedRelease, UnreadableError
from hostd.events import Fanout, Listener, Silent
from hostd.ladder import Options, Resume
from hostd.lifecycle.clearing import Cleared, Taken, clear, container_runs
from hostd.lifecycle.event import START_PHASES, STOP_PHASES, Event, Phase, stop_key
from hostd.lifecycle.gate import Gate, gate_of
from hostd.lifecycle.records import (
    Records,
    Snapshot,
    Started,
    Stopped,
    Watched,
    boot_s,
    pairs,
    take_snapshot,
    unit_invocation,
)
from hostd.lifecycle.side import Plan, SideRelease
from hostd.lock import RUN_DIR, ReleaseLock, acquire, try_lock
from hostd.model import HolderReport, Observation, Report
from hostd.nodes import MadeNodes, missing_paths
from hostd.observe import Observer
from hostd.sources import Sources
from hostd.store import Recorder, Store, parse_resume
from hostd.system.journal import Journal
from hostd.system.pve import ContainerConfig, Pve
from hostd.wire import options_dict, report_dict

Json = dict[str, Any]

CONSUME_WITHIN_S = 120.0
"""An ExecStartPre= that comes later belongs to another start than the last pre-start: Proxmox waits for the old unit's
ExecStopPost= in between, at most our own budget."""
PRE_STOP_S = 5.0
"""The longest that pre-stop waits for the driver."""
_ASKS_THE_DRIVER = frozenset({Phase.PRE_START, Phase.PRE_STOP, Phase.POST_STOP})
"""The phases that come first; a drop-in's mostly finds everything done."""


@dataclass(slots=True)
class Outcome:
    """What the caller is told. `silent`: the container is none of our business."""

    allow: bool = True
    messages: list[str] = field(default_factory=list)
    next_step: str = ""
    report: Json | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Around:
    """Where an event is dealt with."""

    owner: str = "hook"
    """`daemon` or `hook`."""
    journal: Journal | None = None
    pve: Pve = field(default_factory=Pve)
    run_dir: str = RUN_DIR
    cancel: Cancel = field(default_factory=Cancel)
    listener: Listener = field(default_factory=Silent)
    watched: bool = False
    """The daemon watches this stop."""
    make_nodes: Callable[[Iterable[str]], MadeNodes] = lambda paths: MadeNodes()
    caller_uid: int | None = None
    caller_pid: int | None = None


@dataclass(slots=True)
class _Subject:
    """What is known of the container before anything is done."""

    config: ContainerConfig | None
    unreadable: str = ""
    minors: frozenset[int] = frozenset()

    @property
    def wants_gpu(self) -> bool:
        return self.config is not None and self.config.wants_gpu


class Lifecycle:
    """One event of one container."""

    def __init__(self, sources: Sources, event: Event, config: Config, around: Around) -> None:
        self.sources = sources
        self.event = event
        self.around = around
        self.settings: ContainerSettings = config.for_container(event.vmid)
        self.records = Records(around.run_dir)
        self.outcome = Outcome()
        self._begun_s = time.monotonic()
        self._release_id = ""

    def handle(self) -> Outcome:
        """Deals with the event. Raises only what is a bug, and InterruptedRelease."""
        taken = Taken.now(self.sources, self.event.vmid)  # before anything else: it names this incarnation
        if self.event.phase in _ASKS_THE_DRIVER and self._is_known():
            self.sources.nvml.start()  # the driver works while we look at configuration and processes
        try:
            what = {
                Phase.PRE_START: self._start,
                Phase.EXEC_START_PRE: self._start,
                Phase.POST_START: self._started,
                Phase.PRE_STOP: self._stopping,
                Phase.POST_STOP: self._stopped,
                Phase.EXEC_STOP_POST: self._stopped,
                Phase.WATCHDOG: self._watch,
            }[self.event.phase]
            what(taken)
        finally:
            taken.close()
        return self.outcome

    # --- which container ---

    def _is_known(self) -> bool:
        """An earlier event was about a GPU. Cheap, and a hint only."""
        vmid = self.event.vmid
        return self.records.read(Started, vmid) is not None or self.records.read(Snapshot, vmid) is not None

    def _subject(self) -> _Subject:
        try:
            config = self.around.pve.read_container(self.event.vmid)
        except UnreadableError as exc:
            return _Subject(None, exc.message)
        return _Subject(config, "", configured_minors(config.gpu_paths) if config else frozenset())

    def _concerns_us(self, subject: _Subject, taken: Taken) -> bool:
        """False for a container without GPU in its configuration, without holder and without snapshot."""
        if subject.wants_gpu and self.event.phase in _ASKS_THE_DRIVER:
            self.sources.nvml.start()
        if subject.wants_gpu or self.records.read(Snapshot, self.event.vmid) is not None:
            return True
        if self.event.phase not in START_PHASES and self.records.read(Started, self.event.vmid) is not None:
            return True
        return self._holds(taken)

    def _holds(self, taken: Taken) -> bool:
        """A process in the container's cgroup holds a GPU."""
        if taken.payload is None or not taken.payload.populated():
            return False
        observer = Observer(self.sources, self.event.vmid)
        try:
            return bool(observer.look(nvml=False).holders)
        finally:
            observer.close()

    # --- pre-stop ---

    def _stopping(self, taken: Taken) -> None:
        subject = self._subject()
        if not self._concerns_us(subject, taken):
            self.outcome.silent = True
            return
        vmid = self.event.vmid
        observer = Observer(self.sources, vmid)
        try:
            seen = observer.look()
        finally:
            observer.close()
        snapshot = take_snapshot(seen, unit_invocation(vmid), self.records.read(Snapshot, vmid))
        snapshot.minors = sorted({*snapshot.minors, *subject.minors})
        self._write(snapshot)
        self._send(audit.snapshot(self._context(), seen))
        if self.around.watched:
            self._send(audit.watchdog_armed(self._context(), self.settings.hook.watchdog_delay_s))
        else:
            why = "pve-gpu-hostd does not run"
            self._send(audit.watchdog_unarmed(self._context(), why))
            self._say(f"nobody watches this stop: {why}; a stop that hangs will not be explained")
        if seen.holders:
            names = ", ".join(f"{h.process.pid} ({h.process.comm})" for h in seen.holders[:4])
            more = f" and {len(seen.holders) - 4} more" if len(seen.holders) > 4 else ""
            self._say(f"{names}{more} of container {vmid} hold GPUs; they are checked once it has stopped")
        self._done("noted")

    # --- post-stop, ExecStopPost= ---

    def _stopped(self, taken: Taken) -> None:
        subject = self._subject()
        if not self._concerns_us(subject, taken):
            self.outcome.silent = True
            return
        vmid = self.event.vmid
        key = stop_key(self.event, unit_invocation(vmid))
        lock = self._lock(self._stop_budget() / 2)
        if lock is None:
            self._clear_again(taken)
            self._done("busy", "another release of this container is in flight and did not end in time")
            return
        try:
            before = self.records.read(Stopped, vmid)
            if key and before is not None and before.key == key:
                self._clear_again(taken)
                self._drop_stop()
                self._done("known", f"dealt with as release {before.release_id[:8]}")
                return
            snapshot = self.records.read(Snapshot, vmid)
            started = self.records.read(Started, vmid)
            if (
                snapshot is not None
                and snapshot.invocation
                and key.startswith("unit-")
                and key[5:] != snapshot.invocation
            ):
                snapshot = None  # of an earlier run whose end nobody told us
            plan = self._plan(taken, snapshot, started)
            minors = subject.minors | frozenset(
                started.minors if started is not None and subject.config is None else ()
            )
            left_s = max(1.0, self._stop_budget() - (time.monotonic() - self._begun_s))
            report, release = self._release(Subject(vmid, minors), plan, left_s)
            self._write(Stopped(vmid, boot_s(), key, report["release_id"], report["verdict"] or ""))
            self._drop_stop()
            self.outcome.report = report
            self.outcome.next_step = report["next_step"]
            self._say(report["message"])
            if release.runs is not None:
                self._done("runs-again", f"container {vmid} runs again (init {release.runs.pid}); nothing was touched")
            else:
                self._done(report["verdict"] or report["reason"], report["message"])
        finally:
            lock.close()

    def _stop_budget(self) -> float:
        """In the daemon a release goes on behind the caller's back; in the hook itself the budget is the limit."""
        hook = self.settings.hook
        return max(hook.budget_s, self.settings.limits.timeout_s) if self.around.owner == "daemon" else hook.budget_s

    def _drop_stop(self) -> None:
        self.records.drop(Snapshot, self.event.vmid)
        self.records.drop(Watched, self.event.vmid)

    def _clear_again(self, taken: Taken) -> None:
        """A known stop announced once more: something may have come into the cgroup since. No second record."""
        if taken.payload is None or not taken.payload.populated():
            return
        self._on_cleared(self._clear(taken, with_monitor=False))

    # --- pre-start, ExecStartPre= ---

    def _start(self, taken: Taken) -> None:
        vmid = self.event.vmid
        subject = self._subject()
        known = self._known_start()
        if known is not None:
            self._consume(known, taken)
            return
        if not self._concerns_us(subject, taken):
            self.outcome.silent = True
            self.records.drop(Started, vmid)
            return
        running = container_runs(self.sources, vmid)
        if running is not None:
            self._done("runs", f"container {vmid} runs already (init {running.pid}); nothing was touched")
            return
        budget_s = self.settings.hook.pre_start_budget_s
        lock = self._lock(budget_s / 2)
        if lock is None:
            self._on_cleared(self._clear(taken, with_monitor=True))
            self._go_unchecked("another release of this container is still in flight")
            return
        try:
            self._make_nodes(subject)
            if not subject.minors and subject.config is not None:
                subject.minors = configured_minors(subject.config.gpu_paths)
            plan = self._plan(taken, self.records.read(Snapshot, vmid), None)
            plan.clears_monitor, plan.settle_s = True, 0.0
            left_s = max(1.0, budget_s - (time.monotonic() - self._begun_s))
            report, release = self._release(Subject(vmid, subject.minors), plan, left_s)
            self.outcome.report = report
            self._judge_start(report, release, subject)
        finally:
            lock.close()

    def _known_start(self) -> Started | None:
        """The record of the pre-start that this ExecStartPre= (or this second attempt at one call) belongs to."""
        started = self.records.read(Started, self.event.vmid)
        if started is None:
            return None
        if self.event.event_id and started.event_id == self.event.event_id:
            return started
        fresh = 0 <= boot_s() - started.at_s <= CONSUME_WITHIN_S
        ours = self.event.phase is Phase.EXEC_START_PRE and started.phase == Phase.PRE_START
        return started if ours and fresh and started.allow and not started.consumed else None

    def _consume(self, started: Started, taken: Taken) -> None:
        if started.event_id == self.event.event_id and self.event.event_id:
            self.outcome.allow = started.allow
            self.outcome.messages += started.messages
            return
        started.consumed = True
        self._write(started)
        if any(c is not None and c.populated() for c in (taken.payload, taken.monitor)):
            self._on_cleared(self._clear(taken, with_monitor=True))
        self._done("known", f"dealt with as release {started.release_id[:8] or '(unchecked)'}")

    def _judge_start(self, report: Json, release: SideRelease, subject: _Subject) -> None:
        vmid = self.event.vmid
        gpus = [g for g in release.last.gpus if g.info.minor in subject.minors] if release.last is not None else []
        gate = gate_of(release.report, gpus, self.settings.hook)
        stuck = next((c for c in release.cleared if not c.empty and not c.spared), None)
        self._tell_gate(gate, report)
        started = Started(
            vmid,
            boot_s(),
            report["release_id"],
            self.event.event_id,
            self.event.phase.value,
            gate.allow,
            minors=sorted(subject.minors),
            messages=self.outcome.messages,
        )
        if release.last is not None:
            started.baseline_mib = [[g.info.minor, g.baseline_mib] for g in gpus if g.baseline_mib is not None]
        self._write(started)
        if not gate.allow and self.event.phase is Phase.EXEC_START_PRE:
            key = stop_key(replace(self.event, phase=Phase.EXEC_STOP_POST), "")
            self._write(Stopped(vmid, boot_s(), key, report["release_id"], report["verdict"] or ""))
        if stuck is None:
            self._drop_stop()
        self._done("refused" if not gate.allow else report["verdict"] or report["reason"], gate.message)

    def _tell_gate(self, gate: Gate, report: Json) -> None:
        self.outcome.allow = gate.allow
        self.outcome.next_step = gate.next_step
        if not gate.reason:
            self._say(report["message"])
            return
        word = "goes on" if gate.allow else "REFUSED"
        text = gate.message.removeprefix(f"container {self.event.vmid}: ")
        self._say(f"start {word}: {text}")
        self._send(
            audit.gate(
                self._context(),
                blocked=not gate.allow,
                reason=gate.reason,
                message=text,
                next_step=gate.next_step,
            )
        )

    def _go_unchecked(self, why: str) -> None:
        """The start goes on without a verdict; its ExecStartPre= does not wait once more."""
        self._say(f"start goes on unchecked: {why}")
        self._send(audit.gate(self._context(), blocked=False, reason="busy", message=why))
        started = Started(self.event.vmid, boot_s(), "", self.event.event_id, self.event.phase.value)
        self._write(started)
        self._done("unchecked", why)

    def _make_nodes(self, subject: _Subject) -> None:
        paths = missing_paths(subject.config.gpu_paths if subject.config is not None else ())
        if not paths:
            return
        made = self.around.make_nodes(paths)
        if made.made:
            self._send(audit.nodes_made(self._context(), made.made))
            self._say(f"made missing device nodes: {', '.join(made.made)}")
        left = missing_paths(paths)
        if left:
            why = f": {made.error}" if made.error else ""
            self._say(f"cannot make {', '.join(left)}{why}")
            self._send(audit.internal_error("device nodes", f"cannot make {', '.join(left)}{why}", self._context()))

    # --- post-start ---

    def _started(self, taken: Taken) -> None:
        vmid = self.event.vmid
        if not self._concerns_us(self._subject(), taken) and self.records.read(Started, vmid) is None:
            self.outcome.silent = True
            return
        running = container_runs(self.sources, vmid)
        if running is None:
            self._done("not-running", "the container does not run")
            return
        self._drop_stop()
        self._done("running", f"init is pid {running.pid}")

    # --- the stop watchdog ---

    def _watch(self, taken: Taken) -> None:
        from hostd.stopwatch import look_after

        self.outcome.report = look_after(
            self.sources, self.event.vmid, taken, self.records, self._send, self._context()
        )

    # --- one release ---

    def _plan(self, taken: Taken, snapshot: Snapshot | None, started: Started | None) -> Plan:
        baseline = pairs(started.baseline_mib) if started is not None else {}
        return Plan(taken, snapshot, baseline, on_cleared=self._on_cleared)

    def _release(self, subject: Subject, plan: Plan, budget_s: float) -> tuple[Json, SideRelease]:
        limits = replace(self.settings.limits, timeout_s=budget_s, settle_s=0.0)
        options = Options(limits=limits, trigger=self.event.trigger)
        store = Store(self.around.run_dir)
        resume = self._unfinished(store)
        recorder = Recorder(store, self.around.owner, options_dict(options), self.event.as_dict())
        trail = audit.Trail(
            self._send,
            phase=self.event.phase.value,
            caller_uid=self.around.caller_uid,
            caller_pid=self.around.caller_pid,
        )
        fanout = _UnlessInterrupted(Fanout(recorder, trail, self.around.listener))
        self.sources.nvml.start()
        release = SideRelease(self.sources, subject, options, fanout, plan, cancel=self.around.cancel, resume=resume)
        self._release_id = release.report.release_id
        if resume is not None:
            self._send(audit.resumed(self._context(), resume.was_at))
        report = release.run()
        if report.reason == "interrupted":
            raise InterruptedRelease(report.message)
        if recorder.missing:
            self._send(audit.record_missing(self._context(), recorder.missing))
        return report_dict(report), release

    def _unfinished(self, store: Store) -> Resume | None:
        """The record of this very event that a killed worker left open."""
        for record in reversed(store.all()):
            event = record.get("event")
            if record.get("report") is not None or record.get("vmid") != self.event.vmid or not isinstance(event, dict):
                continue
            if event.get("phase") == self.event.phase and event.get("context") == dict(self.event.context):
                return parse_resume(record)
        return None

    def _clear(self, taken: Taken, *, with_monitor: bool) -> list[Cleared]:
        limits = self.settings.limits
        deadline_s = time.monotonic() + min(self.settings.hook.budget_s, 2 * limits.kill_grace_s)
        return [
            clear(
                self.sources,
                cgroup,
                settle_s=0.25,
                grace_s=limits.kill_grace_s,
                deadline_s=deadline_s,
                may_kill=lambda: container_runs(self.sources, self.event.vmid) is None,
                check=self.around.cancel.check,
            )
            for cgroup in (taken.payload, taken.monitor if with_monitor else None)
            if cgroup is not None
        ]

    def _on_cleared(self, cleared: Cleared | list[Cleared]) -> None:
        for one in cleared if isinstance(cleared, list) else [cleared]:
            if not one.processes:
                continue
            names = ", ".join(f"{pid} ({comm})" for pid, comm in one.names)
            if one.spared:
                self._say(f"{names} in {one.cgroup} left alone: the container runs")
                continue
            self._send(audit.cleared(self._context(), one.cgroup, one.names, empty=one.empty))
            self._say(f"left behind in {one.cgroup}: {names}; {'cleared' if one.empty else 'NOT cleared'}")
            for stuck in one.stuck:
                self._say(
                    f"pid {stuck.ref.pid} cannot die: SIGKILL is pending, state {stuck.state}, waiting in "
                    f"{stuck.wchan or 'an unknown place'}; what it waits for has to end, or the node to be rebooted"
                )

    # --- small things ---

    def _lock(self, timeout_s: float) -> ReleaseLock | None:
        """None when somebody else has it for longer than that, or when there is no lock to be had."""
        try:
            return acquire(
                self.event.vmid,
                wait=True,
                timeout_s=timeout_s,
                run_dir=self.around.run_dir,
                check=self.around.cancel.check,
            )
        except BusyError:
            return None
        except OSError as exc:
            self._send(audit.internal_error("lock", str(exc), self._context()))
            return None

    def _context(self) -> audit.Context:
        return audit.Context(
            vmid=self.event.vmid,
            release_id=self._release_id,
            trigger=self.event.trigger,
            phase=self.event.phase.value,
            caller_uid=self.around.caller_uid,
            caller_pid=self.around.caller_pid,
        )

    def _send(self, entry: audit.Entry) -> None:
        if self.around.journal is not None:
            self.around.journal.send(entry)

    def _say(self, text: str) -> None:
        prefix = f"container {self.event.vmid}: "
        self.outcome.messages.append(text.removeprefix(prefix))

    def _write(self, record: Snapshot | Started | Stopped | Watched) -> None:
        if not self.records.write(record):
            self._send(audit.record_missing(self._context(), self.records.problem))

    def _done(self, outcome: str, detail: str = "") -> None:
        context = self._context()
        detail = detail.removeprefix(f"container {self.event.vmid}: ")
        more = [f"{k}={v}" for k, v in self.event.context.items() if k in ("SERVICE_RESULT", "EXIT_STATUS")]
        text = "; ".join(
            part for part in (detail, " ".join(more) if self.event.phase is Phase.EXEC_STOP_POST else "") if part
        )
        self._send(audit.phase_done(context, outcome, time.monotonic() - self._begun_s, detail=text))


class _UnlessInterrupted(Silent):
    """An event that was interrupted (the daemon is being stopped) is not finished: whoever does it again goes on with
    its record. So nobody is told of an end."""

    def __init__(self, inner: Listener) -> None:
        self._inner = inner
        for name in ("started", "observed", "rung_begun", "waiting", "rung_done"):
            setattr(self, name, getattr(inner, name))

    def fate(self, report: Report, holder: HolderReport) -> None:
        self._inner.fate(report, holder)

    def finished(self, report: Report) -> None:
        if report.reason != "interrupted":
            self._inner.finished(report)


def guarded(lifecycle: Lifecycle, journal: Journal | None) -> Outcome:
    """`handle` for callers that must let the container go whatever happens: a bug becomes a message."""
    try:
        return lifecycle.handle()
    except InterruptedRelease:
        raise
    except Exception as exc:  # noqa: BLE001 - a fault of ours must never keep a container from starting or stopping
        if journal is not None:
            context = audit.Context(vmid=lifecycle.event.vmid, phase=lifecycle.event.phase.value)
            journal.send(audit.internal_error("lifecycle", "".join(traceback.format_exception(exc)), context))
        text = f"internal error, nothing was checked: {type(exc).__name__}: {exc}"
        return Outcome(messages=[*lifecycle.outcome.messages, text])


__all__ = ["STOP_PHASES", "Around", "Lifecycle", "Observation", "Outcome", "guarded", "os", "try_lock"]
