"""pre-start, ExecStartPre= and post-start, in the hook's own process."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.embedded.node import GPU_NODES, Container, HolderHandle, Node
from tests.integration.product import dead, lives

from .conftest import STORE, Hook

pytestmark = pytest.mark.embedded
CONFIG = "".join(f"dev{i}: /dev/{name}\n" for i, name in enumerate(GPU_NODES))


@pytest.fixture
def stopped(node: Node, hook: Hook) -> None:
    """Container 129 with both GPUs, not running."""
    node.configure(129, CONFIG)


def squat(node: Node, cgroup: str, **options: object) -> HolderHandle:
    """A process of the host in a cgroup of container 129."""
    given: dict[str, object] = {"argv": ("agent",), "comm": "agent", "ignore_term": True, **options}
    return node.spawn_holder(cgroup=cgroup, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("cgroup", ["lxc/129", "lxc/129/ns/x", "lxc.monitor/129"])
def test_leftovers_are_cleared_and_named(stopped: None, node: Node, hook: Hook, cgroup: str) -> None:
    left = squat(node, cgroup)
    done = hook("pre-start")
    assert done.returncode == 0 and dead(left)
    assert f"left behind in /{cgroup.removesuffix('/ns/x')}: {left.pid} (agent); cleared" in done.stdout
    assert hook.triggers() == ["hook-pre-start"]


def test_pre_start_and_exec_start_pre_share_one_record(stopped: None, node: Node, hook: Hook) -> None:
    assert "free" in hook("pre-start").stdout or hook.records()
    hook("exec-start-pre")
    assert hook.triggers() == ["hook-pre-start"]
    hook("exec-start-pre")
    assert hook.triggers() == ["hook-pre-start", "unit-start-pre"]


def test_a_leftover_that_came_between_is_cleared_without_a_second_record(stopped: None, node: Node, hook: Hook) -> None:
    hook("pre-start")
    left = squat(node, "lxc/129")
    hook("exec-start-pre")
    assert dead(left) and hook.triggers() == ["hook-pre-start"]


def test_the_gate_blocks_a_start_onto_ghost_memory(stopped: None, node: Node, hook: Hook) -> None:
    hook.configure("containers: {129: {hook: {on_dirty: block}}}\n")
    node.control(ghost_mib={50: 5000})
    done = hook("pre-start")
    assert done.returncode == 77
    assert "start REFUSED" in done.stderr and "5,000 MiB on GPU 0" in done.stderr and "next: " in done.stderr
    done = hook("exec-start-pre")
    assert done.returncode == 77
    assert hook.triggers() == ["hook-pre-start", "unit-start-pre"]
    node.control(ghost_mib=None)
    node.clear_control()
    assert hook("pre-start").returncode == 0


def test_the_gate_warns_by_default(stopped: None, node: Node, hook: Hook) -> None:
    node.control(ghost_mib={50: 5000})
    done = hook("pre-start")
    assert done.returncode == 0 and "start goes on: " in done.stdout


def test_an_unknown_verdict_never_blocks(stopped: None, node: Node, hook: Hook) -> None:
    hook.configure("hook: {on_dirty: block, pre_start_budget: 3}\n")
    node.control(hang="nvmlInit")
    done = hook("pre-start", timeout=60)
    assert done.returncode == 0 and "start goes on: " in done.stdout


def test_others_on_the_gpu_never_make_it_dirty(stopped: None, node: Node, hook: Hook) -> None:
    hook.configure("hook: {on_dirty: block, min_free_mib: 100000}\n")
    node.control(ghost_mib={50: 900})
    other = node.container(130).spawn_holder(open=("/dev/nvidia0",), alloc=("50:90000:compute",))
    assert hook("pre-start").returncode == 0
    assert lives(other)


def test_too_little_memory_blocks(stopped: None, node: Node, hook: Hook) -> None:
    hook.configure("hook: {on_dirty: block, min_free_mib: 143300}\n")
    other = node.container(130).spawn_holder(open=("/dev/nvidia0",), alloc=("50:9000:compute",))
    node.control(ghost_mib={50: 900})
    done = hook("pre-start")
    assert done.returncode == 77 and "MiB free" in done.stderr
    assert lives(other)


def test_without_a_gpu_nothing_is_blocked(node: Node, hook: Hook) -> None:
    hook.configure("hook: {on_dirty: block}\n")
    node.control(ghost_mib={50: 5000})
    node.configure(131, "arch: amd64\n")
    done = hook("pre-start", vmid=131)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_missing_nodes_are_made(stopped: None, node: Node, hook: Hook) -> None:
    node.path("/dev/nvidia-uvm").unlink()
    done = hook("pre-start")
    assert "made missing device nodes: /dev/nvidia-uvm" in done.stdout, done.stdout
    assert Path(node.path("/dev/nvidia-uvm")).is_char_device()


def test_post_start_says_whether_the_container_runs(node: Node, container: Container, hook: Hook) -> None:
    assert hook("post-start").returncode == 0
    container.stop()
    assert hook("post-start").returncode == 0
    assert hook.records() == []


def test_a_release_in_flight_holds_a_start_up_for_half_the_budget_only(stopped: None, node: Node, hook: Hook) -> None:
    """Leftovers are cleared all the same, and ExecStartPre= does not wait again."""
    hook.configure("hook: {pre_start_budget: 8}\n")
    hook("pre-start")
    take = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print('held', flush=True); time.sleep(600)"
    busy = node.popen([sys.executable, "-I", "-c", take, f"{STORE}/locks/129.lock"])
    assert busy.popen.stdout is not None and busy.popen.stdout.readline() == "held\n"
    left = squat(node, "lxc/129")
    done = hook("pre-start", timeout=60)
    assert done.returncode == 0 and "goes on unchecked" in done.stdout and dead(left)
    began = time.monotonic()
    assert hook("exec-start-pre").returncode == 0
    assert time.monotonic() - began < 3.5
    busy.process.kill()
    busy.popen.communicate()
