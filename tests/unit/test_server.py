"""The server with real sockets and real forked workers. Sentences as names."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from hostd.errors import BusyError, NoSuchContainerError
from hostd.service import interface, server, varlink
from tests.unit.varlink_harness import DEADLINE_S, IFACE, Client, ServerProcess, alive, run, until

INTERRUPTED, INTERNAL = f"{IFACE}.Interrupted", f"{IFACE}.Internal"

# --- what the server serves in these tests ---


def params_as_they_are(params: varlink.Params) -> dict[str, Any]:
    return dict(params._values)


def echo(params: varlink.Params, caller: server.Caller) -> Mapping[str, object]:
    return {"said": params.text("text"), "uid": caller.uid, "pid": caller.pid}


def no_container(params: varlink.Params, _caller: server.Caller) -> Mapping[str, object]:
    raise NoSuchContainerError("no container 7", next_step="pct list", vmid=7)


def broken(params: varlink.Params, _caller: server.Caller) -> Mapping[str, object]:
    raise ZeroDivisionError("a bug\x1b[31m")


def not_json(params: varlink.Params, _caller: server.Caller) -> Mapping[str, object]:
    return {"x": float("nan"), "y": {1, 2}}


def large(params: varlink.Params, _caller: server.Caller) -> Mapping[str, object]:
    return {"x": "x" * params.integer("size")}


def count(request: dict[str, Any], emit: server.Emit, _ctx: server.Context) -> Mapping[str, object]:
    for i in range(request["n"]):
        emit({"progress": i, "pad": "x" * request.get("pad", 0)})
    return {"sum": request["n"], "pid": os.getpid()}


def describe(_request: object, _emit: server.Emit, ctx: server.Context) -> Mapping[str, object]:
    """What this worker inherited."""
    links = {}
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            links[fd] = os.readlink(f"/proc/self/fd/{fd}")
    handlers = [s for s in signal.valid_signals() if callable(signal.getsignal(s))]
    return {
        "fds": links,
        "handlers": sorted(int(s) for s in handlers),
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "caller": [ctx.caller.pid, ctx.caller.uid],
    }


def misbehave(request: dict[str, Any], _emit: server.Emit, _ctx: server.Context) -> Mapping[str, object]:
    how = request["how"]
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "sysexit":
        raise SystemExit(4)
    if how == "busy":
        raise BusyError("another release is in flight", vmid=9)
    if how == "deep":
        value: list[object] = []
        for _ in range(100_000):
            value = [value]
        return {"x": value}
    raise RuntimeError("a bug in a worker")


def wait_for_go(request: dict[str, Any], emit: server.Emit, ctx: server.Context) -> Mapping[str, object]:
    """Says that it has begun, then waits until the test opens the fifo for writing, or until it is cancelled."""
    emit({"progress": "begun"})
    go = os.open(request["go"], os.O_RDONLY | os.O_NONBLOCK)
    poll = select.poll()
    poll.register(go, select.POLLIN)
    poll.register(ctx.cancel.fileno(), select.POLLIN)
    poll.poll()
    ctx.cancel.check()
    return {"done": True}


def stubborn(_request: object, emit: server.Emit, _ctx: server.Context) -> Mapping[str, object]:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    emit({"progress": "begun"})
    while True:
        signal.pause()


def forked(run: Any, **kw: Any) -> server.Forked:
    return server.Forked(params_as_they_are, run, streams=True, **kw)


METHODS = {
    "Echo": server.Inline(echo),
    "NoContainer": server.Inline(no_container),
    "Broken": server.Inline(broken),
    "NotJson": server.Inline(not_json),
    "Large": server.Inline(large),
    "Count": forked(count),
    "Describe": forked(describe),
    "Misbehave": forked(misbehave),
    "Wait": forked(wait_for_go, graceful=True),
    "WaitUngraceful": forked(wait_for_go),
    "Stubborn": forked(stubborn),
}


@pytest.fixture
def room() -> Iterator[Path]:
    """A short path: a socket's may have 107 bytes."""
    path = Path(tempfile.mkdtemp(prefix="vl"))
    before = len(os.listdir("/proc/self/fd"))
    yield path
    shutil.rmtree(path)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left behind"
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.fixture
def go(room: Path) -> str:
    os.mkfifo(room / "go")
    return str(room / "go")


def let_go(fifo: str) -> int:
    """Opens the gate; close the result to shut it again."""
    fd = os.open(fifo, os.O_RDWR)
    os.write(fd, b"!")
    return fd


@pytest.fixture
def served(room: Path) -> Iterator[ServerProcess]:
    with ServerProcess(room / "s", METHODS) as process:
        yield process


def fast(**kw: Any) -> server.Limits:
    return server.Limits(**{"stop_s": 2.0, **kw})


# --- answers ---


def test_an_inline_method_answers_and_knows_the_caller(served: ServerProcess) -> None:
    reply = served.client().ask("Echo", {"text": "héllo 🚀"})
    assert reply == {"parameters": {"said": "héllo 🚀", "uid": 0, "pid": os.getpid()}}


@pytest.mark.parametrize(
    ("method", "parameters", "error", "said"),
    [
        ("NoContainer", {}, f"{IFACE}.NoSuchContainer", {"reason": "no-such-container", "vmid": 7}),
        ("Echo", {"text": 5}, "org.varlink.service.InvalidParameter", {"parameter": "text"}),
        ("Echo", {"text": "\ud800"}, "org.varlink.service.InvalidParameter", {"parameter": "text"}),
        ("Nonesuch", {}, "org.varlink.service.MethodNotFound", {"method": f"{IFACE}.Nonesuch"}),
        ("Observe", {}, "org.varlink.service.MethodNotImplemented", {"method": f"{IFACE}.Observe"}),
        ("org.nonesuch.Method", {}, "org.varlink.service.InterfaceNotFound", {"interface": "org.nonesuch"}),
        ("Broken", {}, INTERNAL, {"reason": "internal-error"}),
        ("NotJson", {}, INTERNAL, {"reason": "internal-error"}),
        ("Misbehave", {"how": "busy"}, f"{IFACE}.Busy", {"reason": "busy", "vmid": 9}),
        ("Misbehave", {"how": "bug"}, INTERNAL, {"reason": "internal-error"}),
        ("Misbehave", {"how": "deep"}, INTERNAL, {"reason": "internal-error"}),
        ("Misbehave", {"how": "sysexit"}, INTERNAL, {"reason": "internal-error"}),
    ],
)
def test_every_failure_is_a_typed_error(
    served: ServerProcess, method: str, parameters: dict[str, object], error: str, said: dict[str, object]
) -> None:
    client = served.client()
    reply = client.ask(method, parameters)
    assert reply is not None and reply["error"] == error
    assert said.items() <= reply["parameters"].items()
    assert client.ask("Echo", {"text": "still here"}) is not None


def test_an_answer_that_is_too_long_is_shortened_and_is_no_failure(served: ServerProcess) -> None:
    reply = served.client().ask("Large", {"size": varlink.MAX_REPLY})
    assert reply is not None and "error" not in reply and reply["parameters"]["x"].endswith("...")


def test_a_message_never_carries_a_terminal_sequence_of_a_bug(served: ServerProcess) -> None:
    reply = served.client().ask("Broken")
    assert reply is not None and "\x1b" not in reply["parameters"]["message"]
    assert "ZeroDivisionError" in served.stderr()


def test_pipelined_calls_are_answered_in_order_also_behind_a_worker(served: ServerProcess) -> None:
    client = served.client()
    for i in range(50):
        client.say("Echo", {"text": str(i)})
        if i % 10 == 0:
            client.say("Count", {"n": 2}, more=True)
    heard = []
    for _ in range(50 + 5 * 3):
        reply = client.hear()
        assert reply is not None
        heard.append(reply["parameters"])
    expected: list[object] = []
    for i in range(50):
        expected.append(str(i))
        expected.extend([0, 1, 2] if i % 10 == 0 else [])
    assert [h.get("said", h.get("progress", h.get("sum"))) for h in heard] == expected


def test_only_who_asks_for_more_gets_progress(served: ServerProcess) -> None:
    client = served.client()
    assert client.ask("Count", {"n": 5})["parameters"]["sum"] == 5  # type: ignore[index]
    client.say("Count", {"n": 3}, more=True)
    replies = [client.hear() for _ in range(4)]
    assert [r.get("continues", False) for r in replies if r] == [True, True, True, False]


def test_a_oneway_call_has_no_reply_but_is_done(served: ServerProcess) -> None:
    client = served.client()
    client.say("Count", {"n": 1}, oneway=True)
    client.say("Echo", {"text": 5}, oneway=True)
    assert client.ask("Echo", {"text": "next"})["parameters"]["said"] == "next"  # type: ignore[index]
    assert served.finished()["reply"]["parameters"]["sum"] == 1


def test_a_oneway_call_whose_caller_left_at_once_is_done(served: ServerProcess) -> None:
    client = served.client()
    for _ in range(3):
        client.say("Count", {"n": 1}, oneway=True)
    client.close()
    assert [served.finished()["reply"]["parameters"]["sum"] for _ in range(3)] == [1, 1, 1]


def test_a_large_reply_arrives_whole(served: ServerProcess) -> None:
    size = 8 * 1024 * 1024
    reply = served.client().ask("Large", {"size": size})
    assert reply is not None and len(reply["parameters"]["x"]) == size


# --- workers ---


def test_a_worker_that_dies_is_a_typed_error_that_says_how(served: ServerProcess) -> None:
    client = served.client()
    for how, word in (("kill", "signal 9"), ("exit", "(3)")):
        reply = client.ask("Misbehave", {"how": how})
        assert reply is not None and reply["error"] == interface.LOST
        assert word in reply["parameters"]["message"]
    assert served.finished()["status"] == -9
    assert served.finished()["status"] == 3


def test_a_worker_inherits_nothing(served: ServerProcess) -> None:
    bystander = served.client()
    bystander.ask("Echo", {"text": "x"})
    reply = served.client().ask("Describe")
    assert reply is not None
    said = reply["parameters"]
    foreign = {fd: link for fd, link in said["fds"].items() if int(fd) > 2 and not link.startswith(("pipe:", "/proc/"))}
    assert not foreign, said["fds"]
    assert len([link for link in said["fds"].values() if link.startswith("pipe:")]) == 3  # answer, and the cancel pipe
    assert said["handlers"] == [] and said["blocked"] == 0
    assert said["caller"] == [os.getpid(), 0]


def test_a_lost_client_cancels_its_work(served: ServerProcess, go: str) -> None:
    client = served.client()
    assert client.ask("Wait", {"go": go, "on_disconnect": "cancel"}, more=True)["continues"]  # type: ignore[index]
    client.close()
    event = served.finished()
    assert event["reply"]["error"] == INTERRUPTED and event["status"] == 0


def test_ungraceful_work_of_a_lost_client_ends_at_once(served: ServerProcess, go: str) -> None:
    client = served.client()
    client.ask("WaitUngraceful", {"go": go}, more=True)
    client.close()
    event = served.finished()
    assert event["reply"] is None and event["status"] == -signal.SIGTERM


def test_work_goes_on_without_its_client_when_the_call_said_so(served: ServerProcess, go: str) -> None:
    client = served.client()
    client.ask("Wait", {"go": go, "on_disconnect": "continue"}, more=True)
    client.close()
    assert served.client().ask("Echo", {"text": "x"})  # the server has seen the close by now
    gate = let_go(go)
    event = served.finished()
    os.close(gate)
    assert event["reply"] == {"parameters": {"done": True}}


def test_closing_the_sending_side_cancels_where_the_call_said_so_and_the_reply_still_comes(
    served: ServerProcess, go: str
) -> None:
    client = served.client()
    client.ask("Wait", {"go": go, "on_disconnect": "cancel"}, more=True)
    client.sock.shutdown(socket.SHUT_WR)
    reply = client.hear()
    assert reply is not None and reply["error"] == INTERRUPTED
    assert client.hear() is None


def test_a_client_that_closed_its_sending_side_gets_its_answers(served: ServerProcess, go: str) -> None:
    """`printf ... | socat` does that."""
    client = served.client()
    client.say("Echo", {"text": "a"})
    client.say("Wait", {"go": go})
    client.say("Echo", {"text": "b"})
    client.sock.shutdown(socket.SHUT_WR)
    assert client.hear()["parameters"]["said"] == "a"  # type: ignore[index]
    gate = let_go(go)
    assert client.hear() == {"parameters": {"done": True}}
    os.close(gate)
    assert client.hear()["parameters"]["said"] == "b"  # type: ignore[index]
    assert client.hear() is None


def test_above_its_limit_a_lane_makes_requests_wait_in_order_and_other_lanes_go_on(room: Path, go: str) -> None:
    methods = METHODS | {"Look": forked(count, lane="look")}
    with ServerProcess(room / "s", methods, fast(workers={"work": 2, "look": 1})) as served:
        first = [served.client() for _ in range(2)]
        for client in first:
            client.ask("Wait", {"go": go}, more=True)
        waiting = [served.client() for _ in range(3)]
        for i, client in enumerate(waiting):
            client.say("Count", {"n": i})
            assert served.client().ask("Look", {"n": 1})["parameters"]["sum"] == 1  # type: ignore[index]
        until(lambda: len(served.children()) == 2, "two workers, no more")
        waiting[1].close()
        served.client().ask("Echo", {"text": "x"})
        gate = let_go(go)
        assert first[0].hear() == {"parameters": {"done": True}}
        assert waiting[0].hear()["parameters"]["sum"] == 0  # type: ignore[index]
        assert waiting[2].hear()["parameters"]["sum"] == 2  # type: ignore[index]
        os.close(gate)
        until(lambda: not served.children(), "no children")
        ended = []
        while True:
            try:
                ended.append(served.finished(0.2))
            except AssertionError:
                break
        sums = [e["reply"]["parameters"].get("sum") for e in ended if e["method"] == "Count"]
        assert sorted(sums) == [0, 2], "the request of the client that left was never begun"


def test_workers_die_with_the_daemon(room: Path, go: str) -> None:
    with ServerProcess(room / "s", METHODS) as served:
        client = served.client()
        client.ask("Wait", {"go": go, "on_disconnect": "continue"}, more=True)
        (worker,) = served.children()
        served.stop(signal.SIGKILL)
        assert client.hear() is None
        until(lambda: not alive(worker), "the worker's end")


# --- clients that misbehave ---


def test_who_is_not_root_is_told_so_and_closed(room: Path) -> None:
    os.chmod(room, 0o755)
    with ServerProcess(room / "s", METHODS, mode=0o666) as served:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                client = Client(served.path)
                client.send(varlink.encode_call(f"{IFACE}.Echo", {"text": "x"}) * 2)
                os.write(theirs, json.dumps([client.hear(), client.hear()]).encode())
            finally:
                os._exit(0)
        os.close(theirs)
        with os.fdopen(ours) as pipe:
            first, second = json.loads(pipe.read())
        os.waitpid(pid, 0)
        assert first["error"] == f"{IFACE}.NotPermitted" and first["parameters"]["reason"] == "not-root"
        assert "65534" in first["parameters"]["message"]
        assert second is None


def test_the_socket_is_for_root_alone(served: ServerProcess) -> None:
    assert os.stat(served.path).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("said", [b"", b'{"method":"io.pve.Gpu'])
def test_a_silent_or_half_open_client_is_closed(room: Path, said: bytes) -> None:
    with ServerProcess(room / "s", METHODS, fast(idle_s=0.2)) as served:
        client = served.client()
        client.send(said)
        assert client.hear() is None


def test_a_client_that_drips_bytes_is_closed_and_costs_the_others_nothing(room: Path) -> None:
    with ServerProcess(room / "s", METHODS, fast(idle_s=0.3)) as served:
        drip, other = served.client(), served.client()
        sent = 0
        with pytest.raises(OSError):
            while sent < 100_000:
                drip.send(b"x")
                sent += 1
                assert other.ask("Echo", {"text": "x"})
        assert sent < 100_000


@pytest.mark.parametrize(
    "bad",
    [
        b"hello\0",
        b"\0",
        b"[]\0",
        b"{}\0",
        b'{"method":5}\0',
        b'{"method":"a.B","parameters":[]}\0',
        b'{"method":"a.B","more":1}\0',
        b'{"method":"a.B","more":true,"oneway":true}\0',
        b'{"method":"a.B","parameters":{"x":NaN}}\0',
        b'{"method":"a.B","parameters":{"x":' + b"9" * 5000 + b"}}\0",
        b'{"method":"a.B","parameters":' + b'{"x":' * 10000 + b"1" + b"}" * 10000 + b"}\0",
        b"[" * 60000 + b"\0",
        b'"\xff\xfe"\0',
        b"x" * (varlink.MAX_CALL + 1),
    ],
)
def test_a_malformed_message_is_answered_once_and_the_connection_closed(served: ServerProcess, bad: bytes) -> None:
    client = served.client()
    client.say("Echo", {"text": "before"})
    client.send(bad)
    with contextlib.suppress(OSError):
        client.say("Echo", {"text": "after"})
    assert client.hear()["parameters"]["said"] == "before"  # type: ignore[index]
    reply = client.hear()
    assert reply is None or reply["error"] == f"{IFACE}.Usage"
    assert client.hear() is None
    assert served.client().ask("Echo", {"text": "x"})


def test_a_slow_reader_misses_progress_but_not_the_result(served: ServerProcess) -> None:
    slow, other = served.client(), served.client()
    slow.say("Count", {"n": 3000, "pad": 1000}, more=True)
    assert served.finished()["reply"]["parameters"]["sum"] == 3000  # the worker was never held up
    assert other.ask("Echo", {"text": "x"})
    heard = []
    while True:
        reply = slow.hear()
        assert reply is not None
        heard.append(reply["parameters"])
        if not reply.get("continues"):
            break
    assert heard[-1]["sum"] == 3000
    assert 1 < len(heard) < 3000
    assert [h["progress"] for h in heard[:-1]] == sorted(h["progress"] for h in heard[:-1])


def test_a_reader_that_never_reads_is_closed_and_its_memory_given_back(room: Path) -> None:
    with ServerProcess(room / "s", METHODS, fast(write_s=0.3)) as served:
        deaf, other = served.client(), served.client()
        assert other.ask("Echo", {"text": "x"})
        with pytest.raises(OSError):  # its calls are not even read any more, and then it is closed
            for _ in range(100_000):
                deaf.say("Large", {"size": 200_000})
        assert other.ask("Echo", {"text": "x"})
        assert served.status("VmHWM") < 200_000  # KiB


def test_above_the_limit_the_longest_idle_client_is_closed(room: Path) -> None:
    with ServerProcess(room / "s", METHODS, fast(connections=3)) as served:
        clients = []
        for _ in range(3):
            clients.append(served.client())
            assert clients[-1].ask("Echo", {"text": "x"})
        assert clients[0].ask("Echo", {"text": "fresh again"})
        assert served.client().ask("Echo", {"text": "x"})
        assert clients[1].hear() is None
        assert clients[0].ask("Echo", {"text": "x"}) and clients[2].ask("Echo", {"text": "x"})


def test_when_all_are_busy_a_new_client_waits_until_one_is_idle(room: Path, go: str) -> None:
    with ServerProcess(room / "s", METHODS, fast(connections=3)) as served:
        busy = [served.client() for _ in range(3)]
        for client in busy:
            client.ask("Wait", {"go": go}, more=True)
        late = served.client()
        late.say("Echo", {"text": "late"})
        assert not select.select([late.sock], [], [], 0.1)[0]
        gate = let_go(go)
        assert late.hear()["parameters"]["said"] == "late"  # type: ignore[index]
        os.close(gate)


def test_without_descriptors_the_server_waits_and_recovers(room: Path) -> None:
    with ServerProcess(room / "s", METHODS, nofile=30) as served:
        clients = [served.client() for _ in range(40)]
        first = clients[0].ask("Echo", {"text": "x"})
        assert first
        until(lambda: "cannot accept" in served.stderr(), "the complaint")
        reply = clients[0].ask("Count", {"n": 1})
        assert reply is not None and reply["error"] == f"{IFACE}.Lost"  # no descriptor for a worker either
        for client in clients[:30]:
            client.close()
        # What is given back may first go to other clients that wait.
        until(lambda: "sum" in clients[39].ask("Count", {"n": 1})["parameters"], "a worker")  # type: ignore[index]
        assert served.stderr().count("cannot accept") < 50, "it does not spin"


# --- many ---


def test_two_hundred_clients_at_once(served: ServerProcess) -> None:
    clients = [served.client() for _ in range(200)]
    for i, client in enumerate(clients):
        client.say("Count", {"n": i % 7}, more=True)
    for i, client in enumerate(clients):
        for _ in range(i % 7):
            assert client.hear()["continues"]  # type: ignore[index]
        assert client.hear()["parameters"]["sum"] == i % 7  # type: ignore[index]
    assert len({served.finished()["pid"] for _ in clients}) == 200


def test_thousands_of_calls_leak_neither_descriptors_nor_memory(served: ServerProcess) -> None:
    witness = served.client()

    def rounds(n: int) -> None:
        for i in range(n):
            client = Client(served.path)
            for _ in range(4):
                client.say("Echo", {"text": "x" * 500})
                assert client.hear()
            if i % 8 == 0:
                assert client.ask("Count", {"n": 2, "pad": 2000})
                served.finished()
            client.close()

    rounds(300)
    until(lambda: not served.children(), "no children")
    for _ in range(2):
        assert witness.ask("Echo", {"text": "every earlier event has been seen"})
    fds, memory = served.descriptors(), served.status("VmRSS")
    rounds(1000)
    until(lambda: not served.children() and served.descriptors() == fds, "the same descriptors as before")
    assert served.status("VmRSS") - memory < 1024  # KiB


def test_with_nobody_connected_nothing_wakes_the_server(served: ServerProcess) -> None:
    client = served.client()
    client.ask("Echo", {"text": "x"})
    client.ask("Count", {"n": 1})
    fds = served.descriptors()
    client.close()
    until(lambda: served.descriptors() < fds and not served.children(), "an empty server")
    until(served.asleep, "sleep")
    before = served.status("voluntary_ctxt_switches")
    select.select([], [], [], 0.5)
    assert served.status("voluntary_ctxt_switches") == before


# --- stopping, timers ---


def test_a_stop_lets_workers_stop_and_tells_their_callers(room: Path, go: str) -> None:
    with ServerProcess(room / "s", METHODS, fast(workers={"work": 1, "look": 1}, stop_s=30.0)) as served:
        running, queued, idle = served.client(), served.client(), served.client()
        running.ask("Wait", {"go": go}, more=True)
        queued.say("Wait", {"go": go})
        idle.ask("Echo", {"text": "x"})
        begun = time.monotonic()
        assert served.stop() == 0
        assert time.monotonic() - begun < 20
        for client in (running, queued):
            reply = client.hear()
            assert reply is not None and reply["error"] == interface.STOPPING
            assert client.hear() is None
        assert idle.hear() is None
        assert not os.path.exists(served.path)


def test_a_stop_waits_a_bounded_time_for_a_worker_that_does_not_stop(room: Path) -> None:
    with ServerProcess(room / "s", METHODS, fast(stop_s=0.3)) as served:
        client = served.client()
        client.ask("Stubborn", more=True)
        (worker,) = served.children()
        assert served.stop() == 0
        reply = client.hear()
        assert reply is not None and reply["error"] == interface.STOPPING
        until(lambda: not alive(worker), "the worker's end")


def test_timers_run_at_their_time_and_a_cancelled_one_never(room: Path) -> None:
    def setup(it: server.Server) -> None:
        now = time.monotonic()

        def tick(left: int) -> None:
            print("tick", left, file=sys.stderr, flush=True)
            if left:
                it.call_at(time.monotonic() + 0.02, lambda: tick(left - 1))

        it.call_at(now + 0.01, lambda: tick(3))
        it.call_at(now + 0.005, lambda: tick(99)).cancel()
        it.call_at(now + 0.015, lambda: 1 // 0)  # type: ignore[arg-type, return-value]

    with ServerProcess(room / "s", METHODS, setup=setup) as served:
        until(lambda: "tick 0" in served.stderr(), "the last tick")
        assert "tick 99" not in served.stderr()
        assert "ZeroDivisionError" in served.stderr()
        assert served.client().ask("Echo", {"text": "x"})


def test_a_listening_socket_can_be_handed_over(room: Path) -> None:
    """As systemd does; the server then leaves the path alone."""
    path = str(room / "s")
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(path)
    sock.listen()
    it = server.Server(sock, {f"{IFACE}.Echo": METHODS["Echo"]})
    it.call_at(time.monotonic(), it.stop)
    it.run()
    assert os.path.exists(path)
    assert sock.fileno() == -1


def test_the_end_of_one_server_leaves_the_socket_of_another_that_took_its_place(room: Path) -> None:
    with ServerProcess(room / "s", METHODS) as first, ServerProcess(room / "s", METHODS) as second:
        assert first.stop() == 0
        assert (room / "s").is_socket() and second.client().ask("Echo", text="x") is not None
        assert second.stop() == 0
        assert not (room / "s").exists()


def test_varlinkctl_understands_us(served: ServerProcess) -> None:
    if shutil.which("varlinkctl") is None:
        pytest.skip("no varlinkctl here (systemd >= 257)")
    introspected = run("varlinkctl", "introspect", served.path, IFACE)
    assert introspected.returncode == 0 and "method Release" in introspected.stdout
    called = run("varlinkctl", "call", "--more", served.path, f"{IFACE}.Count", '{"n":2}')
    assert json.loads(called.stdout.split("\n")[0].lstrip("\x1e"))["progress"] == 0


def test_the_deadline_of_these_tests_is_above_every_limit_they_set() -> None:
    assert 2 * fast().stop_s < DEADLINE_S
