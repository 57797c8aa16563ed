"""The parts of the daemon that need no node: its talk with systemd, its entries, its second look at the driver."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hostd.clock import boot_ticks_now
from hostd.service import processes, recovery
from hostd.service.notify import Notify, passed_listener, watchdog_period_s
from hostd.service.server import Server


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield sock


@pytest.fixture(params=["python3-systemd", "broken", "missing"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is installed in place of systemd.daemon."""
    if request.param == "python3-systemd":
        pytest.importorskip("systemd.daemon")
    else:
        wrong = None if request.param == "missing" else ModuleType("systemd")
        monkeypatch.setitem(sys.modules, "systemd", wrong)  # type: ignore[arg-type]
        monkeypatch.setitem(sys.modules, "systemd.daemon", None)  # type: ignore[arg-type]
    return str(request.param)


def test_systemd_hears_it_with_and_without_its_library(systemd: socket.socket, library: str) -> None:
    notify = Notify()
    notify("READY=1", "STATUS=idle")
    assert systemd.recv(100) == b"READY=1\nSTATUS=idle"


def test_a_status_that_has_not_changed_is_not_said_again(systemd: socket.socket) -> None:
    notify = Notify()
    for text in ("idle", "idle", "at work", "at work", "idle"):
        notify.status(text)
    systemd.setblocking(False)
    assert [systemd.recv(100) for _ in range(3)] == [b"STATUS=idle", b"STATUS=at work", b"STATUS=idle"]
    with pytest.raises(BlockingIOError):
        systemd.recv(100)


def test_without_systemd_nothing_is_said_and_a_dead_one_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str
) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    Notify()("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "nobody"))
    Notify()("READY=1")


@pytest.mark.parametrize(
    "usec, pid, expected",
    [
        ("60000000", "", 30.0),
        ("60000000", "1", None),
        ("0", "", None),
        ("", "", None),
        ("soon", "", None),
        ("-5", "", None),
    ],
)
def test_the_watchdog_is_fed_at_half_its_time(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str, expected: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.setenv("WATCHDOG_PID", pid or str(os.getpid()))
    assert watchdog_period_s() == expected


def test_a_socket_for_somebody_else_is_not_taken(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    for pid in ("1", "", "x"):
        monkeypatch.setenv("LISTEN_PID", pid)
        monkeypatch.setenv("LISTEN_FDS", "1")
        assert passed_listener() is None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(str(tmp_path / "s"), {})
    yield made
    made.stop()
    made.run()


def turn(server: Server, done: Callable[[], bool]) -> None:
    for _ in range(1000):
        if done():
            return
        server._loop.turn()
    raise AssertionError("it never came")


def test_the_end_of_a_process_is_an_event(server: Server) -> None:
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    ended: list[int] = []
    assert processes.when_ended(server, pid, lambda: ended.append(pid))
    os.close(read)
    os.close(write)
    turn(server, lambda: bool(ended))
    os.waitpid(pid, 0)
    assert ended == [pid]
    assert not processes.when_ended(server, pid, lambda: None), "gone already"
    assert not processes.when_ended(server, 0, lambda: None)


def test_a_fault_in_one_callback_costs_the_others_nothing(tmp_path: Path) -> None:
    logged: list[str] = []
    server = Server(str(tmp_path / "s"), {}, log=logged.append)
    read, write = os.pipe()
    seen: list[int] = []

    def broken(_events: int) -> None:
        os.read(read, 1)
        raise ValueError("on purpose")

    server.watch(read, broken)
    server.call_at(0.0, lambda: seen.append(1))
    os.write(write, b"x")
    turn(server, lambda: bool(seen and logged))
    assert "on purpose" in logged[0]
    server.unwatch(read)
    os.close(read)
    os.close(write)
    server.stop()
    server.run()
    assert not select.select([], [], [], 0)[0]


@pytest.mark.parametrize(
    ("age_s", "timeout_s", "finished"),
    [(0, None, True), (180, None, True), (240, None, False), (240, 20, False), (600, 600, True), (700, 600, False)],
)
def test_a_release_that_was_cut_off_is_finished_only_within_its_own_time(
    age_s: int, timeout_s: int | None, finished: bool
) -> None:
    """Who holds a GPU long after it was never meant by whoever asked."""
    options = {} if timeout_s is None else {"timeout_s": timeout_s}
    at_ticks = boot_ticks_now() - age_s * os.sysconf("SC_CLK_TCK")
    why = recovery._why_not({"at_ticks": at_ticks, "owner": "daemon", "event": None, "options": options}, 1)
    assert (why == "") is finished and (finished or "s old" in why)
