"""What is left in a cgroup after a stop: who is killed, and that a container which runs again is not."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
import threading
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

    def kill(self, *, climb: bool = False) -> bool:
        self.child.kill()
        return True


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


class Old(Left):
    """A cgroup that the kernel does not kill as a whole (threaded, or before Linux 5.14); it lists the child still."""

    there = True

    def kill(self, *, climb: bool = False) -> bool:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    def exists(self) -> bool:
        return self.there


def old(left: Left, path: str) -> Old:
    cgroup = Old(left.child)
    cgroup.path = path
    return cgroup


def test_where_the_kernel_kills_no_cgroup_its_members_are_killed_one_by_one(left: Left) -> None:
    process = Procfs().read_process(left.child.pid)
    assert process is not None
    done = cleared(old(left, process.cgroup.rstrip("/")), lambda: True)
    assert done.killed and done.empty
    assert left.child.wait() == -signal.SIGKILL


def test_who_has_left_the_cgroup_by_then_is_not_killed_with_the_others(left: Left) -> None:
    """Listed a moment ago, moved by somebody since: not in /lxc/129 any more, so not the container's."""
    grace = threading.Timer(0.5, left.child.terminate)  # ends the wait
    grace.start()
    cleared(old(left, "/lxc/129"), lambda: True)
    grace.join()
    assert left.child.wait() == -signal.SIGTERM


def test_who_is_in_a_newer_cgroup_of_that_name_is_not_killed(left: Left) -> None:
    process = Procfs().read_process(left.child.pid)
    assert process is not None
    cgroup = old(left, process.cgroup.rstrip("/"))
    cgroup.there = False
    grace = threading.Timer(0.5, left.child.terminate)
    grace.start()
    cleared(cgroup, lambda: True)
    grace.join()
    assert left.child.wait() == -signal.SIGTERM


def test_a_look_at_the_rest_that_takes_long_comes_before_the_last_question(left: Left) -> None:
    """Asking the driver who holds what may take seconds: the container may be started in them."""
    order: list[str] = []

    def may_kill() -> bool:
        order.append("may kill?")
        return False

    done = clear(
        Sources(Procfs(), None, None, None, 1),  # type: ignore[arg-type]
        left,
        settle_s=0.05,
        grace_s=5.0,
        deadline_s=time.monotonic() + 10,
        may_kill=may_kill,
        look=lambda: order.append("look"),
    )
    assert order == ["look", "may kill?"] and done.spared and left.child.poll() is None
