"""Entries reach a real journald; a journal that is slow, deaf or absent is never in the way."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hostd.system import journal
from tests.unit.journald import AVAILABLE, PrivateJournald

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not AVAILABLE, reason="needs root, systemd-journald and unshare"),
]

PRELUDE = """
import json, os, sys, time, select
from hostd.system.journal import Journal
def entry(text, *more): return (("MESSAGE", text), ("PRIORITY", "6"), ("PVE_VMID", "129"), *more)
def lost(count): return entry(f"dropped {count}")
"""


@pytest.fixture(scope="module")
def node() -> Iterator[PrivateJournald]:
    with PrivateJournald() as made:
        yield made


@pytest.fixture
def deaf() -> Iterator[PrivateJournald]:
    with PrivateJournald("deaf") as made:
        yield made


def messages(node: PrivateJournald, *matches: str) -> list[object]:
    return [found["MESSAGE"] for found in node.entries(*matches)]


WITHOUT_LIBRARY = "import sys; sys.modules['systemd'] = None\n"


@pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "native protocol"])
def test_entries_arrive_in_order_with_all_values_and_marked_as_root_s(node: PrivateJournald, setup: str) -> None:
    tag = "T_NATIVE" if setup else "T_LIBRARY"
    out = node.python(
        setup + PRELUDE + "j = Journal()\n"
        f"for i in range(300): j.send(entry(f'n {{i}}', ('{tag}', 'x'), ('HOLDER_PID', '1'), ('HOLDER_PID', '2')))\n"
        "print(j.flush(10), j.pending, j.dropped, j.close(5), j.pid)"
    )
    assert out.split() == ["True", "0", "0", "True", "0"]
    found = node.entries(f"{tag}=x")
    assert [f["MESSAGE"] for f in found] == [f"n {i}" for i in range(300)]
    assert all(f["HOLDER_PID"] == ["1", "2"] and f["_UID"] == "0" for f in found)
    assert node.processes() == []


@pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "native protocol"])
def test_a_newline_in_a_value_is_a_value_and_no_entry_or_field_of_its_own(node: PrivateJournald, setup: str) -> None:
    """The audit escapes anyway; this is the second line of defence."""
    tag = "F_NATIVE" if setup else "F_LIBRARY"
    evil = "x\\nPVE_VMID=666\\n\\nMESSAGE=forged\\n_UID=0\\nMESSAGE_ID=0000"
    node.python(
        setup + PRELUDE + f"j = Journal(); j.send(entry('{evil}', ('{tag}', 'x\\nMESSAGE=forged'))); j.close(10)"
    )
    (found,) = [f for f in node.entries("PVE_VMID=129") if tag in f]
    assert found["MESSAGE"] == evil.replace("\\n", "\n")
    assert found["PVE_VMID"] == "129"
    assert messages(node, "PVE_VMID=666") == []


def test_the_last_entries_of_a_command_arrive_without_waiting_for_them(node: PrivateJournald) -> None:
    node.python(PRELUDE + "j = Journal(); j.send(entry('last words', ('T_LAST', 'x'))); os._exit(0)")
    node.wait_for_nobody()
    assert messages(node, "T_LAST=x") == ["last words"]


def test_signals_to_the_group_do_not_end_the_child(node: PrivateJournald) -> None:
    node.python(
        PRELUDE + "import signal\nos.setpgrp()\n"
        "for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): signal.signal(n, signal.SIG_IGN)\n"
        "j = Journal(); j.send(entry('before', ('T_SIGNAL', 'x'))); j.flush(10)\n"
        "for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP): os.killpg(0, n); os.kill(j.pid, n)\n"
        "j.send(entry('after', ('T_SIGNAL', 'x'))); assert j.close(10)"
    )
    assert messages(node, "T_SIGNAL=x") == ["before", "after"]


def test_the_child_holds_nothing_of_its_parent(node: PrivateJournald) -> None:
    out = node.python(
        PRELUDE + "f = open('/etc/passwd'); r, w = os.pipe(); os.chdir('/etc')\n"
        "j = Journal(); j.send(entry('x')); j.flush(10)\n"
        "d = f'/proc/{j.pid}/fd'; until = time.monotonic() + 10; fds = 'pipe:'\n"
        "while 'pipe:' in str(fds) and time.monotonic() < until:  # flush()'s is closed a moment after the answer\n"
        "    try: fds = {n: os.readlink(f'{d}/{n}') for n in os.listdir(d)}\n"
        "    except FileNotFoundError: pass\n"
        "print(json.dumps([fds, os.readlink(f'/proc/{j.pid}/cwd'), os.getsid(j.pid) == j.pid])); j.close(5)"
    )
    fds, cwd, own_session = json.loads(out)
    assert {fds.pop(n) for n in ("0", "1", "2")} == {"/dev/null"}
    assert all(target.startswith("socket:") for target in fds.values())
    assert len(fds) <= 2
    assert (cwd, own_session) == ("/", True)


def test_a_child_that_was_killed_is_replaced(node: PrivateJournald) -> None:
    out = node.python(
        PRELUDE + "j = Journal(); j.send(entry('one', ('T_KILLED', 'x'))); j.flush(10); first = j.pid\n"
        "os.kill(first, 9); os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)\n"
        "j.send(entry('two', ('T_KILLED', 'x')))\n"
        "until = time.monotonic() + 10\n"
        "while j.pending and time.monotonic() < until: select.select([], [], [], 0.05); j.pump()\n"
        "print(j.close(10), j.dropped)"
    )
    assert out.split() == ["True", "0"]
    assert messages(node, "T_KILLED=x") == ["one", "two"]


def test_a_forked_worker_shares_the_child(node: PrivateJournald) -> None:
    node.python(
        PRELUDE + "j = Journal(); j.send(entry('parent', ('T_FORK', 'x'))); j.flush(10)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    j.send(entry('worker', ('T_FORK', 'x'))); ok = j.flush(10) and j.pid == 0; os._exit(0 if ok else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "j.send(entry('parent again', ('T_FORK', 'x'))); assert j.close(10)"
    )
    assert messages(node, "T_FORK=x") == ["parent", "worker", "parent again"]


def test_a_worker_whose_socket_was_closed_writes_into_nobody_else_s_descriptor(node: PrivateJournald) -> None:
    out = node.python(
        PRELUDE + "import socket\nj = Journal(); j.send(entry('x')); j.flush(10); fd = j.fileno()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    a, b = socket.socketpair(); os.dup2(a.fileno(), fd); b.setblocking(False)\n"
        "    j.send(entry('elsewhere', ('T_REUSED', 'x'))); ok = j.close(10)\n"
        "    try: b.recv(1); ok = False\n"
        "    except BlockingIOError: pass\n"
        "    os._exit(0 if ok else 1)\n"
        "print(os.waitpid(pid, 0)[1]); j.close(5)"
    )
    assert out.strip() == "0"
    assert messages(node, "T_REUSED=x") == ["elsewhere"]


def test_nothing_is_lost_while_journald_restarts(node: PrivateJournald) -> None:
    code = PRELUDE + (
        "j = Journal()\n"
        "for word in ('before', 'down', 'up'):\n"
        "    sys.stdin.readline(); j.send(entry(word, ('T_RESTART', 'x'))); print('ok', flush=True)\n"
        "print(j.close(20), j.dropped)\n"
    )
    with subprocess.Popen(
        node.command(sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        for command in (None, "stop", "start"):
            if command == "stop":  # what journald has not read dies with its socket, which systemd would keep
                node.wait_for_entry("T_RESTART=x")
            if command:
                node.tell(command)
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "ok\n"
        assert program.stdout.readline().split() == ["True", "0"]
    assert messages(node, "T_RESTART=x") == ["before", "down", "up"]


@pytest.mark.parametrize("setup", ["", WITHOUT_LIBRARY], ids=["python3-systemd", "native protocol"])
def test_a_journal_that_does_not_read_blocks_nobody_and_is_given_up_in_time(deaf: PrivateJournald, setup: str) -> None:
    out = deaf.python(
        setup + PRELUDE + "j = Journal(linger_s=1, on_drop=lost)\n"
        "slowest = 0\n"
        "for i in range(5000):\n"
        "    t = time.monotonic(); j.send(entry(f'n {i}' + 'x' * 200)); slowest = max(slowest, time.monotonic() - t)\n"
        "t = time.monotonic(); done = j.flush(0.3); waited = time.monotonic() - t\n"
        "print(json.dumps([slowest, done, waited, j.pending, j.dropped]))"
    )
    slowest, done, waited, pending, dropped = json.loads(out)
    assert slowest < 1
    assert not done
    assert 0 < pending <= journal.QUEUE_ENTRIES + 1  # one more: the entry that tells of dropped ones
    assert waited < 2
    assert dropped > 1000
    deaf.wait_for_nobody(8)


def test_what_was_dropped_is_said_once_the_journal_reads_again(deaf: PrivateJournald) -> None:
    code = PRELUDE + (
        "j = Journal(on_drop=lost)\n"
        "for i in range(3000): j.send(entry('x' * 500, ('T_DROP', 'x')))\n"
        "print(j.dropped, flush=True); sys.stdin.readline()\n"
        "print(j.flush(20), flush=True); j.send(entry('after', ('T_DROP', 'x'))); print(j.close(20))\n"
    )
    with subprocess.Popen(
        deaf.command(sys.executable, "-c", code), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        dropped = int(program.stdout.readline())
        deaf.tell("hear")
        deaf.tell("start")
        program.stdin.write("\n")
        program.stdin.flush()
        assert program.stdout.read().split() == ["True", "True"]
    found = messages(deaf, "PVE_VMID=129")
    said = [int(text.split()[1]) for text in map(str, found) if text.startswith("dropped")]
    assert sum(said) == dropped > 0
    assert found[-1] == "after"
    in_the_deaf_socket = 3000 - dropped + len(said) + 1 - len(found)  # its queue went with it
    assert 0 <= in_the_deaf_socket <= 20


def test_without_journald_nothing_is_started_and_nothing_is_said() -> None:
    with PrivateJournald("") as empty:
        done = empty.run(
            sys.executable, "-c",
            PRELUDE + "j = Journal(); j.send(entry('x')); "
            "assert (j.pid, j.fileno(), j.flush(5), j.close(5)) == (0, -1, True, True)",
        )  # fmt: skip
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("under_systemd", [False, True])
def test_without_journald_the_daemon_has_the_same_facts_on_stderr(under_systemd: bool) -> None:
    extra = ["JOURNAL_STREAM=8:1"] if under_systemd else []
    with PrivateJournald("") as empty:
        done = empty.run(
            "env", *extra, sys.executable, "-c",
            PRELUDE + "j = Journal(stderr=True)\n"
            "j.send(entry('hello', ('HOLDER_COMM', 'a \"b\"\\nc'), ('EMPTY', ''))); j.send(entry('two')); j.close(10)",
        )  # fmt: skip
    prefix = "<6>" if under_systemd else ""
    assert done.stderr.splitlines() == [
        prefix + 'hello | PVE_VMID=129 HOLDER_COMM="a \\"b\\"\\nc" EMPTY=""',
        prefix + "two | PVE_VMID=129",
    ]


def test_packing_keeps_fields_whole_and_entries_bounded() -> None:
    entry = [("A", "x"), ("A", "y=z"), ("B", "ü" * 8000), ("C", "\udcff")] + [(f"N{i}", "v" * 1000) for i in range(100)]
    fields = list(journal._unpack(journal._pack(entry)))
    assert fields[:2] == [b"A=x", b"A=y=z"]
    assert len(fields[2]) <= journal.MAX_VALUE
    fields[2].decode()
    assert fields[3] == b"C=\\udcff"
    assert sum(map(len, fields)) <= journal.MAX_ENTRY
