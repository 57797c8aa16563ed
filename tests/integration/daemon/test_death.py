"""The daemon, or a worker of it, dies in the middle of a release: nothing is lost and nothing is done twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.embedded.node import Container, HolderHandle, Node, wait_until
from tests.embedded.scope import Running
from tests.integration.daemon.conftest import Daemon, Job
from tests.integration.product import Answer, Product, finish, parsed

pytestmark = [pytest.mark.embedded, pytest.mark.root]
Killer = Callable[[Daemon], None]


def kill_daemon(daemon: Daemon) -> None:
    daemon.kill()


def kill_worker(daemon: Daemon) -> None:
    (worker,) = daemon.children_of_kind("Release")
    os.kill(worker, signal.SIGKILL)


def stop_daemon(daemon: Daemon) -> None:
    begun = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - begun < 15


KILLERS = pytest.mark.parametrize("kill", [kill_daemon, kill_worker, stop_daemon], ids=lambda k: k.__name__)


def release(product: Product, *words: str) -> Running:
    return product.start("129", "--json", *words)


def answer_of(running: Running) -> Answer:
    done = finish(running)
    return parsed(done.status, done.out, done.err)


def the_record(daemon: Daemon) -> dict[str, Any]:
    (record,) = daemon.records()
    return record


def finished_once(daemon: Daemon, answer: Answer) -> None:
    """One record, closed with the report that the caller got."""
    record = the_record(daemon)
    assert record["release_id"] == answer.json["release_id"]
    assert record["report"] == answer.json


@KILLERS
def test_in_the_first_look(daemon: Daemon, product: Product, container: Container, node: Node, kill: Killer) -> None:
    job = Job(container, "obey")
    node.control(init_delay_ms=1200)
    running = release(product)
    wait_until(lambda: bool(daemon.records()), "the record")
    assert the_record(daemon)["rungs"] == []
    kill(daemon)
    answer = answer_of(running).must_be("released")
    assert job.terms() == 1 and answer.steps() == ["term"]
    assert the_record(daemon)["owner"] == "cli"
    finished_once(daemon, answer)


@KILLERS
def test_after_sigterm(daemon: Daemon, product: Product, container: Container, kill: Killer) -> None:
    job = Job(container, "ignore")
    running = release(product, "--grace", "1")
    wait_until(lambda: job.has_term(), "the SIGTERM")
    assert [r["step"] for r in the_record(daemon)["rungs"]] == ["term"]
    kill(daemon)
    answer = answer_of(running).must_be("released")
    assert job.terms() == 1
    assert answer.steps() == ["term", "term", "kill"] and answer.json["rungs"][1]["sent"] == 0
    assert answer.json["rungs"][0]["note"] == "cut off"
    finished_once(daemon, answer)


@KILLERS
def test_while_a_killed_task_hangs(
    daemon: Daemon, product: Product, container: Container, kill: Killer
) -> None:
    frozen = container.frozen_fs()
    with frozen:
        holder = container.spawn_holder(open=("/dev/nvidia0", "/dev/nvidiactl"), touch=frozen.path("x"), ignore_term=True)
        frozen.freeze()
        holder.trigger()
        holder.main.wait_stuck()
        running = release(product, "--now")
        wait_until(lambda: [r["step"] for r in _rungs(daemon)] == ["kill"], "the KILL rung")
        kill(daemon)
        wait_until(lambda: [r["step"] for r in _rungs(daemon)] == ["kill", "kill"], "the CLI's KILL rung")
    answer = answer_of(running).must_be("released")
    assert answer.fates() == {holder.pid: "exited"}
    finished_once(daemon, answer)


@KILLERS
def test_while_memory_drains(
    daemon: Daemon, product: Product, engine: Callable[..., HolderHandle], node: Node, kill: Killer
) -> None:
    holder = engine()
    node.control(free_delay_ms=600, fall_mib_per_ms=40, fall_step_mib=500, list_draining=0)
    running = release(product, "--now")
    holder.wait_gone()
    wait_until(lambda: bool(_rungs(daemon)) and _rungs(daemon)[-1]["done"], "the end of the KILL rung")
    assert the_record(daemon)["report"] is None
    kill(daemon)
    answer = answer_of(running).must_be("released")
    assert answer.json["was_held"] and answer.steps() == ["kill"]
    assert answer.gpu(50)["used_mib_after"] == 0
    finished_once(daemon, answer)


def test_after_the_verdict_before_the_answer(
    daemon: Daemon, product: Product, engine: Callable[..., HolderHandle], node: Node
) -> None:
    """The daemon stands still while the worker finishes: the report is in the record, the caller has not heard it."""
    holder = engine()
    node.control(free_delay_ms=300)
    running = release(product, "--now")
    wait_until(lambda: bool(_rungs(daemon)), "the KILL rung")
    os.kill(daemon.pid, signal.SIGSTOP)
    holder.wait_gone()
    wait_until(lambda: the_record(daemon)["report"] is not None, "the report")
    report = the_record(daemon)["report"]
    daemon.kill()
    answer = answer_of(running).must_be("released")
    assert answer.json == report
    assert the_record(daemon)["owner"] == "daemon"


@pytest.mark.parametrize("moment", range(0, 240, 12), ids="{}ms".format)
def test_its_worker_at_any_moment(daemon: Daemon, product: Product, container: Container, moment: int) -> None:
    job = Job(container, "ignore")
    running = release(product, "--grace", "0.05")
    wait_until(lambda: bool(daemon.records()) or running.popen.poll() is not None, "the record")
    time.sleep(moment / 1000)
    for worker in daemon.children_of_kind("Release"):
        os.kill(worker, signal.SIGKILL)
    answer = answer_of(running).must_be("released")
    assert job.terms() <= 1
    finished_once(daemon, answer)


@pytest.mark.parametrize("moment", range(0, 240, 10), ids="{}ms".format)
def test_at_any_moment(daemon: Daemon, product: Product, container: Container, moment: int) -> None:
    """A sweep through the whole release, restarts as systemd does them included."""
    job = Job(container, "ignore")
    running = release(product, "--grace", "0.05")
    wait_until(lambda: bool(daemon.records()) or running.popen.poll() is not None, "the record")
    time.sleep(moment / 1000)  # the moment is the subject here, not something waited for
    daemon.kill()
    daemon.start()
    answer = answer_of(running).must_be("released")
    assert job.terms() <= 1
    daemon.settle()
    finished_once(daemon, answer)


def test_a_restarted_daemon_finishes_what_nobody_else_does(
    daemon: Daemon, product: Product, container: Container
) -> None:
    job = Job(container, "ignore")
    running = release(product, "--grace", "1")
    wait_until(job.has_term, "the SIGTERM")
    daemon.signal(signal.SIGSTOP)  # else it may see that its caller is gone, and cancel
    assert daemon.running is not None
    daemon.running.process.wait_state("T")
    running.process.kill()
    daemon.kill()
    running.popen.communicate()
    release_id = the_record(daemon)["release_id"]
    daemon.start()
    wait_until(lambda: the_record(daemon)["report"] is not None, "the report")
    assert the_record(daemon)["report"]["reason"] == "released"
    assert the_record(daemon)["release_id"] == release_id and the_record(daemon)["owner"] == "daemon"
    assert job.terms() == 1
    daemon.settle()
    daemon.kill()
    told = daemon.stderr().count("release-resumed")
    daemon.start().settle()
    assert daemon.stderr().count("release-resumed") == told == 1


def test_a_worker_that_dies_for_nobody_is_replaced_at_once(
    daemon: Daemon, container: Container, product: Product
) -> None:
    job = Job(container, "ignore")
    client = daemon.client()
    client.say("Release", {"vmid": 129, "options": {"grace_s": 1}, "on_disconnect": "continue"})
    wait_until(job.has_term, "the SIGTERM")
    client.close()
    daemon.settle_connections()
    kill_worker(daemon)
    wait_until(lambda: the_record(daemon)["report"] is not None, "the report")
    assert the_record(daemon)["report"]["reason"] == "released"
    assert job.terms() == 1


def test_what_a_killed_command_line_left_is_reported_once(
    idle_daemon: Daemon, container: Container, product: Product
) -> None:
    job = Job(container, "ignore")
    running = product.start("129", "--grace", "30", "--no-daemon")
    wait_until(job.has_term, "the SIGTERM")
    running.process.kill()
    running.popen.communicate()
    idle_daemon.start()
    wait_until(lambda: the_record(idle_daemon)["report"] is not None, "the report")
    report = the_record(idle_daemon)["report"]
    assert (report["verdict"], report["reason"]) == (None, "interrupted")
    assert job.process.alive()
    idle_daemon.settle()
    idle_daemon.kill()
    idle_daemon.start().settle()
    assert idle_daemon.stderr().count("release-abandoned") == 1
    job.process.kill()
    assert job.terms() == 1


def test_a_daemon_that_comes_back_waits_for_the_one_who_is_at_it(
    daemon: Daemon, container: Container, product: Product
) -> None:
    """The command line went on by itself and is killed too: the daemon notices, without a timer, and says so."""
    job = Job(container, "ignore")
    running = release(product, "--grace", "30")
    wait_until(job.has_term, "the SIGTERM")
    daemon.kill()
    wait_until(lambda: the_record(daemon)["owner"] == "cli", "the command line goes on")
    daemon.start().settle()
    assert the_record(daemon)["report"] is None
    running.process.kill()
    running.popen.communicate()
    wait_until(lambda: the_record(daemon)["report"] is not None, "the report")
    assert the_record(daemon)["report"]["reason"] == "interrupted"
    job.process.kill()
    assert job.terms() == 1


def _rungs(daemon: Daemon) -> list[dict[str, Any]]:
    records = daemon.records()
    return list(records[0]["rungs"]) if records else []
