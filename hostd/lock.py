"""One release per container: an flock that daemon, CLI and hook share (DESIGN 4, "One at a time")."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable

from hostd.errors import BusyError
from hostd.statefile import read_bytes
from hostd.verdicts import say

RUN_DIR = "/run/pve-gpu-release"
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
"""A full or read-only /run; EFBIG: the caller's limit on the size of files (RLIMIT_FSIZE, `ulimit -f`)."""
_DAMAGED = (errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)
"""A directory, a link, a file where the directory should be, a socket in place of the lock file (open(2))."""


class ReleaseLock:
    """Held from construction until `close()`; the kernel gives it back when the process dies.

    The descriptor is close-on-exec and helpers close it (`syscalls.close_other_fds`): flock survives in a forked child.
    """

    def __init__(self, fd: int, path: str) -> None:
        self._fd = fd
        self.path = path

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ReleaseLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def ensure_run_dir(run_dir: str = RUN_DIR) -> None:
    """Makes the directory 0700 if tmpfiles has not; OSError when it cannot be made."""
    try:
        os.mkdir(run_dir, 0o700)
    except FileExistsError:
        return


def open_lock_file(vmid: int, run_dir: str = RUN_DIR) -> tuple[int, str]:
    """(descriptor, path) of the lock file of a container.

    On a full or read-only /run, or where something else is in the file's place, the directory itself is locked: coarser,
    but a release is never skipped (DESIGN 6).
    """
    try:
        ensure_run_dir(run_dir)
        locks = os.path.join(run_dir, "locks")
        try:
            os.mkdir(locks, 0o700)
        except FileExistsError:
            pass
        path = os.path.join(locks, f"{vmid}.lock")
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600), path
    except OSError as exc:
        if exc.errno not in (*_NO_ROOM, *_DAMAGED):
            raise
        path = run_dir if os.path.isdir(run_dir) else "/run"
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), path


def try_lock(vmid: int, run_dir: str = RUN_DIR) -> ReleaseLock | None:
    """The lock, or None when somebody else has it."""
    fd, path = open_lock_file(vmid, run_dir)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    _write_owner(fd)
    return ReleaseLock(fd, path)


def is_held(vmid: int, run_dir: str = RUN_DIR) -> bool:
    """True when somebody else has the lock now. Makes and changes nothing."""
    try:
        path = os.path.join(run_dir, "locks", f"{vmid}.lock")
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def acquire(
    vmid: int,
    *,
    wait: bool,
    timeout_s: float,
    run_dir: str = RUN_DIR,
    on_wait: Callable[[int, float], None] | None = None,
    check: Callable[[], None] | None = None,
) -> ReleaseLock:
    """Waits for the lock up to `timeout_s`. Raises BusyError when it is taken and `wait` is false or the time is up.

    `on_wait(owner_pid, seconds)` is called about once a second; `check()` may raise to stop waiting. flock(2) cannot be
    waited for together with a descriptor, so this polls, from 5 ms to 100 ms.
    """
    begun = time.monotonic()
    pause, told = 0.005, 0.0
    while True:
        lock = try_lock(vmid, run_dir)
        if lock is not None:
            return lock
        waited = time.monotonic() - begun
        owner = read_owner(vmid, run_dir)
        if not wait or waited >= timeout_s:
            message, step = say("busy", vmid=vmid, pid=owner or "unknown")
            raise BusyError(message, next_step=step if not wait else "try again", vmid=vmid)
        if on_wait is not None and (told == 0.0 or waited - told >= 1.0):
            on_wait(owner, waited)
            told = max(waited, 0.001)
        if check is not None:
            check()
        time.sleep(pause)
        pause = min(0.1, pause * 1.5)


def read_owner(vmid: int, run_dir: str = RUN_DIR) -> int:
    """The pid written by the last owner; 0 when unknown. A hint for people, never a decision."""
    try:
        return int(read_bytes(os.path.join(run_dir, "locks", f"{vmid}.lock"), 20) or b"0")
    except ValueError:
        return 0


def _write_owner(fd: int) -> None:
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, b"%d\n" % os.getpid(), 0)
    except OSError as exc:
        if exc.errno not in (*_NO_ROOM, errno.EBADF, errno.EINVAL, errno.EISDIR):
            raise
