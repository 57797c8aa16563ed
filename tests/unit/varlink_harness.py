"""A real server in a process of its own, for the tests of the service: real sockets, real forked workers."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hostd.service import server as service

DEADLINE_S = 60.0
IFACE = "io.pve.GpuRelease"


class ServerProcess:
    """`with ServerProcess(path, methods) as s:` forks, waits until it listens, and leaves nothing behind."""

    def __init__(
        self,
        path: Path,
        methods: Mapping[str, service.Inline | service.Forked],
        limits: service.Limits | None = None,
        mode: int = 0o600,
        nofile: int | None = None,
        setup: Callable[[service.Server], None] | None = None,
    ) -> None:
        self.path = str(path)
        self.methods = {f"{IFACE}.{name}": how for name, how in methods.items()}
        self.limits = limits or service.Limits(stop_s=2.0)
        self.mode = mode
        self.nofile = nofile
        self.setup = setup
        self.stderr_path = f"{self.path}.stderr"
        self._clients: list[Client] = []

    def __enter__(self) -> ServerProcess:
        ready, self._ready = os.pipe()
        self._events, self._events_out = os.pipe()
        fcntl.fcntl(
            self._events_out, fcntl.F_SETPIPE_SZ, 1 << 20
        )  # a test that reads no events must not stop the server
        self.pid = os.fork()
        if self.pid == 0:
            try:
                os.close(ready)
                os.close(self._events)
                self._serve()
            except BaseException:  # noqa: BLE001 - the end of a forked child
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        os.close(self._ready)
        os.close(self._events_out)
        self._pidfd = os.pidfd_open(self.pid)
        self._buffer = b""
        assert os.read(ready, 1) == b"!", Path(self.stderr_path).read_text()
        os.close(ready)
        return self

    def _serve(self) -> None:
        err = os.open(self.stderr_path, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(err, 2)
        os.close(err)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)  # pytest's goes elsewhere
        if self.nofile:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.nofile, self.nofile))

        def finished(worker: service.Worker, outcome: service.Outcome) -> None:
            event = {
                "method": worker.method.rpartition(".")[2],
                "pid": worker.pid,
                "status": outcome.status,
                "reply": outcome.reply,
                "caller": worker.caller.uid,
            }
            os.write(self._events_out, json.dumps(event).encode() + b"\n")

        server = service.Server(self.path, self.methods, version="0", limits=self.limits, on_finished=finished)
        os.chmod(self.path, self.mode)
        wake, wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(wake_out)
        server.watch(wake, lambda _events: (os.read(wake, 64), server.stop())[1])
        if self.setup:
            self.setup(server)
        os.write(self._ready, b"!")
        os.close(self._ready)
        server.run()

    def __exit__(self, kind: object, *_exc: object) -> None:
        for client in self._clients:
            client.close()
        status = self.stop()
        os.close(self._pidfd)
        os.close(self._events)
        assert kind is not None or status in (0, -9), Path(self.stderr_path).read_text()

    def stop(self, signum: int = signal.SIGTERM) -> int | None:
        """End it and give its wait status; None when it was reaped before."""
        if self.pid == 0:
            return 0
        try:
            signal.pidfd_send_signal(self._pidfd, signum)
        except ProcessLookupError:
            pass
        if not select.select([self._pidfd], [], [], DEADLINE_S)[0]:
            os.kill(self.pid, signal.SIGKILL)
            raise AssertionError("the server did not stop")
        pid, self.pid = self.pid, 0
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def finished(self, timeout: float = DEADLINE_S) -> dict[str, Any]:
        """The next worker that ended, as `on_finished` saw it."""
        end = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = end - time.monotonic()
            assert left > 0 and select.select([self._events], [], [], left)[0], "no worker ended"
            data = os.read(self._events, 65536)
            assert data, "the server is gone"
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)  # type: ignore[no-any-return]

    def client(self) -> Client:
        client = Client(self.path)
        self._clients.append(client)
        return client

    def stderr(self) -> str:
        return Path(self.stderr_path).read_text()

    # --- what the kernel says about it ---

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def asleep(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"

    def status(self, key: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1])
        raise KeyError(key)


class Client:
    """A raw client: says exactly the bytes that a test wants."""

    def __init__(self, path: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        # As the product's own client: a non-blocking connect to a full backlog fails at once on AF_UNIX, this one waits.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(DEADLINE_S), 0))
        self.sock.connect(path)
        self.sock.settimeout(DEADLINE_S)
        self.buffer = b""

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def say(self, method: str, parameters: object = None, **flags: bool) -> None:
        name = method if "." in method else f"{IFACE}.{method}"
        self.send(json.dumps({"method": name, "parameters": parameters or {}, **flags}).encode() + b"\0")

    def hear(self) -> dict[str, Any] | None:
        """The next message; None when the connection is closed."""
        while b"\0" not in self.buffer:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionResetError:
                return None
            if not data:
                assert not self.buffer, "half a message"
                return None
            self.buffer += data
        raw, self.buffer = self.buffer.split(b"\0", 1)
        return json.loads(raw)  # type: ignore[no-any-return]

    def ask(self, method: str, parameters: object = None, **flags: bool) -> dict[str, Any] | None:
        self.say(method, parameters, **flags)
        return self.hear()

    def close(self) -> None:
        self.sock.close()


def until(condition: Callable[[], bool], what: str = "the condition") -> None:
    """Wait for something that only the kernel's files show. Fails at the deadline."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true"
        select.select([], [], [], 0.002)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
