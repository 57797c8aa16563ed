"""One client: bytes in and out of its socket, within bounds. It decides nothing about methods."""

from __future__ import annotations

import select
import socket
from collections import deque
from typing import TYPE_CHECKING

from hostd.service import varlink

if TYPE_CHECKING:
    from hostd.service.jobs import Job
    from hostd.service.worker import Caller

READ_SIZE = 64 * 1024
PROGRESS_BOUND = 64 * 1024
"""Unsent bytes above which progress messages are left out: the final reply tells everything anyway."""
CALL_BOUND = 1024 * 1024
"""Unsent bytes above which no further call of this client is looked at."""


class Connection:
    """State of one connection; the socket is non-blocking."""

    __slots__ = (
        "caller",
        "closing",
        "deadline",
        "eof",
        "fd",
        "framer",
        "gone",
        "half_closed",
        "job",
        "mask",
        "out",
        "pending",
        "sock",
        "stranger",
        "write_deadline",
    )

    def __init__(self, sock: socket.socket, caller: Caller, stranger: bool) -> None:
        self.sock = sock
        self.fd = sock.fileno()
        self.caller = caller
        self.stranger = stranger
        """Not root: every call is answered with NotPermitted, and the connection closed."""
        self.framer = varlink.Framer()
        self.pending: deque[bytes] = deque()
        self.out = bytearray()
        self.job: Job | None = None
        """The call that is being answered; the next one waits for it."""
        self.eof = False
        self.half_closed = False
        self.gone = False
        self.closing = False
        """Close once everything is sent."""
        self.deadline: float | None = None
        """Idle limit; None while a call is being answered."""
        self.write_deadline: float | None = None
        self.mask = 0

    def wanted(self) -> int:
        """The epoll events that this connection can use now (EPOLLHUP always comes)."""
        mask = 0
        if not (self.eof or self.closing or self.pending) and len(self.out) < CALL_BOUND:
            mask |= select.EPOLLIN
        if not self.half_closed:
            mask |= select.EPOLLRDHUP
        if self.out:
            mask |= select.EPOLLOUT
        return mask

    def read(self) -> bool:
        """Take what is there, once. False when the connection is broken."""
        try:
            data = self.sock.recv(READ_SIZE)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            self.eof = self.half_closed = True
        self.pending.extend(self.framer.feed(data))
        return True

    def read_rest(self) -> None:
        """Everything that a client sent before it went away: at most what the kernel had buffered."""
        try:
            while not self.framer.overflow:
                data = self.sock.recv(READ_SIZE)
                if not data:
                    break
                self.pending.extend(self.framer.feed(data))
        except OSError:
            pass
        self.eof = True

    def send(self, message: bytes) -> bool:
        """Queue a message and send what the kernel takes. False when the connection is broken."""
        if self.gone:
            return True
        self.out += message
        return self.flush()

    def flush(self) -> bool:
        try:
            while self.out:
                with memoryview(self.out) as view, view[: 256 * 1024] as part:
                    sent = self.sock.send(part, socket.MSG_NOSIGNAL)
                del self.out[:sent]
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    @property
    def idle(self) -> bool:
        return self.job is None and not self.pending and not self.out
