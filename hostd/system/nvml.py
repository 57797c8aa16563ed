"""What the driver says, through a disposable child process (`nvml_child`): bounded in time, one outstanding call.

`send_*` and `receive_*` are two halves, so that a caller can look at processes, or wait on pidfds and `fileno()` at
once, while the driver works; `snapshot()` and `memory()` are both halves in one. A failure is never an exception: it
comes back as a BlindSpot with a stable code:

`nvml-missing`        no pynvml, or no usable libnvidia-ml.so.1
`driver-mismatch`     library and kernel module are of different versions
`driver-not-loaded`   no kernel module
`driver-silent`       deadline passed, child died, another call on this node is stuck, or an error about everything
"""

from __future__ import annotations

import fcntl
import marshal
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from hostd.model import BlindSpot, GpuInfo, NvmlClient, NvmlGpu, NvmlSnapshot
from hostd.system import nvml_child
from hostd.system.nvml_child import LOCK_PATH

KILL_WAIT_S = 0.2
"""How long a killed child may take to die before it counts as stuck in the driver."""
CLOSE_DEADLINE_S = 1.0
RESTART_PAUSE_S = 30.0
"""The first child that fails is replaced at the next request; after that one at most every so often: no storm."""


class Wedged(NamedTuple):
    """The call that holds the driver's lock for too long."""

    pid: int
    since: float
    """Unix time at which the call began."""
    call: str
    age_s: float


AGE_SHARE = 0.9
"""Whoever gives up does so when its own deadline passes; the call that it gave up began a little later."""


def read_wedged(lock_path: str = LOCK_PATH, older_than_s: float = 10.0) -> Wedged | None:
    """Who holds `nvml.lock`, if that is a living process and it has for longer than `older_than_s`.

    Never waits. The lock is the proof, the record in the file only says whose it is; the age is by CLOCK_BOOTTIME,
    since the wall clock may jump.
    """
    try:
        fd = os.open(lock_path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        record = _head(fd)
    else:
        return None
    finally:
        os.close(fd)
    wedged = parse_lock_record(record, time.clock_gettime(time.CLOCK_BOOTTIME))
    if wedged is None or wedged.age_s < older_than_s or not _exists(wedged.pid):
        return None
    return wedged


def _head(fd: int) -> bytes:
    """Empty where something that has no content is in the file's place."""
    try:
        return os.pread(fd, 4096, 0)
    except OSError:
        return b""


def parse_lock_record(record: bytes, boot_now_s: float) -> Wedged | None:
    """The record in `nvml.lock`; None when it is empty or half written."""
    import json  # only when somebody holds the lock

    try:
        fields = json.loads(record)
        return Wedged(
            int(fields["pid"]), float(fields["since"]), str(fields["call"]), boot_now_s - float(fields["boot"])
        )
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


def _exists(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


@dataclass(slots=True)
class _Child:
    """One forked child: its pidfd and our ends of the two pipes."""

    pid: int
    pidfd: int
    requests: int
    requests_reader: int
    """The child's end, which we keep open too: a write to a dead child then raises no SIGPIPE, whoever resets that."""
    replies: int

    @property
    def running(self) -> bool:
        return not _readable(self.pidfd, 0)

    def kill(self) -> None:
        try:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        except OSError:
            pass

    def close_pipes(self) -> None:
        for fd in (self.requests, self.requests_reader, self.replies):
            if fd >= 0:
                os.close(fd)
        self.requests = self.requests_reader = self.replies = -1

    def reap(self) -> str | None:
        """How it ended, and the end of it here; None while it lives."""
        if self.running:
            return None
        try:
            _, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # somebody else reaped it, or SIGCHLD is ignored
            status = 0
        os.close(self.pidfd)
        code = os.waitstatus_to_exitcode(status)
        return signal.strsignal(-code) or f"signal {-code}" if code < 0 else f"exit status {code}"


_abandoned: list[_Child] = []
"""Children of this process that SIGKILL did not end. While one lives no other is started: nobody adds to a stuck
driver.
"""


def _stuck_pid() -> int | None:
    _abandoned[:] = [child for child in _abandoned if child.reap() is None]
    return _abandoned[0].pid if _abandoned else None


@dataclass(slots=True)
class _Request:
    call: str
    deadline: float
    failure: BlindSpot | None = None


class Nvml:
    """The driver as one caller sees it. To be used from a single-threaded process (it forks)."""

    def __init__(self, deadline_s: float, lock_path: str = LOCK_PATH) -> None:
        """`deadline_s`: limit on every request, the wait for other callers on the node included."""
        self._deadline_s = deadline_s
        self._lock_path = lock_path
        self._child: _Child | None = None
        self._request: _Request | None = None
        self._buffer = bytearray()
        self._losses = 0
        self._last_loss_at = 0.0
        self._last_loss = ""
        self._memory_uuids: list[str] = []
        self.blind_spots: tuple[BlindSpot, ...] = ()
        """Of the request received last."""

    # --- life ---

    @property
    def alive(self) -> bool:
        """True when there is a child that can be asked without forking one."""
        return self._child is not None and self._child.running

    @property
    def pid(self) -> int | None:
        """Pid of the child: it has the GPU nodes open itself, so the host's list of holders shows it."""
        return self._child.pid if self._child is not None else None

    @property
    def pending(self) -> bool:
        """True while an answer is outstanding; `fileno()` becomes readable when it comes or the child dies."""
        return self._request is not None and self._child is not None

    def fileno(self) -> int:
        """Descriptor to poll for POLLIN while `pending`; -1 without a child."""
        return self._child.replies if self._child is not None else -1

    @property
    def left_s(self) -> float | None:
        """Seconds until the outstanding request counts as unanswered; None when there is none."""
        return max(0.0, self._request.deadline - time.monotonic()) if self._request is not None else None

    def start(self, *, init: bool = True) -> None:
        """Forks the child and returns at once; it imports pynvml and calls nvmlInit meanwhile. `init=False`: it
        opens no device before the first request (a standby child)."""
        if self._child is None:
            self._fork(init)

    def close(self, deadline_s: float = CLOSE_DEADLINE_S) -> None:
        """Ends the child, with nvmlShutdown if that answers in time (0: kill it, the kernel closes what it has
        open).
        """
        busy, self._request = self._request is not None, None
        child, self._child = self._child, None
        if child is None:
            return
        child.close_pipes()
        if deadline_s > 0 and not busy:
            _readable(child.pidfd, deadline_s)
        _end(child)

    def __enter__(self) -> Nvml:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- requests ---

    def snapshot(
        self, *, uuids: Iterable[str] | None = None, nvlink: bool = False, deadline_s: float | None = None
    ) -> NvmlSnapshot:
        """Every GPU (or those of `uuids`) in one look; with `nvlink` their peers too."""
        self.send_snapshot_request(uuids=uuids, nvlink=nvlink, deadline_s=deadline_s)
        return self.receive_snapshot()

    def wedged(self) -> Wedged | None:
        """The driver call of anybody, ours or not, that has not come back for as long as we would have waited."""
        return read_wedged(self._lock_path, older_than_s=AGE_SHARE * self._deadline_s)

    def send_snapshot_request(
        self, *, uuids: Iterable[str] | None = None, nvlink: bool = False, deadline_s: float | None = None
    ) -> None:
        self._send(("snapshot", nvml_child.as_list(uuids), nvlink), deadline_s)

    def receive_snapshot(self) -> NvmlSnapshot:
        """The answer to the request sent last, until its deadline. Asks first, if that was another one or none."""
        if not self._awaits("snapshot"):
            self.send_snapshot_request()
        reply = self._receive()
        if isinstance(reply, BlindSpot):
            return NvmlSnapshot((), blind_spots=(reply,))
        gpus = tuple(_gpu(gpu) for gpu in reply["gpus"])
        return NvmlSnapshot(gpus, reply["driver"], self.blind_spots)

    def memory(self, uuids: Iterable[str], deadline_s: float | None = None) -> dict[str, int | None]:
        """Used MiB per GPU (as `NvmlGpu.used_mib`), None where it cannot be had; `blind_spots` then says why."""
        self.send_memory_request(uuids, deadline_s)
        return self.receive_memory()

    def send_memory_request(self, uuids: Iterable[str], deadline_s: float | None = None) -> None:
        self._memory_uuids = nvml_child.as_list(uuids) or []
        self._send(("memory", self._memory_uuids), deadline_s)

    def receive_memory(self) -> dict[str, int | None]:
        """As `receive_snapshot`, for the GPUs named last."""
        if not self._awaits("memory"):
            self.send_memory_request(self._memory_uuids)
        reply = self._receive()
        if isinstance(reply, BlindSpot):
            return dict.fromkeys(self._memory_uuids, None)
        return dict(reply["used"])

    def recovery_actions(self, deadline_s: float | None = None) -> dict[str, int | None]:
        """UUID -> field value 230 (`NvmlGpu.recovery_action`); None where the driver does not say, empty when
        silent.
        """
        self._send(("recovery",), deadline_s)
        reply = self._receive()
        return {} if isinstance(reply, BlindSpot) else dict(reply["actions"])

    def set_persistence(self, uuid: str, enabled: bool, deadline_s: float | None = None) -> BlindSpot | None:
        """Sets the persistence mode of one GPU. None: done."""
        self._send(("persistence", uuid, enabled), deadline_s)
        reply = self._receive()
        if isinstance(reply, BlindSpot):
            return reply
        if "error" not in reply:
            return None
        code, text = reply["error"]
        return BlindSpot("nvml", f"persistence mode of GPU {uuid}", text, code)

    # --- one request ---

    def _send(self, request: tuple[Any, ...], deadline_s: float | None) -> None:
        if self._request is not None:
            self._receive()  # an answer that nobody fetched
        limit_s = self._deadline_s if deadline_s is None else deadline_s
        self._request = _Request(request[0], time.monotonic() + limit_s)
        if self._child is not None and not self._child.running:
            self._lose("child", died=True)
        if self._child is None:
            self._request.failure = self._fork(init=False)
        if self._child is not None:
            nvml_child.write_frame(self._child.requests, request)

    def _awaits(self, call: str) -> bool:
        return self._request is not None and self._request.call == call

    def _receive(self) -> Mapping[str, Any] | BlindSpot:
        request = self._request
        assert request is not None
        reply: Mapping[str, Any] | BlindSpot = request.failure or self._read_reply(request)
        self._request = None
        if not isinstance(reply, BlindSpot) and "failed" in reply:
            code, text = reply["failed"]
            reply = BlindSpot("nvml", request.call, text, code)
        if isinstance(reply, BlindSpot):
            self.blind_spots = (reply,)
        else:
            self.blind_spots = tuple(BlindSpot("nvml", *spot) for spot in reply.get("spots", ()))
        return reply

    def _read_reply(self, request: _Request) -> Mapping[str, Any] | BlindSpot:
        child = self._child
        assert child is not None
        del self._buffer[:]
        size = 4
        while len(self._buffer) < size:
            left_s = request.deadline - time.monotonic()
            if not _readable(child.replies, max(0.0, left_s)):
                return self._lose(request.call, died=False)
            part = os.read(child.replies, 65536)
            if not part:
                return self._lose(request.call, died=True)
            self._buffer += part
            if len(self._buffer) >= 4:
                size = 4 + int.from_bytes(self._buffer[:4], "little")
        reply: Mapping[str, Any] = marshal.loads(bytes(self._buffer[4:size]))
        return reply

    def _lose(self, call: str, *, died: bool) -> BlindSpot:
        """Gives the child up, dead or silent past the deadline. The next request may start another one."""
        child, self._child = self._child, None
        assert child is not None
        wedged = read_wedged(self._lock_path, older_than_s=0.0)
        child.close_pipes()
        if died:
            _readable(child.pidfd, KILL_WAIT_S)  # let it end its own way, so that we can say how
        ended = _end(child)
        why = f"the NVML child died ({ended})" if died else "no answer within the deadline"
        if ended is None:
            why += f"; pid {child.pid} does not die: it is stuck in the driver"
        elif wedged is not None and wedged.pid != child.pid:
            why += f"; pid {wedged.pid} has been in {wedged.call} for {wedged.age_s:.0f} s"
        self._losses += 1
        self._last_loss_at, self._last_loss = time.monotonic(), why
        return BlindSpot("nvml", call, why, "driver-silent")

    def _fork(self, init: bool) -> BlindSpot | None:
        """Starts the child, or says why not."""
        stuck = _stuck_pid()
        if stuck is not None:
            return BlindSpot("nvml", "child", f"pid {stuck} is still stuck in the driver", "driver-silent")
        if self._losses > 1 and time.monotonic() - self._last_loss_at < RESTART_PAUSE_S:
            return BlindSpot("nvml", "child", f"{self._last_loss}; not tried again yet", "driver-silent")
        wedged = read_wedged(self._lock_path, older_than_s=self._deadline_s)
        if wedged is not None:
            text = f"pid {wedged.pid} has been in {wedged.call} for {wedged.age_s:.0f} s"
            return BlindSpot("nvml", "nvml.lock", text, "driver-silent")
        try:
            self._child = _fork_child(self._lock_path, init)
        except OSError as exc:
            return BlindSpot("nvml", "child", f"cannot start a process: {exc}", "driver-silent")
        return None


def _end(child: _Child) -> str | None:
    """Kills what still runs, waits a moment for its end and says how it ended; None: it cannot die and is abandoned."""
    child.kill()
    _readable(child.pidfd, KILL_WAIT_S)
    ended = child.reap()
    if ended is None:
        _abandoned.append(child)
    return ended


def _readable(fd: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(-(-timeout_s * 1000 // 1)))  # rounded up: 0.4 ms left must not spin


def _fork_child(lock_path: str, init: bool) -> _Child:
    parent = os.getpid()
    pipes: list[int] = []
    pid = -1
    try:
        pipes += os.pipe2(os.O_CLOEXEC)
        pipes += os.pipe2(os.O_CLOEXEC)
        requests_reader, requests, replies, replies_writer = pipes
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _become_child(requests_reader, replies_writer, parent, lock_path, init)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        pidfd = os.pidfd_open(pid)
    except OSError:
        for fd in pipes:
            os.close(fd)
        if pid > 0:
            os.kill(pid, signal.SIGKILL)  # our own child, not reaped yet: the number is still its
            os.waitpid(pid, 0)
        raise
    os.close(replies_writer)
    return _Child(pid, pidfd, requests, requests_reader, replies)


def _become_child(requests: int, replies: int, parent: int, lock_path: str, init: bool) -> NoReturn:
    status = 70  # EX_SOFTWARE
    try:
        nvml_child.main(requests, replies, parent, lock_path, init)
        status = 0
    finally:
        os._exit(status)


def _gpu(reply: Mapping[str, Any]) -> NvmlGpu:
    return NvmlGpu(
        info=GpuInfo(reply["minor"], reply["uuid"], reply["pci"], reply["name"], reply["index"]),
        total_mib=reply.get("total"),
        used_mib=reply.get("used"),
        reserved_mib=reply.get("reserved"),
        bar1_used_mib=reply.get("bar1"),
        clients=tuple(NvmlClient(pid, used, frozenset(kinds)) for pid, used, kinds in reply.get("clients", ())),
        implausible_pids=tuple(reply.get("odd", ())),
        recovery_action=reply.get("recovery"),
        persistence_mode=reply.get("persistence"),
        mig=reply.get("mig"),
        nvlink_peers=tuple(reply["peers"]),
        error=reply.get("error", ""),
        error_code=reply.get("code", ""),
    )
