"""Calls that workers answer: lanes with a limit each, a queue behind each, and what becomes of every worker."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from hostd.service import interface, varlink
from hostd.service.clients import Clients
from hostd.service.connection import PROGRESS_BOUND, Connection
from hostd.service.limits import Limits
from hostd.service.loop import Loop
from hostd.service.worker import Caller, Forked, Outcome, Worker, cannot_here, spawn
from hostd.verdicts import say


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


class Jobs:
    """Starts workers, passes on what they say, reaps them."""

    def __init__(
        self,
        loop: Loop,
        clients: Clients,
        limits: Limits,
        worker_keeps: Callable[[], Iterable[int]],
    ) -> None:
        self._loop = loop
        self._clients = clients
        self._limits = limits
        self.on_started: Callable[[Worker], None] = lambda worker: None
        self.on_finished: Callable[[Worker, Outcome], None] = lambda worker, outcome: None
        self._worker_keeps = worker_keeps
        self._working: dict[int, Job] = {}
        self._running: dict[str, int] = dict.fromkeys(limits.workers, 0)
        self._queues: dict[str, deque[Job]] = {lane: deque() for lane in limits.workers}
        self.stopping = False

    def __len__(self) -> int:
        return len(self._working)

    @property
    def workers(self) -> tuple[Worker, ...]:
        return tuple(job.worker for job in self._working.values() if job.worker is not None)

    @property
    def queued(self) -> int:
        return sum(len(queue) for queue in self._queues.values())

    def add(self, job: Job) -> None:
        """Start it, or queue it behind the others of its lane."""
        connection = job.connection
        if connection is not None:
            connection.job = job
        self._queues[job.how.lane].append(job)
        if connection is not None and connection.half_closed and job.on_disconnect == "cancel":
            self.cancel(job)
            return
        self._fill(job.how.lane)

    def half_closed(self, connection: Connection) -> None:
        """Said by the caller with `on_disconnect: cancel`, and it still wants the reply."""
        job = connection.job
        if job is not None and job.on_disconnect == "cancel":
            self.cancel(job)

    def left(self, connection: Connection) -> None:
        """The client is gone."""
        job = connection.job
        if job is not None and job.leave == "cancel":
            self.cancel(job)

    def cancel(self, job: Job) -> None:
        if job.worker is not None:
            if not job.worker.cancelled:
                job.worker.cancel()
            return
        queue = self._queues[job.how.lane]
        if job in queue:
            queue.remove(job)
            facts = facts_of("interrupted", "cancelled before it began")
            self._end(job, varlink.VarlinkError(f"{interface.INTERFACE}.Interrupted", facts))

    def stop(self) -> None:
        """Nothing new begins; what is at work is told to stop where that is safe."""
        self.stopping = True
        for queue in self._queues.values():
            while queue:
                self._end(queue.popleft(), stopping_error())
        for job in self._working.values():
            if job.worker is not None:
                job.worker.hand_over()

    def close(self) -> None:
        """End what has not ended."""
        for job in tuple(self._working.values()):
            self._end(job, stopping_error())
            if job.worker is not None:
                job.worker.abandon()
        self._working.clear()

    # --- workers ---

    def _fill(self, lane: str) -> None:
        """Start what waits in a lane, as far as there is room."""
        queue = self._queues[lane]
        while queue and self._running[lane] < self._limits.workers[lane]:
            job = queue.popleft()
            more = job.call.more and job.connection is not None
            try:
                worker = spawn(
                    job.call.method, job.how, job.request, job.caller, more, time.monotonic(), self._worker_keeps()
                )
            except OSError as exc:
                self._end(job, not_begun_error(exc))
                continue
            job.worker = worker
            self._running[lane] += 1
            self._working[worker.pid] = job
            self._loop.watch(worker.pipe, lambda _events, job=job: self._on_pipe(job))  # type: ignore[misc]
            self._loop.watch(worker.pidfd, lambda _events, job=job: self._on_exit(job))  # type: ignore[misc]
            self._loop.guard(self.on_started, worker)

    def _on_pipe(self, job: Job) -> None:
        worker = job.worker
        if worker is None or not self._loop.watches(worker.pipe):
            return
        progress, open_still = worker.receive()
        connection = job.connection
        if connection is not None and not connection.gone:
            for message in progress:
                if len(connection.out) < PROGRESS_BOUND and job.call.more:
                    self._clients.send(connection, message)
        if not open_still:
            self._loop.unwatch(worker.pipe)
            if worker.broken:
                worker.kill()
        if worker.final is not None and job.connection is not None and not self._ended_by_stop(worker):
            self._end(job, worker.final)
        elif connection is not None and not connection.gone:
            self._clients.rest(connection)

    def _on_exit(self, job: Job) -> None:
        worker = job.worker
        if worker is None:
            return
        while self._loop.watches(worker.pipe) and worker.final is None:
            before = worker.unread
            self._on_pipe(job)
            if worker.final is None and worker.unread == before:
                break
        outcome = worker.reap()
        if outcome is None:  # an event of a descriptor that had this number before
            return
        for fd in (worker.pipe, worker.pidfd):
            if self._loop.watches(fd):
                self._loop.unwatch(fd)
            self._loop.close_later(fd)
        del self._working[worker.pid]
        self._running[worker.lane] -= 1
        worker.orphaned = job.connection is None or job.connection.gone
        self._end(job, stopping_error() if self.stopping else lost_error(outcome.status))
        self._loop.guard(self.on_finished, worker, outcome)
        self._fill(worker.lane)

    def _ended_by_stop(self, worker: Worker) -> bool:
        return self.stopping and worker.cancelled and worker.failed

    def _end(self, job: Job, answer: bytes | varlink.VarlinkError) -> None:
        """The final reply, if it was not given yet; then the next call of this client."""
        connection, job.connection = job.connection, None
        if connection is None:
            return
        connection.job = None
        if not job.call.oneway:
            self._clients.send(connection, answer if isinstance(answer, bytes) else varlink.encode_error(answer))
        self._clients.ready(connection)


def facts_of(reason: str, detail: str) -> dict[str, object]:
    message, next_step = say(reason, detail=detail, vmid="?")
    return {"reason": reason, "message": message, "next_step": next_step, "vmid": None}


def stopping_error() -> varlink.VarlinkError:
    return cannot_here("the daemon is being stopped", reason="stopping", name=interface.STOPPING)


def lost_error(status: int) -> varlink.VarlinkError:
    how = f"was ended by signal {-status} without an answer" if status < 0 else f"left without an answer ({status})"
    return cannot_here(f"the worker {how}", reason="worker-lost")


def not_begun_error(exc: OSError) -> varlink.VarlinkError:
    """No process, descriptor or memory for a worker: the caller may have its own, so the work is not lost with ours."""
    return cannot_here(f"cannot start a worker: {exc.strerror or exc}", reason="worker-lost")
