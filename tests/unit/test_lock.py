"""One release per container, whoever performs it; real locks, real processes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.errors import BusyError, InterruptedRelease
from hostd.lock import acquire, ensure_run_dir, is_held, read_owner, try_lock
from tests.product_command import ROOT

HOLD = """
import sys
sys.path.insert(0, sys.argv[1])
from hostd.lock import try_lock
lock = try_lock(129, sys.argv[2])
print("held" if lock else "busy", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def other(run_dir: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock of container 129."""
    command = [sys.executable, "-I", "-c", HOLD, str(ROOT), run_dir]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_the_lock_is_exclusive_per_container_and_given_back(run_dir: str) -> None:
    first = try_lock(129, run_dir)
    assert first is not None and try_lock(129, run_dir) is None
    other = try_lock(130, run_dir)
    assert other is not None
    first.close()
    first.close()
    with acquire(129, wait=False, timeout_s=0, run_dir=run_dir):
        assert is_held(129, run_dir) and is_held(130, run_dir) and not is_held(131, run_dir)
    other.close()
    assert not is_held(129, run_dir) and not is_held(130, run_dir)


def test_a_limit_on_the_size_of_files_keeps_nobody_from_the_lock(run_dir: str) -> None:
    """RLIMIT_FSIZE of whoever started us: the owner's pid is a hint and may be missing."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with acquire(129, wait=False, timeout_s=0, run_dir=run_dir):
            assert is_held(129, run_dir) and read_owner(129, run_dir) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_looking_whether_it_is_held_makes_nothing(run_dir: str) -> None:
    assert not is_held(129, run_dir) and not os.path.exists(run_dir)


def test_without_waiting_it_is_busy_and_names_the_owner(run_dir: str, other: subprocess.Popen[str]) -> None:
    with pytest.raises(BusyError) as caught:
        acquire(129, wait=False, timeout_s=60, run_dir=run_dir)
    assert f"(pid {other.pid})" in caught.value.message and read_owner(129, run_dir) == other.pid


def test_waiting_ends_at_the_limit(run_dir: str, other: subprocess.Popen[str]) -> None:
    told: list[int] = []
    begun = time.monotonic()
    with pytest.raises(BusyError):
        acquire(129, wait=True, timeout_s=0.3, run_dir=run_dir, on_wait=lambda pid, _: told.append(pid))
    assert 0.3 <= time.monotonic() - begun < 10 and told == [other.pid]


def test_waiting_can_be_interrupted(run_dir: str, other: subprocess.Popen[str]) -> None:
    def interrupted() -> None:
        raise InterruptedRelease("interrupted")

    with pytest.raises(InterruptedRelease):
        acquire(129, wait=True, timeout_s=60, run_dir=run_dir, check=interrupted)
    assert other.poll() is None


def test_a_killed_owner_gives_it_back(run_dir: str, other: subprocess.Popen[str]) -> None:
    other.kill()
    with acquire(129, wait=True, timeout_s=30, run_dir=run_dir):
        assert read_owner(129, run_dir) == os.getpid()


def test_an_executed_program_does_not_inherit_it(run_dir: str) -> None:
    lock = try_lock(129, run_dir)
    assert lock is not None
    with subprocess.Popen(["sleep", "1000"], close_fds=False) as child:
        lock.close()
        again = try_lock(129, run_dir)
        assert again is not None
        again.close()
        child.kill()


def test_the_directory_is_for_root_alone(run_dir: str) -> None:
    ensure_run_dir(run_dir)
    ensure_run_dir(run_dir)
    assert os.stat(run_dir).st_mode & 0o777 == 0o700


def test_a_lock_file_that_is_a_link_is_not_followed(run_dir: str, tmp_path: Path) -> None:
    os.makedirs(f"{run_dir}/locks")
    target = tmp_path / "victim"
    target.write_text("precious")
    os.symlink(target, f"{run_dir}/locks/129.lock")
    lock = try_lock(129, run_dir)
    assert lock is not None and lock.path == run_dir  # the directory, as on a full /run: a release is never skipped
    lock.close()
    assert target.read_text() == "precious" and not is_held(129, run_dir)


@pytest.mark.parametrize("text", ["", "x", "-", "12x"])
def test_a_half_written_owner_is_unknown(run_dir: str, text: str) -> None:
    os.makedirs(f"{run_dir}/locks")
    Path(f"{run_dir}/locks/129.lock").write_text(text)
    assert read_owner(129, run_dir) == 0
