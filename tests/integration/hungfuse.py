"""A FUSE file system whose server does not answer: not at all (a dead pmxcfs), or not to a close (a driver that hangs).

While the server is silent about a flush, the closing task is in D state inside exit(), past the point where /proc shows
its descriptors: what an NVIDIA driver that hangs in its release looks like.
"""

from __future__ import annotations

import os
import select
import struct
import sys
import threading
from types import TracebackType

from tests.embedded.scope import Scope

_IN = struct.Struct("=IIQQIIII")
_OUT = struct.Struct("=IiQ")
_ATTR = struct.Struct("=6Q10I")
LOOKUP, FORGET, GETATTR, OPEN, RELEASE, FLUSH, INIT, OPENDIR = 1, 2, 3, 14, 18, 25, 26, 27
MOUNT = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
sys.exit(ctypes.get_errno() if libc.mount(b"hung", sys.argv[1].encode(), b"fuse", 0, sys.argv[2].encode()) else 0)
"""


class HungFuse:
    """Mounted at `path` inside a node or a container; context manager. `answers`: everything but flushes."""

    def __init__(self, scope: Scope, path: str, *, answers: bool) -> None:
        self.path = path
        self._scope = scope
        self._answers = answers
        self._fd = -1
        self._thread: threading.Thread | None = None
        self._stop = -1

    def __enter__(self) -> HungFuse:
        self._scope.path(self.path).mkdir(parents=True, exist_ok=True)
        self._fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        data = f"fd={self._fd},rootmode=40000,user_id=0,group_id=0"
        command = [sys.executable, "-I", "-c", MOUNT, self.path, data]
        status = self._scope.popen(command, pass_fds=(self._fd,)).popen.wait(timeout=60)
        if status:
            os.close(self._fd)
            raise OSError(status, f"cannot mount FUSE: {os.strerror(status)}")
        if self._answers:
            self._stop = os.eventfd(0, os.EFD_CLOEXEC)
            self._thread = threading.Thread(target=self._serve)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._thread is not None:
            os.eventfd_write(self._stop, 1)
            self._thread.join()
            os.close(self._stop)
        os.close(self._fd)  # the connection is aborted: whoever waits for it goes on

    def _serve(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLIN)
        poll.register(self._stop, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poll.poll()}
            if self._stop in ready:
                return
            try:
                request = os.read(self._fd, 1 << 20)
            except OSError:
                continue
            _, opcode, unique, *_ = _IN.unpack_from(request)
            answer = self._answer(opcode)
            if answer is not None:
                error, body = answer
                os.write(self._fd, _OUT.pack(_OUT.size + len(body), error, unique) + body)

    @staticmethod
    def _answer(opcode: int) -> tuple[int, bytes] | None:
        file = _ATTR.pack(2, 0, 0, 0, 0, 0, 0, 0, 0, 0o100666, 1, 0, 0, 0, 4096, 0)
        folder = _ATTR.pack(1, 0, 0, 0, 0, 0, 0, 0, 0, 0o40755, 2, 0, 0, 0, 4096, 0)
        if opcode == INIT:
            return 0, struct.pack("=4I2H2I2H8I", 7, 31, 65536, 0, 12, 9, 65536, 1, 1, 0, *[0] * 8)
        if opcode == LOOKUP:
            return 0, struct.pack("=4Q2I", 2, 1, 3600, 3600, 0, 0) + file
        if opcode == GETATTR:
            return 0, struct.pack("=Q2I", 3600, 0, 0) + folder
        if opcode in (OPEN, OPENDIR):
            return 0, struct.pack("=Q2I", 1, 0, 0)
        if opcode == RELEASE:
            return 0, b""
        if opcode in (FLUSH, FORGET):
            return None
        return -38, b""  # ENOSYS
