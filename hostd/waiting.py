"""Waiting that follows progress, not a clock: pidfds, the driver's memory figures, CPU time of the dying."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hostd.cancel import Cancel
from hostd.sources import Sources
from hostd.system.pidfd import Pinned

TICK_S = 0.1
"""Between two samples while nothing else wakes us; an exit wakes at once."""

QUIET_S = 0.25
"""The driver is not asked for memory before: a question costs a teardown some 10 ms of its 100 (H200)."""


class MemoryGauge:
    """Asks the driver for used memory without ever waiting for it; a new low is progress."""

    def __init__(self, sources: Sources, uuids: Sequence[str], limit_s: Callable[[], float] | None = None) -> None:
        """`limit_s()`: how long an answer may take; an open question delays the next one by as much."""
        self._nvml = sources.nvml
        self._limit_s = limit_s
        self._uuids = tuple(u for u in uuids if u)
        self.used_mib: int | None = None
        self._lowest: int | None = None

    def fileno(self) -> int | None:
        """Readable when an answer is there; None when nothing was asked."""
        return self._nvml.fileno() if self._nvml.pending else None

    def ask(self) -> None:
        if self._uuids and self._nvml.alive and not self._nvml.pending:
            self._nvml.send_memory_request(self._uuids, self._limit_s() if self._limit_s is not None else None)

    def take(self) -> bool:
        """Reads an answer that has come; True when memory has fallen to a new low."""
        figures = self._nvml.receive_memory()
        values = [v for v in figures.values() if v is not None]
        if not values or len(values) < len(self._uuids):
            return False
        self.used_mib = sum(values)
        fell = self._lowest is not None and self.used_mib < self._lowest
        if self._lowest is None or fell:
            self._lowest = self.used_mib
        return fell

    def settle(self) -> None:
        """Takes a pending answer, so that the next request starts clean."""
        if self._nvml.pending:
            self.take()


@dataclass(slots=True)
class Patience:
    """Seconds without progress, and an absolute end."""

    grace_s: float
    deadline_s: float
    """CLOCK_MONOTONIC."""
    last_progress_s: float = 0.0
    ever: bool = False
    """There was progress at all."""

    def __post_init__(self) -> None:
        self.last_progress_s = time.monotonic()

    def progressed(self) -> None:
        self.last_progress_s = time.monotonic()
        self.ever = True

    @property
    def moving(self) -> bool:
        """There was progress, and not so long ago that none is expected any more: only the absolute end stops us."""
        return self.ever and time.monotonic() - self.last_progress_s < self.grace_s

    @property
    def left_s(self) -> float:
        now = time.monotonic()
        return min(self.last_progress_s + self.grace_s, self.deadline_s) - now

    @property
    def stalled(self) -> bool:
        return self.left_s <= 0


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Waits until a descriptor is readable (its number may be a large one: no select(2))."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def wait_for_exits(
    pins: Sequence[Pinned],
    patience: Patience,
    gauge: MemoryGauge,
    cancel: Cancel,
    *,
    cpu_ticks: Callable[[int], int | None] | None = None,
    hopeless: Callable[[Sequence[Pinned]], bool] | None = None,
    tell: Callable[[Sequence[Pinned], int | None], None] | None = None,
) -> list[Pinned]:
    """Waits until every pinned process is dead or nothing has moved for the grace; returns those still alive.

    `cpu_ticks(pid)`: growth of it counts as progress (only for processes that are dying). `hopeless(alive)`: none of
    them can ever act on the signal. A readable pidfd means dead: exit_notify() comes after the files were closed
    (FACTS: the memory is free 0.1 ms later).
    """
    alive = {pin.fd: pin for pin in pins}
    ticks: dict[int, int] = {}
    begun = told = time.monotonic()
    while alive and not patience.stalled:
        cancel.check()
        if hopeless is not None and hopeless(list(alive.values())):
            break
        if _poll(alive, gauge, cancel, min(TICK_S, max(0.0, patience.left_s))):
            patience.progressed()
            continue
        if cpu_ticks is not None and _burns(alive, ticks, cpu_ticks):
            patience.progressed()
        if time.monotonic() - begun >= QUIET_S:
            gauge.ask()
        if tell is not None and time.monotonic() - told >= 1.0:
            told = time.monotonic()
            tell(list(alive.values()), gauge.used_mib)
    return list(alive.values())


def _poll(alive: dict[int, Pinned], gauge: MemoryGauge, cancel: Cancel, timeout_s: float) -> bool:
    """One wait; takes the dead out of `alive`. True when something moved."""
    poll = select.poll()
    for fd in alive:
        poll.register(fd, select.POLLIN)
    poll.register(cancel.fileno(), select.POLLIN)
    nvml_fd = gauge.fileno()
    if nvml_fd is not None:
        poll.register(nvml_fd, select.POLLIN)
    moved = False
    for fd, _ in poll.poll(timeout_s * 1000):
        if fd in alive:
            del alive[fd]
            moved = True
        elif fd == nvml_fd:
            moved = gauge.take() or moved
    return moved


def _burns(alive: dict[int, Pinned], ticks: dict[int, int], cpu_ticks: Callable[[int], int | None]) -> bool:
    moved = False
    for pin in alive.values():
        now = cpu_ticks(pin.ref.pid) or 0
        moved = moved or now > ticks.get(pin.ref.pid, now)
        ticks[pin.ref.pid] = now
    return moved
