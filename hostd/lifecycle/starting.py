"""A start: leftovers cleared, device nodes made, the gate; and what a start that succeeded makes of an earlier stop."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hostd import audit
from hostd.climb import Subject
from hostd.clock import boot_s
from hostd.engine import configured_minors
from hostd.lifecycle.clearing import Taken, container_runs
from hostd.lifecycle.event import Phase, stop_key
from hostd.lifecycle.gate import Gate, gate_of
from hostd.lifecycle.handling import Handling, Known
from hostd.lifecycle.records import Snapshot, Started, Stopped
from hostd.lifecycle.releasing import release_for
from hostd.lifecycle.side import Plan, SideRelease
from hostd.nodes import missing_paths

Json = dict[str, Any]

CONSUME_WITHIN_S = 120.0
"""An ExecStartPre= that comes later belongs to another start than the last pre-start: Proxmox waits for the old unit's
ExecStopPost= in between, at most our own budget."""


class Starting:
    """`about_to` at pre-start and ExecStartPre=, `done` at post-start."""

    def __init__(self, on: Handling) -> None:
        self._on = on

    def about_to(self, taken: Taken) -> None:
        """pre-start, ExecStartPre=: one record per start, whichever comes first."""
        on = self._on
        vmid = on.event.vmid
        known = on.known()
        earlier = self._known_start()
        if earlier is not None:
            self._consume(earlier, taken)
            return
        if not on.concerns_us(known, taken):
            on.outcome.silent = True
            on.records.drop(Started, vmid)
            return
        running = container_runs(on.sources, vmid)
        if running is not None:
            on.done("runs", f"container {vmid} {running.words} already; nothing was touched")
            return
        budget_s = on.settings.hook.pre_start_budget_s
        lock = on.lock(budget_s / 2)
        if lock is None:
            on.on_cleared(on.clear(taken, with_monitor=True))
            self._go_unchecked("another release of this container is still in flight")
            return
        try:
            self._release(taken, known, budget_s)
        finally:
            lock.close()

    def _release(self, taken: Taken, known: Known, budget_s: float) -> None:
        on = self._on
        self._make_nodes(known)
        if not known.minors and known.config is not None:
            known.minors = configured_minors(known.config.gpu_paths)
        snapshot = on.records.read(Snapshot, on.event.vmid)
        plan = Plan(taken, snapshot, settle_s=0.0, clears_monitor=True, on_cleared=on.on_cleared)
        left_s = max(1.0, budget_s - on.elapsed_s())
        report, release = release_for(on, Subject(on.event.vmid, known.minors), plan, left_s)
        on.outcome.report = report
        self._judge_start(report, release, known)

    def _known_start(self) -> Started | None:
        """The record of the pre-start that this ExecStartPre= (or this second attempt at one call) belongs to."""
        on = self._on
        started = on.records.read(Started, on.event.vmid)
        if started is None:
            return None
        if on.event.event_id and started.event_id == on.event.event_id:
            return started
        fresh = 0 <= boot_s() - started.at_s <= CONSUME_WITHIN_S
        ours = on.event.phase is Phase.EXEC_START_PRE and started.phase == Phase.PRE_START
        return started if ours and fresh and started.allow and not started.consumed else None

    def _consume(self, started: Started, taken: Taken) -> None:
        on = self._on
        if started.event_id == on.event.event_id and on.event.event_id:
            on.outcome.allow = started.allow
            on.outcome.messages += started.messages
            return
        started.consumed = True
        on.write(started)
        if any(c is not None and c.populated() for c in (taken.payload, taken.monitor)):
            on.on_cleared(on.clear(taken, with_monitor=True))
        on.done("known", f"dealt with as release {started.release_id[:8] or '(unchecked)'}")

    def _judge_start(self, report: Json, release: SideRelease, known: Known) -> None:
        """The gate, and what is remembered of this start."""
        on, vmid = self._on, self._on.event.vmid
        gpus = [g for g in release.last.gpus if g.info.minor in known.minors] if release.last is not None else []
        gate = gate_of(release.report, gpus, on.settings.hook)
        stuck = next((c for c in release.cleared if not c.empty and not c.spared), None)
        self._tell_gate(gate, report)
        started = Started(
            vmid,
            boot_s(),
            report["release_id"],
            on.event.event_id,
            on.event.phase.value,
            gate.allow,
            minors=sorted(known.minors),
            messages=on.outcome.messages,
        )
        if release.last is not None:
            # The container does not run: none of it is its own.
            started.baseline_mib = [[g.info.minor, g.ghost_mib] for g in gpus if g.ghost_mib is not None]
        on.write(started)
        if not gate.allow and on.event.phase is Phase.EXEC_START_PRE:
            key = stop_key(replace(on.event, phase=Phase.EXEC_STOP_POST), "")
            on.write(Stopped(vmid, boot_s(), key, report["release_id"], report["verdict"] or ""))
        if stuck is None:
            on.drop_stop()
        on.done("refused" if not gate.allow else report["verdict"] or report["reason"], gate.message)

    def _tell_gate(self, gate: Gate, report: Json) -> None:
        on = self._on
        on.outcome.allow = gate.allow
        on.outcome.next_step = gate.next_step
        if not gate.reason:
            on.say(report["message"])
            return
        word = "goes on" if gate.allow else "REFUSED"
        text = gate.message.removeprefix(f"container {on.event.vmid}: ")
        on.say(f"start {word}: {text}")
        on.send(
            audit.gate(
                on.context(),
                blocked=not gate.allow,
                reason=gate.reason,
                message=text,
                next_step=gate.next_step,
            )
        )

    def _go_unchecked(self, why: str) -> None:
        """The start goes on without a verdict; its ExecStartPre= does not wait once more."""
        on = self._on
        on.say(f"start goes on unchecked: {why}")
        on.send(audit.gate(on.context(), blocked=False, reason="busy", message=why))
        started = Started(on.event.vmid, boot_s(), "", on.event.event_id, on.event.phase.value)
        on.write(started)
        on.done("unchecked", why)

    def _make_nodes(self, known: Known) -> None:
        on = self._on
        paths = missing_paths(known.config.gpu_paths if known.config is not None else ())
        if not paths:
            return
        made = on.around.make_nodes(paths)
        if made.made:
            on.send(audit.nodes_made(on.context(), made.made))
            on.say(f"made missing device nodes: {', '.join(made.made)}")
        left = missing_paths(paths)
        if left:
            why = f": {made.error}" if made.error else ""
            on.say(f"cannot make {', '.join(left)}{why}")
            on.send(audit.internal_error("device nodes", f"cannot make {', '.join(left)}{why}", on.context()))

    def done(self, taken: Taken) -> None:
        """post-start: what a stop has left is of no interest any more."""
        on = self._on
        vmid = on.event.vmid
        if not on.concerns_us(on.known(), taken) and on.records.read(Started, vmid) is None:
            on.outcome.silent = True
            return
        running = container_runs(on.sources, vmid)
        if running is None:
            on.done("not-running", "the container does not run")
            return
        on.drop_stop()
        on.done("running", f"the container {running.words}")
