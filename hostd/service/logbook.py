"""The daemon's own entries in the journal. The process that sends them lives only while there is something to send."""

from __future__ import annotations

import os
import time

from hostd import audit
from hostd.service.server import Server
from hostd.system.journal import Entry, Journal

LINGER_S = 0.5
"""What comes within it uses the same process."""
RETRY_MOST_S = 30.0


class Logbook:
    """`say` never blocks. While the journal does not read there are retries, ever rarer; after that, nothing ticks."""

    def __init__(self) -> None:
        self._journal = Journal(stderr=True, on_drop=audit.entries_dropped)
        self._server: Server | None = None
        self._armed = False
        self._pause_s = LINGER_S

    def attach(self, server: Server) -> None:
        """From now on the server's loop looks after the process."""
        self._server = server
        self._arm()

    def say(self, entry: Entry) -> None:
        self._journal.send(entry)
        self._arm()

    def close(self) -> None:
        """At the end of the daemon: give the last entries a second."""
        self._journal.close(deadline_s=1.0)

    def _arm(self) -> None:
        if self._server is not None and not self._armed and (self._journal.pid or self._journal.pending):
            self._armed = True
            self._server.call_at(time.monotonic() + self._pause_s, self._settle)

    def _settle(self) -> None:
        self._armed = False
        self._journal.pump()
        if self._journal.pending:
            self._pause_s = min(RETRY_MOST_S, 2 * self._pause_s)
            self._arm()
            return
        self._pause_s = LINGER_S
        self._journal.close()
        pid, self._journal.pid = self._journal.pid, 0
        if pid:
            self._reap_later(pid)

    def _reap_later(self, pid: int) -> None:
        """It ends by itself when it has sent everything, which may take as long as the journal likes."""
        assert self._server is not None
        try:
            pidfd = os.pidfd_open(pid)  # our unreaped child: the number is still its own
        except OSError:
            self._server.call_at(time.monotonic() + RETRY_MOST_S, lambda: self._reap_later(pid))
            return
        server = self._server

        def ended(_events: int) -> None:
            os.waitpid(pid, os.WNOHANG)
            server.unwatch(pidfd)
            os.close(pidfd)

        server.watch(pidfd, ended)
