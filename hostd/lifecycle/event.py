"""A lifecycle event as hookscript and drop-in see it. Pure.

Events come twice, out of order, late or never (PCT_FLOWS 7): they are facts to reconcile, not a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    PRE_START = "pre-start"
    POST_START = "post-start"
    PRE_STOP = "pre-stop"
    POST_STOP = "post-stop"
    EXEC_START_PRE = "exec-start-pre"
    EXEC_STOP_POST = "exec-stop-post"
    WATCHDOG = "watchdog"
    """The stop watchdog of the daemon looks after a stop that takes long; nobody outside sends it."""


TRIGGERS = {
    Phase.PRE_START: "hook-pre-start",
    Phase.POST_STOP: "hook-post-stop",
    Phase.EXEC_START_PRE: "unit-start-pre",
    Phase.EXEC_STOP_POST: "unit-stop-post",
    Phase.POST_START: "hook-post-start",
    Phase.PRE_STOP: "hook-pre-stop",
    Phase.WATCHDOG: "stop-watchdog",
}
"""`trigger` of release records and journal entries; stable."""

START_PHASES = frozenset({Phase.PRE_START, Phase.EXEC_START_PRE})
STOP_PHASES = frozenset({Phase.POST_STOP, Phase.EXEC_STOP_POST})

CONTEXT_KEYS = ("INVOCATION_ID", "SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS", "LXC_PID", "LXC_TARGET", "EVENT_ID")
"""What the script passes on of its environment, and the id that the hook gives to one call of it."""
_MAX_VALUE = 64


@dataclass(frozen=True, slots=True)
class Event:
    vmid: int
    phase: Phase
    source: str
    """`hookscript`, `drop-in` or `daemon`."""
    context: Mapping[str, str] = field(default_factory=dict)

    @property
    def trigger(self) -> str:
        return TRIGGERS[self.phase]

    @property
    def event_id(self) -> str:
        """The same for a second attempt at one and the same call (its daemon died), else different; may be empty."""
        return self.context.get("EVENT_ID", "")

    def as_dict(self) -> dict[str, object]:
        return {"vmid": self.vmid, "phase": self.phase.value, "source": self.source, "context": dict(self.context)}


def parse_context(values: Mapping[str, object]) -> dict[str, str]:
    """The known keys with plain values; whatever else a caller's environment had is left out."""
    found = {}
    for key in CONTEXT_KEYS:
        value = values.get(key)
        if isinstance(value, str) and len(value) <= _MAX_VALUE and _plain(value):
            found[key] = value
    return found


def _plain(text: str) -> bool:
    return text.isascii() and text.replace("-", "").replace("_", "").isalnum()


def stop_key(event: Event, unit_invocation: str) -> str:
    """What names one stop: the invocation of the container's unit, which post-stop and ExecStopPost= share.

    In a post-stop under an `lxc-start` by hand INVOCATION_ID is whatever the shell had; so it counts there only when it
    is `unit_invocation`, the one that systemd has for the unit now. Then the old init's pid names the stop.
    Empty: nothing names it.
    """
    invocation = event.context.get("INVOCATION_ID", "")
    if event.phase is Phase.EXEC_STOP_POST or (invocation and invocation == unit_invocation):
        return f"unit-{invocation}" if invocation else ""
    pid = event.context.get("LXC_PID", "")
    return f"init-{pid}" if pid.isdigit() else ""
