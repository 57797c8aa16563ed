"""The sockets between the tests and the node: requests to an init, and reports that carry the sender's real pid."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass

UCRED = struct.Struct("3i")
DEADLINE_S = 60.0


class NodeError(Exception):
    """The embedded node could not be built or did not do what it was asked to."""


def report_socket() -> tuple[socket.socket, socket.socket]:
    """(ours, theirs): datagrams with the sender's credentials; the kernel translates its pid into our namespace."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    return ours, theirs


def receive(sock: socket.socket, timeout_s: float = DEADLINE_S) -> tuple[str, int]:
    """One datagram and the pid of its sender as we see it; ("", 0) when every sender is gone."""
    sock.settimeout(timeout_s)
    data, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_SPACE(UCRED.size))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            return data.decode(errors="replace"), UCRED.unpack(content[: UCRED.size])[0]
    return data.decode(errors="replace"), 0


@dataclass(slots=True)
class Init:
    """The init of a node or container, seen through its control socket."""

    control: socket.socket
    outer_pid: int

    @classmethod
    def greet(cls, control: socket.socket) -> Init:
        """Wait until it says hello from inside its namespaces."""
        try:
            word, outer_pid = receive(control)
        except TimeoutError as error:
            raise NodeError("cannot start an init: no hello in time") from error
        if word != "hello" or not outer_pid:
            raise NodeError(f"cannot start an init: it said {word!r}")
        return cls(control, outer_pid)

    def ask(self, *words: str, fd: int | None = None) -> None:
        """Have it do one thing (mount, umount, open, hostname, pivot, exec); raises NodeError with the errno's name."""
        message = b"".join(os.fsencode(word) + b"\0" for word in words)
        socket.send_fds(self.control, [message], [] if fd is None else [fd])
        answer, _ = receive(self.control)
        if answer != "0":
            reason = os.strerror(int(answer)) if answer.isdigit() else "it died"
            raise NodeError(f"cannot {' '.join(words)}: {reason}")

    def mount(self, source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
        self.ask("mount", source, target, kind, str(flags), data)
