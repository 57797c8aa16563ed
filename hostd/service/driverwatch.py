"""Remembers a driver call that does not come back: said once, shown in Status, taken back when that process ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hostd import audit
from hostd.service.processes import when_ended
from hostd.service.server import Server
from hostd.system.journal import Entry
from hostd.system.nvml import AGE_SHARE, Wedged, read_wedged


class DriverWatch:
    """`look()` after every request that may have asked the driver: three system calls. No timer, no driver call."""

    def __init__(self, server: Server, say: Callable[[Entry], None], deadline_s: Callable[[], float]) -> None:
        self._server = server
        self._say = say
        self._deadline_s = deadline_s
        self._known: Wedged | None = None
        self.times = 0
        """Calls that got stuck since the daemon began."""

    def look(self) -> None:
        if self._known is not None:
            return
        wedged = read_wedged(older_than_s=AGE_SHARE * self._deadline_s())
        if wedged is None or not when_ended(self._server, wedged.pid, self._ended):
            return
        self._known = wedged
        self.times += 1
        self._say(audit.nvml_wedged(wedged.pid, wedged.call, wedged.age_s))

    @property
    def facts(self) -> dict[str, Any]:
        return {"driver_hangs": self.times}

    def _ended(self) -> None:
        known, self._known = self._known, None
        if known is not None:
            self._say(audit.nvml_recovered(known.pid))
            self.look()  # another may have got stuck behind it
