"""When killing is not enough, on a real GPU (issue 6): a job that its supervisor starts again, and `wait`.

Skipped, with the reason, while the product has not got these options; PGR_REQUIRE_HARD=1 makes that a failure.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from . import product
from .channel import wait_readable
from .container import Process
from .world import SLACK_MIB, World

DOCKER = "ns/docker/" + "4f" * 32
SYSTEMD = "ns/system.slice/vllm.service"
OTHER = "ns/system.slice/other.service"
JOBS = pytest.mark.parametrize(("cgroup", "nested", "name"), [(DOCKER, "init", "4f4f4f4f"), (SYSTEMD, "", "vllm")])


@pytest.fixture(scope="session")
def offered() -> str:
    """What the product's help says."""
    return product.help_text()


def need(offered: str, *words: str) -> None:
    missing = [word for word in words if word not in offered]
    if missing and os.environ.get("PGR_REQUIRE_HARD") == "1":
        pytest.fail(f"the product's help does not offer {missing}", pytrace=False)
    if missing:
        pytest.skip(f"the product does not offer {missing} yet")


def start_supervised(world: World, cgroup: str, nested: str) -> tuple[Process, Process]:
    """A restarting parent with a real CUDA child, and another service of the container that holds nothing."""
    gpu = world.machine.first
    box = world.container(129)
    other = box.spawn("--no-cuda", "--report-signals", cgroup=OTHER, label="other-service")
    world.foreign.append(other)
    options = [f"--gpu={gpu.uuid}=512", "--supervise", f"--open={world.machine.node(gpu)}", "--open=/dev/nvidiactl"]
    boss = box.spawn(*options, event="supervisor", cgroup=cgroup, nested=nested, label="supervisor")
    boss.channel.expect("ready", 60, round=1)
    return boss, other


@JOBS
def test_a_supervised_job_that_comes_back_is_never_called_released(
    world: World, offered: str, cgroup: str, nested: str, name: str
) -> None:
    boss, _other = start_supervised(world, cgroup, nested)
    done = world.release("--grace", "2", case=f"supervised job {cgroup[3:20]}")
    done.must_end(3, "respawned")
    assert boss.is_alive()
    assert {h["fate"] for h in done.report["holders"]} & {"respawned"}
    told = done.report["message"] + str(done.report["next_step"])
    assert name in told, "it says what brings the job back"
    world.assert_foreign_untouched()


@JOBS
def test_a_supervised_job_is_freed_and_kept_free(
    world: World, offered: str, cgroup: str, nested: str, name: str
) -> None:
    need(offered, "--stop-units")
    gpu = world.machine.first
    boss, _other = start_supervised(world, cgroup, nested)
    box = world.boxes[129]
    done = world.release("--stop-units", "--grace", "2", case=f"--stop-units {cgroup[3:20]}")
    done.must_end(0, "released")
    world.assert_free(gpu)
    assert not box.cgroup.populated(cgroup), "nobody is left who could start it again"
    assert not boss.is_alive()
    assert box.is_running()
    world.run("verify", "129", "--json").must_end(0, "nothing-held")
    world.assert_foreign_untouched()


def waited(world: World, *argv: str) -> None:
    """Start `wait` when a holder with 16 GiB of pinned memory has just got SIGKILL; it returns when that is over."""
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=8192", f"--pinned={16 << 10}")
    began = time.monotonic()
    holder.send_signal(signal.SIGKILL)
    child = subprocess.Popen(
        [*product.PROGRAM, "wait", *argv, "--timeout", "60"],
        cwd=product.ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        pidfd = os.pidfd_open(child.pid)
        free_at = returned_at = 0.0
        limit = world.machine.idle_mib[gpu.uuid] + SLACK_MIB
        while not returned_at and time.monotonic() - began < 90:
            if not free_at and world.driver.used_mib(gpu) <= limit and not holder.is_alive():
                free_at = time.monotonic()
            if wait_readable(pidfd, 0.001):
                returned_at = time.monotonic()
                if not free_at and world.driver.used_mib(gpu) <= limit and not holder.is_alive():
                    free_at = returned_at
        os.close(pidfd)
    finally:
        child.kill()
        text = (child.communicate()[0] or b"").decode(errors="replace")
    world.notes.append(f"wait {argv} -> {child.returncode}: {text}")
    assert returned_at, "wait did not return"
    assert child.returncode == 0, text
    assert free_at, f"wait returned after {returned_at - began:.3f} s, before the memory was free: {text}"
    world.assert_free(gpu)
    figures = (free_at - began, returned_at - began, returned_at - free_at)
    label = "wait --gpu --free" if "--free" in argv else "wait --gpu" if "--gpu" in argv else "wait 129"
    world.machine.figures.add("wait", label, *(f"{value * 1000:.0f}" for value in figures))


def test_wait_for_a_gpu_returns_when_the_drain_is_over(bare_world: World, offered: str) -> None:
    need(offered, "wait", "--free")
    gpu = bare_world.machine.first
    free = bare_world.driver.memory(gpu).free_mib - 64
    waited(bare_world, "--gpu", gpu.uuid, "--free", str(free))


def test_wait_for_a_container_returns_when_the_drain_is_over(bare_world: World, offered: str) -> None:
    need(offered, "wait", "--free")
    waited(bare_world, "129")
