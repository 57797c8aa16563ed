"""Helper processes that may get stuck in the kernel, so that we do not: a deadline, SIGKILL, and no waiting after it.

Reading `/etc/pve` (FUSE), `cmdline`, `maps` and `map_files` of a stuck process (FACTS, Kernel) or a file on a dead
server can block for ever. A blocked read cannot be taken back, a process can be given up. A helper holds nothing of
ours: no descriptor but its pipes, no terminal, no working directory, no lock; it dies with us (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import NamedTuple, NoReturn

from hostd import syscalls

_KILL_PATIENCE_S = 0.02
"""How long a killed helper may take to be gone before it is left behind: an exit takes about 1 ms."""

_abandoned: list[int] = []


class Outcome(StrEnum):
    """How a call in a helper ended."""

    ANSWER = "answer"
    """`data` is what the function returned."""
    FAILED = "failed"
    """The function raised OSError: `errno` and `error` say which."""
    TIMEOUT = "timeout"
    """No answer within the deadline: a blind spot."""
    DIED = "died"
    """The helper ended without an answer (killed, out of memory, an exception that is a bug)."""


class Answer(NamedTuple):
    outcome: Outcome
    data: bytes = b""
    errno: int = 0
    error: str = ""
    """For people; empty for an answer."""


class Disposable:
    """One helper process and the two pipes to it.

    `main(request_fd, reply_fd)` runs in the child, which ends when it returns. Speaks bytes; framing is the caller's.
    Create it while the process has a single thread (fork).
    """

    def __init__(self, main: Callable[[int, int], None], *, keep: Iterable[int] = ()) -> None:
        """Raises OSError when no process or pipe can be made. `keep`: descriptors the child may keep."""
        reap_abandoned()
        pipes: list[int] = []
        parent = os.getpid()
        try:
            pipes += _pipe()
            pipes += _pipe()
            self.pid = os.fork()
        except OSError:
            for fd in pipes:
                os.close(fd)
            raise
        child_in, self.write_fd, self.read_fd, child_out = pipes
        if self.pid == 0:
            _run_child(main, child_in, child_out, (child_in, child_out, *keep), parent)
        os.close(child_in)
        os.close(child_out)
        os.set_blocking(self.write_fd, False)
        self._reaped = False

    def write(self, data: bytes, deadline_s: float) -> bool:
        """Hand all of `data` over. False when the helper did not take it within `deadline_s` or is dead."""
        end = time.monotonic() + deadline_s
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self.write_fd, view) :]
            except BlockingIOError:
                left = end - time.monotonic()
                if left <= 0 or not _wait(self.write_fd, select.POLLOUT, left):
                    return False
            except BrokenPipeError:
                return False
        return True

    def read(self, timeout_s: float) -> bytes | None:
        """Some bytes of the reply; None: nothing came within `timeout_s`; b"": the helper is dead or done."""
        if not _wait(self.read_fd, select.POLLIN, timeout_s):
            return None
        return os.read(self.read_fd, 1 << 18)

    def close(self) -> None:
        """End the helper, whatever it is doing, without waiting for one that cannot die. Idempotent."""
        if self._reaped:
            return
        self._reaped = True
        os.close(self.write_fd)
        os.close(self.read_fd)
        _end(self.pid)


def call_with_deadline(fn: Callable[[], bytes], deadline_s: float) -> Answer:
    """Run `fn` in a helper process; its bytes, its OSError, or why there is neither, within `deadline_s`.

    Only bytes come back; changes that `fn` makes to our memory are lost.
    """

    def main(_request_fd: int, reply_fd: int) -> None:
        try:
            reply = b"+" + fn()
        except OSError as exc:
            reply = b"-%d %s" % (exc.errno or 0, os.fsencode(str(exc)))
        view = memoryview(reply + b".")
        while view:
            view = view[os.write(reply_fd, view) :]

    end = time.monotonic() + deadline_s
    helper = Disposable(main)
    try:
        parts: list[bytes] = []
        while True:
            part = helper.read(max(0.0, end - time.monotonic()))
            if part is None:
                return Answer(Outcome.TIMEOUT, error=f"no answer within {deadline_s:g} s")
            if not part:
                break
            parts.append(part)
        reply = b"".join(parts)
        if not reply.endswith(b"."):
            return Answer(Outcome.DIED, error="the helper process died")
        if reply.startswith(b"+"):
            return Answer(Outcome.ANSWER, reply[1:-1])
        code, _, text = reply[1:-1].partition(b" ")
        return Answer(Outcome.FAILED, errno=int(code), error=os.fsdecode(text))
    finally:
        helper.close()


def reap_abandoned() -> int:
    """Collect helpers that were left behind and have died since; how many still have not."""
    _abandoned[:] = [pid for pid in _abandoned if not _reap(pid)]
    return len(_abandoned)


def abandoned() -> tuple[int, ...]:
    """Pids of helpers that got SIGKILL and were not gone in time."""
    return tuple(_abandoned)


def _pipe() -> tuple[int, int]:
    """A pipe whose ends are never 0, 1 or 2, also when our caller closed those."""
    ends = list(os.pipe())
    for i, fd in enumerate(ends):
        if fd <= 2:
            import fcntl

            ends[i] = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
            os.close(fd)
    return ends[0], ends[1]


def _wait(fd: int, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, event)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))


def _reap(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _end(pid: int) -> None:
    """SIGKILL a child of ours (not reaped, so the pid is its own) and collect it, or leave it for later."""
    if _reap(pid):
        return
    os.kill(pid, signal.SIGKILL)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        _abandoned.append(pid)
        return
    try:
        _wait(pidfd, select.POLLIN, _KILL_PATIENCE_S)
    finally:
        os.close(pidfd)
    if not _reap(pid):
        _abandoned.append(pid)


def _run_child(
    main: Callable[[int, int], None], request_fd: int, reply_fd: int, keep: tuple[int, ...], parent: int
) -> NoReturn:
    status = 1
    try:
        syscalls.set_pdeathsig(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the line above
        _default_signals()
        os.setsid()  # Ctrl-C on the terminal is the parent's business
        os.chdir("/")
        syscalls.close_other_fds(keep)
        null = os.open("/dev/null", os.O_RDWR)
        for fd in range(3):
            if fd != null and fd not in keep:
                os.dup2(null, fd)
        if null > 2:
            os.close(null)
        _abandoned.clear()
        main(request_fd, reply_fd)
        status = 0
    finally:
        os._exit(status)


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)  # those set from C (faulthandler) too
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
