"""PID namespaces on real ones: two levels deep, a second one beside it, and the way for old kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hostd import syscalls
from hostd.model import ProcessRef
from hostd.system import pidns
from hostd.system.pidns import PidNamespace
from hostd.system.procfs import Procfs

pytestmark = pytest.mark.root

# A namespace whose init starts a sleeper and a nested namespace with a sleeper of its own.
NESTED = "sleep 600 & unshare --pid --fork sh -c 'sleep 600 & echo ready; wait' & wait"


class Namespaces:
    def __init__(self) -> None:
        self.outer = subprocess.Popen(["unshare", "--pid", "--fork", "sh", "-c", NESTED], stdout=subprocess.PIPE)
        assert self.outer.stdout is not None
        assert self.outer.stdout.readline() == b"ready\n"
        (self.init,) = children(self.outer.pid)
        self.members = descendants(self.init) | {self.init}
        self.nested_init = next(pid for pid in self.members if ns_pids(pid)[-1] == 1 and len(ns_pids(pid)) == 3)

    def end(self) -> None:
        os.kill(self.init, 9)
        self.outer.wait()
        assert self.outer.stdout is not None
        self.outer.stdout.close()


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid: int) -> set[int]:
    found = set(children(pid))
    for child in children(pid):
        found |= descendants(child)
    return found


def ns_pids(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/status").read_text()
    return [int(word) for word in text.partition("NSpid:")[2].partition("\n")[0].split()]


def ref(pid: int) -> ProcessRef:
    found = Procfs().read_ref(pid)
    assert found is not None
    return found


def namespace_of(pid: int) -> PidNamespace:
    found = PidNamespace.open(ref(pid))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def spaces() -> Iterator[Namespaces]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    made = Namespaces()
    yield made
    made.end()


def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel before 6.11 answers."""

    def unknown(*_: object) -> int:
        raise OSError(25, "Inappropriate ioctl for device")

    monkeypatch.setattr(syscalls, "ns_get_tgid_from_pidns", unknown)
    monkeypatch.setattr(syscalls, "ns_get_tgid_in_pidns", unknown)


def between(monkeypatch: pytest.MonkeyPatch) -> None:
    """6.11 to 6.16: the ioctl is there, the mount option is not."""
    monkeypatch.setattr(syscalls, "proc_for_pidns", syscalls.proc_by_entering)


def current(_: pytest.MonkeyPatch) -> None:
    pass


KERNELS: list[Callable[[pytest.MonkeyPatch], None]] = [current, between, old_kernel]


@pytest.mark.parametrize("kernel", KERNELS)
def test_members_are_those_of_the_namespace_and_of_nested_ones(
    spaces: Namespaces, kernel: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(monkeypatch)
    with namespace_of(spaces.init) as outer, namespace_of(spaces.nested_init) as nested:
        for _ in range(2):
            pids, blind = outer.members()
            assert pids == spaces.members
            assert blind == []
            assert nested.members()[0] == {spaces.nested_init, *children(spaces.nested_init)}
        assert outer.sweeps == (kernel is old_kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_numbers_are_translated_both_ways(
    spaces: Namespaces, kernel: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel(monkeypatch)
    with namespace_of(spaces.init) as outer, namespace_of(spaces.nested_init) as nested:
        for pid in spaces.members:
            numbers = ns_pids(pid)
            assert outer.ns_pid(pid) == numbers[1]
            assert outer.host_pid(numbers[1]) == pid
            assert nested.ns_pid(pid) == (numbers[2] if len(numbers) > 2 else None)
        assert outer.host_pid(30_000) is None
        assert outer.ns_pid(os.getpid()) is None
        for nonsense in (0, -1):
            assert outer.host_pid(nonsense) is None
            assert outer.ns_pid(nonsense) is None


def test_ancestry_goes_down_and_never_up_or_across(spaces: Namespaces) -> None:
    other = Namespaces()
    try:
        with namespace_of(spaces.init) as outer, namespace_of(spaces.nested_init) as nested:
            assert all(outer.is_ancestor_or_same(pid) is True for pid in spaces.members)
            assert nested.is_ancestor_or_same(spaces.nested_init) is True
            assert nested.is_ancestor_or_same(spaces.init) is False
            assert outer.is_ancestor_or_same(os.getpid()) is False
            assert outer.is_ancestor_or_same(other.init) is False
            assert outer.inode != nested.inode
    finally:
        other.end()


def test_members_that_come_and_go_are_seen_without_a_new_instance(spaces: Namespaces) -> None:
    with namespace_of(spaces.init) as outer:
        before, _ = outer.members()
        with subprocess.Popen(["nsenter", "-t", str(spaces.init), "-p", "sleep", "600"]) as entered:
            started = set[int]()
            while not started:
                started = outer.members()[0] - before
            assert started == set(children(entered.pid))
            os.kill(started.pop(), 9)
            entered.wait()
            assert outer.members()[0] == before


def test_a_dead_namespace_has_no_members(spaces: Namespaces) -> None:
    other = Namespaces()
    with namespace_of(other.init) as before, namespace_of(other.init) as after:
        assert before.members()[0] == other.members
        other.end()
        assert before.members()[0] == set()
        assert after.members()[0] == set()
        assert after.host_pid(1) is None


def test_a_process_that_is_gone_or_another_gives_no_namespace(spaces: Namespaces) -> None:
    start = ref(spaces.init).start_time
    assert PidNamespace.open(ProcessRef(spaces.init, start + 1)) is None
    child = subprocess.Popen(["sleep", "600"])
    gone = ref(child.pid)
    child.kill()
    child.wait()
    assert PidNamespace.open(gone) is None
    with namespace_of(spaces.init) as outer:
        assert outer.is_ancestor_or_same(gone.pid) is None


def test_no_descriptor_is_left(spaces: Namespaces) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with namespace_of(spaces.init) as outer:
        outer.members()
        outer.is_ancestor_or_same(spaces.nested_init)
        outer.is_ancestor_or_same(os.getpid())
        outer._level()
    outer.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_our_own_namespace_is_told_from_a_nested_one() -> None:
    assert pidns.own_inode() == os.stat("/proc/self/ns/pid").st_ino
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from hostd.system import pidns\n"
        "assert not pidns.first_namespace()\n"
    )
    here = str(Path(__file__).resolve().parents[2])
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", code, here]
    subprocess.run(command, check=True, timeout=60)
