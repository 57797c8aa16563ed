"""Which event does what. `Lifecycle.handle` is called by the daemon's worker and, without one, by the hook itself."""

from __future__ import annotations

import traceback

from hostd import audit
from hostd.config import Config
from hostd.errors import InterruptedRelease
from hostd.lifecycle.clearing import Taken
from hostd.lifecycle.event import Event, Phase
from hostd.lifecycle.handling import Around, Handling, Outcome
from hostd.lifecycle.starting import Starting
from hostd.lifecycle.stopping import Stopping
from hostd.sources import Sources
from hostd.system.journal import Journal


class Lifecycle:
    """One event of one container."""

    def __init__(self, sources: Sources, event: Event, config: Config, around: Around) -> None:
        self.event = event
        self._on = Handling(sources, event, config, around)

    @property
    def outcome(self) -> Outcome:
        """So far."""
        return self._on.outcome

    def handle(self) -> Outcome:
        """Deals with the event. Raises only what is a bug, and InterruptedRelease."""
        on = self._on
        taken = Taken.now(on.sources, self.event.vmid)  # before anything else: it names this incarnation
        on.begin()
        starting, stopping = Starting(on), Stopping(on)
        try:
            what = {
                Phase.PRE_START: starting.about_to,
                Phase.EXEC_START_PRE: starting.about_to,
                Phase.POST_START: starting.done,
                Phase.PRE_STOP: stopping.announced,
                Phase.POST_STOP: stopping.over,
                Phase.EXEC_STOP_POST: stopping.over,
                Phase.WATCHDOG: self._watch,
            }[self.event.phase]
            what(taken)
            on.note_driver()
        finally:
            taken.close()
        return on.outcome

    def _watch(self, taken: Taken) -> None:
        """The stop watchdog."""
        from hostd.stopwatch import look_after

        on = self._on
        on.outcome.report = look_after(on.sources, self.event.vmid, taken, on.records, on.send, on.context())


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
        what = "cannot look" if isinstance(exc, OSError) else f"internal error: {type(exc).__name__}"
        text = f"{what}; nothing was checked: {exc}"
        return Outcome(messages=[*lifecycle.outcome.messages, text])
