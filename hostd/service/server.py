"""The daemon's socket: which call is answered how. It does no work of its own: slow work is forked (`worker.py`).

`loop` waits, `listener` accepts, `clients` speaks with them, `jobs` has the workers. What one client does, or does not
do, costs the others nothing: every buffer, queue and wait has a bound (`limits`).
"""

from __future__ import annotations

import math
import re
import select
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping

from hostd.errors import NotPermittedError
from hostd.service import interface, varlink
from hostd.service.clients import Clients
from hostd.service.connection import Connection
from hostd.service.jobs import Job, Jobs, facts_of, stopping_error
from hostd.service.limits import Limits
from hostd.service.listener import Listener
from hostd.service.loop import Loop, Timer
from hostd.service.worker import Caller, Context, Emit, Forked, Inline, Outcome, Worker, encode_failure
from hostd.verdicts import say

__all__ = ["Caller", "Context", "Emit", "Forked", "Inline", "Limits", "Outcome", "Server", "Timer", "Worker"]


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
        on_started: Callable[[Worker], None] | None = None,
        on_finished: Callable[[Worker, Outcome], None] | None = None,
        worker_keeps: Callable[[], Iterable[int]] = tuple,
        is_stale: Callable[[], bool] = lambda: False,
    ) -> None:
        """`is_stale()` is asked before each call that takes a worker; True: this process is not fit for it any more, it
        stops, and the caller does the work itself."""
        self.limits = limits or Limits()
        log = log or (lambda text: print(text, file=sys.stderr))
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
        self._is_stale = is_stale
        self._stop_at: float | None = None
        self._loop = Loop(log)
        self._loop.add(self)
        self._clients = Clients(
            self._loop,
            self.limits,
            self._answer,
            self._malformed,
            half_closed=lambda connection: self._jobs.half_closed(connection),
            gone=lambda connection: self._jobs.left(connection),
        )
        self._jobs = Jobs(self._loop, self._clients, self.limits, worker_keeps)
        self._jobs.on_started = on_started or self._jobs.on_started
        self._jobs.on_finished = on_finished or self._jobs.on_finished
        self._listener = Listener(listener, self._loop, self._clients, self.limits, log)

    # --- what the daemon uses ---

    def watch(self, fd: int, callback: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        """Call `callback(events)` whenever `fd` is ready."""
        self._loop.watch(fd, callback, events)

    def unwatch(self, fd: int) -> None:
        """Before the descriptor is closed."""
        self._loop.unwatch(fd)

    def call_at(self, when: float, run: Callable[[], None]) -> Timer:
        """Run a function once at `when` (time.monotonic()). A watchdog arms its next one from the last."""
        return self._loop.call_at(when, run)

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
        self._jobs.add(Job(None, caller, call, how, how.parse(params), "continue"))

    @property
    def connections(self) -> int:
        return len(self._clients)

    @property
    def refused(self) -> int:
        """Clients closed for misbehaviour, for Status."""
        return self._clients.refused

    @property
    def workers(self) -> tuple[Worker, ...]:
        return self._jobs.workers

    @property
    def queued(self) -> int:
        return self._jobs.queued

    @property
    def stopping(self) -> bool:
        return self._stop_at is not None

    def run(self) -> None:
        """Serve until `stop()` has been called and everything has ended or been ended. Closes everything."""
        try:
            while not self._finished():
                self._loop.turn()
        finally:
            self._jobs.close()
            self._clients.close()
            self._listener.close()
            self._loop.close()

    def stop(self) -> None:
        """Take no more calls, let workers stop within `stop_s`; callers without a reply get `Stopping`."""
        if self.stopping:
            return
        self._stop_at = time.monotonic() + self.limits.stop_s
        self._listener.close()
        self._jobs.stop()
        self._clients.close_idle()

    # --- as a part of the loop ---

    def due(self) -> float:
        return math.inf if self._stop_at is None else self._stop_at

    def attend(self, now: float) -> None:
        return

    def _finished(self) -> bool:
        if self._stop_at is None:
            return False
        return time.monotonic() >= self._stop_at or not (self._jobs or self._clients.any_unsent())

    # --- calls ---

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
            self._clients.send(connection, message)

    def _start(self, connection: Connection, call: varlink.Call, how: Forked, params: varlink.Params) -> None:
        leave = params.choice_or("on_disconnect", how.on_disconnect, ("cancel", "continue"))
        request = how.parse(params)
        job = Job(connection, connection.caller, call, how, request, "continue" if call.oneway else leave)
        if self._is_stale():
            self.stop()
        if self.stopping:
            raise stopping_error()
        if not (connection.gone and job.leave == "cancel"):
            self._jobs.add(job)

    def _turn_away(self, connection: Connection) -> None:
        connection.closing = True
        message, next_step = say("not-root", uid=connection.caller.uid)
        raise NotPermittedError(message, next_step=next_step)

    def _method(self, call: varlink.Call) -> Inline | Forked:
        if self.stopping:
            raise stopping_error()
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
        self._clients.refused += 1
        connection.closing = True
        connection.pending.clear()
        parameters = facts_of("usage", f"cannot read the message: {varlink.printable(why, 200)}")
        error = varlink.VarlinkError(f"{interface.INTERFACE}.Usage", parameters)
        self._clients.send(connection, varlink.encode_error(error))

    # --- org.varlink.service ---

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
