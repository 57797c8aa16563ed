"""A running release as event dicts: the daemon's `progress` replies and what the terminal shows are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hostd.events import Silent
from hostd.model import Holder, Observation, Report, RungRecord
from hostd.wire import observed_event, rung_event, waiting_event

Json = dict[str, Any]


class EventListener(Silent):
    """Turns what a release tells into event dicts for `emit`."""

    def __init__(self, emit: Callable[[Json], None]) -> None:
        self._emit = emit

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        self._emit(observed_event(observation, holders) | {"vmid": report.vmid})

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        self._emit(rung_event("rung_begun", rung) | {"vmid": report.vmid})

    def waiting(self, report: Report, what: str, since_s: float) -> None:
        self._emit(waiting_event(what, since_s) | {"vmid": report.vmid})

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        self._emit(rung_event("rung_done", rung) | {"vmid": report.vmid})
