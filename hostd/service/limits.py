"""Every bound of the server: what one client does, or does not do, costs the others nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds where not named otherwise."""

    connections: int = 512
    """Above it the longest idle client is closed; when none is idle, nobody is accepted until one leaves."""
    strangers: int = 16
    """Of them not root."""
    idle_s: float = 30.0
    """Without a complete call (half a call does not count)."""
    stranger_s: float = 2.0
    write_s: float = 30.0
    """A client that has not taken everything for so long is closed."""
    workers: Mapping[str, int] = field(default_factory=lambda: {"work": 128, "look": 32})
    """At the same time, by lane; further requests wait in order."""
    stop_s: float = 5.0
    """For workers to stop at `stop()`, before SIGKILL."""
