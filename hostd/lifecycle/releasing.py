"""The release that an event leads to: written ahead with the event, in the journal, gone on with when it was cut off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hostd import audit
from hostd.climb import Subject
from hostd.errors import InterruptedRelease
from hostd.events import Fanout, Listener, Silent
from hostd.ladder import Options, Resume
from hostd.lifecycle.event import Event
from hostd.lifecycle.handling import Handling
from hostd.lifecycle.side import Plan, SideRelease
from hostd.model import HolderReport, Report
from hostd.store import Recorder, Store, parse_resume
from hostd.wire import options_dict, report_dict

Json = dict[str, Any]


def release_for(on: Handling, subject: Subject, plan: Plan, budget_s: float) -> tuple[Json, SideRelease]:
    """Runs it within the budget. Raises InterruptedRelease when we are asked to stop.

    `ladder.stop_units` and `ladder.reset` mean nothing here: the job's supervisor went with the container, and under a
    reset the container might be started (a start waits for this release only so long, then goes on).
    """
    limits = replace(on.settings.limits, timeout_s=budget_s, settle_s=0.0)
    options = Options(limits=limits, trigger=on.event.trigger)
    store = Store(on.around.run_dir)
    resume = _unfinished(store, on.event)
    recorder = Recorder(store, on.around.owner, options_dict(options), on.event.as_dict())
    trail = audit.Trail(
        on.send,
        phase=on.event.phase.value,
        caller_uid=on.around.caller_uid,
        caller_pid=on.around.caller_pid,
    )
    fanout = _UnlessInterrupted(Fanout(recorder, trail, on.around.listener))
    on.sources.nvml.start()
    release = SideRelease(on.sources, subject, options, fanout, plan, cancel=on.around.cancel, resume=resume)
    on.release_id = release.report.release_id
    if resume is not None:
        on.send(audit.resumed(on.context(), resume.was_at))
    report = release.run()
    if report.reason == "interrupted":
        raise InterruptedRelease(report.message)
    if recorder.missing:
        on.send(audit.record_missing(on.context(), recorder.missing))
    return report_dict(report), release


def _unfinished(store: Store, this: Event) -> Resume | None:
    """The record of this very event that a killed worker left open."""
    for record in reversed(store.all()):
        event = record.get("event")
        if record.get("report") is not None or record.get("vmid") != this.vmid or not isinstance(event, dict):
            continue
        if event.get("phase") == this.phase and event.get("context") == dict(this.context):
            return parse_resume(record)
    return None


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
