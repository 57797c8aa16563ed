"""The driver hangs, dies or lies while the daemon and its workers ask it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.embedded.node import Container, FrozenFs, HolderHandle, Node, wait_until
from tests.integration.daemon.conftest import Daemon, Job
from tests.integration.product import QUICK, Product, finish

pytestmark = [pytest.mark.embedded, pytest.mark.root]
SHORT = QUICK.replace("nvml: {deadline: 5}", "nvml: {deadline: 0.6}")


def nvml_children(node: Node) -> list[int]:
    """Every process of this node that is the driver's caller, by its name, on this machine."""
    found = []
    for entry in os.listdir(node.path("/proc")):
        if not entry.isdecimal():
            continue
        try:
            if node.read(f"/proc/{entry}/comm").strip() == "pgr-nvml":
                found.append(int(entry))
        except OSError:
            continue
    return found


def in_driver(node: Node) -> list[int]:
    """Those of them that are in the frozen call."""
    found = []
    for pid in nvml_children(node):
        try:
            state = node.read(f"/proc/{pid}/stat").rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] if state == "D" else []
    return found


@pytest.fixture
def stuck(daemon: Daemon, product: Product, node: Node) -> Iterator[FrozenFs]:
    """The driver's next memory call never comes back, and SIGKILL does not end it."""
    product.configure(SHORT)
    daemon.signal(signal.SIGHUP)
    frozen = node.frozen_fs()
    with frozen:
        frozen.freeze()
        node.control(hang_d="nvmlDeviceGetMemoryInfo", hang_d_path=frozen.path("x"))
        yield frozen


def test_a_stuck_call_is_shown_counted_and_not_added_to(
    daemon: Daemon, product: Product, engine: Callable[..., HolderHandle], stuck: FrozenFs, node: Node
) -> None:
    holder = engine()
    answer = product.release("129", "--now")
    assert answer.status == 4 and not holder.alive(), answer.out
    (pid,) = in_driver(node)
    for _ in range(3):
        status = daemon.status()
        assert status["driver"]["nvml"] == "wedged"
        wedged = status["driver"]["wedged"]
        assert wedged["pid"] == pid and wedged["call"] and wedged["since"].endswith("Z") and wedged["age_s"] > 0.5
        assert product.release("129").status == 4
        assert in_driver(node) == [pid]
    assert daemon.status()["daemon"]["driver_hangs"] == 1
    assert str(pid) in product.run("status").out
    wait_until(lambda: daemon.stderr().count("nvml-wedged") == 1, "the entry")
    stuck.thaw()
    node.control(hang_d=None, hang_d_path=None)
    wait_until(lambda: "nvml-recovered" in daemon.stderr(), "the recovery is noticed without a question")
    assert daemon.status()["driver"]["nvml"] == "ok"
    assert daemon.status()["driver"]["wedged"] is None
    assert product.release("129").must_be("nothing-held")
    daemon.settle()
    assert nvml_children(node) == []


def test_a_hundred_releases_add_nothing_to_a_stuck_driver(
    daemon: Daemon, product: Product, stuck: FrozenFs, node: Node
) -> None:
    holders = [
        node.container(vmid).spawn_holder(open=("/dev/nvidia0",), alloc=("50:10:compute",)) for vmid in range(300, 400)
    ]
    clients = [daemon.client() for _ in holders]
    for number, client in enumerate(clients):
        client.sock.settimeout(120)
        client.say("Release", {"vmid": 300 + number, "options": {"now": True}})
    worst = 0
    for client in clients:
        reply = client.hear()
        worst = max(worst, len(in_driver(node)))
        assert reply is not None and reply["parameters"]["report"]["verdict"] == "unknown", reply
        client.close()
    assert worst == 1
    assert not [holder for holder in holders if holder.alive()]


def test_a_stuck_driver_keeps_nobody_from_stopping(
    daemon: Daemon, product: Product, container: Container, stuck: FrozenFs
) -> None:
    job = Job(container, "ignore")
    running = product.start("129", "--json", "--grace", "3")
    wait_until(job.has_term, "the SIGTERM")
    assert daemon.stop() == 0
    done = finish(running)
    assert done.status == 4 and job.terms() == 1
    assert json.loads(done.out)["reason"]


@pytest.mark.parametrize("how", ["crash", "exit", "killed"])
def test_the_child_dies_in_the_middle_of_a_call(
    daemon: Daemon, product: Product, engine: Callable[..., HolderHandle], node: Node, how: str
) -> None:
    """Once: another one is asked. Always: the verdict is unknown, never released."""
    holder = engine()
    if how == "killed":
        node.control(delay="nvmlDeviceGetMemoryInfo", delay_ms=400)
        running = product.start("129", "--now", "--json")
        wait_until(lambda: len(nvml_children(node)) == 1, "the child")
        (child,) = nvml_children(node)
        node.run(["/bin/kill", "-9", str(child)], check=True)
        node.control(delay=None, delay_ms=None)
        done = finish(running)
        assert done.status in (0, 4), done.out
    else:
        node.control(**{how: "nvmlDeviceGetMemoryInfo"})
        answer = product.release("129", "--now")
        assert answer.status == 4, answer.out
        node.control(**{how: None})
    holder.wait_gone()
    assert product.release("129").must_be("nothing-held")
    daemon.settle()
    assert nvml_children(node) == []


def test_the_child_is_there_while_a_release_runs_and_gone_after_it(
    daemon: Daemon, product: Product, container: Container, node: Node
) -> None:
    job = Job(container, "ignore")
    assert nvml_children(node) == []
    running = product.start("129", "--grace", "0.5")
    wait_until(job.has_term, "the SIGTERM")
    assert len(nvml_children(node)) == 1
    finish(running)
    assert job.terms() == 1
    daemon.settle()
    assert nvml_children(node) == []


