"""Entries to systemd-journald, never in the way of a release.

A journal that does not read blocks its writers after a few entries (FACTS), so a child process does the sending: the
caller hands entries over a socket pair that never blocks, queues a bounded number when it is full, and counts the rest.
The child outlives its parent by a bounded time, so that the last entries of a command arrive.

Entries are `(field, value)` pairs; fields may repeat. `hostd/audit.py` makes them.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

SOCKET = "/run/systemd/journal/socket"
"""Where journald listens, https://systemd.io/JOURNAL_NATIVE_PROTOCOL/"""

Entry = Iterable[tuple[str, str]]

MAX_VALUE = 8 << 10
MAX_ENTRY = 64 << 10
QUEUE_ENTRIES = 1000
QUEUE_BYTES = 1 << 20
RETRY_S = 0.1
_ENTRY, _FLUSH = b"E", b"F"
_LENGTH = struct.Struct("=I")
_NOT_ON_STDERR = frozenset(("MESSAGE", "MESSAGE_ID", "PRIORITY", "SYSLOG_IDENTIFIER", "SYSLOG_PID"))


def reachable() -> bool:
    """True when a journald has its socket on this machine."""
    try:
        return stat.S_ISSOCK(os.stat(SOCKET).st_mode)
    except OSError:
        return False


class Journal:
    """Sends entries. Nothing here blocks (`flush` and `close` do, up to their deadline) or raises for its sake.

    Without journald the entries become one line each on stderr when `stderr` is set (daemon), else nothing is sent (the
    command line and the hook have said it all to their caller).

    After a fork the new process may go on using the object: it shares the journal child, takes over no queued entries
    and waits for nobody's child.
    """

    def __init__(
        self, *, stderr: bool = False, linger_s: float = 10.0, on_drop: Callable[[int], Entry] | None = None
    ) -> None:
        self.dropped = 0
        """Entries lost so far in this process."""
        self.pid = 0
        """The journal child while it runs and is ours to wait for, else 0."""
        self._stderr = stderr
        self._linger_s = linger_s
        self._on_drop = on_drop
        self._unsaid = 0
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._socket: socket.socket | None = None
        self._inode = 0
        self._started_s = self._not_before_s = 0.0
        self._owner = os.getpid()

    # --- for the caller ----------------------------------------------------------------------------------------------

    @property
    def pending(self) -> int:
        """Entries that the child has not taken yet; while there are any, poll `fileno()` for writing, call `pump`."""
        return len(self._queue)

    def fileno(self) -> int:
        """The descriptor towards the child, -1 when there is none."""
        return self._socket.fileno() if self._socket is not None else -1

    def send(self, entry: Entry) -> None:
        """Hand over one entry."""
        self._notice_fork()
        if self._socket is None and not self._stderr and not reachable():
            return
        frame = _ENTRY + _pack(entry)
        if len(self._queue) >= QUEUE_ENTRIES or self._queued_bytes + len(frame) > QUEUE_BYTES:
            self.pump()
        if len(self._queue) >= QUEUE_ENTRIES or self._queued_bytes + len(frame) > QUEUE_BYTES:
            self.dropped += 1
            self._unsaid += 1
            return
        if self._unsaid and self._on_drop is not None:
            count, self._unsaid = self._unsaid, 0
            self._enqueue(_ENTRY + _pack(self._on_drop(count)))
        self._enqueue(frame)
        self.pump()

    def pump(self) -> None:
        """Pass on what is queued, as far as that goes without waiting."""
        self._notice_fork()
        for _ in range(2):  # a child that died is replaced once
            if not self._queue or not self._start():
                return
            try:
                while self._queue:
                    self._ours().send(self._queue[0], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    self._queued_bytes -= len(self._queue.popleft())
                return
            except (BlockingIOError, InterruptedError):
                return
            except OSError:
                self._forget_child()

    def flush(self, deadline_s: float) -> bool:
        """Wait until the journal has everything sent so far; False when the time was over first."""
        self._notice_fork()
        until = time.monotonic() + deadline_s
        self.pump()
        while self._queue and self._wait(self.fileno(), select.POLLOUT, until):
            self.pump()
        if self._queue:
            return False
        if self._socket is None:
            return True
        return self._handshake(until)

    def close(self, deadline_s: float = 0.0) -> bool:
        """Flush, then let the child end by itself. A later `send` starts a new one."""
        done = self.flush(deadline_s) if deadline_s > 0 else not self._queue
        self._notice_fork()
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self.pid and done and deadline_s > 0:
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)  # it has nothing left to do but to see the end of the socket
            self.pid = 0
        elif self.pid:
            self.reap()
        return done

    def reap(self) -> None:
        """Collect the child if it has ended; for callers that live on after `close`."""
        if self.pid:
            try:
                if os.waitpid(self.pid, os.WNOHANG)[0]:
                    self.pid = 0
            except ChildProcessError:
                self.pid = 0

    # --- inside ------------------------------------------------------------------------------------------------------

    def _enqueue(self, frame: bytes) -> None:
        self._queue.append(frame)
        self._queued_bytes += len(frame)

    def _ours(self) -> socket.socket:
        assert self._socket is not None
        return self._socket

    def _wait(self, fd: int, event: int, until: float) -> bool:
        """False when the time is over or there is nothing to wait for."""
        left = until - time.monotonic()
        if left <= 0 or fd < 0:
            return False
        poll = select.poll()
        poll.register(fd, event)
        return bool(poll.poll(max(1, int(left * 1000))))

    def _handshake(self, until: float) -> bool:
        """The child answers on a pipe of our own once it has sent everything before: safe with several writers."""
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            while True:
                try:
                    socket.send_fds(self._ours(), [_FLUSH], [theirs], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
                    break
                except (BlockingIOError, InterruptedError):
                    if not self._wait(self.fileno(), select.POLLOUT, until):
                        return False
                except OSError:
                    return False
            os.close(theirs)
            theirs = -1
            return self._wait(ours, select.POLLIN, until) and os.read(ours, 1) == b"k"
        finally:
            os.close(ours)
            if theirs >= 0:
                os.close(theirs)

    def _notice_fork(self) -> None:
        """In a forked process: drop what the parent queued, and make sure that the socket is still that socket."""
        if self._owner == os.getpid():
            return
        self._owner = os.getpid()
        self.pid = self.dropped = self._unsaid = self._queued_bytes = 0
        self._queue.clear()
        if self._socket is not None:
            try:
                same = os.fstat(self._socket.fileno()).st_ino == self._inode
            except OSError:
                same = False
            if not same:
                self._socket.detach()  # closed by whoever closes descriptors in children; the number is another's now
                self._socket = None

    def _forget_child(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if time.monotonic() - self._started_s < 1:
            self._not_before_s = time.monotonic() + 1  # it died young: no storm of forks
        self.reap()

    def _start(self) -> bool:
        """Make sure that there is a child; False when none can be made."""
        if self._socket is not None:
            return True
        if time.monotonic() < self._not_before_s:
            return False
        self.reap()
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError:
            return False
        try:
            pid = os.fork()
        except OSError:
            ours.close()
            theirs.close()
            return False
        if pid == 0:
            try:
                _Child(theirs, self._stderr, self._linger_s, self._on_drop).run()
            finally:
                os._exit(0)
        theirs.close()
        self._socket, self.pid, self._started_s = ours, pid, time.monotonic()
        self._inode = os.fstat(ours.fileno()).st_ino
        return True


class _Child:
    """The process that may block on the journal. Leaves nothing of its parent open but what it needs."""

    def __init__(
        self, source: socket.socket, stderr: bool, linger_s: float, on_drop: Callable[[int], Entry] | None
    ) -> None:
        self._source = source
        self._linger_s = linger_s
        self._on_drop = on_drop
        self._ended_s: float | None = None
        self._lost = 0
        self._detach(keep_stderr=stderr)
        self._stderr = stderr
        self._prefix = bool(os.environ.get("JOURNAL_STREAM"))
        self._sendv = _load_sendv()
        self._native: socket.socket | None = None

    def _detach(self, *, keep_stderr: bool) -> None:
        """Out of the caller's terminal, directory, descriptors and signal handling."""
        from hostd.syscalls import close_other_fds  # ctypes: only here

        os.setsid()
        os.chdir("/")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_IGN)  # it ends when its parent has ended and everything is sent
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGALRM, self._on_alarm)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for fd in (0, 1) if keep_stderr else (0, 1, 2):
            os.dup2(null, fd)
        if self._source.fileno() < 3:  # the parent had a standard stream closed
            self._source = socket.socket(fileno=os.dup(self._source.fileno()))
        close_other_fds((0, 1, 2, self._source.fileno()))

    def run(self) -> None:
        """Until every writer has closed its end."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._source, MAX_ENTRY + 1024, 1)
            except OSError:
                return
            if not data:
                break
            if data[:1] == _ENTRY:
                self._deliver(list(_unpack(data[1:])))
            for fd in fds:
                with suppress(OSError):
                    os.write(fd, b"k")
                os.close(fd)

    def _deliver(self, fields: list[bytes]) -> None:
        if self._lost and self._on_drop is not None and reachable():
            count, self._lost = self._lost, 0
            self._deliver(list(_unpack(_pack(self._on_drop(count)))))
        give_up = time.monotonic() + (0 if self._stderr else self._linger_s)
        signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)  # wakes a blocked send, see _on_alarm
        try:
            while True:
                if reachable():
                    try:
                        self._to_journal(fields)
                        return
                    except InterruptedError:
                        continue
                    except OSError:
                        pass
                if time.monotonic() >= give_up:
                    break
                time.sleep(RETRY_S)
            if self._stderr:
                os.write(2, _line(fields, prefix=self._prefix))
            else:
                self._lost += 1
        except OSError:
            self._lost += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _to_journal(self, fields: list[bytes]) -> None:
        if self._sendv is not None:
            self._sendv(*fields)
            return
        if self._native is None:
            self._native = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._native.sendto(_native(fields), SOCKET)

    def _on_alarm(self, number: int, frame: object) -> None:
        """While something blocks: has every writer gone, and for too long?"""
        poll = select.poll()
        poll.register(self._source, 0)
        if not poll.poll(0):
            return
        now = time.monotonic()
        if self._ended_s is None:
            self._ended_s = now
        elif now - self._ended_s >= self._linger_s:
            os._exit(1)


def _load_sendv() -> Callable[..., None] | None:
    """`systemd.journal.sendv`, or None: then the native protocol serves as well."""
    try:
        from systemd.journal import sendv
    except Exception:  # noqa: BLE001 - missing or broken, in whatever way
        return None
    found: Callable[..., None] = sendv
    return found


# --- formats -------------------------------------------------------------------------------------------------------


def _pack(entry: Entry) -> bytes:
    """Length-prefixed `FIELD=value` strings; oversized values are cut, fields beyond the entry's limit are left out."""
    parts: list[bytes] = []
    size = 0
    for name, value in entry:
        data = f"{name}={value}".encode("utf-8", "backslashreplace")
        if len(data) > MAX_VALUE:
            data = data[:MAX_VALUE].decode("utf-8", "ignore").encode()
        size += _LENGTH.size + len(data)
        if size > MAX_ENTRY:
            break
        parts += (_LENGTH.pack(len(data)), data)
    return b"".join(parts)


def _unpack(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        yield data[at : at + length]
        at += length


def _native(fields: list[bytes]) -> bytes:
    """journald's datagram: `FIELD=value` lines, values with a newline in the binary form."""
    parts: list[bytes] = []
    for data in fields:
        name, _, value = data.partition(b"=")
        if b"\n" in value:
            parts.append(name + b"\n" + struct.pack("<Q", len(value)) + value + b"\n")
        else:
            parts.append(data + b"\n")
    return b"".join(parts)


def _line(fields: list[bytes], *, prefix: bool) -> bytes:
    """One line with the same facts, for stderr; `<6>` in front where systemd reads it (sd-daemon(3))."""
    message, priority, facts = b"", b"6", []
    for data in fields:
        name, _, value = data.partition(b"=")
        if name == b"MESSAGE":
            message = value
        elif name == b"PRIORITY":
            priority = value
        if name.decode() not in _NOT_ON_STDERR:
            plain = value and not set(value) & set(b' "\\\n=')
            facts.append(data if plain else name + b'="' + value.replace(b"\\", b"\\\\").replace(b'"', b'\\"') + b'"')
    line = b" | ".join(part for part in (message, b" ".join(facts)) if part).replace(b"\n", b"\\n")
    return (b"<" + priority + b">" if prefix else b"") + line + b"\n"
