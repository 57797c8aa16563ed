"""/proc/PID: parsers on text, the reader on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hostd.model import ProcessRef
from hostd.system import procfs
from hostd.system.procfs import Procfs, parse_cgroup, parse_stat, parse_status, parse_tracer


@contextmanager
def running(code: str) -> Iterator[int]:
    """A Python process that has run `code` and waits; its pid."""
    script = f"{code}\nprint('ready', flush=True)\nimport sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child.pid
        finally:
            child.kill()


RENAME = "import ctypes; ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)"


# --- parsers ---


def stat_line(comm: bytes, pid: int = 7, ppid: int = 1, start: int = 99) -> bytes:
    return b"%d (%s) S %d " % (pid, comm, ppid) + b"0 " * 9 + b"30 12 0 0 20 0 4 0 %d 0 0\n" % start


@given(st.binary(max_size=64), st.integers(1, 2**22), st.integers(0, 2**22), st.integers(0, 2**63))
def test_a_stat_line_is_read_right_whatever_the_name_is(comm: bytes, pid: int, ppid: int, start: int) -> None:
    fields = parse_stat(stat_line(comm, pid, ppid, start))
    assert fields == procfs.StatFields(pid, comm, "S", ppid, 42, 4, start)


@given(st.binary(max_size=300))
def test_what_is_no_stat_line_raises_value_error_and_nothing_else(text: bytes) -> None:
    try:
        parse_stat(text)
    except ValueError:
        pass


@given(st.lists(st.integers(1, 2**22), min_size=1, max_size=32), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_status_gives_every_level_and_a_pending_sigkill(pids: list[int], task: int, group: int) -> None:
    text = (
        b"Name:\tx\\nUid:\t5\nState:\tS (sleeping)\nTgid:\t7\nUid:\t1000\t0\t0\t0\nNStgid:\t1\nNSpid:\t"
        + b"\t".join(b"%d" % pid for pid in pids)
        + b"\nThreads:\t3\nSigPnd:\t%016x\nShdPnd:\t%016x\nSigBlk:\tffffffffffffffff\n" % (task, group)
    )
    fields = parse_status(text)
    assert fields == procfs.StatusFields(1000, 7, tuple(pids), 3, bool((task | group) & 0x100))


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (b"0::/lxc/129/ns\n", "/lxc/129/ns"),
        (b"9:name=systemd:/x\n8:pids:/y\n0::/lxc/129\n", "/lxc/129"),
        (b"0::/lxc/129/ns/a (deleted)\n", "/lxc/129/ns/a"),
        (b"0::/lxc/129/ns/a:b 0::/c\n", "/lxc/129/ns/a:b 0::/c"),
        (b"9:name=systemd:/lxc/129\n", ""),
        (b"", ""),
        (b"0::/\xff\n", "/\udcff"),
    ],
)
def test_the_v2_path_is_found_on_unified_and_hybrid_hosts(text: bytes, path: str) -> None:
    assert parse_cgroup(text) == path


# --- the reader ---


def test_a_real_process_is_read_whole() -> None:
    with running("pass") as pid:
        process = Procfs().read_process(pid)
        assert process is not None
        assert (process.pid, process.ppid, process.uid) == (pid, os.getpid(), os.getuid())
        assert process.pidns == os.stat("/proc/self/ns/pid").st_ino
        assert process.ns_pids == ()
        assert process.threads == 1
        assert process.cgroup.startswith("/")
        assert process.ref == Procfs().read_ref(pid)
        assert not process.is_zombie


@pytest.mark.parametrize("name", [b"VLLM::EngineCor", b") S 1 (", b"a\nUid:\t0\nb", b"\xff\xfe \\n", b")))"])
def test_a_hostile_name_changes_nothing_but_the_name(name: bytes) -> None:
    with running(RENAME.format(name=name)) as pid:
        process = Procfs().read_process(pid)
        assert process is not None
        assert (process.ppid, process.uid, process.threads) == (os.getpid(), os.getuid(), 1)
        process.comm.encode("utf-8")  # never a surrogate


def test_a_pid_that_nobody_has_is_gone_and_not_an_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    fs = Procfs()
    assert fs.read_process(child.pid) is None
    assert fs.read_ref(child.pid) is None
    assert fs.cpu_ticks(child.pid) is None
    assert fs.threads(child.pid) == []
    assert fs.task_state(child.pid, child.pid) is None
    assert fs.read_stuck(child.pid) == []


def test_a_missing_root_is_an_error_and_not_an_empty_node(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Procfs(str(tmp_path / "none")).pids()


def test_pids_lists_us_and_leaves_out_what_is_no_number() -> None:
    assert os.getpid() in Procfs().pids()


def test_a_zombie_is_read_and_seen_as_one() -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    process = Procfs().read_process(child.pid)
    child.wait()
    assert process is not None
    assert process.is_zombie


DEAD_LEADER = (
    "import ctypes, os, threading\n"
    "def live():\n"
    "    while open('/proc/%d/stat' % os.getpid()).read().rsplit(')')[1].split()[0] != 'Z': pass\n"
    "    os.write(1, b'ready\\n')\n"
    "    os.read(0, 1)\n"
    "threading.Thread(target=live).start()\n"
    "ctypes.CDLL(None).syscall(60, 0)"
)


def test_a_dead_leader_with_a_live_thread_is_no_zombie() -> None:
    with running(DEAD_LEADER) as pid:
        process = Procfs().read_process(pid)
        assert process is not None
        assert process.state == "Z"
        assert process.threads == 2
        assert not process.is_zombie
        tids = Procfs().threads(pid)
        assert sorted(filter(None, (Procfs().task_state(pid, tid) for tid in tids))) in (["S", "Z"], ["R", "Z"])


def test_threads_are_listed() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert thread.native_id in Procfs().threads(os.getpid())
    finally:
        stop.set()
        thread.join()


def test_cpu_time_grows_with_work() -> None:
    before = Procfs().cpu_ticks(os.getpid())
    assert before is not None
    while (Procfs().cpu_ticks(os.getpid()) or 0) < before + 2:
        sum(range(100_000))


def test_a_stopped_process_that_was_killed_is_not_said_to_be_stuck_but_told_as_it_is() -> None:
    with running("pass") as pid:
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        (stuck,) = Procfs().read_stuck(pid)
        assert stuck.ref == Procfs().read_ref(pid)
        assert (stuck.tid, stuck.state, stuck.kill_pending) == (pid, "T", False)


@pytest.mark.root
def test_a_sleeping_task_shows_where_it_waits() -> None:
    with running("pass") as pid:
        (stuck,) = Procfs().read_stuck(pid)
        assert "pipe" in stuck.stack
        assert stuck.ref == ProcessRef(pid, stuck.ref.start_time)


def test_a_tree_of_text_serves_as_proc(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    here = tmp_path / "4711"
    (here / "task" / "4711").mkdir(parents=True)
    (here / "stat").write_bytes(stat_line(b"x (y) z", 4711, 1, 12345))
    (here / "status").write_bytes(b"Name:\tx\nUid:\t1000\t0\t0\t0\nNSpid:\t4711\t40\t2\nThreads:\t1\n")
    (here / "cgroup").write_bytes(b"0::/lxc/129/ns\n")
    fs = Procfs(str(tmp_path))
    assert fs.pids() == [4711]
    process = fs.read_process(4711)
    assert process is not None
    assert (process.comm, process.ns_pids, process.start_time) == ("x (y) z", (40, 2), 12345)
    assert process.pidns == 0


@pytest.mark.parametrize(("text", "pid"), [
    (b"Name:\tx\nPid:\t7\nTracerPid:\t4711\nUid:\t0\n", 4711), (b"Name:\tx\nTracerPid:\t0\n", 0), (b"", 0),
    (b"Name:\tTracerPid:\t9\nTracerPid:\t0\n", 0), (b"Name:\tx\nTracerPid:", 0),
])
def test_the_tracer_is_read(text: bytes, pid: int) -> None:
    assert parse_tracer(text) == pid
