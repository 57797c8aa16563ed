"""Jobs that come back, without and with `--stop-units`: named, then ended; nothing outside the unit is touched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.embedded.node import Container, Node
from tests.embedded.scope import Running
from tests.integration.product import Product

from . import jobs
from .jobs import DOCKER_ID, UNIT

pytestmark = pytest.mark.usefixtures("neighbours")


@pytest.fixture
def services(container: Container) -> Iterator[list[Running]]:
    """What else runs in the container: it must live on, whatever a test does."""
    found = [
        container.popen(["sleep", "600"], cgroup="system.slice/ssh.service"),
        container.popen(["sleep", "600"], cgroup="system.slice/postgresql.service"),
        container.popen(["sleep", "600"], cgroup="init.scope"),
        container.attach(["sleep", "600"]),
    ]
    yield found
    assert all(one.process.alive() for one in found), "another service of the container was ended"
    assert container.init_process.alive()
    for one in found:
        one.kill()


# --- a systemd unit with Restart=always and RestartSec=100ms ---------------------------------------------------------


@pytest.mark.case("respawn-unit")
def test_a_unit_that_restarts_is_named_with_the_command_that_stops_it(
    product: Product, container: Container, services: list[Running], expected: str
) -> None:
    job = jobs.supervised(container)
    answer = product.release(129, "--grace", "1").must_be(expected)
    assert "vllm.service" in answer.message
    assert "--stop-units" in answer.json["next_step"]
    assert "pct exec 129 -- systemctl stop vllm.service" in answer.json["next_step"]
    assert job.alive() and job.pid not in answer.signalled()


@pytest.mark.case("stop-unit-killed")
def test_a_unit_whose_manager_cannot_be_asked_is_killed_as_a_whole_when_it_comes_back(
    product: Product, container: Container, services: list[Running], expected: str
) -> None:
    job = jobs.supervised(container)
    answer = product.release(129, "--stop-units", "--grace", "1").must_be(expected)
    assert answer.steps()[0] == "stop-unit" and "cgroup-kill" in answer.steps()
    assert "no socket /run/systemd/private" in answer.json["rungs"][0]["note"]
    jobs.wait_empty(container, UNIT)
    assert not job.alive()
    assert product.ask("verify", 129).reason == "nothing-held"


# --- a shell loop ----------------------------------------------------------------------------------------------------


@pytest.mark.case("respawn-loop")
@pytest.mark.parametrize("cgroup", ["init.scope", ".lxc"])
def test_a_shell_loop_is_named_by_its_process(
    product: Product, container: Container, services: list[Running], expected: str, cgroup: str
) -> None:
    loop = jobs.shell_loop(container, cgroup)
    answer = product.release(129, "--grace", "1").must_be(expected)
    assert f"pid {loop.pid} (sh)" in answer.message
    assert f"kill {loop.running.process.ns_pid}" in answer.json["next_step"]
    assert loop.alive()


@pytest.mark.case("stop-loop")
@pytest.mark.parametrize("cgroup", ["init.scope", ".lxc"])
def test_a_shell_loop_is_ended_itself_and_nobody_beside_it(
    product: Product, container: Container, services: list[Running], expected: str, cgroup: str
) -> None:
    loop = jobs.shell_loop(container, cgroup)
    answer = product.release(129, "--stop-units", "--grace", "1").must_be(expected)
    assert any("starts the job again" in rung["note"] for rung in answer.json["rungs"])
    assert "cgroup-kill" not in answer.steps()
    assert not loop.alive() and loop.pid in answer.signalled()
    assert product.ask("verify", 129).reason == "nothing-held"


# --- docker in the container -----------------------------------------------------------------------------------------


@pytest.fixture
def docker(container: Container) -> Container:
    return container.nested(f"docker/{DOCKER_ID}", ["nvidia0", "nvidiactl", "nvidia-uvm"])


@pytest.mark.case("respawn-docker")
def test_a_nested_container_that_restarts_its_job_is_named(
    product: Product, container: Container, docker: Container, services: list[Running], expected: str
) -> None:
    job = jobs.supervised(docker, cgroup="")
    answer = product.release(129, "--grace", "1").must_be(expected)
    assert DOCKER_ID in answer.message
    assert f"docker stop {DOCKER_ID[:12]}" in answer.json["next_step"]
    assert job.alive()


@pytest.mark.case("stop-docker")
def test_a_nested_container_is_killed_as_a_whole_when_its_job_comes_back(
    product: Product, container: Container, docker: Container, services: list[Running], expected: str
) -> None:
    job = jobs.supervised(docker, cgroup="")
    assert len(job.running.process.nested_pids()) == 3, "two PID namespaces below the node's"
    answer = product.release(129, "--stop-units", "--grace", "1").must_be(expected)
    assert "cgroup-kill" in answer.steps()
    assert not job.alive() and not docker.init_process.alive()


# --- faster than we look ---------------------------------------------------------------------------------------------


@pytest.mark.case("bomb")
def test_holders_that_fork_faster_than_a_look_are_never_called_released(
    product: Product, container: Container, services: list[Running], expected: str
) -> None:
    bomb = jobs.bomb(container)
    answer = product.release(129, "--now").must_be(expected)
    assert "vllm.service" in answer.message and bomb.alive()
    assert answer.json["duration_ms"] < 20_000


@pytest.mark.case("stop-bomb")
def test_holders_that_fork_faster_than_a_look_go_with_their_cgroup(
    product: Product, container: Container, services: list[Running], expected: str
) -> None:
    bomb = jobs.bomb(container)
    answer = product.release(129, "--now", "--stop-units").must_be(expected)
    assert "cgroup-kill" in answer.steps() and not bomb.alive()
    jobs.wait_empty(container, UNIT)


def test_a_bomb_without_a_unit_is_bounded_and_said(
    node: Node, product: Product, container: Container, services: list[Running]
) -> None:
    bomb = jobs.bomb(container, "init.scope")
    answer = product.release(129, "--now")
    assert answer.reason == "respawned" and answer.status == 3 and bomb.alive()
    bomb.running.kill()
