"""Pinned processes: pid reuse, refusal of pids that are none, waits."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from hostd.model import ProcessRef
from hostd.system.pidfd import Pinned, wait_any
from hostd.system.procfs import Procfs

read_ref = Procfs().read_ref


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process
        process.kill()


def ref_of(pid: int) -> ProcessRef:
    ref = read_ref(pid)
    assert ref is not None
    return ref


def pin(pid: int) -> Pinned:
    pinned = Pinned.pin(ref_of(pid), read_ref)
    assert pinned is not None
    return pinned


def test_a_signal_reaches_the_process_and_the_wait_sees_it_go(child: subprocess.Popen[bytes]) -> None:
    with pin(child.pid) as pinned:
        assert not pinned.gone()
        assert wait_any([pinned], 0) == []
        assert pinned.send(signal.SIGTERM)
        assert wait_any([pinned], 10) == [pinned]
        assert pinned.gone()
        assert not pinned.send(signal.SIGKILL)
    assert child.wait() == -signal.SIGTERM


def test_a_reaped_process_is_gone_and_not_an_error(child: subprocess.Popen[bytes]) -> None:
    ref = ref_of(child.pid)
    with pin(child.pid) as pinned:
        child.kill()
        child.wait()
        assert pinned.gone()
        assert not pinned.send(signal.SIGKILL)
    assert Pinned.pin(ref, read_ref) is None


@pytest.mark.parametrize("pid", [1, 0, -1, -4711])
def test_pids_that_are_none_or_init_are_refused(pid: int) -> None:
    with pytest.raises(ValueError, match="never a target"):
        Pinned.pin(ProcessRef(pid, 1), lambda _: ProcessRef(pid, 1))


def test_a_pid_that_was_given_to_another_process_is_not_pinned(child: subprocess.Popen[bytes]) -> None:
    ref = ref_of(child.pid)
    before = set(os.listdir("/proc/self/fd"))
    assert Pinned.pin(ProcessRef(ref.pid, ref.start_time - 1), read_ref) is None
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_recheck_that_fails_leaves_no_descriptor_behind(child: subprocess.Popen[bytes]) -> None:
    def fails(_: int) -> ProcessRef | None:
        raise PermissionError

    ref = ref_of(child.pid)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(PermissionError):
        Pinned.pin(ref, fails)
    assert set(os.listdir("/proc/self/fd")) == before


def test_wait_any_names_those_that_left_and_only_those(child: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen(["sleep", "600"]) as other, pin(child.pid) as stays, pin(other.pid) as leaves:
        other.kill()
        assert wait_any([stays, leaves], 10) == [leaves]


def test_what_we_may_not_signal_says_so() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give it up")
    with subprocess.Popen(["sleep", "600"]) as process:
        ref = ref_of(process.pid)
        child = os.fork()
        if child == 0:
            try:
                os.setuid(65534)
                pinned = Pinned.pin(ref, lambda _: ref)
                assert pinned is not None
                try:
                    pinned.send(signal.SIGTERM)
                except PermissionError:
                    os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert process.poll() is None
        process.kill()
