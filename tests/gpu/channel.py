"""The test's end of a socket to a process that may live in another PID namespace."""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Message:
    """One message; `pid` is the sender's in *our* PID namespace: the kernel says so, not the sender (unix(7))."""

    event: str
    pid: int
    facts: dict[str, Any] = field(default_factory=dict)


class ChannelClosedError(Exception):
    """The other side is gone."""


class Channel:
    """A SOCK_SEQPACKET socket of JSON objects. Messages that nobody waited for are kept for the next caller."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.kept: list[Message] = []

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """(our end, the other side's end)"""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(ours), theirs

    def close(self) -> None:
        self.socket.close()

    def send(self, request: dict[str, Any], fds: Sequence[int] = ()) -> None:
        raw = json.dumps(request).encode()
        if fds:
            socket.send_fds(self.socket, [raw], list(fds))
        else:
            self.socket.send(raw)

    def _receive(self, timeout_s: float) -> Message | None:
        """The next message; None after `timeout_s`. Raises ChannelClosedError."""
        poller = select.poll()
        poller.register(self.socket, select.POLLIN)
        if not poller.poll(max(0.0, timeout_s) * 1000):
            return None
        try:
            raw, ancillary, _flags, _address = self.socket.recvmsg(65536, socket.CMSG_SPACE(struct.calcsize("3i")))
        except ConnectionResetError:
            raw = b""
        if not raw:
            raise ChannelClosedError
        pid = 0
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
                pid = struct.unpack("3i", data[: struct.calcsize("3i")])[0]
        facts = json.loads(raw)
        return Message(facts.pop("event"), pid, facts)

    def expect(self, event: str, timeout_s: float, **facts: object) -> Message:
        """The next message with this event (and these facts). Raises TimeoutError, ChannelClosedError, or
        RuntimeError when the other side says `error` first."""

        def matches(message: Message) -> bool:
            return message.event == event and all(message.facts.get(k) == v for k, v in facts.items())

        for message in self.kept:
            if matches(message):
                self.kept.remove(message)
                return message
        deadline = time.monotonic() + timeout_s
        while True:
            message_or_none = self._receive(deadline - time.monotonic())
            if message_or_none is None:
                raise TimeoutError(f"no {event!r} within {timeout_s:g} s; kept: {self.kept}")
            if matches(message_or_none):
                return message_or_none
            if message_or_none.event == "error":
                raise RuntimeError(message_or_none.facts.get("what", "error"))
            self.kept.append(message_or_none)

    def drain(self) -> list[Message]:
        """Every message that is there now, kept ones too, without waiting."""
        found, self.kept = self.kept, []
        try:
            while (message := self._receive(0)) is not None:
                found.append(message)
        except ChannelClosedError:
            pass
        return found


def wait_readable(fd: int, timeout_s: float) -> bool:
    """True when `fd` (a pidfd: the process is dead) became readable in time."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def close_quietly(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:
        pass
