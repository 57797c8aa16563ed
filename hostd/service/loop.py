"""One epoll loop, no threads. It sleeps until a descriptor, a timer or a part's deadline wakes it: nothing ticks."""

from __future__ import annotations

import heapq
import math
import os
import select
import time
import traceback
from collections.abc import Callable
from typing import Protocol


class Part(Protocol):
    """Something with work of its own after the events of a turn."""

    def due(self) -> float:
        """When it wants its next turn (time.monotonic()); 0: at once; inf: not before an event."""

    def attend(self, now: float) -> None:
        """Its turn; called after every batch of events."""


class Timer:
    """One call of a function at a time of CLOCK_MONOTONIC; see `Loop.call_at`."""

    __slots__ = ("run", "when")

    def __init__(self, when: float, run: Callable[[], None]) -> None:
        self.when = when
        self.run: Callable[[], None] | None = run

    def cancel(self) -> None:
        self.run = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Loop:
    """Descriptors, timers and parts. Not for signal handlers: let them write to a descriptor that is watched here."""

    def __init__(self, log: Callable[[str], None]) -> None:
        self._log = log
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._timers: list[Timer] = []
        self._parts: list[Part] = []
        self._closing: list[int] = []

    def add(self, part: Part) -> None:
        self._parts.append(part)

    def watch(self, fd: int, callback: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call `callback(events)` whenever `fd` is ready."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self._epoll.modify(fd, events)

    def unwatch(self, fd: int) -> None:
        """Before the descriptor is closed."""
        del self._callbacks[fd]
        self._epoll.unregister(fd)

    def watches(self, fd: int) -> bool:
        return fd in self._callbacks

    def close_later(self, fd: int) -> None:
        """Close it at the end of the turn, so that no number is reused within one batch of events."""
        self._closing.append(fd)

    def call_at(self, when: float, run: Callable[[], None]) -> Timer:
        """Run a function once at `when` (time.monotonic()). A watchdog arms its next one from the last."""
        timer = Timer(when, run)
        heapq.heappush(self._timers, timer)
        return timer

    def turn(self) -> None:
        """Wait for what comes first, and deal with it."""
        for fd, events in self._epoll.poll(self._timeout()):
            callback = self._callbacks.get(fd)
            if callback is not None:
                self.guard(callback, events)
        now = time.monotonic()
        while self._timers and (self._timers[0].when <= now or self._timers[0].run is None):
            run = heapq.heappop(self._timers).run
            if run is not None:
                self.guard(run)
        for part in self._parts:
            part.attend(now)
        self._close_all()

    def guard(self, callback: Callable[..., None], *args: object) -> None:
        """A fault in one callback is logged and costs the others nothing."""
        try:
            callback(*args)
        except Exception:  # noqa: BLE001
            self._log(f"internal error in {getattr(callback, '__qualname__', callback)}: {traceback.format_exc()}")

    def close(self) -> None:
        self._close_all()
        self._epoll.close()

    def _close_all(self) -> None:
        while self._closing:
            os.close(self._closing.pop())

    def _timeout(self) -> float | None:
        when = min((part.due() for part in self._parts), default=math.inf)
        if self._timers:
            when = min(when, self._timers[0].when)
        return None if when == math.inf else max(0.0, when - time.monotonic())
