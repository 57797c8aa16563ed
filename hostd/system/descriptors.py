"""Which device nodes one process has open, told by device number; every task's table, since a dead leader has none."""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable

from hostd import syscalls
from hostd.errors import is_gone
from hostd.system.rings import is_ring, registered_nodes

_BEAT_EVERY = 256
_UNSTABLE_TRIES = 4
_UNSTABLE_S = 0.25
"""How long a table is read again while descriptors leave it between the list and the question. A server with 1,000
descriptors and 1,000 connections a second is through after a few reads; who moves one descriptor all the time is not."""
_MOST_LISTINGS = 16
"""How often the tasks of one process may be listed again in one look."""
_REPS = 8


class Descriptors:
    """Asks for character devices of some majors. `beat` is called while a long answer goes on. What it does can block
    (statx of a FUSE file): for a helper process."""

    def __init__(self, majors: Iterable[int], beat: Callable[[], None]) -> None:
        self._majors = frozenset(majors)
        self._beat = beat
        self._statx = syscalls.FastStatx()
        self.problem: OSError | None = None
        """What kept the last `read` from asking everything, beside what it found."""

    def read(self, pid: int) -> set[tuple[int, int]]:
        """(major, minor) of the nodes that it has open. Raises OSError, one that `is_gone` when the process left."""
        found: set[tuple[int, int]] = set()
        # One directory per task below `task`, so a single thread shows as 3 links (fs/proc/base.c).
        alone = os.stat(b"/proc/%d/task" % pid).st_nlink == 3
        self.problem = self._fd_table(pid, found)
        if not alone:
            self.problem = self._other_tables(pid, found) or self.problem
        return found

    def _other_tables(self, pid: int, found: set[tuple[int, int]]) -> OSError | None:
        """Tables of the other tasks where they do not share one already seen (a dead leader has none at all).

        A thread may hand its table to one that it starts and end; so the list is read again until it shows no task
        that was not looked at. One that ends while the list is read cuts it short: then it has fewer than there are.
        """
        path = b"/proc/%d/task" % pid
        problem: OSError | None = None
        looked_at, tables = {pid}, [pid]
        for _ in range(_MOST_LISTINGS):
            try:
                tids = {int(name) for name in os.listdir(path)}
                whole = len(tids) >= os.stat(path).st_nlink - 2
            except OSError as exc:
                return problem if is_gone(exc) else exc
            fresh = tids - looked_at
            problem = self._tables_of(fresh, tables, found) or problem
            if found or (whole and not fresh):
                return problem
            looked_at |= fresh
        return problem or OSError(errno.EAGAIN, "tasks come faster than they can be looked at")

    def _tables_of(self, tids: Iterable[int], tables: list[int], found: set[tuple[int, int]]) -> OSError | None:
        problem: OSError | None = None
        for number, tid in enumerate(sorted(tids)):
            if number % 64 == 63:
                self._beat()
            if self._shares_table(tid, tables):
                continue
            try:
                problem = self._fd_table(tid, found) or problem
            except OSError as exc:
                if not is_gone(exc):
                    problem = exc
                continue
            if len(tables) < _REPS:
                tables.append(tid)
        return problem

    @staticmethod
    def _shares_table(tid: int, seen: list[int]) -> bool:
        for other in seen:
            try:
                if syscalls.kcmp_files(tid, other):
                    return True
            except OSError:
                continue  # cannot be told: walk it
        return False

    def _fd_table(self, tid: int, found: set[tuple[int, int]]) -> OSError | None:
        """Add the GPU nodes open in one task's table; what kept us from asking one of its descriptors.

        No descriptor is left out by its link text: a statx costs as much as the readlink that could spare it.
        A descriptor that left between the list and the question may have got another number, so where nothing was
        found the table is read again.
        """
        path = b"/proc/%d/fd" % tid
        here = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until = time.monotonic() + _UNSTABLE_S
            for tried in itertools.count(1):
                names = os.listdir(path)
                if not names:
                    return None
                problem, left = self._ask(tid, here, names, found)
                if found or not left:
                    return problem
                if tried >= _UNSTABLE_TRIES and time.monotonic() > until:
                    break
                self._beat()
            return OSError(errno.EAGAIN, "descriptors change faster than they can be read")
        finally:
            os.close(here)

    def _ask(self, tid: int, here: int, names: list[bytes], found: set[tuple[int, int]]) -> tuple[OSError | None, bool]:
        """(what kept us from asking one of them, did one leave meanwhile?)"""
        statx, where, words = self._statx.call, self._statx.where, self._statx.words
        majors, flags = self._majors, syscalls.STATX_FLAGS
        problem: OSError | None = None
        left = False
        beat = _BEAT_EVERY
        for name in names:
            try:
                if statx(here, name, flags, 1, where):
                    mode, major, minor = syscalls.statx_rdev(name, here)
                else:
                    mode, major, minor = words[7], words[32], words[33]
                if major in majors and mode & 0o170000 == 0o020000 and not _is_path_only(tid, name):
                    found.add((major, minor))
                elif not mode & 0o170000 and is_ring(name, here):  # of no type: an anonymous inode
                    found |= registered_nodes(tid, name, majors)
            except OSError as exc:
                left = left or is_gone(exc)
                problem = problem if is_gone(exc) else exc
            beat -= 1
            if not beat:
                beat = _BEAT_EVERY
                self._beat()
        return problem, left


def _is_path_only(tid: int, name: bytes) -> bool:
    """True for a descriptor opened with O_PATH: it names the node, the driver knows nothing of it (open(2)).

    The mode of the link cannot tell: access mode 3, for ioctl only, shows none either. Raises OSError.
    """
    fd = os.open(b"/proc/%d/fdinfo/%s" % (tid, name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    flags = next((line.split()[1] for line in text.splitlines() if line.startswith(b"flags:")), None)
    if flags is None:
        raise OSError(errno.EIO, "fdinfo without flags")
    return bool(int(flags, 8) & os.O_PATH)
