"""Files that are registered in an io_uring: open in no table of descriptors, and named only by the ring's fdinfo.

A program may register a descriptor with its ring and close it (io_uring_register(2)): the file stays open as long as the
ring. The kernel tells the paths of such files (io_uring/fdinfo.c), not their device numbers, so each path is looked up in
the process's own root. That finds what an ordinary program registers; who moves the node afterwards is told as unknown,
who puts something harmless in its place is not seen (docs/security.md).
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Container

from hostd import syscalls

LINK = b"anon_inode:[io_uring]"
_MOST_BYTES = 4 << 20
_TRIES, _PAUSE_S = 20, 0.002
_ENTRY = re.compile(rb"^ *\d+: (/.*|nvidia.*)$", re.M)
_ESCAPE = re.compile(rb"\\([0-7]{3})")
_NO_NODE = (b"/memfd:", b"/anon_hugepage")
"""What the kernel calls files that never had a path."""


def is_ring(name: bytes, dir_fd: int) -> bool:
    """True when this descriptor of a directory /proc/TID/fd is an io_uring. Raises OSError."""
    return os.readlink(name, dir_fd=dir_fd) == LINK


def registered_nodes(tid: int, name: bytes, majors: Container[int]) -> set[tuple[int, int]]:
    """(major, minor) of the character devices of these majors that are registered in the ring `name` of a task.

    Raises OSError: one that `is_gone` when task or descriptor left, another when it cannot be told. Can block (a path on a
    hanging file system): for a helper process.
    """
    paths = [path for path in _registered(tid, name) if not path.startswith(_NO_NODE)]
    if not paths:
        return set()
    found = set()
    root = os.open(b"/proc/%d/root" % tid, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for path in paths:
            mode, rdev = _look_up(root, path)
            if stat.S_ISCHR(mode) and os.major(rdev) in majors:
                found.add((os.major(rdev), os.minor(rdev)))
    finally:
        os.close(root)
    return found


def _registered(tid: int, name: bytes) -> list[bytes]:
    for _ in range(_TRIES):
        text = _read(b"/proc/%d/fdinfo/%s" % (tid, name))
        paths = parse_registered(text)
        if paths is not None:
            return paths
        time.sleep(_PAUSE_S)
    if b"UserFiles:" in text:
        return []  # so often busy is unlikely: a table without files
    raise OSError(errno.EBUSY, "an io_uring is too busy to tell its files")


def parse_registered(text: bytes) -> list[bytes] | None:
    """Paths of the files that fdinfo of a ring lists, pure; sockets and pipes have none. Before Linux 6.5 it is the last
    part of a path alone.

    None: it lists nothing although there may be something: the kernel only tries to get the ring's lock.
    """
    _, found, rest = text.partition(b"UserFiles:\t")
    count, _, entries = rest.partition(b"\n")
    entries = entries.partition(b"UserBufs:")[0]
    if not found or (int(count) and b": " not in entries):
        return None
    return [_ESCAPE.sub(lambda m: bytes([int(m[1], 8) & 0xFF]), path) for path in _ENTRY.findall(entries)]


def _look_up(root: int, path: bytes) -> tuple[int, int]:
    """(mode, rdev) of what is there now; a path that leads nowhere raises OSError that is not `is_gone`."""
    try:
        if not path.startswith(b"/"):
            raise OSError(errno.ENOTSUP, "no path")
        fd = syscalls.name_in_root(root, path)
    except OSError as exc:
        name = os.fsdecode(path[-64:])
        raise OSError(errno.ESTALE, f"cannot tell what '{name}', registered in an io_uring, is") from exc
    try:
        info = os.fstat(fd)
        return info.st_mode, info.st_rdev
    finally:
        os.close(fd)


def _read(path: bytes) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = b""
        while len(data) < _MOST_BYTES and (part := os.read(fd, 1 << 16)):
            data += part
        if len(data) >= _MOST_BYTES:
            raise OSError(errno.EFBIG, "an io_uring has more files registered than are read")
        return data
    finally:
        os.close(fd)
