"""Pinning a process before it is signalled: a pid may be reused at any time, a pidfd stays (pidfd_open(2))."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Sequence

from hostd.errors import is_gone
from hostd.model import ProcessRef


class Pinned:
    """One process, held so that signals and waits can only reach it. Close it; a context manager does."""

    __slots__ = ("fd", "ref")

    def __init__(self, fd: int, ref: ProcessRef) -> None:
        self.fd = fd
        """Polls readable when the process, all tasks included, has exited; -1 after `close`."""
        self.ref = ref

    @classmethod
    def pin(cls, ref: ProcessRef, recheck: Callable[[int], ProcessRef | None]) -> Pinned | None:
        """Hold the process `ref`; None when it is gone or its pid is another's by now.

        `recheck` reads who has the pid (`Procfs.read_ref`) after the pidfd was opened: equal start times mean that it
        is the one looked at before. ValueError for pid <= 1 (no pid, a broadcast, init); OSError when it cannot be
        said.
        """
        if ref.pid <= 1:
            raise ValueError(f"pid {ref.pid} is never a target")
        try:
            fd = os.pidfd_open(ref.pid)
        except OSError as exc:
            if is_gone(exc):
                return None
            raise
        try:
            if recheck(ref.pid) == ref:
                return cls(fd, ref)
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def __enter__(self) -> Pinned:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def gone(self) -> bool:
        """It has exited (a zombie counts: it holds nothing)."""
        return bool(wait_any((self,), 0))

    def send(self, sig: int) -> bool:
        """Send a signal; False when it has exited already. Accepted is not dead. PermissionError propagates."""
        if self.gone():
            return False
        try:
            signal.pidfd_send_signal(self.fd, sig)
        except ProcessLookupError:
            return False
        return True


def wait_any(pinned: Sequence[Pinned], timeout_s: float | None) -> list[Pinned]:
    """Those that have exited, as soon as there is one, or none at the timeout (None: no limit)."""
    by_fd = {one.fd: one for one in pinned}
    poll = select.poll()
    for fd in by_fd:
        poll.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000)]
