"""Jobs that are started again when they die, and what can stop them: scripts that run inside a container."""

from __future__ import annotations

import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.embedded.node import Container, wait_until
from tests.embedded.scope import Running

UNIT = "system.slice/vllm.service"
DOCKER_ID = "a1b2" * 16
JOB = """
import os, signal, time
fds = [os.open(p, os.O_RDWR | os.O_NOCTTY) for p in ("/dev/nvidia0", "/dev/nvidiactl")]
print("up", flush=True)
time.sleep(600)
"""
"""Holds GPU 0 by descriptor."""
SUPERVISOR = """
import os, subprocess, sys, time
pause_s = float(sys.argv[1])
while True:
    subprocess.call([sys.executable, "-I", "-c", sys.argv[2]])
    time.sleep(pause_s)
"""
"""`Restart=always`, `RestartSec=` its first argument."""
BOMB = """
import os, signal, time
os.setpgid(0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
def burn():
    fd = os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
    time.sleep(0.06)
    if os.fork() == 0:
        os.close(fd)
        burn()
    time.sleep(0.02)
    os._exit(0)
for _ in range(4):
    if os.fork() == 0:
        burn()
while True:
    time.sleep(600)
"""
"""Four chains of holders that live 80 ms each and are succeeded before they end."""


@dataclass(slots=True)
class Job:
    """A supervisor and how often its job has come up."""

    running: Running

    def wait_up(self, timeout_s: float = 20) -> None:
        """Until the job has (again) come up."""
        out = self.running.popen.stdout
        assert out is not None
        assert select.select([out], [], [], timeout_s)[0], "the job did not come up"
        assert out.readline() == "up\n"

    @property
    def pid(self) -> int:
        return self.running.pid

    def alive(self) -> bool:
        return self.running.process.alive()


def start(container: Container, argv: Sequence[str], cgroup: str | None = None) -> Job:
    job = Job(container.popen(argv, cgroup=cgroup))
    job.wait_up()
    return job


def supervised(container: Container, cgroup: str | None = UNIT, pause_s: float = 0.1) -> Job:
    """A job under a supervisor that is in the same cgroup."""
    return start(container, [sys.executable, "-I", "-c", SUPERVISOR, str(pause_s), JOB], cgroup)


def shell_loop(container: Container, cgroup: str | None = None) -> Job:
    """`while true; do job; done` in a shell."""
    script = f"while :; do {sys.executable} -I -c '{JOB}'; done"
    return start(container, ["/bin/sh", "-c", script], cgroup)


def bomb(container: Container, cgroup: str | None = UNIT) -> Job:
    return start(container, [sys.executable, "-I", "-c", BOMB], cgroup)


def empty(container: Container, cgroup: str) -> bool:
    return "populated 0" in (container.cgroup(cgroup) / "cgroup.events").read_text()


def wait_empty(container: Container, cgroup: str) -> None:
    wait_until(lambda: empty(container, cgroup), f"{cgroup} empty")
