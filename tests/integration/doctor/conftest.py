"""An embedded node on which everything is as `doctor` wants it; tests break one thing at a time."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.fixtures import make_node, require_node  # noqa: F401
from tests.embedded.node import Container, Node
from tests.embedded.scope import MS_BIND, Running

from .advice import objection

REPOSITORY = Path(__file__).resolve().parents[3]
UNITS = "/etc/systemd/system"
VENDOR = "/usr/lib/systemd/system"
SNIPPETS = "/run/vz/snippets"
DAEMON_SOCKET = "/run/pve-gpu-release/io.pve.GpuRelease"
CONFIG = """\
dev0: /dev/nvidia0
dev1: /dev/nvidia1
dev2: /dev/nvidiactl
dev3: /dev/nvidia-uvm
hostname: ct129
hookscript: local:snippets/pve-gpu-release
"""
STORAGE = "dir: local\n\tpath /run/vz\n\tcontent snippets,iso\n"
LISTEN = """\
import os, socket
os.makedirs("/run/systemd/journal", exist_ok=True)
s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
s.bind("/run/systemd/journal/socket")
while True:
    s.recv(1 << 16)
"""
PROBE = """\
import json, sys, time
sys.path.insert(0, {repository!r})
from hostd.doctor.facts import Facts
from hostd.doctor.runner import CHECKS, result_dict, run_checks
start = time.monotonic()
wanted = sys.argv[1].split(",")
print(json.dumps(result_dict(run_checks(Facts(), [c for c in CHECKS if c.name in wanted]), start)))
"""
"""Some of the checks only: the whole of them costs a second each time."""


@dataclass(frozen=True, slots=True)
class Found:
    """What `doctor --json` said."""

    json: dict[str, Any]
    status: int = 0

    def __post_init__(self) -> None:
        """Whatever a test looks at: what is advised can be pasted."""
        assert [said for f in self.json["findings"] if (said := objection(f["mend"]))] == []

    @property
    def codes(self) -> list[str]:
        return [f["code"] for f in self.json["findings"]]

    @property
    def wrong(self) -> list[str]:
        """Errors and warnings."""
        return [f["code"] for f in self.json["findings"] if f["severity"] != "note"]

    @property
    def blind(self) -> list[dict[str, str]]:
        return list(self.json["could_not_look"])

    def one(self, code: str) -> dict[str, Any]:
        found = [f for f in self.json["findings"] if f["code"] == code]
        assert len(found) == 1, self.json
        return dict(found[0])


class FineNode:
    """The node, and `doctor` in it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._services: list[Running] = []
        self._furnish()

    def _furnish(self) -> None:
        node = self.node
        node.control(persistence=1)
        node.init.mount("units", VENDOR, "tmpfs")
        node.init.mount("log", "/var/log", "tmpfs")
        node.path("/var/log/journal").mkdir()
        shutil.rmtree(node.path("/etc/systemd"), ignore_errors=True)
        for name in ("pve-container@.service", "pve-container-debug@.service", "pve-guests.service"):
            node.write(f"{VENDOR}/{name}", "[Service]\nKillMode=mixed\nExecStart=/usr/bin/lxc-start -F -n %i\n")
        for path in sorted((REPOSITORY / "etc/systemd").rglob("*")):
            if path.is_file():
                node.write(f"{UNITS}/{path.relative_to(REPOSITORY / 'etc/systemd')}", path.read_bytes())
        self.enable("pve-gpu-release-boot.service", "multi-user.target")
        self.enable("pve-gpu-hostd.socket", "sockets.target")
        node.write(f"{SNIPPETS}/pve-gpu-release", (REPOSITORY / "hookscripts/pve-gpu-release").read_bytes(), 0o755)
        node.write("/etc/pve/storage.cfg", STORAGE)
        node.write("/etc/pve-gpu-release/config.yaml", "nvml: {deadline: 3}\n")
        node.path("/run/pve-gpu-release").mkdir(mode=0o700)
        self.serve([sys.executable, "-I", "-c", LISTEN], "/run/systemd/journal/socket")

    def enable(self, unit: str, target: str) -> None:
        link = self.node.path(f"{UNITS}/{target}.wants/{unit}")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"{UNITS}/{unit}")

    def start_daemon(self) -> Running:
        run = f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); from hostd.daemon import entry; entry()"
        return self.serve([sys.executable, "-I", "-c", run, "--socket", DAEMON_SOCKET], DAEMON_SOCKET)

    def serve(self, command: list[str], socket: str) -> Running:
        running = self.node.popen(command)
        self._services.append(running)
        end = time.monotonic() + 20
        while not self.node.path(socket).exists():
            assert running.popen.poll() is None, running.popen.communicate()
            assert time.monotonic() < end
            time.sleep(0.01)
        return running

    def close(self) -> None:
        for running in self._services:
            if running.popen.poll() is None:
                running.process.kill(signal.SIGKILL)
            running.popen.communicate(timeout=60)

    def doctor(self, *words: str, **options: Any) -> Any:
        """The command line, as an administrator runs it."""
        return self.node.run([sys.executable, "-I", "-m", "hostd.cli", "doctor", *words], **options)

    def all(self) -> Found:
        done = self.doctor("--json")
        assert done.stderr == ""
        return Found(json.loads(done.stdout), done.returncode)

    def look(self, *checks: str) -> Found:
        """Some checks only."""
        probe = PROBE.format(repository=str(REPOSITORY))
        done = self.node.run([sys.executable, "-I", "-c", probe, ",".join(checks)])
        assert done.returncode == 0, done.stderr
        found = Found(json.loads(done.stdout))
        assert found.json["checks"] == sorted(checks, key=found.json["checks"].index)
        return found

    def mend(self, finding: dict[str, Any]) -> None:
        """Pastes what is advised into root's shell."""
        self.node.run(["bash", "-c", finding["mend"]], check=True)

    def systemctl(self, text: str) -> None:
        """A systemd that runs, as far as `systemctl show` tells."""
        self.node.write("/run/fake-systemctl", f"#!/bin/sh\ncat <<'END'\n{text}END\n", 0o755)
        self.node.path("/run/systemd/system").mkdir(parents=True, exist_ok=True)
        self.node.init.mount("/run/fake-systemctl", "/usr/bin/systemctl", "", MS_BIND)

    def pve(self, name: str, text: str) -> None:
        self.node.write(f"/etc/pve/{name}", text)


@pytest.fixture
def make_fine(make_node: Callable[..., Node]) -> Iterator[Callable[..., FineNode]]:  # noqa: F811
    made: list[FineNode] = []

    def make(**options: Any) -> FineNode:
        made.append(FineNode(make_node(**options)))
        return made[-1]

    yield make
    for fine in made:
        fine.close()


@pytest.fixture
def fine(make_fine: Callable[..., FineNode]) -> FineNode:
    """Without containers."""
    return make_fine()


@pytest.fixture
def ct(fine: FineNode) -> Container:
    """Container 129 with both GPUs and our hookscript."""
    return fine.node.container(129, config=CONFIG)
