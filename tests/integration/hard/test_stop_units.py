"""Jobs that come back, without and with `--stop-units`: named, then ended; nothing outside the unit is touched."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.embedded.node import Container, Node
from tests.embedded.scope import Running
from tests.integration.conftest import ONE_GPU
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


@pytest.mark.parametrize("name", ["cron.service", "ssh.service", "docker.service", "systemd-logind.service", "vllm.service"])
def test_the_process_of_a_service_of_many_is_not_ended_for_one_job(
    product: Product, container: Container, services: list[Running], name: str
) -> None:
    """It starts the job again and again; its parent is in another cgroup."""
    job = container.spawn_holder(
        open=ONE_GPU, cgroup=f"system.slice/{name}", respawn=-1, ignore_term=True, supervisor_comm="starter"
    )
    (starter,) = job.by_role("supervisor")
    answer = product.ask(129, "--stop-units", "--grace", "1")
    if name == "vllm.service":
        answer.must_be("released")
        assert not starter.alive()
    else:
        answer.must_be("respawned")
        assert starter.alive() and f"left alone, {name} serves more than this job" in " ".join(answer.json["details"])


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
    """Its chains may be met between two forks and end for good: `released` is right then, and only then."""
    bomb = jobs.bomb(container, "init.scope")
    answer = product.release(129, "--now")
    if answer.reason == "released":
        assert not jobs.holders(container), "somebody still held the GPU"
    else:
        answer.must_be("respawned")
    assert bomb.alive()
    bomb.running.kill()


# --- asking the supervisor -------------------------------------------------------------------------------------------


@pytest.mark.case("stop-unit-asked")
@pytest.mark.parametrize("unprivileged", [False, True], ids=["privileged", "unprivileged"])
def test_systemd_is_asked_over_its_own_socket(node: Node, product: Product, expected: str, unprivileged: bool) -> None:
    container = node.container(131, unprivileged=unprivileged)
    other = container.popen(["sleep", "600"], cgroup="system.slice/ssh.service")
    jobs.become_systemd(container)
    job = jobs.supervised(container)
    answer = product.release(131, "--stop-units").must_be(expected)
    assert answer.steps() == ["stop-unit"], answer.out
    rung = answer.json["rungs"][0]
    assert rung["note"] == "systemd stops vllm.service" and rung["gone"] == 1
    assert not job.alive() and other.process.alive()


def test_what_systemd_refuses_is_ended_by_signals(node: Node, product: Product, container: Container) -> None:
    jobs.become_systemd(container)
    job = jobs.start(container, [jobs.PYTHON, "-I", "-c", jobs.JOB], "other.slice/odd name;$(x).service")
    answer = product.release(129, "--stop-units").must_be("released")
    assert answer.steps() == ["stop-unit", "term"]
    assert "NoSuchUnit: Unit not loaded." in answer.json["rungs"][0]["note"]
    assert not job.alive()


def test_whoever_is_not_the_containers_systemd_is_not_asked(product: Product, container: Container) -> None:
    """A socket in its place, served by another process (it could be one of the host's that was mounted in)."""
    script = (
        "import os, socket\nos.makedirs('/run/systemd', exist_ok=True)\ns = socket.socket(socket.AF_UNIX)\n"
        "s.bind('/run/systemd/private')\ns.listen()\nprint('up', flush=True)\npeer, _ = s.accept()\n"
        "import sys\nprint('asked' if peer.recv(4096) else 'left alone', flush=True)\n"
    )
    impostor = jobs.start(container, [jobs.PYTHON, "-I", "-c", script])
    job = jobs.start(container, [jobs.PYTHON, "-I", "-c", jobs.JOB], UNIT)
    answer = product.release(129, "--stop-units").must_be("released")
    assert (
        f"not served by who should (pid {impostor.running.process.ns_pid} in there)" in answer.json["rungs"][0]["note"]
    )
    out = impostor.running.popen.stdout
    assert out is not None and out.readline() == "left alone\n"
    assert not job.alive()


def test_a_manager_that_never_answers_does_not_hold_a_release_up(product: Product, container: Container) -> None:
    jobs.become_systemd(container)
    job = jobs.start(container, [jobs.PYTHON, "-I", "-c", jobs.JOB], UNIT)
    container.init_process.kill(signal.SIGSTOP)
    try:
        answer = product.release(129, "--stop-units").must_be("released")
        assert answer.steps() == ["stop-unit", "term"] and not job.alive()
        assert answer.json["duration_ms"] < 8000
    finally:
        container.init_process.kill(signal.SIGCONT)


def test_symlinks_of_the_container_do_not_lead_out_of_it(node: Node, product: Product, container: Container) -> None:
    node.write("/run/outside/private", "")
    container.path("/run/systemd").symlink_to("/proc/1/root/../../../../run/outside")
    job = jobs.start(container, [jobs.PYTHON, "-I", "-c", jobs.JOB], UNIT)
    answer = product.release(129, "--stop-units").must_be("released")
    assert answer.steps() == ["stop-unit", "term"] and answer.json["rungs"][0]["sent"] == 0
    assert not job.alive()


@pytest.mark.case("stop-docker-asked")
def test_docker_is_asked_over_its_api(
    product: Product, container: Container, docker: Container, services: list[Running], expected: str
) -> None:
    engine = jobs.dockerd(container)
    job = jobs.supervised(docker, cgroup="")
    answer = product.release(129, "--stop-units").must_be(expected)
    assert answer.steps() == ["stop-unit"]
    assert f"container {DOCKER_ID[:12]}" in answer.json["rungs"][0]["note"]
    assert not job.alive() and engine.alive()
