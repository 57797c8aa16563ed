"""The daemon's socket: one epoll loop, no threads, no work of its own. Slow work is forked (`worker.py`).

What one client does, or does not do, costs the others nothing: every buffer, queue and wait here has a bound. Nothing
ticks while nobody is connected: the loop then sleeps until a descriptor or a timer of the caller wakes it.
"""

from __future__ import annotations

import errno
import heapq
import math
import os
import re
import select
import socket
import stat
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from hostd.errors import NotPermittedError
from hostd.service import interface, varlink
from hostd.service.connection import CALL_BOUND, PROGRESS_BOUND, Connection
from hostd.service.worker import (
    Caller,
    Context,
    Emit,
    Forked,
    Inline,
    Outcome,
    Worker,
    encode_failure,
    internal,
    spawn,
)
from hostd.verdicts import say

__all__ = ["Caller", "Context", "Emit", "Forked", "Inline", "Limits", "Outcome", "Server", "Timer", "Worker"]

_UCRED = struct.Struct("=iII")
_CALLS_PER_TURN = 32


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the server; seconds where not named otherwise."""

    connections: int = 512
    """Above it the longest idle client is closed; when none is idle, nobody is accepted until one leaves."""
    strangers: int = 16
    """Of them not root."""
    idle_s: float = 30.0
    """Without a complete call (half a call does not count)."""
    stranger_s: float = 2.0
    write_s: float = 30.0
    """A client that has not taken everything for so long is closed."""
    workers: Mapping[str, int] = field(default_factory=lambda: {"work": 128, "look": 32})
    """At the same time, by lane; further requests wait in order."""
    stop_s: float = 5.0
    """For workers to stop at `stop()`, before SIGKILL."""


class Timer:
    """One call of a function at a time of CLOCK_MONOTONIC; see `Server.call_at`."""

    __slots__ = ("run", "when")

    def __init__(self, when: float, run: Callable[[], None]) -> None:
        self.when = when
        self.run: Callable[[], None] | None = run

    def cancel(self) -> None:
        self.run = None

    def __lt__(self, other: Timer) -> bool:
        return self.when < other.when


class Job:
    """A call that a worker answers, or will answer when its lane has room."""

    __slots__ = ("call", "caller", "connection", "how", "leave", "on_disconnect", "request", "worker")

    def __init__(
        self,
        connection: Connection | None,
        caller: Caller,
        call: varlink.Call,
        how: Forked,
        request: object,
        leave: str,
    ) -> None:
        self.connection = connection
        """None for work that the daemon gave itself (`Server.submit`)."""
        self.caller = caller
        self.call = call
        self.how = how
        self.request = request
        self.leave = leave
        """`cancel` or `continue` when the client goes away."""
        self.on_disconnect = call.parameters.get("on_disconnect")
        """As the caller gave it."""
        self.worker: Worker | None = None


class Server:
    """Answers `methods` on one listening socket until `stop()`. Not for signal handlers: let them write to a
    descriptor (signal.set_wakeup_fd) that is watched here.

    `listener`: a listening socket (socket activation), or the path of one to make, mode 0600.
    `on_finished` gets every worker that ended with its outcome, also when its client is long gone.
    """

    def __init__(
        self,
        listener: socket.socket | str,
        methods: Mapping[str, Inline | Forked],
        *,
        version: str = "",
        url: str = "",
        descriptions: Mapping[str, str] = interface.DESCRIPTIONS,
        limits: Limits | None = None,
        log: Callable[[str], None] | None = None,
        on_finished: Callable[[Worker, Outcome], None] | None = None,
        worker_keeps: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        self.limits = limits or Limits()
        self._log = log or (lambda text: print(text, file=sys.stderr))
        self._on_finished = on_finished
        self._worker_keeps = worker_keeps
        self._version = version
        self._url = url
        self._descriptions = descriptions
        self._methods: dict[str, Inline | Forked] = {
            f"{interface.SERVICE}.GetInfo": Inline(self._get_info),
            f"{interface.SERVICE}.GetInterfaceDescription": Inline(self._get_description),
            **methods,
        }
        self._declared = {
            f"{name}.{member}"
            for name, text in descriptions.items()
            for member in re.findall(r"^method (\w+)", text, re.MULTILINE)
        }
        lanes = {how.lane for how in self._methods.values() if isinstance(how, Forked)}
        if lanes - self.limits.workers.keys():
            raise ValueError(f"no limit for the lanes {lanes - self.limits.workers.keys()}")
        self._made_path = ""
        self._listener: socket.socket | None = self._listen(listener) if isinstance(listener, str) else listener
        self._listener.setblocking(False)
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[int], None]] = {}
        self._connections: dict[int, Connection] = {}
        self._strangers = 0
        self._ready: dict[Connection, None] = {}
        self._closed: list[int] = []
        self._workers: dict[int, Job] = {}
        self._running: dict[str, int] = dict.fromkeys(self.limits.workers, 0)
        self._queues: dict[str, deque[Job]] = {lane: deque() for lane in self.limits.workers}
        self._timers: list[Timer] = []
        self._sweep_at = math.inf
        self._accepting = False
        self._stop_at: float | None = None
        self.refused = 0
        """Clients closed for misbehaviour, for Status."""
        self._accept(True)

    # --- what the daemon uses ----------------------------------------------------------------------------------

    def watch(self, fd: int, callback: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call `callback(events)` whenever `fd` is ready."""
        self._callbacks[fd] = callback
        self._epoll.register(fd, events)

    def unwatch(self, fd: int) -> None:
        """Before the descriptor is closed."""
        del self._callbacks[fd]
        self._epoll.unregister(fd)

    def call_at(self, when: float, run: Callable[[], None]) -> Timer:
        """Run a function once at `when` (time.monotonic()). A watchdog arms its next one from the last."""
        timer = Timer(when, run)
        heapq.heappush(self._timers, timer)
        return timer

    def submit(self, method: str, parameters: Mapping[str, object], caller: Caller) -> None:
        """Start a worker for a call that no client made; its outcome goes to `on_finished` alone.

        Raises what the call would answer with.
        """
        call = varlink.Call(method, dict(parameters), more=False, oneway=True)
        how = self._method(call)
        if not isinstance(how, Forked):
            raise TypeError(f"{method} is answered inline")
        params = varlink.Params(call.parameters)
        params.choice_or("on_disconnect", "continue", ("cancel", "continue"))
        job = Job(None, caller, call, how, how.parse(params), "continue")
        self._queues[how.lane].append(job)
        self._fill(how.lane)

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(job.worker for job in self._workers.values() if job.worker is not None)

    @property
    def queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    @property
    def stopping(self) -> bool:
        return self._stop_at is not None

    def run(self) -> None:
        """Serve until `stop()` has been called and everything has ended or been ended. Closes everything."""
        try:
            while not self._finished():
                self._turn()
        finally:
            self._close()

    def stop(self) -> None:
        """Take no more calls, let workers stop within `stop_s`; callers without a reply get `Stopping`."""
        if self.stopping:
            return
        self._stop_at = time.monotonic() + self.limits.stop_s
        self._accept(False)
        self._drop_listener()
        for queue in self._queues.values():
            while queue:
                self._end_job(queue.popleft(), _stopping())
        for job in self._workers.values():
            if job.worker is not None:
                job.worker.cancel()
        for connection in tuple(self._connections.values()):
            if connection.job is None:
                connection.closing = True
                self._ready[connection] = None

    # --- the loop ----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for fd, events in self._epoll.poll(self._timeout()):
            connection = self._connections.get(fd)
            if connection is not None:
                self._on_connection(connection, events)
            elif fd in self._callbacks:
                self._guard(self._callbacks[fd], events)
        if self._ready:
            ready, self._ready = self._ready, {}
            for connection in ready:
                self._advance(connection)
        now = time.monotonic()
        while self._timers and (self._timers[0].when <= now or self._timers[0].run is None):
            run = heapq.heappop(self._timers).run
            if run is not None:
                self._guard(run)
        if now >= self._sweep_at:
            self._sweep(now)
        # Descriptors are closed only here, so that no number is reused within one batch of events.
        while self._closed:
            os.close(self._closed.pop())

    def _timeout(self) -> float | None:
        if self._ready:
            return 0
        when = min(self._sweep_at, self._timers[0].when if self._timers else math.inf, self._stop_at or math.inf)
        return None if when == math.inf else max(0.0, when - time.monotonic())

    def _guard(self, callback: Callable[..., None], *args: object) -> None:
        """A fault in one callback is logged and costs the others nothing."""
        try:
            callback(*args)
        except Exception:  # noqa: BLE001
            self._log(f"internal error in {getattr(callback, '__qualname__', callback)}: {traceback.format_exc()}")

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        if time.monotonic() >= self._stop_at:
            return True
        return not self._workers and not any(connection.out for connection in self._connections.values())

    def _close(self) -> None:
        for job in tuple(self._workers.values()):
            self._end_job(job, _stopping())
            if job.worker is not None:
                job.worker.abandon()
        self._workers.clear()
        for connection in tuple(self._connections.values()):
            self._drop(connection)
        while self._closed:
            os.close(self._closed.pop())
        self._drop_listener()
        self._epoll.close()

    # --- listening ---------------------------------------------------------------------------------------------

    def _listen(self, path: str) -> socket.socket:
        try:
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                os.unlink(path)  # a dead daemon's; two live ones are systemd's to prevent
        except FileNotFoundError:
            pass
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        before = os.umask(0o177)  # the mode must be right from the first moment; no other thread can notice
        try:
            sock.bind(path)
            sock.listen(512)
        except OSError:
            sock.close()
            raise
        finally:
            os.umask(before)
        self._made_path = path
        return sock

    def _drop_listener(self) -> None:
        if self._listener is None:
            return
        if self._made_path:
            try:
                os.unlink(self._made_path)
            except FileNotFoundError:
                pass
        self._listener.close()
        self._listener = None

    def _accept(self, wanted: bool) -> None:
        """Start or pause accepting."""
        if self._listener is None or wanted == self._accepting:
            return
        self._accepting = wanted
        if wanted:
            self.watch(self._listener.fileno(), self._on_listener)
        else:
            self.unwatch(self._listener.fileno())

    def _resume_accepting(self) -> None:
        if not self.stopping:
            self._accept(True)

    def _on_listener(self, _events: int) -> None:
        for _ in range(64):
            if self._listener is None:
                return
            full = len(self._connections) >= self.limits.connections
            if full and not any(connection.idle for connection in self._connections.values()):
                self._accept(False)  # until one leaves or is idle
                return
            try:
                sock, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    # The waiting client would wake us for ever; look again when something may have been given back.
                    self._log(f"cannot accept a connection: {exc}; pausing for a second")
                    self._accept(False)
                    self.call_at(time.monotonic() + 1.0, self._resume_accepting)
                return
            if full:
                self._evict()
            self._welcome(sock)

    def _evict(self) -> None:
        """Close the longest idle client, strangers first."""
        idle = [connection for connection in self._connections.values() if connection.idle]
        if idle:
            self.refused += 1
            self._drop(min(idle, key=lambda c: (not c.stranger, c.deadline or math.inf)))

    def _welcome(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        caller = Caller(*_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)))
        stranger = caller.uid != 0
        if stranger and self._strangers >= self.limits.strangers:
            self.refused += 1
            self._closed.append(sock.detach())
            return
        self._strangers += stranger
        connection = Connection(sock, caller, stranger)
        self._connections[connection.fd] = connection
        connection.mask = connection.wanted()
        self._epoll.register(connection.fd, connection.mask)
        self._rest(connection)

    # --- one connection ----------------------------------------------------------------------------------------

    def _on_connection(self, connection: Connection, events: int) -> None:
        if events & (select.EPOLLHUP | select.EPOLLERR):
            connection.read_rest()
            self._leave(connection)
            return
        if events & select.EPOLLOUT and not connection.flush():
            self._drop(connection)
            return
        if events & select.EPOLLRDHUP:
            connection.half_closed = True
            job = connection.job
            if job is not None and job.on_disconnect == "cancel":  # said by the caller, and it still wants the reply
                self._cancel(job)
        if events & select.EPOLLIN and not connection.read():
            self._drop(connection)
            return
        self._advance(connection)

    def _advance(self, connection: Connection) -> None:
        """Answer what is waiting, in order, as far as it can be answered now; then see what to wait for."""
        for _ in range(_CALLS_PER_TURN):
            if connection.closing or connection.job is not None or len(connection.out) >= CALL_BOUND:
                break
            if not connection.pending:
                if connection.framer.overflow:
                    self._malformed(connection, f"a message is longer than {varlink.MAX_CALL} bytes")
                elif connection.eof:
                    connection.closing = True
                break
            self._answer(connection, connection.pending.popleft())
        else:
            self._ready[connection] = None
        if connection.gone:
            return
        if connection.closing and not connection.out:
            self._drop(connection)
            return
        self._rest(connection)

    def _rest(self, connection: Connection) -> None:
        """Set events and limits of a connection by what it waits for now."""
        mask = connection.wanted()
        if mask != connection.mask:
            connection.mask = mask
            self._epoll.modify(connection.fd, mask)
        limits, now = self.limits, time.monotonic()
        if connection.job is not None:
            connection.deadline = None
        elif connection.deadline is None:
            connection.deadline = now + (limits.stranger_s if connection.stranger else limits.idle_s)
            self._sweep_at = min(self._sweep_at, connection.deadline)
            if not self._accepting:
                self._resume_accepting()  # this one could make room now
        if not connection.out:
            connection.write_deadline = None
        elif connection.write_deadline is None:
            connection.write_deadline = now + limits.write_s
            self._sweep_at = min(self._sweep_at, connection.write_deadline)

    def _sweep(self, now: float) -> None:
        """Close who is over a limit. Runs at the earliest limit, so never while nobody is connected."""
        self._sweep_at = math.inf
        for connection in tuple(self._connections.values()):
            if now >= (connection.write_deadline or math.inf) or now >= (connection.deadline or math.inf):
                self.refused += 1
                self._drop(connection)
            else:
                self._sweep_at = min(
                    self._sweep_at, connection.write_deadline or math.inf, connection.deadline or math.inf
                )

    def _leave(self, connection: Connection) -> None:
        """The client is gone: what it asked for is cancelled or goes on, as it said."""
        pending = connection.pending
        self._drop(connection)
        connection.pending = pending
        connection.eof = True
        if pending:
            self._ready[connection] = None

    def _drop(self, connection: Connection) -> None:
        """Close a connection now and settle what it was waiting for."""
        if connection.gone:
            return
        connection.gone = True
        connection.pending = deque()
        connection.out.clear()
        self._epoll.unregister(connection.fd)
        del self._connections[connection.fd]
        self._strangers -= connection.stranger
        if not self._connections:
            self._sweep_at = math.inf
        self._closed.append(connection.sock.detach())
        job = connection.job
        if job is not None and job.leave == "cancel":
            self._cancel(job)
        if not self._accepting:
            self._resume_accepting()

    def _cancel(self, job: Job) -> None:
        if job.worker is not None:
            if not job.worker.cancelled:
                job.worker.cancel()
            return
        queue = self._queues[job.how.lane]
        if job in queue:
            queue.remove(job)
            facts = _facts("interrupted", "cancelled before it began")
            self._end_job(job, varlink.VarlinkError(f"{interface.INTERFACE}.Interrupted", facts))

    # --- calls -------------------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, raw: bytes) -> None:
        try:
            call = varlink.parse_call(raw)
        except varlink.MalformedMessage as exc:
            self._malformed(connection, str(exc))
            return
        connection.deadline = None
        try:
            if connection.stranger:
                self._turn_away(connection)
            how = self._method(call)
            params = varlink.Params(call.parameters)
            if isinstance(how, Inline):
                message = varlink.encode_reply(how.run(params, connection.caller))
            else:
                self._start(connection, call, how, params)
                return
        except Exception as exc:  # noqa: BLE001 - every end of a call is a typed answer
            message = encode_failure(exc)
        if not call.oneway:
            self._send(connection, message)

    def _turn_away(self, connection: Connection) -> None:
        connection.closing = True
        message, next_step = say("not-root", uid=connection.caller.uid)
        raise NotPermittedError(message, next_step=next_step)

    def _method(self, call: varlink.Call) -> Inline | Forked:
        if self.stopping:
            raise _stopping()
        how = self._methods.get(call.method)
        if how is not None:
            return how
        if call.interface not in self._descriptions:
            raise varlink.interface_not_found(call.interface)
        if call.method in self._declared:
            raise varlink.method_not_implemented(call.method)
        raise varlink.method_not_found(call.method)

    def _malformed(self, connection: Connection, why: str) -> None:
        """Answer once and close: after such a message the borders of the next one cannot be trusted."""
        self.refused += 1
        connection.closing = True
        connection.pending.clear()
        parameters = _facts("usage", f"cannot read the message: {varlink.printable(why, 200)}")
        self._send(connection, varlink.encode_error(varlink.VarlinkError(f"{interface.INTERFACE}.Usage", parameters)))

    def _send(self, connection: Connection, message: bytes) -> None:
        if not connection.send(message):
            self._drop(connection)

    # --- workers -----------------------------------------------------------------------------------------------

    def _start(self, connection: Connection, call: varlink.Call, how: Forked, params: varlink.Params) -> None:
        leave = params.choice_or("on_disconnect", how.on_disconnect, ("cancel", "continue"))
        request = how.parse(params)
        job = Job(connection, connection.caller, call, how, request, "continue" if call.oneway else leave)
        if connection.gone and job.leave == "cancel":
            return
        connection.job = job
        if connection.half_closed and job.on_disconnect == "cancel":
            self._queues[how.lane].append(job)
            self._cancel(job)
            return
        self._queues[how.lane].append(job)
        self._fill(how.lane)

    def _fill(self, lane: str) -> None:
        """Start what waits in a lane, as far as there is room."""
        queue = self._queues[lane]
        while queue and self._running[lane] < self.limits.workers[lane]:
            job = queue.popleft()
            more = job.call.more and job.connection is not None
            try:
                worker = spawn(
                    job.call.method, job.how, job.request, job.caller, more, time.monotonic(), self._worker_keeps()
                )
            except OSError as exc:
                self._end_job(job, internal(f"cannot start a worker: {exc}"))
                continue
            job.worker = worker
            self._running[lane] += 1
            self._workers[worker.pid] = job
            self.watch(worker.pipe, lambda _events, job=job: self._on_pipe(job))  # type: ignore[misc]
            self.watch(worker.pidfd, lambda _events, job=job: self._on_exit(job))  # type: ignore[misc]

    def _on_pipe(self, job: Job) -> None:
        worker = job.worker
        if worker is None or worker.pipe not in self._callbacks:
            return
        progress, open_still = worker.receive()
        connection = job.connection
        if connection is not None and not connection.gone:
            for message in progress:
                if len(connection.out) < PROGRESS_BOUND and job.call.more:
                    self._send(connection, message)
        if not open_still:
            self.unwatch(worker.pipe)
            if worker.broken:
                worker.kill()
        if worker.final is not None and job.connection is not None and not self._ended_by_stop(worker):
            self._end_job(job, worker.final)
        elif connection is not None and not connection.gone:
            self._rest(connection)

    def _on_exit(self, job: Job) -> None:
        worker = job.worker
        if worker is None:
            return
        while worker.pipe in self._callbacks and worker.final is None:
            before = len(worker._buffer)
            self._on_pipe(job)
            if worker.final is None and len(worker._buffer) == before:
                break
        outcome = worker.reap()
        if outcome is None:  # an event of a descriptor that had this number before
            return
        for fd in (worker.pipe, worker.pidfd):
            if fd in self._callbacks:
                self.unwatch(fd)
            self._closed.append(fd)
        del self._workers[worker.pid]
        self._running[worker.lane] -= 1
        self._end_job(job, _stopping() if self.stopping else internal(f"the worker {_how_it_ended(outcome.status)}"))
        if self._on_finished is not None:
            self._guard(self._on_finished, worker, outcome)
        self._fill(worker.lane)

    def _ended_by_stop(self, worker: Worker) -> bool:
        return self.stopping and worker.cancelled and worker.failed

    def _end_job(self, job: Job, answer: bytes | varlink.VarlinkError) -> None:
        """The final reply, if it was not given yet; then the next call of this client."""
        connection, job.connection = job.connection, None
        if connection is None:
            return
        connection.job = None
        if not job.call.oneway:
            self._send(connection, answer if isinstance(answer, bytes) else varlink.encode_error(answer))
        self._ready[connection] = None

    # --- org.varlink.service -----------------------------------------------------------------------------------

    def _get_info(self, params: varlink.Params, _caller: Caller) -> Mapping[str, object]:
        params.no_others()
        return {
            "vendor": "pve-gpu-release",
            "product": "pve-gpu-hostd",
            "version": self._version,
            "url": self._url,
            "interfaces": list(self._descriptions),
        }

    def _get_description(self, params: varlink.Params, _caller: Caller) -> Mapping[str, object]:
        name = params.text("interface")
        params.no_others()
        if name not in self._descriptions:
            raise varlink.interface_not_found(name)
        return {"description": self._descriptions[name]}


def _facts(reason: str, detail: str) -> dict[str, object]:
    message, next_step = say(reason, detail=detail, vmid="?")
    return {"reason": reason, "message": message, "next_step": next_step, "vmid": None}


def _stopping() -> varlink.VarlinkError:
    return varlink.VarlinkError(
        interface.STOPPING,
        {
            "reason": "stopping",
            "message": "the daemon is being stopped",
            "next_step": "the same command does the work without the daemon",
            "vmid": None,
        },
    )


def _how_it_ended(status: int) -> str:
    return f"was ended by signal {-status} without an answer" if status < 0 else f"left without an answer ({status})"
