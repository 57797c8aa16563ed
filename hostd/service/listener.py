"""The listening socket: made or passed, when to accept, whom to let in."""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
import time
from collections.abc import Callable

from hostd.service.clients import Clients
from hostd.service.limits import Limits
from hostd.service.loop import Loop
from hostd.service.worker import Caller

_UCRED = struct.Struct("=iII")
_OUT_OF = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PER_TURN = 64


class Listener:
    """Accepts on one socket while there is room, and pauses while there is none."""

    def __init__(
        self, where: socket.socket | str, loop: Loop, clients: Clients, limits: Limits, log: Callable[[str], None]
    ) -> None:
        """`where`: a listening socket (socket activation), or the path of one to make, mode 0600."""
        self._loop = loop
        self._clients = clients
        self._limits = limits
        self._log = log
        self._path = where if isinstance(where, str) else ""
        self._socket: socket.socket | None = make_socket(where) if isinstance(where, str) else where
        self._socket.setblocking(False)
        self._entry = _identity(self._path) if self._path else None
        self._accepting = False
        clients.on_room = self.resume
        self.resume()

    def resume(self) -> None:
        if self._socket is not None and not self._accepting:
            self._accepting = True
            self._loop.watch(self._socket.fileno(), self._on_ready)

    def pause(self) -> None:
        if self._socket is not None and self._accepting:
            self._accepting = False
            self._loop.unwatch(self._socket.fileno())

    def close(self) -> None:
        """No more clients; a socket that was made here is removed."""
        self.pause()
        if self._socket is None:
            return
        if self._path and self._entry == _identity(self._path):  # else another daemon listens there by now
            try:
                os.unlink(self._path)
            except FileNotFoundError:
                pass
        self._socket.close()
        self._socket = None

    def _on_ready(self, _events: int) -> None:
        for _ in range(_PER_TURN):
            if self._socket is None:
                return
            full = len(self._clients) >= self._limits.connections
            if full and not self._clients.any_idle():
                self.pause()  # until one leaves or is idle
                return
            try:
                sock, _address = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in _OUT_OF:
                    # The waiting client would wake us for ever; look again when something may have been given back.
                    self._log(f"cannot accept a connection: {exc}; pausing for a second")
                    self.pause()
                    self._loop.call_at(time.monotonic() + 1.0, self.resume)
                return
            if full:
                self._clients.evict()
            self._welcome(sock)

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        caller = Caller(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))
        self._clients.add(sock, caller)


def _identity(path: str) -> tuple[int, int] | None:
    """Which entry of which file system is at `path`; None when nothing is. A socket's inode lives until it is closed, so
    nothing else gets the same number meanwhile."""
    try:
        entry = os.lstat(path)
    except OSError:
        return None
    return entry.st_dev, entry.st_ino


def make_socket(path: str) -> socket.socket:
    """A listening socket at `path`, mode 0600 from the first moment. Raises OSError."""
    try:
        if stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)  # a dead daemon's; two live ones are systemd's to prevent
    except FileNotFoundError:
        pass
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)  # no other thread can notice
    try:
        sock.bind(path)
        sock.listen(512)
    except OSError:
        sock.close()
        raise
    finally:
        os.umask(before)
    return sock
