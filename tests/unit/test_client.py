"""The caller's side, against the real server and against sockets that are none of ours."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd import errors
from hostd.service import client, interface, server, varlink
from tests.unit.test_server import METHODS, fast, let_go
from tests.unit.varlink_harness import ServerProcess


@pytest.fixture
def room() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="vl"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def served(room: Path) -> Iterator[ServerProcess]:
    with ServerProcess(room / "s", METHODS) as process:
        yield process


def refused(path: Path | str, timeout: float = 3.0) -> str:
    """What DaemonAbsent says; it must come soon after `timeout`."""
    begun = time.monotonic()
    with pytest.raises(client.DaemonAbsent) as caught:
        client.connect(str(path), timeout)
    assert time.monotonic() - begun < timeout + 1.0
    return str(caught.value)


# --- calls ---


def test_calls_on_one_connection_go_one_after_the_other(served: ServerProcess) -> None:
    with client.connect(served.path) as it:
        assert it.call("Echo", {"text": "é"})["said"] == "é"
        assert it.call("Count", {"n": 2})["sum"] == 2
        replies = list(it.call_more("Count", {"n": 3}))
        assert [r.get("progress") for r in replies] == [0, 1, 2, None]
        assert replies[-1]["sum"] == 3
        assert "method Release" in str(
            it.call("org.varlink.service.GetInterfaceDescription", {"interface": interface.INTERFACE})["description"]
        )


def test_typed_errors_are_the_exceptions_that_were_raised(served: ServerProcess) -> None:
    with client.connect(served.path) as it:
        with pytest.raises(errors.NoSuchContainerError) as caught:
            it.call("NoContainer")
        assert (caught.value.next_step, caught.value.vmid) == ("pct list", 7)
        with pytest.raises(errors.BusyError):
            list(it.call_more("Misbehave", {"how": "busy"}))
        assert it.call("Echo", {"text": "x"})


def test_what_a_killed_worker_left_undone_the_caller_does_itself(served: ServerProcess) -> None:
    with client.connect(served.path) as it:
        with pytest.raises(client.DaemonLost, match="signal 9"):
            it.call("Misbehave", {"how": "kill"})
        assert it.call("Echo", {"text": "x"})


def test_what_the_daemon_has_no_process_for_the_caller_does_itself(served: ServerProcess) -> None:
    """No descriptor is left for a worker's pipe (fork(2) saying EAGAIN ends the same way: tests/integration/daemon)."""
    with client.connect(served.path) as it:
        before = resource.prlimit(served.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        with pytest.raises(client.DaemonLost, match="cannot start a worker: Too many open files"):
            it.call("Count", {"n": 2})
        resource.prlimit(served.pid, resource.RLIMIT_NOFILE, before)
        assert it.call("Count", {"n": 2})["sum"] == 2


@pytest.mark.parametrize("what", [OSError(errno.EMFILE, "x"), BlockingIOError(errno.EAGAIN, "x"), MemoryError()], ids=repr)
def test_what_a_worker_has_nothing_left_for_the_caller_does_itself(room: Path, what: Exception) -> None:
    def fail(*_: object) -> dict[str, object]:
        raise what

    methods = {"Fail": server.Forked(lambda params: params.no_others(), fail)}
    with ServerProcess(room / "s", methods) as served, client.connect(served.path) as it:
        replies = it.call_more("Fail")
        with pytest.raises(client.DaemonLost, match="the worker cannot do it"):
            next(replies)


def test_what_another_version_does_not_know_the_caller_does_itself(served: ServerProcess) -> None:
    """A method, a parameter, an error: the work is done here, and a request that is wrong is found to be so here."""
    with client.connect(served.path) as it:
        with pytest.raises(client.DaemonLost, match="MethodNotFound"):
            it.call("FromTheFuture")
        with pytest.raises(client.DaemonLost, match="InvalidParameter"):
            it.call("Echo", {"text": 5})


@pytest.mark.parametrize("name", ["ExpectedMore", "PermissionDenied", "Quantum"])
def test_an_error_that_this_version_does_not_know_leaves_the_work_to_the_caller(room: Path, name: str) -> None:
    def fail(_params: varlink.Params, _caller: server.Caller) -> dict[str, object]:
        raise varlink.VarlinkError(f"{interface.SERVICE}.{name}", {"message": 7})

    with ServerProcess(room / "s", {"Fail": server.Inline(fail)}) as served, client.connect(served.path) as it:
        replies = it.call_more("Fail")
        with pytest.raises(client.DaemonLost, match=name):
            next(replies)


def test_a_known_error_with_an_unknown_reason_keeps_its_meaning() -> None:
    facts: dict[str, object] = {"reason": "refused-by-quantum", "message": "no", "vmid": "x", "next_step": None}
    found = interface.error_from(f"{interface.INTERFACE}.Refused", facts)
    assert isinstance(found, errors.RefusedError) and (found.reason, found.message, found.vmid) == ("refused", "no", None)
    assert interface.error_from(f"{interface.INTERFACE}.Busy", {"reason": []}) is not None


def test_large_replies_come_whole(served: ServerProcess) -> None:
    with client.connect(served.path) as it:
        assert len(str(it.call("Large", {"size": 5_000_000})["x"])) == 5_000_000


def test_cancel_stops_the_work_and_its_end_is_heard(served: ServerProcess, room: Path) -> None:
    os.mkfifo(room / "go")
    with client.connect(served.path) as it:
        replies = it.call_more("Wait", {"go": str(room / "go"), "on_disconnect": "cancel"})
        assert next(replies)["progress"] == "begun"
        it.cancel()
        with pytest.raises(errors.InterruptedRelease):
            next(replies)


# --- a daemon that goes away ---


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_in_the_middle_is_lost(room: Path, how: signal.Signals) -> None:
    os.mkfifo(room / "go")
    with ServerProcess(room / "s", METHODS) as served, client.connect(served.path) as it:
        replies = it.call_more("Wait", {"go": str(room / "go")})
        next(replies)
        served.stop(how)
        with pytest.raises(client.DaemonLost):
            next(replies)
        with pytest.raises(client.DaemonLost):
            it.call("Echo", {"text": "x"})


def test_a_daemon_that_says_nothing_any_more_is_lost_after_the_timeout(served: ServerProcess) -> None:
    with client.connect(served.path) as it:
        os.kill(served.pid, signal.SIGSTOP)
        try:
            with pytest.raises(client.DaemonLost):
                it.call("Echo", {"text": "x"}, timeout=0.2)
        finally:
            os.kill(served.pid, signal.SIGCONT)


def test_a_signal_that_does_not_interrupt_the_wait_is_acted_on_too(served: ServerProcess) -> None:
    """As one that comes right before the system call: here another thread takes it, and the call never hears of it."""
    seen: list[int] = []

    def twice() -> None:
        for already in range(2):
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
            until = time.monotonic() + 10
            while len(seen) == already and time.monotonic() < until:
                time.sleep(0.001)
        counted.append(len(seen))
        os.kill(served.pid, signal.SIGCONT)

    counted: list[int] = []
    previous = signal.signal(signal.SIGUSR2, lambda number, _: seen.append(number))
    with client.connect(served.path) as it:
        os.kill(served.pid, signal.SIGSTOP)
        sender = threading.Thread(target=twice)
        sender.start()
        try:
            assert it.call("Echo", {"text": "x"}, timeout=60.0)
        finally:
            sender.join()
            signal.signal(signal.SIGUSR2, previous)
    assert counted == [2]


def test_work_that_was_lost_with_the_call_saying_continue_goes_on(served: ServerProcess, room: Path) -> None:
    os.mkfifo(room / "go")
    with client.connect(served.path) as it:
        next(it.call_more("Wait", {"go": str(room / "go"), "on_disconnect": "continue"}))
    gate = let_go(str(room / "go"))
    assert served.finished()["reply"] == {"parameters": {"done": True}}
    os.close(gate)


# --- nobody there, or the wrong one ---


def test_no_socket_is_no_daemon(room: Path) -> None:
    assert "No such file" in refused(room / "none")


def test_a_socket_that_nobody_listens_on_is_no_daemon(room: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(room / "s"))
    assert "refused" in refused(room / "s")


def test_a_listener_that_never_answers_is_no_daemon(room: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(room / "s"))
        sock.listen()
        assert "no answer" in refused(room / "s", 0.2)


def test_a_full_backlog_is_no_daemon(room: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(room / "s"))
        sock.listen(0)
        waiting = []
        try:
            for _ in range(10):
                one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                waiting.append(one)
                one.connect(str(room / "s"))
        except BlockingIOError:
            pass
        refused(room / "s", 0.2)
        for one in waiting:
            one.close()


@pytest.mark.parametrize("answer", [b"{\0", b"[]\0", b"\xff\0", b"[" * 100_000 + b"\0", b'{"a":1}{}\0', b""])
def test_nonsense_instead_of_an_answer_is_no_daemon(room: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(room / "s"))
        sock.listen()
        pid = os.fork()
        if pid == 0:
            try:
                peer, _ = sock.accept()
                peer.recv(4096)
                peer.sendall(answer)
            finally:
                os._exit(0)
        refused(room / "s")
        os.waitpid(pid, 0)


def test_a_socket_that_is_not_roots_is_not_trusted(room: Path) -> None:
    with ServerProcess(room / "s", METHODS) as served:
        os.chown(served.path, 65534, 65534)
        assert "not a socket of root's" in refused(served.path)


def test_a_directory_that_others_can_change_is_not_trusted(room: Path) -> None:
    with ServerProcess(room / "s", METHODS) as served:
        os.chmod(room, 0o777)
        assert "others than root" in refused(served.path)
        os.chmod(room, 0o700)


def test_a_link_or_a_file_is_not_trusted(room: Path) -> None:
    (room / "file").write_text("x")
    (room / "link").symlink_to("s")
    with ServerProcess(room / "s", METHODS):
        assert "not a socket" in refused(room / "file")
        assert "not a socket" in refused(room / "link")


def test_a_listener_that_is_not_root_is_not_trusted(room: Path) -> None:
    """Root's path, but whoever called listen(2) is another: SO_PEERCRED names that one."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(room / "s"))
        pid = os.fork()
        if pid == 0:
            try:
                os.setuid(65534)
                sock.listen()
                sock.accept()[0].recv(1)
            finally:
                os._exit(0)
        while True:
            said = refused(room / "s")
            if "refused" not in said:
                break
        assert "not root" in said
        os.waitpid(pid, 0)


# --- JSON without `json` ---


@pytest.mark.parametrize(
    "value",
    [{}, {"a": [1, -2, 3.5, 1e300, True, False, None, 'x\n\x00\x1b"\\é🚀\ud800']}, {"a": {"b": {"c": [[[]]]}}}],
)
def test_our_quick_json_is_json(value: dict[str, object]) -> None:
    assert json.loads(client.encode(value)[:-1]) == value
    assert client.decode(json.dumps(value).encode()) == value
    assert client.decode(b" \n" + json.dumps(value, indent=2, ensure_ascii=True).encode() + b" ") == value


def test_the_slow_way_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    value = {"a": [1, "é", None]}
    quick = client.decode(client.encode(value)[:-1])
    monkeypatch.setattr(client, "_scan", None)
    monkeypatch.setattr(client, "_chunks", None)
    assert client.decode(client.encode(value)[:-1]) == quick == value


# What `pve-gpu-release 129` with a daemon, and a hook, load: `signal` with `enum`, and `typing` with `re`, alone would be a
# third of that.
QUICK = ["hostd.service.client", "hostd.hook", "hostd.cli.main, hostd.cli.quick, hostd.cli.release, hostd.cli.remote"]


@pytest.mark.parametrize("modules", QUICK)
def test_importing_the_client_and_who_uses_it_loads_nothing_heavy(modules: str) -> None:
    code = f"import sys; b = set(sys.modules); import {modules}; print(*sorted(set(sys.modules) - b))"
    path = str(Path(client.__file__).parents[2])
    loaded = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {path!r}); {code}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    of_every_python = {"os", "os.path", "posixpath", "genericpath", "stat", "_collections_abc", "abc"}
    built_in = {*sys.builtin_module_names, "_socket", "_json"}  # the latter two are in Debian's
    ours = {m for m in loaded if m.partition(".")[0] == "hostd"}
    assert set(loaded) - ours - of_every_python - built_in <= {"__future__"}, loaded
    assert not {"hostd.model", "hostd.service.varlink", "hostd.verdicts"} & ours


def test_the_limits_of_client_and_server_agree() -> None:
    assert client.MAX_REPLY == varlink.MAX_REPLY
    assert server.Limits().idle_s > client.CONNECT_TIMEOUT_S
    assert fast().idle_s == server.Limits().idle_s
