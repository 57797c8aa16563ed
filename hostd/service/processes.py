"""Waiting for the end of a process that is not ours, in the server's loop: an event, not a timer."""

from __future__ import annotations

import os
from collections.abc import Callable

from hostd.service.server import Server


def when_ended(server: Server, pid: int, run: Callable[[], None]) -> bool:
    """Call `run` once when the process has ended. False when it has ended already or cannot be watched."""
    if pid <= 0:
        return False
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False

    def ended(_events: int) -> None:
        server.unwatch(pidfd)
        os.close(pidfd)
        run()

    server.watch(pidfd, ended)
    return True
