"""One request in a process of its own: forked, single-threaded, disposable. The parent never waits for it.

The worker sends finished Varlink messages (it does the encoding, the daemon only forwards), each behind one kind byte
and a length: progress messages, then exactly one result or error.
"""

from __future__ import annotations

import gc
import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

from hostd.cancel import Cancel
from hostd.errors import PgrError, is_exhausted
from hostd.service import interface, varlink
from hostd.syscalls import close_other_fds, set_pdeathsig

PROGRESS, RESULT, ERROR = b"P", b"R", b"E"
_HEADER = struct.Struct("=cI")
_READ_PER_TURN = 1024 * 1024
_SIGNALS = tuple(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})  # once: it builds an enum a signal

Emit = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: SO_PEERCRED of the connection, taken when it was made."""

    pid: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Inline:
    """A method that is answered in the daemon itself: quick, never blocking."""

    run: Callable[[varlink.Params, Caller], Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Forked:
    """A method that is answered by a worker.

    `parse` runs in the daemon before the fork (pure and quick; it raises typed errors), `run` in the worker.
    """

    parse: Callable[[varlink.Params], Any]
    run: Callable[[Any, Emit, Context], Mapping[str, object]]
    graceful: bool = False
    """True: SIGTERM only requests `Context.cancel`, the work decides where it stops. False: SIGTERM ends the worker."""
    on_disconnect: str = "cancel"
    """Where the call has no `on_disconnect` parameter of its own."""
    streams: bool = False
    """True when the replies before the last one may be `progress`."""
    lane: str = "work"
    """Each lane has its own limit on concurrent workers, so that slow work never keeps quick questions waiting."""


class Context:
    """What a worker knows beside its request."""

    def __init__(self, method: str, caller: Caller, more: bool) -> None:
        self.method = method
        self.caller = caller
        self.more = more
        self.cancel = Cancel()
        """Requested by SIGTERM when the method is `graceful`; by SIGUSR1 it is handed over."""

    def on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        # systemd and the daemon may both send it, and that is no impatient second Ctrl-C.
        if not self.cancel.requested:
            self.cancel.request(signum, frame)

    def on_sigusr1(self, signum: int, frame: FrameType | None) -> None:
        self.cancel.hand_over(signum, frame)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker ended: the message it left, and its wait status."""

    message: bytes | None
    """The final reply as it went (or would have gone) to the caller; None when it died without one."""
    failed: bool
    status: int
    """As of waitid: exit code, or minus the signal."""

    @property
    def reply(self) -> dict[str, object] | None:
        """The final reply decoded: `parameters`, and `error` when it failed."""
        if self.message is None:
            return None
        value = varlink.parse_reply(self.message)
        return value if isinstance(value, dict) else None


@dataclass(slots=True)
class Worker:
    """A running worker as the daemon sees it."""

    pid: int
    pidfd: int
    pipe: int
    method: str
    caller: Caller
    request: object
    started: float
    graceful: bool
    lane: str
    cancelled: bool = False
    final: bytes | None = None
    failed: bool = False
    broken: bool = False
    """It sent something that is no frame: nothing more is read from it."""
    orphaned: bool = False
    """It ended and nobody was waiting for its answer."""
    _buffer: bytearray = field(default_factory=bytearray)

    def cancel(self) -> None:
        """SIGTERM: before its next rung a graceful one stops, any other one ends at once."""
        self.cancelled = True
        self._signal(signal.SIGTERM)

    def hand_over(self) -> None:
        """SIGUSR1: the daemon is being stopped. A graceful one stops before its next rung and leaves the rest, written
        ahead, to whoever goes on with it; any other one ends at once."""
        self.cancelled = True
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    @property
    def unread(self) -> int:
        """Bytes of a message that has not come in full."""
        return len(self._buffer)

    def _signal(self, signum: int) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, signum)
        except ProcessLookupError:
            pass

    def receive(self) -> tuple[list[bytes], bool]:
        """Progress messages that came, and whether more may come; a final message lands in `final`."""
        progress: list[bytes] = []
        taken = 0
        while taken < _READ_PER_TURN and not self.broken:
            try:
                data = os.read(self.pipe, 65536)
            except BlockingIOError:
                return progress, True
            if not data:
                return progress, False
            taken += len(data)
            self._buffer += data
            self._split(progress)
        return progress, not self.broken

    def _split(self, progress: list[bytes]) -> None:
        start, size = 0, len(self._buffer)
        while size - start >= _HEADER.size:
            kind, length = _HEADER.unpack_from(self._buffer, start)
            if kind not in (PROGRESS, RESULT, ERROR) or length > varlink.MAX_REPLY or self.final is not None:
                self.broken = True
                return
            if size - start < _HEADER.size + length:
                break
            start += _HEADER.size
            message = bytes(memoryview(self._buffer)[start : start + length])
            start += length
            if kind == PROGRESS:
                progress.append(message)
            else:
                self.final, self.failed = message, kind == ERROR
        del self._buffer[:start]

    def reap(self) -> Outcome | None:
        """Wait status and last message once it has ended, None before. The descriptors stay open."""
        ended = os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        if ended is None:
            return None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        return Outcome(self.final, self.failed, status)

    def abandon(self) -> None:
        """Close what belongs to it without waiting: SIGKILL is on its way, init will reap it."""
        self.kill()
        try:
            os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            pass
        os.close(self.pidfd)
        os.close(self.pipe)


def spawn(
    method: str, how: Forked, request: object, caller: Caller, more: bool, now: float, keep: Iterable[int]
) -> Worker:
    """Fork a worker; OSError when that is impossible. `keep`: further descriptors that the work needs."""
    ours, theirs = os.pipe2(os.O_CLOEXEC)
    # No signal may reach the child while it still has the daemon's handlers.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    parent = os.getpid()
    try:
        pid = os.fork()
        if pid == 0:
            _child(theirs, parent, method, how, request, caller, more, keep)
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.set_blocking(ours, False)
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)  # still our unreaped child: the pid cannot be anyone else's
        os.waitpid(pid, 0)
        os.close(ours)
        raise
    return Worker(pid, pidfd, ours, method, caller, request, now, how.graceful, how.lane)


# --- in the child --------------------------------------------------------------------------------------------------


def _child(
    pipe: int,
    parent: int,
    method: str,
    how: Forked,
    request: object,
    caller: Caller,
    more: bool,
    keep: Iterable[int],
) -> NoReturn:
    status = 1
    try:
        set_pdeathsig(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        close_other_fds({0, 1, 2, pipe, *keep})
        gc.freeze()  # an object of the daemon's that is finalised here could close a descriptor of ours by its number
        context = Context(method, caller, more)
        _reset_signals(context if how.graceful else None)
        kind, message = _answer(pipe, how, request, context)
        _write(pipe, kind, message)
        status = 0
    except BrokenPipeError:
        status = 1  # the daemon was killed: its successor or the caller goes on, and our own end is on its way
    except BaseException:  # noqa: BLE001 - the last line of a process: whatever it is, it goes to the journal
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _reset_signals(context: Context | None) -> None:
    signal.set_wakeup_fd(-1)
    for signum in _SIGNALS:
        if signal.getsignal(signum) not in (signal.SIG_DFL, signal.SIG_IGN, None):
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C on a daemon in the foreground: the daemon decides
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    if context is not None:
        signal.signal(signal.SIGTERM, context.on_sigterm)
        signal.signal(signal.SIGUSR1, context.on_sigusr1)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _answer(pipe: int, how: Forked, request: object, context: Context) -> tuple[bytes, bytes]:
    def emit(parameters: Mapping[str, object]) -> None:
        if context.more and how.streams:
            _write(pipe, PROGRESS, varlink.encode_reply(parameters, continues=True))

    try:
        return RESULT, varlink.encode_reply(how.run(request, emit, context))
    except BaseException as exc:  # noqa: BLE001 - every end of a request is a typed answer
        return ERROR, encode_failure(exc)


def _write(pipe: int, kind: bytes, message: bytes) -> None:
    data = memoryview(_HEADER.pack(kind, len(message)) + message)
    while data:
        data = data[os.write(pipe, data) :]


def encode_failure(exc: BaseException) -> bytes:
    """The error reply for an exception; what is not typed is a bug: Internal, and the traceback goes to stderr."""
    try:
        return varlink.encode_error(typed(exc))
    except varlink.Unencodable as broken:
        return varlink.encode_error(internal(str(broken)))


def typed(exc: BaseException) -> varlink.VarlinkError:
    if isinstance(exc, varlink.VarlinkError):
        return exc
    if isinstance(exc, PgrError):
        return varlink.VarlinkError(interface.error_name(exc), interface.error_parameters(exc), exc.message)
    if is_exhausted(exc):
        why = (isinstance(exc, OSError) and exc.strerror) or "not enough memory"
        return cannot_here(f"the worker cannot do it: {why}", reason="worker-lost")
    traceback.print_exception(exc)
    return internal(varlink.printable(f"{type(exc).__name__}: {exc}", 500))


def cannot_here(message: str, *, reason: str, name: str = interface.LOST) -> varlink.VarlinkError:
    """The typed error for what the caller does itself, because the daemon cannot."""
    step = "the same command does the work without the daemon"
    return varlink.VarlinkError(name, {"reason": reason, "message": message, "next_step": step, "vmid": None}, message)


def internal(detail: str) -> varlink.VarlinkError:
    """The typed error for a fault of ours, worded by the verdict table."""
    from hostd.verdicts import say

    message, next_step = say("internal-error", detail=detail)
    exc = PgrError(message, next_step=next_step)
    return varlink.VarlinkError(interface.error_name(exc), interface.error_parameters(exc), detail)
