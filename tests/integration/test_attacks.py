"""Attacks on the climb: what changes under it while it looks, waits and judges."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.embedded.node import Container, HolderHandle, Node, wait_until
from tests.embedded.scope import Running, Scope

from .conftest import ALL_NODES, ONE_GPU
from .product import Product, dead, finish, held_mib, lives, parsed, wait_for_rung

Engine = Callable[..., HolderHandle]


# --- the container comes and goes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("attempt", range(4))
def test_a_container_that_is_started_again_in_the_middle_is_left_alone(
    node: Node, product: Product, container: Container, engine: Engine, attempt: int
) -> None:
    """`pct reboot` while we wait after TERM: the new run's job on the GPU is not ours to end."""
    old = engine(ignore_term=True)
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    container.stop()
    old.wait_gone()
    again = node.container(129)
    new = [again.spawn_holder(open=ONE_GPU, alloc=("50:1000:compute",)) for _ in range(3)]
    done = finish(running)
    answer = parsed(done.status, done.out, done.err)
    assert lives(*new) and again.init_process.alive(), answer.out
    assert not {one.pid for one in new} & answer.signalled()
    if answer.reason != "released":  # it was done before the new job opened the GPU
        answer.must_be("container-restarted")
        assert {fate for pid, fate in answer.fates().items() if pid != old.pid} == {"spared"}


@pytest.mark.case("restarted")
def test_the_new_run_is_told_apart_even_while_something_of_the_old_one_is_left(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    """A process of the host's namespace in the old cgroup survives the stop (and would fail Proxmox's own start)."""
    left = node.spawn_holder(open=ONE_GPU, alloc=("50:9:compute",), cgroup="lxc/129/ns/.lxc", ignore_term=True)
    running = product.start(129, "--grace", "2", "--json")
    wait_for_rung(node)
    container.stop()
    again = node.container(129)
    new = again.spawn_holder(open=ONE_GPU, alloc=("50:1000:compute",))
    done = finish(running)
    answer = parsed(done.status, done.out, done.err).must_be("container-restarted")
    assert lives(new) and dead(left) and answer.signalled() == {left.pid}
    assert answer.fates() == {left.pid: "exited", new.pid: "spared"}


def test_a_unit_of_the_new_run_is_not_killed_as_a_whole(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    """--stop-units, and the container with the same unit is started again meanwhile."""
    unit: dict[str, Any] = {"cgroup": "system.slice/vllm.service"}
    left = node.spawn_holder(open=ONE_GPU, cgroup="lxc/129/ns/.lxc", ignore_term=True)
    loop = engine(respawn=-1, **unit)
    running = product.start(129, "--grace", "2", "--stop-units", "--json")
    wait_for_rung(node)
    container.stop()
    again = node.container(129)
    new = again.spawn_holder(open=ONE_GPU, alloc=("50:1000:compute",), respawn=-1, **unit)
    bystander = again.spawn_holder(argv=("sh",), **unit)
    done = finish(running)
    answer = parsed(done.status, done.out, done.err)
    assert lives(new, bystander) and again.init_process.alive(), answer.out
    assert dead(loop, left) and answer.status == 3


def test_a_container_that_is_stopped_in_the_middle_is_released(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    holder = engine(ignore_term=True)
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    container.stop()
    done = finish(running)
    parsed(done.status, done.out, done.err).must_be("released")
    assert dead(holder) and held_mib(node) == {} and not node.path("/sys/fs/cgroup/lxc/129").exists()


# --- a descriptor that is in no table ---------------------------------------------------------------------------------

REGISTER_AND_CLOSE = """
import ctypes, os, time
libc = ctypes.CDLL(None)
ring = libc.syscall(425, 4, (ctypes.c_char * 120)())
if ring < 0:
    print("no io_uring", flush=True)
fd = os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
assert libc.syscall(427, ring, 2, (ctypes.c_int * 1)(fd), 1) == 0
os.close(fd)
print("ready", flush=True)
time.sleep(1000)
"""


def test_a_gpu_that_is_open_only_in_an_io_uring_is_released(product: Product, container: Container) -> None:
    """In the container's own mount namespace: the path that the kernel tells is one of it."""
    job = container.popen([sys.executable, "-I", "-c", REGISTER_AND_CLOSE], stdin=subprocess.PIPE)
    assert job.popen.stdout is not None
    if (said := job.popen.stdout.readline()) != "ready\n":
        pytest.skip(said)
    assert "nvidia" not in open_files(job)
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {job.pid} and not job.process.alive()


# --- holders that come late, leave by themselves, change what they are -----------------------------------------------


def test_an_old_process_that_opens_the_gpu_during_the_release_is_ended_too(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    """Not respawned: it is older than the first signal."""
    late = script(container, OPEN_ON_INPUT)
    first = engine(ignore_term=True)
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    tell(late, "open")
    wait_until(lambda: "nvidia0" in open_files(late), "it has opened the GPU")
    first.kill()
    done = finish(running)
    answer = parsed(done.status, done.out, done.err).must_be("released")
    assert answer.fates() == {first.pid: "exited", late.pid: "exited"} and not late.process.alive()


def test_a_holder_that_ends_by_itself_between_look_and_signal(node: Node, product: Product, engine: Engine) -> None:
    short = [engine(alloc=("50:10:compute",), exit_on_trigger=True) for _ in range(20)]
    running = product.start(129, "--json")
    for one in short:
        one.trigger()
    done = finish(running)
    answer = parsed(done.status, done.out, done.err)
    assert answer.reason in ("released", "nothing-held") and dead(*short) and held_mib(node) == {}


def test_a_holder_that_executes_another_program_keeps_its_identity(
    node: Node, product: Product, container: Container
) -> None:
    """exec keeps pid, start time and descriptors without close-on-exec; only the name changes."""
    running = script(container, EXEC_WITH_GPU)
    wait_until(lambda: comm_of(running) == "sleep", "exec")
    answer = product.release(129).must_be("released")
    assert answer.holder(running.pid)["comm"] == "sleep" and not running.process.alive()


def test_a_process_that_executes_away_from_the_gpu_is_no_holder(product: Product, container: Container) -> None:
    running = script(container, EXEC_WITHOUT_GPU)
    wait_until(lambda: comm_of(running) == "sleep", "exec")
    product.release(129).must_be("nothing-held")
    assert running.process.alive()


def test_a_holder_that_is_moved_to_another_container_in_the_grace_is_not_killed(
    node: Node, product: Product, engine: Engine
) -> None:
    node.container(130)
    moved = engine(ignore_term=True)
    running = product.start(129, "--grace", "1", "--json")
    wait_for_rung(node)
    (node.cgroup("lxc/130/ns/init.scope") / "cgroup.procs").write_text(str(moved.main.outer_pid))
    done = finish(running)
    answer = parsed(done.status, done.out, done.err)
    assert lives(moved) and answer.steps() == ["term"], answer.out
    assert answer.fates()[moved.pid] in ("survived", "spared")  # moved after its TERM, or before


def test_a_job_that_comes_back_after_a_moment_is_met(node: Node, product: Product, container: Container) -> None:
    """RestartSec=100ms: gone when we look, back when we have judged; a shell loop with a pause."""
    loop = script(container, LOOP.replace("PAUSE", "0.15"), cgroup="system.slice/vllm.service")
    answer = product.release(129, "--now")
    answer.must_be("respawned")
    assert "vllm.service" in answer.message and loop.process.alive()
    loop.process.kill()


def test_a_fork_chain_that_hands_the_descriptor_on_is_never_called_released(
    node: Node, product: Product, container: Container
) -> None:
    """Each process forks its successor and leaves: there is always one, and never for long."""
    chain = script(container, CHAIN)
    answer = product.release(129, "--now", timeout=90)
    alive = [p for p in container.members() if p.pid != container.init_pid and p.alive()]
    assert answer.json["verdict"] == "held" or not alive, answer.out
    for process in container.members():
        if process.pid != container.init_pid:
            process.kill()
    chain.process.kill()


def test_many_threads(node: Node, product: Product, engine: Engine) -> None:
    holder = engine(threads=500)
    product.release(129).must_be("released")
    assert dead(holder)


# --- memory of several -----------------------------------------------------------------------------------------------


def test_dead_openers_of_three_containers_and_the_host(node: Node, product: Product, engine: Engine) -> None:
    """Each released by itself; nobody is blamed for the others' memory, which stays as it was."""
    containers = {vmid: node.container(vmid) for vmid in (130, 131)}
    families = {129: engine(alloc=("50:1000:compute",), children=2, die=True)}
    for vmid, container in containers.items():
        families[vmid] = container.spawn_holder(open=ALL_NODES, alloc=(f"50:{vmid}0:compute",), children=2, die=True)
    host = node.spawn_holder(open=ALL_NODES, alloc=("50:77:compute",), children=1, die=True)
    left = 1000 + 1300 + 1310 + 77
    for vmid, family in families.items():
        answer = product.release(vmid).must_be("released")
        left -= 1000 if vmid == 129 else vmid * 10
        assert answer.gpu(50)["used_mib_after"] == left and answer.gpu(50)["ghost_mib"] == 0 and dead(family)
    assert len(host.alive()) == 1


def test_a_leak_of_a_dead_openers_memory_is_not_hidden_behind_others_workers(
    node: Node, product: Product, engine: Engine
) -> None:
    """The driver goes on charging the dead opener when its heirs are gone; workers of a living job elsewhere, which no
    list shows, have nothing to do with it."""
    other = node.container(130).spawn_holder(open=ALL_NODES, alloc=("50:2048:compute",), children=3)
    engine(alloc=("50:1000:compute",), children=2, die=True)
    node.control(leak_mib={50: 400}, list_draining=1)
    answer = product.release(129).must_be("ghost-memory")
    assert answer.gpu(50)["ghost_mib"] == 400 and lives(other)


def test_a_dead_openers_memory_that_was_also_passed_on_is_held_by_the_other(
    node: Node, product: Product, container: Container
) -> None:
    path = "/run/nvidia-standin/passed"
    receiver = node.container(130).spawn_holder(listen=path)
    sender = container.spawn_holder(open=ONE_GPU, alloc=("50:500:compute",), connect=path, children=2)
    received = receiver.next_report()
    sender.main.kill()
    sender.main.wait_gone()
    answer = product.release(129).must_be("held-by-other")
    assert received.alive() and str(received.pid) in answer.message and held_mib(node) == {50: 500}


def test_an_importer_that_allocates_besides_is_still_seen(node: Node, product: Product, engine: Engine) -> None:
    """It takes over 42,759 MiB while its own job goes on."""
    exporter = engine(term_ms=500)
    other = node.container(130)
    importer = other.spawn_holder(open=ONE_GPU, alloc=("50:700:compute",), import_=tuple(exporter.allocations()))
    answer = product.release(129).must_be("taken-over")
    assert lives(importer) and str(importer.pid) in answer.message


def test_an_importer_that_leaves_meanwhile_has_taken_nothing(node: Node, product: Product, engine: Engine) -> None:
    exporter = engine()
    other = node.container(130)
    importer = other.spawn_holder(open=ONE_GPU, alloc=("50:7:compute",), import_=tuple(exporter.allocations()))
    loop = engine(alloc=("50:5:compute",), ignore_term=True)
    running = product.start(129, "--grace", "60", "--json")
    exporter.wait_gone()
    importer.kill()
    importer.wait_gone()
    loop.kill()
    done = finish(running)
    parsed(done.status, done.out, done.err).must_be("released")
    assert dead(loop) and held_mib(node) == {}


def test_two_importers_share_what_one_exporter_left(node: Node, product: Product, engine: Engine) -> None:
    exporter = engine(alloc=("50:1000:compute", "51:3000:compute"), open=ALL_NODES)
    other = node.container(130)
    importer = other.spawn_holder(open=ALL_NODES, alloc=("51:7:compute",), import_=tuple(exporter.allocations()))
    answer = product.release(129)
    assert answer.status == 6 and lives(importer), answer.out


def test_memory_of_a_holder_outside_the_selection_is_no_ghost(node: Node, product: Product, engine: Engine) -> None:
    first = engine(alloc=("50:1000:compute",))
    family = engine(alloc=("50:3000:compute",), children=2, die=True)
    answer = product.release(129, "--pid", first.main.ns_pid).must_be("released")
    assert answer.signalled() == {first.pid} and answer.gpu(50)["used_mib_after"] == 3000
    assert all(p.alive() for p in family.by_role("child"))


# --- scripts ---------------------------------------------------------------------------------------------------------

OPEN_ON_INPUT = """
import os, sys, time
print("ready", flush=True)
sys.stdin.readline()
fd = os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
time.sleep(1000)
"""
EXEC_WITH_GPU = """
import os
fd = os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
os.set_inheritable(fd, True)
print("ready", flush=True)
os.execvp("sleep", ["sleep", "1000"])
"""
EXEC_WITHOUT_GPU = EXEC_WITH_GPU.replace("os.set_inheritable(fd, True)", "")
LOOP = """
import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
first = True
while True:
    pid = os.fork()
    if pid == 0:
        fd = os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
        if first:
            print("ready", flush=True)
        time.sleep(1000)
    first = False
    os.waitpid(pid, 0)
    time.sleep(PAUSE)
"""
CHAIN = """
import os, signal, time
fd = os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
print("ready", flush=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.setsid() if os.getpid() != os.getsid(0) else None
for _ in range(100000):
    if os.fork():
        time.sleep(0.003)
        os._exit(0)
"""


def script(scope: Scope, text: str, **options: object) -> Running:
    """A Python program in the container that has said "ready"."""
    running = scope.popen([sys.executable, "-I", "-c", text], stdin=subprocess.PIPE, **options)  # type: ignore[arg-type]
    assert running.popen.stdout is not None and running.popen.stdout.readline() == "ready\n"
    return running


def tell(running: Running, line: str) -> None:
    assert running.popen.stdin is not None
    running.popen.stdin.write(line + "\n")
    running.popen.stdin.flush()


def open_files(running: Running) -> str:
    directory = f"/proc/{running.process.outer_pid}/fd"
    return " ".join(os.readlink(f"{directory}/{fd}") for fd in os.listdir(directory))


def comm_of(running: Running) -> str:
    return Path(f"/proc/{running.process.outer_pid}/comm").read_text().strip()


@pytest.mark.parametrize("cgroup", ["system.slice/a.service", ".lxc"])
def test_a_process_with_a_deleted_working_directory_and_no_root(product: Product, engine: Engine, cgroup: str) -> None:
    holder = engine(cgroup=cgroup, uid=65534)
    product.release(129).must_be("released")
    assert dead(holder)
