"""A file system that can be frozen: tasks that write to it are then in D state, also after SIGKILL."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

FIFREEZE, FITHAW = 0xC0045877, 0xC0045878
LOOP_CTL_GET_FREE, LOOP_CONFIGURE = 0x4C82, 0x4C0A
LO_FLAGS_AUTOCLEAR = 4


@dataclass(slots=True)
class FrozenFs:
    """An ext4 on a loop device, mounted inside the node at `inside`; always thawed when the node ends."""

    inside: str
    descriptor: int
    loop: int

    def path(self, name: str) -> str:
        """A file on it, as processes of the node name it."""
        return f"{self.inside}/{name}"

    def freeze(self) -> None:
        fcntl.ioctl(self.descriptor, FIFREEZE, 0)

    def thaw(self) -> None:
        """Idempotent."""
        try:
            fcntl.ioctl(self.descriptor, FITHAW, 0)
        except OSError:
            return

    def close(self) -> None:
        if self.descriptor >= 0:
            self.thaw()
            os.close(self.descriptor)
            self.descriptor = -1

    def detached(self) -> bool:
        """The kernel has let go of the loop device (a little after the last mount is gone)."""
        return not Path(f"/sys/block/loop{self.loop}/loop/backing_file").exists()

    def __enter__(self) -> FrozenFs:
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()

    def hand_over(self, guard: socket.socket) -> None:
        """Give the guard what it needs to thaw it, should the tests die."""
        socket.send_fds(guard, [b"thaw"], [self.descriptor])


def attach_loop(image: Path) -> tuple[int, int]:
    """(descriptor, number) of a loop device on a copy of that image; both vanish with their last user."""
    with tempfile.NamedTemporaryFile(prefix=f"embedded-node-{os.getpid()}-", suffix=".ext4") as copy:
        shutil.copyfile(image, copy.name)
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(20):
                number = fcntl.ioctl(control, LOOP_CTL_GET_FREE)
                loop = os.open(f"/dev/loop{number}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.ioctl(loop, LOOP_CONFIGURE, _loop_config(copy.fileno()))
                    return loop, number
                except OSError:  # somebody else was faster
                    os.close(loop)
        finally:
            os.close(control)
    raise OSError("cannot get a free loop device")


def _loop_config(descriptor: int) -> bytes:
    """struct loop_config: fd, block size, struct loop_info64 (lo_flags at byte 52), reserved."""
    info = bytearray(232)
    struct.pack_into("I", info, 52, LO_FLAGS_AUTOCLEAR)
    return struct.pack("II", descriptor, 0) + bytes(info) + bytes(64)
