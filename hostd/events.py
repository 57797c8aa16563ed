"""What a release tells while it runs. Listeners: the terminal, the journal, the write-ahead record, a Varlink stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hostd.model import Holder, HolderReport, Observation, Report, RungRecord


class Listener(Protocol):
    """Every method returns quickly and never raises into the release (see `Fanout`)."""

    def started(self, report: Report) -> None:
        """A release begins: id, vmid and trigger are set."""

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        """A complete look was taken; `holders` are the selected ones."""

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        """Intent: written down before the first signal of a rung."""

    def waiting(self, report: Report, what: str, since_s: float) -> None:
        """Still waiting, for people: what for and how long. At most about once a second."""

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        """Outcome of a rung."""

    def fate(self, report: Report, holder: HolderReport) -> None:
        """What became of one holder."""

    def finished(self, report: Report) -> None:
        """The verdict is in the report."""


class Silent:
    """A listener that does nothing: base class of the others."""

    def started(self, report: Report) -> None:
        return

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        return

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        return

    def waiting(self, report: Report, what: str, since_s: float) -> None:
        return

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        return

    def fate(self, report: Report, holder: HolderReport) -> None:
        return

    def finished(self, report: Report) -> None:
        return


class Fanout(Silent):
    """Tells several listeners; one that fails (closed terminal, full disk) is dropped and never stops a release."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = list(listeners)
        self.failures: list[str] = []

    def _tell(self, method: str, *args: object) -> None:
        for listener in tuple(self._listeners):
            try:
                getattr(listener, method)(*args)
            except Exception as exc:  # noqa: BLE001 - a listener must never stop a release in the middle
                self._listeners.remove(listener)
                self.failures.append(f"{type(listener).__name__}.{method}: {exc}")

    def started(self, report: Report) -> None:
        self._tell("started", report)

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        self._tell("observed", report, observation, tuple(holders))

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        self._tell("rung_begun", report, rung, tuple(targets))

    def waiting(self, report: Report, what: str, since_s: float) -> None:
        self._tell("waiting", report, what, since_s)

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        self._tell("rung_done", report, rung)

    def fate(self, report: Report, holder: HolderReport) -> None:
        self._tell("fate", report, holder)

    def finished(self, report: Report) -> None:
        self._tell("finished", report)
