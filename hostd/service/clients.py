"""The open connections: calls in, replies out, in order and within limits. What a call means is decided elsewhere."""

from __future__ import annotations

import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable

from hostd.service import varlink
from hostd.service.connection import CALL_BOUND, Connection
from hostd.service.limits import Limits
from hostd.service.loop import Loop
from hostd.service.worker import Caller

_CALLS_PER_TURN = 32


class Clients:
    """A part of the loop: its own deadlines are those of the slowest client, so it has none while nobody is there."""

    def __init__(
        self,
        loop: Loop,
        limits: Limits,
        answer: Callable[[Connection, bytes], None],
        malformed: Callable[[Connection, str], None],
        half_closed: Callable[[Connection], None],
        gone: Callable[[Connection], None],
    ) -> None:
        """`answer` gets one call after the other; `malformed` what no call can follow; `half_closed` a client that
        sends no more and waits for its reply; `gone` one whose call is still being answered."""
        self._loop = loop
        self._limits = limits
        self._answer = answer
        self._malformed = malformed
        self._half_closed = half_closed
        self._gone = gone
        self._open: dict[int, Connection] = {}
        self._strangers = 0
        self._ready: dict[Connection, None] = {}
        self._sweep_at = math.inf
        self.refused = 0
        """Clients closed for misbehaviour, for Status."""
        self.on_room: Callable[[], None] = lambda: None
        """Called when one more client may fit in."""
        loop.add(self)

    def __len__(self) -> int:
        return len(self._open)

    # --- as a part of the loop ---

    def due(self) -> float:
        return 0.0 if self._ready else self._sweep_at

    def attend(self, now: float) -> None:
        if self._ready:
            ready, self._ready = self._ready, {}
            for connection in ready:
                self._loop.guard(self._advance, connection)
        if now >= self._sweep_at:
            self._sweep(now)

    # --- for listener and server ---

    def add(self, sock: socket.socket, caller: Caller) -> None:
        stranger = caller.uid != 0
        if stranger and self._strangers >= self._limits.strangers:
            self.refused += 1
            self._loop.close_later(sock.detach())
            return
        self._strangers += stranger
        connection = Connection(sock, caller, stranger)
        self._open[connection.fd] = connection
        connection.mask = connection.wanted()
        self._loop.watch(connection.fd, lambda events: self._on_events(connection, events), connection.mask)
        self.rest(connection)

    def any_idle(self) -> bool:
        return any(connection.idle for connection in self._open.values())

    def evict(self) -> None:
        """Close the longest idle client, strangers first."""
        idle = [connection for connection in self._open.values() if connection.idle]
        if idle:
            self.refused += 1
            self.drop(min(idle, key=lambda c: (not c.stranger, c.deadline or math.inf)))

    def ready(self, connection: Connection) -> None:
        """Look at its next call in this turn or the next."""
        self._ready[connection] = None

    def send(self, connection: Connection, message: bytes) -> None:
        if not connection.send(message):
            self.drop(connection)

    def any_unsent(self) -> bool:
        return any(connection.out for connection in self._open.values())

    def close_idle(self) -> None:
        """Close every client that waits for no answer, once it has taken what was sent."""
        for connection in tuple(self._open.values()):
            if connection.job is None:
                connection.closing = True
                self.ready(connection)

    def close(self) -> None:
        for connection in tuple(self._open.values()):
            self.drop(connection)

    def drop(self, connection: Connection) -> None:
        """Close a connection now and settle what it was waiting for."""
        if connection.gone:
            return
        connection.gone = True
        connection.pending = deque()
        connection.out.clear()
        self._loop.unwatch(connection.fd)
        del self._open[connection.fd]
        self._strangers -= connection.stranger
        if not self._open:
            self._sweep_at = math.inf
        self._loop.close_later(connection.sock.detach())
        if connection.job is not None:
            self._gone(connection)
        self.on_room()

    def rest(self, connection: Connection) -> None:
        """Set events and limits of a connection by what it waits for now."""
        mask = connection.wanted()
        if mask != connection.mask:
            connection.mask = mask
            self._loop.change(connection.fd, mask)
        limits, now = self._limits, time.monotonic()
        if connection.job is not None:
            connection.deadline = None
        elif connection.deadline is None:
            connection.deadline = now + (limits.stranger_s if connection.stranger else limits.idle_s)
            self._sweep_at = min(self._sweep_at, connection.deadline)
            self.on_room()  # this one could make room now
        if not connection.out:
            connection.write_deadline = None
        elif connection.write_deadline is None:
            connection.write_deadline = now + limits.write_s
            self._sweep_at = min(self._sweep_at, connection.write_deadline)

    # --- one connection ---

    def _on_events(self, connection: Connection, events: int) -> None:
        try:
            self._deal_with(connection, events)
        except BaseException:
            self.drop(connection)  # the same event would come again and again
            raise

    def _deal_with(self, connection: Connection, events: int) -> None:
        if events & (select.EPOLLHUP | select.EPOLLERR):
            connection.read_rest()
            self._leave(connection)
            return
        if events & select.EPOLLOUT and not connection.flush():
            self.drop(connection)
            return
        if events & select.EPOLLRDHUP:
            connection.half_closed = True
            if connection.job is not None:
                self._half_closed(connection)
        if events & select.EPOLLIN and not connection.read():
            self.drop(connection)
            return
        self._advance(connection)

    def _advance(self, connection: Connection) -> None:
        """Answer what is waiting, in order, as far as it can be answered now; then see what to wait for."""
        for _ in range(_CALLS_PER_TURN):
            if connection.closing or connection.job is not None or len(connection.out) >= CALL_BOUND:
                break
            if not connection.pending:
                if connection.framer.overflow:
                    self._malformed(connection, f"a message is longer than {varlink.MAX_CALL} bytes")
                elif connection.eof:
                    connection.closing = True
                break
            self._answer(connection, connection.pending.popleft())
        else:
            self.ready(connection)
        if connection.gone:
            return
        if connection.closing and not connection.out:
            self.drop(connection)
            return
        self.rest(connection)

    def _sweep(self, now: float) -> None:
        """Close who is over a limit. Runs at the earliest limit, so never while nobody is connected."""
        self._sweep_at = math.inf
        for connection in tuple(self._open.values()):
            until = min(connection.write_deadline or math.inf, connection.deadline or math.inf)
            if now >= until:
                self.refused += 1
                self.drop(connection)
            else:
                self._sweep_at = min(self._sweep_at, until)

    def _leave(self, connection: Connection) -> None:
        """The client is gone: what it asked for is cancelled or goes on, as it said."""
        pending = connection.pending
        self.drop(connection)
        connection.pending = pending
        connection.eof = True
        if pending:
            self.ready(connection)
