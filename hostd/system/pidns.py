"""PID namespaces: ours, a container's, who is in it, and numbers translated between them.

Membership finds processes that left the container's cgroup (or were never in it) but still run under its init. With
Linux >= 6.11 it needs no walk over the host: a procfs instance of the namespace lists its members, an ioctl turns each
number into the host's (FACTS, Kernel). Older kernels: a sweep over /proc.
"""

from __future__ import annotations

import errno
import os

from hostd import syscalls
from hostd.errors import is_gone
from hostd.model import BlindSpot, ProcessRef

FIRST_INODE = 4026531836
"""PROC_PID_INIT_INO of include/linux/proc_ns.h: the host's own namespace on every kernel."""
_READ = os.O_RDONLY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_LEVELS = 32
"""MAX_PID_NS_LEVEL of include/linux/pid_namespace.h."""


def own_inode() -> int:
    """Inode of the PID namespace that we run in. OSError when /proc is not there."""
    return os.stat("/proc/self/ns/pid").st_ino


def first_namespace() -> bool:
    """True in the host's first PID namespace; in another one the driver's client lists are shortened silently."""
    return own_inode() == FIRST_INODE


class PidNamespace:
    """One PID namespace below ours, held by a descriptor: it stays the same one however often pids are reused."""

    def __init__(self, fd: int, inode: int) -> None:
        self.fd = fd
        self.inode = inode
        self._instance: int | None = None
        self._sweeps = False

    @classmethod
    def open(cls, ref: ProcessRef) -> PidNamespace | None:
        """The namespace of the process `ref`; None when that process is gone. OSError else (EACCES: not root)."""
        try:
            here = os.open(f"/proc/{ref.pid}", _DIRECTORY)
        except OSError as exc:
            if is_gone(exc):
                return None
            raise
        try:
            if syscalls.read_start_time(here) != ref.start_time:
                return None
            fd = os.open("ns/pid", _READ, dir_fd=here)
        except OSError as exc:
            if is_gone(exc):
                return None
            raise
        finally:
            os.close(here)
        return cls(fd, os.fstat(fd).st_ino)

    def __enter__(self) -> PidNamespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptors back. Idempotent."""
        if self._instance is not None:
            os.close(self._instance)
            self._instance = None
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    @property
    def sweeps(self) -> bool:
        """True when the kernel has no direct way, so that `members` costs a walk over the host (known after one)."""
        return self._sweeps

    def members(self) -> tuple[set[int], list[BlindSpot]]:
        """Host pids of all members, those of nested namespaces included, and what could not be read.

        The first call makes the procfs instance (some ms); later ones cost about 10 us per member.
        """
        if self._instance is None and not self._sweeps:
            try:
                self._translate(1)
                self._instance = syscalls.proc_for_pidns(self.fd)
            except OSError:
                self._sweeps = True
        if self._instance is None:
            return self._sweep()
        try:
            names = os.listdir(self._instance)
        except OSError as exc:
            return set(), [BlindSpot("pidns", f"pid:[{self.inode}]", str(exc), "pidns-unreadable")]
        pids = set()
        for name in names:
            if name.isdecimal() and (pid := self._translate(int(name))):
                pids.add(pid)
        return pids, []

    def _translate(self, ns_pid: int) -> int | None:
        """Host pid of a number inside; None when nobody has it. OSError ENOTTY on an old kernel."""
        try:
            return syscalls.ns_get_tgid_from_pidns(self.fd, ns_pid)
        except ProcessLookupError:
            return None

    def _sweep(self) -> tuple[set[int], list[BlindSpot]]:
        """Members by looking at every process of the host: about 10 us each."""
        pids: set[int] = set()
        blind: list[BlindSpot] = []
        known = {self.inode: True, own_inode(): False}
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            try:
                inode = os.stat(f"/proc/{name}/ns/pid").st_ino
            except OSError as exc:
                # With a single number it is of our own namespace: no member, whatever else cannot be read.
                if not is_gone(exc) and len(_ns_pids(int(name))) > 1:
                    blind.append(BlindSpot("pidns", f"process {name}", exc.strerror or str(exc), "pidns-unreadable"))
                continue
            inside = known.get(inode)
            if inside is None:
                inside = self.is_ancestor_or_same(int(name))
                if inside is None:
                    continue
                known[inode] = inside
            if inside:
                pids.add(int(name))
        return pids, blind

    def is_ancestor_or_same(self, pid: int) -> bool | None:
        """Does our process `pid` run in this namespace or one below it? None when it is gone or cannot be read."""
        try:
            fd = os.open(f"/proc/{pid}/ns/pid", _READ)
        except OSError:
            return None
        try:
            for _ in range(_MAX_LEVELS + 1):
                if os.fstat(fd).st_ino == self.inode:
                    return True
                try:
                    parent = syscalls.ns_get_parent(fd)
                except PermissionError:
                    return False  # the next one up is not below ours: ioctl_nsfs(2)
                os.close(fd)
                fd = parent
            return False
        except OSError:
            return None
        finally:
            os.close(fd)

    def host_pid(self, ns_pid: int) -> int | None:
        """Our pid of the process that is `ns_pid` in this namespace; None when there is none."""
        if ns_pid < 1:
            return None
        try:
            return self._translate(ns_pid)
        except OSError as exc:
            if exc.errno not in (errno.ENOTTY, errno.EINVAL):
                raise
        level = self._level()
        for pid in self._sweep()[0]:
            numbers = _ns_pids(pid)
            if len(numbers) > level and numbers[level] == ns_pid:
                return pid
        return None

    def ns_pid(self, host_pid: int) -> int | None:
        """The number of our process `host_pid` in this namespace; None when it is not a member."""
        if host_pid < 1:
            return None
        try:
            return syscalls.ns_get_tgid_in_pidns(self.fd, host_pid)
        except ProcessLookupError:
            return None
        except OSError as exc:
            if exc.errno not in (errno.ENOTTY, errno.EINVAL):
                raise
        if not self.is_ancestor_or_same(host_pid):
            return None
        numbers, level = _ns_pids(host_pid), self._level()
        return numbers[level] if len(numbers) > level else None

    def _level(self) -> int:
        """Levels between our own namespace and this one (1: directly below)."""
        own = own_inode()
        fd, level = os.dup(self.fd), 0
        try:
            while os.fstat(fd).st_ino != own:
                parent = syscalls.ns_get_parent(fd)
                os.close(fd)
                fd, level = parent, level + 1
        finally:
            os.close(fd)
        return level


def _ns_pids(pid: int) -> tuple[int, ...]:
    """The `NSpid:` line of a process, ours first; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            text = file.read()
    except OSError:
        return ()
    _, found, rest = text.partition(b"\nNSpid:")
    return tuple(map(int, rest.split(b"\n", 1)[0].split())) if found else ()
