"""Numbers are no identities: recycled pids in the driver's lists, pids that cannot be seen, and 0 in a cgroup's list."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node, wait_until
from tests.embedded.scope import Running

from .conftest import ONE_GPU
from .product import Product, dead, held_mib, lives

Engine = Callable[..., HolderHandle]

RECYCLE = """
import ctypes, os, signal, sys
wanted, init = int(sys.argv[1]), sys.argv[2]
if ctypes.CDLL(None, use_errno=True).setns(os.open(f"/proc/{init}/ns/pid", os.O_RDONLY), 0x20000000):
    sys.exit("cannot enter")
for _ in range(300):                                 # somebody of the node may fork between the two
    open("/proc/sys/kernel/ns_last_pid", "w").write(str(wanted - 1))
    child = os.fork()
    if child == 0:
        os.execvp("sleep", ["sleep", "1000"])
    if child == wanted:
        print("recycled", flush=True)
        sys.stdin.read()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if child == wanted:
        sys.exit()
sys.exit("cannot get that pid")
"""
"""A child in the PID namespace of INIT that has that pid in the node's."""


def test_a_recycled_pid_that_is_a_live_process_of_the_host_is_not_signalled(
    node: Node, product: Product, engine: Engine
) -> None:
    family = engine(children=1, die=True)
    innocent = node.spawn_holder(argv=("sshd",))
    node.control(hide_clients={50: family.main.pid}, extra_clients={50: f"{innocent.pid}:42759:compute"})
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {family.by_role("child")[0].pid}
    assert lives(innocent) and dead(family) and held_mib(node) == {}


def test_a_recycled_pid_that_is_another_containers_job_on_the_gpu_is_not_signalled(
    node: Node, product: Product, engine: Engine
) -> None:
    family = engine(children=1, die=True)
    other = node.container(130).spawn_holder(open=ONE_GPU, alloc=("50:2048:compute",))
    node.control(hide_clients={50: family.main.pid}, extra_clients={50: f"{other.pid}:42759:compute"})
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {family.by_role("child")[0].pid} and lives(other)
    assert held_mib(node) == {50: 2048}


def test_a_recycled_pid_that_is_a_live_process_of_the_container_is_not_signalled(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    """Really recycled: a shell of the container has the number by which the driver knows the dead opener."""
    family = engine(children=1, die=True)
    with recycled(node, container, family.main.pid):
        assert node.path(f"/proc/{family.main.pid}/comm").read_text() == "sleep\n"
        answer = product.release(129).must_be("released")
        assert answer.signalled() == {family.by_role("child")[0].pid}
        assert answer.fates().get(family.main.pid) in (None, "spared")
        assert node.path(f"/proc/{family.main.pid}/comm").read_text() == "sleep\n", "the innocent shell lives on"
    assert dead(family) and held_mib(node) == {}


class recycled:  # noqa: N801 - used as a context manager
    """A `sleep` in the container that has that pid in the node's namespace."""

    def __init__(self, node: Node, container: Container, pid: int) -> None:
        command = [sys.executable, "-I", "-c", RECYCLE, str(pid), str(container.init_pid)]
        self._running: Running = node.popen(command, stdin=subprocess.PIPE)
        assert self._running.popen.stdout is not None
        assert self._running.popen.stdout.readline() == "recycled\n"
        wait_until(lambda: node.path(f"/proc/{pid}/comm").read_text() == "sleep\n", "sleep")
        (container.cgroup("init.scope") / "cgroup.procs").write_text(str(node.outer_pid(pid)))

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        assert self._running.popen.stdin is not None
        self._running.popen.stdin.close()
        self._running.popen.wait(timeout=60)


def test_a_member_that_cannot_be_seen_is_a_blind_spot_and_pid_0_nobodys(
    node: Node, product: Product, engine: Engine, container: Container
) -> None:
    """A process of a namespace above ours in the container's cgroup: the kernel shows 0 for it."""
    holder = engine()
    with subprocess.Popen(["sleep", "1000"]) as outside:
        try:
            (container.cgroup("init.scope") / "cgroup.procs").write_text(str(outside.pid))
            wait_until(
                lambda: "0\n" in node.run(["cat", "/sys/fs/cgroup/lxc/129/ns/init.scope/cgroup.procs"]).stdout, "0"
            )
            answer = product.release(129).must_be("blind-spots")
            assert answer.signalled() == {holder.pid} and dead(holder) and outside.poll() is None
            assert "cannot be seen" in answer.message
        finally:
            outside.kill()


@pytest.mark.parametrize("word", ["host:1", "host:0"])
def test_pid_1_can_not_be_selected(product: Product, container: Container, word: str) -> None:
    product.ask(129, "--pid", word).must_be("usage")


def test_our_own_helpers_are_no_holders_even_in_the_containers_cgroup(
    node: Node, product: Product, engine: Engine
) -> None:
    """Run from a shell that was moved into the container's cgroup, our NVML child has GPU nodes open there."""
    holder = engine()
    done = node.run([*product.command, "129", "--json"], cgroup="lxc/129/ns/.lxc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f'"pid": {holder.pid}' in done.stdout and dead(holder)
