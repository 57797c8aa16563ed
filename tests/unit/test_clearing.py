"""What is left in a cgroup after a stop: who is killed, and that a container which runs again is not."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from hostd.lifecycle.clearing import Cleared, clear
from hostd.model import BlindSpot, Process
from hostd.sources import Sources
from hostd.system.cgroupfs import ContainerCgroup
from hostd.system.procfs import Procfs


class Left(ContainerCgroup):
    """A cgroup with one process in it: a child of ours."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        super().__init__(-1, "/lxc/129", 129)
        self.child = child

    def wait_empty(self, timeout_s: float) -> bool:
        try:
            self.child.wait(max(0.001, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def pids(self) -> tuple[set[int], list[BlindSpot]]:
        return ({self.child.pid} if self.child.poll() is None else set()), []

    def kill(self) -> None:
        self.child.kill()


@pytest.fixture
def left() -> Iterator[Left]:
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"]) as child:
        yield Left(child)
        child.kill()


def cleared(left: Left, may_kill: Callable[[], bool], seen: list[Process] | None = None) -> Cleared:
    sources = Sources(Procfs(), None, None, None, 1)  # type: ignore[arg-type]
    return clear(
        sources,
        left,
        settle_s=0.05,
        grace_s=5.0,
        deadline_s=time.monotonic() + 10,
        may_kill=may_kill,
        before_kill=lambda processes: seen.extend(processes) if seen is not None else None,
    )


def test_what_does_not_go_by_itself_is_killed_and_named(left: Left) -> None:
    seen: list[Process] = []
    done = cleared(left, lambda: True, seen)
    assert done.killed and done.empty and not done.spared
    assert [p.pid for p in done.processes] == [p.pid for p in seen] == [left.child.pid]
    assert left.child.wait() == -signal.SIGKILL


def test_a_container_that_runs_again_by_then_is_spared(left: Left) -> None:
    """Asked last thing before the kill: the container may have been started while we waited for the rest to go."""
    asked_s: list[float] = []
    begun_s = time.monotonic()

    def may_kill() -> bool:
        asked_s.append(time.monotonic() - begun_s)
        return False

    seen: list[Process] = []
    done = cleared(left, may_kill, seen)
    assert done.spared and not done.killed and not done.empty and seen == []
    assert left.child.poll() is None
    assert len(asked_s) == 1 and asked_s[0] >= 0.05, "not before the time to settle"


def test_what_goes_by_itself_is_nobody_s_doing(left: Left) -> None:
    left.child.terminate()
    left.child.wait()
    done = cleared(left, lambda: pytest.fail("nothing is left to kill"))
    assert done.empty and not done.killed and done.processes == []
