"""Holders in every shape that has been seen: found, ended, proven gone; nobody else is touched."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node, Process, wait_until

from .conftest import ALL_NODES, ONE_GPU
from .product import Product, dead, held_mib, lives, parsed

Engine = Callable[..., HolderHandle]
pytestmark = pytest.mark.usefixtures("neighbours")
OTHERS = {51: 2048}
"""What the neighbours keep."""


@pytest.mark.case("plain")
def test_plain_holders_go_on_term_and_their_memory_with_them(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    both = engine(open=ALL_NODES, alloc=("50:42759:compute", "51:42759:compute"), comm="VLLM::EngineCor")
    monitor = engine(alloc=(), argv=("nvtop",), open=("/dev/nvidia0", "/dev/nvidiactl"))
    answer = product.release(129).must_be(expected)
    assert answer.fates() == {both.pid: "exited", monitor.pid: "exited"}
    assert answer.steps() == ["term"] and answer.signalled() == {both.pid, monitor.pid}
    assert answer.json["was_held"] and not answer.json["dry_run"] and answer.json["blind_spots"] == []
    assert (answer.gpu(50)["used_mib_before"], answer.gpu(50)["used_mib_after"]) == (42759, 0)
    assert (answer.gpu(51)["used_mib_before"], answer.gpu(51)["used_mib_after"]) == (44807, 2048)
    assert dead(both, monitor) and held_mib(node) == OTHERS


def test_now_skips_term(node: Node, product: Product, engine: Engine) -> None:
    holder = engine(ignore_term=True)
    answer = product.release(129, "--now").must_be("released")
    assert answer.steps() == ["kill"] and dead(holder) and held_mib(node) == OTHERS


@pytest.mark.case("term-ignored")
def test_a_holder_that_ignores_term_is_killed_after_the_grace(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    deaf, obedient = engine(ignore_term=True), engine()
    answer = product.release(129, "--grace", "0.5").must_be(expected)
    term, kill = answer.json["rungs"]
    assert (term["step"], term["sent"], term["gone"]) == ("term", 2, 1) and term["waited_ms"] >= 500
    assert (kill["step"], kill["targets"], kill["gone"]) == ("kill", [deaf.pid], 1)
    assert dead(deaf, obedient) and held_mib(node) == OTHERS


def test_a_holder_that_needs_time_after_term_gets_it(node: Node, product: Product, engine: Engine) -> None:
    slow = engine(term_ms=700)
    answer = product.release(129).must_be("released")
    assert answer.steps() == ["term"] and answer.json["rungs"][0]["waited_ms"] >= 650
    assert dead(slow) and held_mib(node) == OTHERS


@pytest.mark.case("stopped")
def test_a_stopped_holder_is_killed_at_once(node: Node, product: Product, engine: Engine, expected: str) -> None:
    holder = engine(stop=True)
    answer = product.release(129).must_be(expected)
    assert answer.steps() == ["term", "kill"] and answer.json["rungs"][0]["note"] == "stopped"
    assert answer.json["rungs"][0]["waited_ms"] < 2500, "it waited for somebody who cannot act"
    assert dead(holder) and held_mib(node) == OTHERS


@pytest.mark.case("frozen")
def test_in_a_frozen_container_kill_works_and_nothing_is_thawed(
    node: Node, product: Product, container: Container, engine: Engine, expected: str
) -> None:
    holder, innocent = engine(term_ms=1), container.spawn_holder(argv=("sshd",))
    (container.payload / "cgroup.freeze").write_text("1")
    wait_until(lambda: "frozen 1" in (container.payload / "cgroup.events").read_text(), "frozen")
    answer = product.release(129).must_be(expected)
    assert answer.steps() == ["term", "kill"] and answer.json["rungs"][0]["note"] == "frozen"
    assert "frozen 1" in (container.payload / "cgroup.events").read_text()
    assert dead(holder) and lives(innocent) and held_mib(node) == OTHERS


@pytest.mark.parametrize("below", ["ns", "ns/docker/" + "ab12" * 16])
def test_a_part_of_the_container_that_is_frozen_is_not_waited_for(
    node: Node, product: Product, container: Container, engine: Engine, below: str
) -> None:
    """LXC freezes the inner cgroup, `docker pause` the nested container's."""
    holder = engine(term_ms=1, cgroup="docker/" + "ab12" * 16)
    (container.payload / below / "cgroup.freeze").write_text("1")
    wait_until(lambda: "frozen 1" in (container.payload / below / "cgroup.events").read_text(), "frozen")
    answer = product.release(129).must_be("released")
    assert answer.steps() == ["term", "kill"] and answer.json["rungs"][0]["waited_ms"] < 2500
    assert "frozen 1" in (container.payload / below / "cgroup.events").read_text()
    assert dead(holder) and held_mib(node) == OTHERS


@pytest.mark.case("dead-leader")
def test_a_zombie_leader_with_live_threads_is_a_holder(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    holder = engine(mode="dead-leader")
    answer = product.release(129).must_be(expected)
    found = answer.holder(holder.pid)
    assert found["state"] == "Z" and found["evidence"] == ["fd", "nvml"] and found["memory_mib"] == 42759
    assert dead(holder) and held_mib(node) == OTHERS


def test_a_true_zombie_is_nobody(product: Product, engine: Engine) -> None:
    holder = engine(zombies=3)
    answer = product.release(129).must_be("released")
    assert set(answer.fates()) == {holder.pid}


@pytest.mark.case("dead-opener")
def test_children_of_a_dead_opener_are_found_though_the_driver_names_the_dead(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    family = engine(children=2, die=True)
    opener, children = family.main.pid, {p.pid for p in family.by_role("child")}
    answer = product.release(129).must_be(expected)
    assert set(answer.fates()) == children and answer.signalled() == children
    assert {h["inherited_from"] for h in answer.json["holders"]} == {opener}
    assert answer.gpu(50)["used_mib_after"] == 0 and dead(family) and held_mib(node) == OTHERS


@pytest.mark.case("mapping-only")
def test_a_mapping_outlives_its_descriptor_and_is_enough(make_node: Callable[..., Node], expected: str) -> None:
    with make_node(driver="zero") as node:
        product = Product(node)
        container, other = node.container(129), node.container(130)
        holder = container.spawn_holder(map=("/dev/nvidia0",), alloc=("5:1000:compute",))
        foreign = other.spawn_holder(map=("/dev/nvidia0",))
        answer = product.release(129).must_be(expected)
        assert answer.holder(holder.pid)["evidence"] == ["map", "nvml"]
        assert answer.signalled() == {holder.pid}
        assert dead(holder) and lives(foreign) and held_mib(node) == {}


@pytest.mark.case("nested")
@pytest.mark.parametrize("nodes", ["bind", "mknod"])
def test_a_holder_in_a_container_in_the_container(
    node: Node, product: Product, container: Container, expected: str, nodes: str
) -> None:
    name = "docker/" + "a1b2" * 16
    inner = container.nested(name, ["nvidia0", "nvidiactl", "nvidia-uvm"], nodes=nodes)
    holder = inner.spawn_holder(open=ONE_GPU, alloc=("50:42759:compute",), cgroup="")
    answer = product.release(129).must_be(expected)
    found = answer.holder(holder.pid)
    assert len(found["ns_pids"]) == 2 and found["unit"] == "a1b2" * 16
    assert dead(holder) and inner.init_process.alive() and held_mib(node) == OTHERS


@pytest.mark.case("other-session")
def test_renamed_workers_in_other_sessions_are_found_by_what_they_hold(
    node: Node, product: Product, container: Container, engine: Engine, expected: str
) -> None:
    server = engine(argv=("VLLM::EngineCore",), comm="VLLM::EngineCor", children=2, grandchildren=1, child_setsid=True)
    daemon = engine(daemon=True, setsid=True, comm="sglang::schedul")
    attached = engine(cgroup=".lxc", argv=("bash",))
    idle = container.spawn_holder(argv=("python3", "train.py"), comm="python3")
    server.main.kill()
    server.main.wait_gone()
    answer = product.release(129).must_be(expected)
    assert len(answer.signalled()) == 6 and dead(server, daemon, attached)
    assert lives(idle) and held_mib(node) == OTHERS


@pytest.mark.case("thread-table")
def test_a_descriptor_in_one_threads_own_table_is_found(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    holder = engine(mode="private-table", threads=3)
    answer = product.release(129).must_be(expected)
    assert answer.signalled() == {holder.pid} and dead(holder) and held_mib(node) == OTHERS


@pytest.mark.case("namespace-only")
def test_a_process_in_the_containers_pid_namespace_but_in_a_host_cgroup_is_the_containers(
    node: Node, product: Product, container: Container, engine: Engine, expected: str
) -> None:
    holder = engine()
    move(node, holder.main, "system.slice/elsewhere.service")
    answer = product.release(129).must_be(expected)
    assert answer.holder(holder.pid)["cgroup"] == "/system.slice/elsewhere.service"
    assert dead(holder) and held_mib(node) == OTHERS


def test_a_process_in_our_namespace_but_in_anothers_cgroup_is_the_others(
    node: Node, product: Product, engine: Engine
) -> None:
    taken, ours = engine(), engine()
    move(node, taken.main, "lxc/130/ns/init.scope")
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {ours.pid} and lives(taken)


def test_a_host_process_in_our_cgroup_is_ours(node: Node, product: Product, container: Container) -> None:
    guest = node.spawn_holder(open=ONE_GPU, alloc=("50:7:compute",), cgroup="lxc/129/ns/init.scope")
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {guest.pid} and answer.holder(guest.pid)["ns_pids"] == [] and dead(guest)
    assert container.init_process.alive()


def test_the_holders_of_a_container_without_init_are_found(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    left = node.spawn_holder(open=ONE_GPU, alloc=("50:9:compute",), cgroup="lxc/129/ns/.lxc")
    container.stop()
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {left.pid} and dead(left)


def test_a_container_whose_monitor_died_is_released_like_any(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    holder = engine()
    container.kill_monitor()
    assert product.release(129).must_be("released").signalled() == {holder.pid}
    assert dead(holder) and held_mib(node) == OTHERS


def test_an_unprivileged_container(node: Node, product: Product) -> None:
    container = node.container(131, unprivileged=True)
    holder = container.spawn_holder(open=ONE_GPU, alloc=("50:42759:compute",), uid=1000)
    answer = product.release(131).must_be("released")
    assert answer.holder(holder.pid)["user"] == "101000" and dead(holder)


def test_holders_below_a_threaded_cgroup_are_found(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    holder = engine(cgroup="system.slice/job.service", threads=2)
    threaded = container.cgroup("system.slice/job.service/threads")
    (threaded / "cgroup.type").write_text("threaded")
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {holder.pid} and dead(holder) and held_mib(node) == OTHERS


def test_more_holders_than_the_soft_limit_of_descriptors(node: Node, product: Product, engine: Engine) -> None:
    family = engine(children=20, grandchildren=9, die=True)
    limited = ["prlimit", "--nofile=128:4096", *product.command, "129", "--json"]
    done = node.run(limited)
    answer = parsed(done.returncode, done.stdout, done.stderr).must_be("released")
    assert len(answer.signalled()) == 200 and dead(family) and held_mib(node) == OTHERS


def test_more_holders_than_the_hard_limit_of_descriptors(node: Node, product: Product, engine: Engine) -> None:
    family = engine(children=20, grandchildren=9, die=True)
    done = node.run(["prlimit", "--nofile=128:128", *product.command, "129", "--json"])
    answer = parsed(done.returncode, done.stdout, done.stderr).must_be("released")
    assert len(answer.signalled()) == 200 and dead(family) and held_mib(node) == OTHERS


@pytest.mark.case("dry-run")
@pytest.mark.parametrize("words", [["129", "-n"], ["verify", "129"]], ids=["dry-run", "verify"])
def test_a_dry_run_signals_nobody(product: Product, engine: Engine, expected: str, words: list[str]) -> None:
    holder = engine(children=2)
    answer = product.release(*words).must_be(expected)
    assert set(answer.fates().values()) == {"spared"} and answer.json["rungs"] == []
    assert answer.json["dry_run"] and answer.json["was_held"] and lives(holder)


@pytest.mark.case("deadline")
def test_the_time_limit_passes_with_living_holders_while_something_still_moves(
    node: Node, product: Product, container: Container, engine: Engine, expected: str
) -> None:
    """One task is in D state, but memory goes on falling: too early to call it unkillable."""
    with container.frozen_fs() as frozen:
        slow, pinned = engine(touch=frozen.path("x"), alloc=("50:10:compute",)), engine()
        node.control(fall_mib_per_ms=2, fall_step_mib=16)
        frozen.freeze()
        slow.trigger()
        slow.main.wait_stuck()
        answer = product.release(129, "--now", "--timeout", "3").must_be(expected)
        assert answer.fates() == {slow.pid: "survived", pinned.pid: "exited"}
        assert 3000 <= answer.json["duration_ms"] < 8000 and "3 s" in answer.message
    slow.wait_gone()


@pytest.mark.case("respawn")
@pytest.mark.parametrize("unit", ["vllm.service", None], ids=["unit", "loop"])
def test_what_comes_back_as_fast_as_it_is_killed_is_no_success(
    product: Product, engine: Engine, expected: str, unit: str | None
) -> None:
    where = {"cgroup": f"system.slice/{unit}"} if unit else {}
    family = engine(respawn=-1, supervisor_comm="run-loop", **where)
    supervisor, first = family.by_role("supervisor")[0], family.main.pid
    answer = product.release(129).must_be(expected)
    assert (unit or "run-loop") in answer.message
    fates = answer.fates()
    assert fates.pop(first) == "exited" and "respawned" in fates.values()
    assert supervisor.pid not in answer.signalled() and supervisor.alive()


def test_what_comes_back_only_once_is_released(node: Node, product: Product, engine: Engine) -> None:
    family = engine(respawn=1)
    answer = product.release(129).must_be("released")
    assert len(answer.fates()) == 2 and set(answer.fates().values()) == {"exited"}
    assert held_mib(node) == OTHERS
    family.next_report()


@pytest.mark.case("unkillable")
def test_a_task_that_cannot_die_is_named_with_what_it_waits_for(
    product: Product, container: Container, engine: Engine, expected: str
) -> None:
    with container.frozen_fs() as frozen:
        stuck, other = engine(touch=frozen.path("x")), engine()
        frozen.freeze()
        stuck.trigger()
        stuck.main.wait_stuck()
        answer = product.release(129, "--grace", "0.5").must_be(expected)
        assert answer.fates() == {stuck.pid: "unkillable", other.pid: "exited"}
        why = answer.holder(stuck.pid)["stuck"]
        assert why["state"] == "D" and why["kill_pending"] and why["wchan"] in why["stack"] and "rwsem" in why["wchan"]
        assert str(stuck.pid) in answer.message and why["wchan"] in answer.message
        assert answer.json["started"] <= why["since"] <= time.strftime("%Y-%m-%dT%H:%M:%S.999Z", time.gmtime())
    stuck.wait_gone()


def test_unkillable_comes_quickly_when_the_time_limit_is_short(
    product: Product, container: Container, engine: Engine
) -> None:
    with container.frozen_fs() as frozen:
        stuck = engine(touch=frozen.path("x"))
        frozen.freeze()
        stuck.trigger()
        stuck.main.wait_stuck()
        answer = product.release(129, "--now", "--timeout", "2").must_be("unkillable")
        assert answer.json["duration_ms"] < 8000
    stuck.wait_gone()


def test_timeout_shorter_than_the_grace_still_kills(node: Node, product: Product, engine: Engine) -> None:
    holder = engine(ignore_term=True)
    answer = product.release(129, "--timeout", "3", "--grace", "60").must_be("released")
    assert answer.steps() == ["term", "kill"] and answer.json["duration_ms"] < 20_000
    assert dead(holder) and held_mib(node) == OTHERS


def test_a_term_handler_that_forks_a_new_holder_does_not_get_away(
    node: Node, product: Product, container: Container
) -> None:
    script = (
        "import os,signal,sys,time\n"
        "fd=os.open('/dev/nvidia0',os.O_RDWR|os.O_NOCTTY)\n"
        "def term(*_):\n"
        "    if os.fork(): os._exit(0)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, term)\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    import sys

    running = container.popen([sys.executable, "-I", "-c", script])
    assert running.popen.stdout is not None and running.popen.stdout.readline() == "ready\n"
    answer = product.release(129).must_be("released")
    assert answer.steps()[:2] == ["term", "kill"] and len(answer.fates()) == 2
    assert set(answer.fates().values()) == {"exited"}
    assert running.popen.wait(timeout=60) == 0


def test_a_process_that_lets_go_of_the_gpu_and_lives_has_not_exited(
    node: Node, product: Product, container: Container
) -> None:
    import sys

    script = (
        "import os,signal,time\n"
        "fd=os.open('/dev/nvidia0',os.O_RDWR|os.O_NOCTTY)\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.close(fd))\n"
        "print('ready', flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    running = container.popen([sys.executable, "-I", "-c", script])
    assert running.popen.stdout is not None and running.popen.stdout.readline() == "ready\n"
    answer = product.release(129, "--grace", "1").must_be("released")
    assert answer.steps() == ["term"], "it had let go: a KILL would hit somebody who holds nothing"
    assert running.process.alive() and answer.fates() == {running.pid: "survived"}


TRACER = """
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
assert libc.ptrace(0x4206, int(sys.argv[1]), None, 0x40) == 0  # PTRACE_SEIZE with PTRACE_O_TRACEEXIT
print("ready", flush=True)
sys.stdin.read()
"""


def test_who_holds_a_killed_one_back_by_tracing_it_is_named(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    holder = engine()
    words = [sys.executable, "-I", "-c", TRACER, str(holder.main.ns_pid)]
    tracer = container.popen(words, stdin=subprocess.PIPE)
    assert tracer.popen.stdout is not None and tracer.popen.stdout.readline() == "ready\n"
    answer = product.release(129, "--now").must_be("holders-survive")
    (detail,) = answer.json["details"]
    assert f"pid {holder.pid} (" in detail and f"is traced by pid {tracer.pid} (" in detail
    assert answer.fates() == {holder.pid: "survived"}
    tracer.process.kill()
    holder.wait_gone()
    product.release(129).must_be("nothing-held")


def wait_for_state(process: Process, state: str) -> None:
    wait_until(lambda: process.state() == state, f"{process.pid} in state {state}")


def move(node: Node, process: Process, cgroup: str) -> None:
    """Into another cgroup of the node, as the host's root can."""
    (node.cgroup(cgroup) / "cgroup.procs").write_text(str(process.outer_pid))
    assert process.cgroup() == f"/{cgroup}"


def test_term_is_what_a_stopped_process_gets_first(product: Product, engine: Engine) -> None:
    holder = engine()
    holder.main.kill(signal.SIGSTOP)
    holder.main.wait_state("T")
    answer = product.release(129).must_be("released")
    assert answer.json["rungs"][0]["sent"] == 1 and dead(holder)


@pytest.mark.parametrize("limit", [40, 64, 128])
@pytest.mark.parametrize("words", [(), ("--now",)], ids=["term", "now"])
def test_more_holders_than_descriptors(
    node: Node, product: Product, container: Container, words: tuple[str, ...], limit: int
) -> None:
    """Each of them gets each rung's signal, however few can be held at a time."""
    crowd = container.spawn_holder(open=ONE_GPU, crowd=150)
    deaf = container.spawn_holder(open=ONE_GPU, ignore_term=True)
    product.command = ("prlimit", f"--nofile={limit}:{limit}", *product.command)
    answer = product.release(129, "--grace", "1", *words).must_be("released")
    assert dead(crowd, deaf)
    sent = {rung["step"]: rung["sent"] for rung in answer.json["rungs"]}
    assert sent == ({"kill": 152} if words else {"term": 152, "kill": 1})
