"""Cancelling a release: a flag and a descriptor that becomes readable, so that every wait ends at once."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

from hostd.errors import InterruptedRelease


class Cancel:
    """`request()` from a signal handler or a test; `check()` raises InterruptedRelease at a safe point.

    A second request raises KeyboardInterrupt where it lands: an impatient second Ctrl-C ends a blocking read too.
    """

    def __init__(self) -> None:
        self.requested = False
        self.handed_over = False
        """Not by whoever asked for the work: somebody else goes on with it (the daemon is being stopped)."""
        self._previous: dict[int, Any] = {}
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def fileno(self) -> int:
        return self._read

    def request(self, signum: int = signal.SIGINT, frame: FrameType | None = None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        os.write(self._write, b"\0")

    def hand_over(self, signum: int = signal.SIGUSR1, frame: FrameType | None = None) -> None:
        """Stop at the next safe point and leave the rest to a successor. Nothing after a cancellation."""
        if not self.requested:
            self.handed_over = True
            self.request(signum, frame)

    def install(self, *signals: int) -> None:
        """Makes these signals request the cancellation (main thread only)."""
        for number in signals:
            previous = signal.signal(number, self.request)
            self._previous.setdefault(number, signal.SIG_DFL if previous is None else previous)

    def check(self) -> None:
        if self.requested:
            raise InterruptedRelease("interrupted")

    def close(self) -> None:
        for number, previous in self._previous.items():  # a late Ctrl-C must not find descriptors that are others' now
            signal.signal(number, previous)
        os.close(self._read)
        os.close(self._write)
