"""pve-gpu-hostd in an embedded node, as systemd would run it; the test plays systemd and the clients."""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.fixtures import container, make_node, node, require_node  # noqa: F401
from tests.embedded.node import Container, Node, wait_until
from tests.embedded.scope import Running
from tests.integration.conftest import engine  # noqa: F401
from tests.integration.product import Product
from tests.product_command import command
from tests.unit.varlink_harness import Client

SOCKET = "/run/pve-gpu-release/io.pve.GpuRelease"
RELEASES = "/run/pve-gpu-release/releases"
CGROUP = "/system.slice/pve-gpu-hostd.service"
ACTIVATE = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.environ |= {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
os.execv(sys.argv[2], sys.argv[2:])
"""
COUNTING = """
import os, select, signal, sys
mask = {signal.SIGTERM, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, mask)
held = [os.open(path, os.O_RDWR | os.O_NOCTTY) for path in sys.argv[2:]]
print("ready", os.getpid(), flush=True)
while True:
    info = signal.sigwaitinfo(mask)
    print("term", info.si_pid, flush=True)
    if sys.argv[1] == "obey":
        sys.exit(0)
"""


class Daemon:
    """One pve-gpu-hostd after another on the same node; `start` waits until it listens."""

    def __init__(self, node: Node, product: Product, logs: Path) -> None:  # noqa: F811
        self.node = node
        self.logs = logs
        self.product = product
        self.running: Running | None = None
        self.errors: list[Path] = []

    def start(self, *words: str, env: dict[str, str] | None = None, python_file: str = "") -> Daemon:
        self.node.path(SOCKET).unlink(missing_ok=True)
        start = [sys.executable, "-I", python_file] if python_file else command("hostd.daemon")
        return self._launch([*start, *words], env)

    def start_activated(self, listening: socket.socket) -> Daemon:
        """As systemd.socket(5) does it: the socket is descriptor 3, LISTEN_PID is the daemon's own."""
        words = [sys.executable, "-I", "-c", ACTIVATE, str(listening.fileno()), *command("hostd.daemon")]
        return self._launch(words, None, (listening.fileno(),))

    def _launch(self, words: list[str], env: dict[str, str] | None, pass_fds: tuple[int, ...] = ()) -> Daemon:
        log = self.logs / f"{len(self.errors)}.log"
        self.errors.append(log)
        with open(log, "w") as out:
            self.running = self.node.popen(
                words, cgroup=CGROUP, env=env, stdout=out, stderr=out, pass_fds=pass_fds
            )
        wait_until(self.listens, "the daemon listens")
        return self

    def signal(self, number: int) -> None:
        assert self.running is not None
        self.running.process.kill(number)

    def listens(self) -> bool:
        assert self.running is not None
        assert self.running.popen.poll() is None, self.stderr()
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(self.node.path(SOCKET)))
            except OSError:
                return False
        client = self.client()
        try:
            return client.ask("org.varlink.service.GetInfo") is not None
        finally:
            client.close()

    @property
    def pid(self) -> int:
        """On this machine."""
        assert self.running is not None
        return self.running.process.outer_pid

    def stderr(self) -> str:
        return "".join(path.read_text() for path in self.errors)

    def kill(self) -> None:
        """-9. What systemd adds (SIGKILL to the rest of the cgroup) happens by itself: workers die with their parent."""
        assert self.running is not None
        self.running.process.kill()
        self.running.process.wait_gone()
        self.running.popen.wait(20)

    def stop(self, timeout: float = 60) -> int:
        """systemctl stop; its exit status."""
        assert self.running is not None
        self.running.process.kill(15)
        return self.running.popen.wait(timeout)

    def client(self) -> Client:
        return Client(str(self.node.path(SOCKET)))

    def status(self) -> dict[str, Any]:
        client = self.client()
        try:
            reply = client.ask("Status")
        finally:
            client.close()
        assert reply is not None and "error" not in reply, reply
        return dict(reply["parameters"])

    # --- what the kernel says ---

    def children(self) -> list[int]:
        return [int(pid) for pid in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def children_of_kind(self, what: str) -> list[int]:
        """Workers; `what` is for people: a daemon at rest has no other children than they and the journal's."""
        return [pid for pid in self.children() if not _is_session_leader(pid)]

    def settle(self) -> None:
        """Until nothing is at work and no child is left."""
        wait_until(self.alone, "the daemon is alone")

    def settle_connections(self) -> None:
        def gone() -> bool:
            return sum(link.startswith("socket:") for link in self.descriptors()) <= 3  # listener, epoll's, journal's

        wait_until(gone, "the connections are gone")

    def descriptors(self) -> list[str]:
        found = []
        for entry in os.listdir(f"/proc/{self.pid}/fd"):
            try:
                found.append(os.readlink(f"/proc/{self.pid}/fd/{entry}"))
            except FileNotFoundError:
                continue
        return sorted(found)

    def alone(self) -> bool:
        return not self.children()

    def records(self) -> list[dict[str, Any]]:
        """The written-ahead records that are complete JSON."""
        found = []
        for path in sorted(self.node.path(RELEASES).glob("*.json")) if self.node.path(RELEASES).exists() else []:
            try:
                found.append(json.loads(path.read_text()))
            except (OSError, ValueError):
                continue
        return found

    def record(self, release_id: str | None = None) -> dict[str, Any] | None:
        return next((r for r in self.records() if release_id in (None, r["release_id"])), None)


class Job:
    """A holder that counts the SIGTERMs it gets."""

    def __init__(self, scope: Container, how: str = "ignore", devices: tuple[str, ...] = ("/dev/nvidia0",)) -> None:
        """`how`: obey or ignore SIGTERM."""
        self.running = scope.popen([sys.executable, "-I", "-S", "-c", COUNTING, how, *devices])
        assert self.running.popen.stdout is not None
        self._out = self.running.popen.stdout
        self._heard = b""
        wait_until(self._ready, "the job is ready")

    @property
    def process(self) -> Any:
        return self.running.process

    def _ready(self) -> bool:
        self.has_term()
        return b"ready" in self._heard

    def has_term(self) -> bool:
        """It has heard one (and every one so far is counted)."""
        while readable(self._out.fileno(), 0):
            data = os.read(self._out.fileno(), 4096)
            if not data:
                break
            self._heard += data
        return b"term" in self._heard

    def terms(self) -> int:
        """After its end."""
        self.process.wait_gone()
        while data := os.read(self._out.fileno(), 4096):
            self._heard += data
        return self._heard.count(b"term")


def _is_session_leader(pid: int) -> bool:
    """The journal's process has a session of its own (setsid), a worker is in the daemon's."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return True
    return int(fields[3]) == pid


@pytest.fixture
def product(node: Node) -> Product:  # noqa: F811
    product = Product(node)
    product.command = tuple(command())
    return product


@pytest.fixture
def idle_daemon(node: Node, product: Product, tmp_path: Path) -> Iterator[Daemon]:  # noqa: F811
    """Not started yet."""
    daemon = Daemon(node, product, tmp_path)
    yield daemon
    if daemon.running is not None and daemon.running.popen.poll() is None:
        assert daemon.stop() == 0, daemon.stderr()
    assert "Traceback" not in daemon.stderr()


@pytest.fixture
def daemon(idle_daemon: Daemon) -> Daemon:
    return idle_daemon.start()


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    return wait_until


def readable(fd: int, timeout_s: float) -> bool:
    return bool(select.select([fd], [], [], timeout_s)[0])


__all__ = ["RELEASES", "SOCKET", "Daemon", "Job", "readable", "time"]
