"""pre-stop, post-stop and ExecStopPost=, in the hook's own process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node
from tests.integration.product import dead, held_mib, lives

from .conftest import INVOCATION, RUN, Hook, of_unit

pytestmark = pytest.mark.embedded
NEXT = "fedcba9876543210fedcba9876543210"


def test_a_stop_with_holders_is_verified_against_the_snapshot(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle], neighbours: list[HolderHandle]
) -> None:
    of_unit(node, INVOCATION)
    holder = engine(ignore_term=True)
    said = hook("pre-stop")
    assert said.returncode == 0 and "nobody watches this stop" in said.stdout
    snapshot = hook.remembered("snapshots")
    assert snapshot is not None and snapshot["holders"][0]["pid"] == holder.pid
    assert snapshot["invocation"] == INVOCATION and 50 in snapshot["minors"]
    assert holder.alive() and hook.records() == []
    container.stop()
    assert hook("post-stop", INVOCATION_ID=INVOCATION).returncode == 0
    report = hook.report()
    assert hook.triggers() == ["hook-post-stop"]
    assert (report["verdict"], report["reason"], report["was_held"]) == ("released", "released", True)
    assert [h["fate"] for h in report["holders"]] == ["exited"]
    assert {g["minor"] for g in report["gpus"]} == {50, 51}
    assert hook.remembered("snapshots") is None
    hook("exec-stop-post", INVOCATION_ID=INVOCATION, SERVICE_RESULT="success")
    hook("post-stop", INVOCATION_ID=INVOCATION)
    assert hook.triggers() == ["hook-post-stop"]
    assert 50 not in held_mib(node)


def covered(path: str) -> tuple[str, ...]:
    return "unshare", "-m", "sh", "-c", f'mount -t tmpfs none /sys/fs/cgroup/{path} && exec "$@"', "sh"


@pytest.mark.parametrize(
    "blinded",
    [
        ("setpriv", "--bounding-set", "-sys_ptrace"),
        ("unshare", "--pid", "--fork", "--mount-proc"),
        covered("lxc/129"),
        covered("lxc.monitor"),
    ],
    ids=["no ptrace rights", "another PID namespace", "the payload covered", "monitors covered"],
)
def test_a_container_that_runs_is_not_taken_for_a_stopped_one(
    container: Container, hook: Hook, engine: Callable[..., HolderHandle], blinded: tuple[str, ...]
) -> None:
    """A late post-stop, or one by hand, of somebody who sees too little to say that it has stopped."""
    holder = engine()
    said = hook("post-stop", prefix=blinded).stdout
    assert "nothing was touched" in said or "nothing was checked" in said
    assert lives(holder) and container.init_process.alive() and hook.records() == []


def test_a_container_with_more_cgroups_than_are_walked_is_not_taken_for_a_stopped_one(
    container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    holder = engine()
    with container.unwalkable():
        assert "nothing was touched" in hook("post-stop").stdout
        assert lives(holder) and container.init_process.alive() and hook.records() == []


def test_each_stop_has_its_own_record(node: Node, container: Container, hook: Hook) -> None:
    of_unit(node, INVOCATION)
    container.stop()
    hook("exec-stop-post", INVOCATION_ID=INVOCATION)
    hook("exec-stop-post", INVOCATION_ID=NEXT)
    assert hook.triggers() == ["unit-stop-post", "unit-stop-post"]


def test_what_is_left_in_the_cgroup_is_killed_and_named(
    node: Node, container: Container, hook: Hook, neighbours: list[HolderHandle]
) -> None:
    left = node.spawn_holder(
        argv=("agent",), comm="agent", open=("/dev/nvidia0",), cgroup="lxc/129", ignore_term=True
    )
    container.stop()
    assert left.alive()
    hook("exec-stop-post", INVOCATION_ID=INVOCATION)
    assert dead(left)
    report = hook.report()
    assert report["verdict"] == "released"
    (rung,) = report["rungs"]
    assert rung["step"] == "cgroup-kill" and rung["targets"] == [left.pid] and rung["gone"] == 1
    assert "agent" in rung["note"]
    assert [(h["pid"], h["fate"]) for h in report["holders"]] == [(left.pid, "exited")]


def test_who_was_its_by_the_cgroup_alone_and_left_that_is_somebody_elses(
    node: Node, container: Container, hook: Hook, neighbours: list[HolderHandle]
) -> None:
    """In container 130's PID namespace, in 129's cgroup at the pre-stop, in neither's cgroup at the post-stop: `ps` says
    130's. Only what runs in the PID namespace of 129's own init stays 129's wherever it goes."""
    guest = node.container(130).spawn_holder(open=("/dev/nvidia0",), cgroup="/lxc/129/ns/guest", ignore_term=True)
    of_unit(node, INVOCATION)
    hook("pre-stop")
    snapshot = hook.remembered("snapshots")
    assert snapshot is not None and [(h["pid"], h["inside"]) for h in snapshot["holders"]] == [(guest.pid, False)]
    (node.cgroup("/system.slice/guest.scope") / "cgroup.procs").write_text(str(guest.main.outer_pid))
    container.stop()
    hook("post-stop", INVOCATION_ID=INVOCATION)
    assert lives(guest) and hook.report()["rungs"] == []


def test_who_runs_in_its_pid_namespace_is_its_own_in_any_cgroup(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    holder = engine(ignore_term=True)
    of_unit(node, INVOCATION)
    (node.cgroup("/system.slice/astray.scope") / "cgroup.procs").write_text(str(holder.main.outer_pid))
    hook("pre-stop")
    snapshot = hook.remembered("snapshots")
    assert snapshot is not None and [(h["pid"], h["inside"]) for h in snapshot["holders"]] == [(holder.pid, True)]
    container.stop()
    hook("post-stop", INVOCATION_ID=INVOCATION)
    assert dead(holder) and hook.report()["verdict"] == "released"


def test_a_killed_monitor_leaves_the_payload_to_us(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle], neighbours: list[HolderHandle]
) -> None:
    holder = engine(ignore_term=True)
    container.kill_monitor()
    hook("exec-stop-post", INVOCATION_ID=INVOCATION, SERVICE_RESULT="signal", EXIT_STATUS="KILL")
    assert dead(holder)
    assert hook.report()["verdict"] == "released"
    assert hook.triggers() == ["unit-stop-post"]


def test_a_container_that_runs_again_is_not_touched(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    holder = engine()
    hook("post-stop", INVOCATION_ID=INVOCATION)
    hook("exec-stop-post", INVOCATION_ID=INVOCATION)
    hook("exec-stop-post", INVOCATION_ID=NEXT)
    hook("pre-start")
    hook("exec-start-pre")
    assert lives(holder)
    assert hook.records() == [], "nothing was released"


def test_a_post_stop_while_it_runs_says_nothing_of_a_release_and_uses_nothing_up(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    """Late, of an earlier run, or by hand, even with the invocation of the unit: the stop that comes is dealt with."""
    of_unit(node, INVOCATION)
    holder = engine()
    hook("pre-stop")
    said = hook("post-stop", INVOCATION_ID=INVOCATION).stdout
    assert "nothing was touched" in said and "released" not in said and hook.records() == [] and lives(holder)
    assert hook.remembered("snapshots") is not None and hook.remembered("stops") is None
    container.stop()
    hook("post-stop", INVOCATION_ID=INVOCATION)
    assert hook.triggers() == ["hook-post-stop"] and [h["pid"] for h in hook.report()["holders"]] == [holder.pid]


def test_a_hookscript_that_outlives_the_unit_makes_no_second_record(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    """A hung post-stop and systemctl stop: ExecStopPost= comes first, and systemd has forgotten the invocation by then."""
    engine()
    of_unit(node, INVOCATION)
    container.stop()
    hook("exec-stop-post", INVOCATION_ID=INVOCATION)
    node.path("/run/systemd/units/invocation:pve-container@129.service").unlink()
    hook("post-stop", INVOCATION_ID=INVOCATION, LXC_PID="4711")
    assert hook.triggers() == ["unit-stop-post"]


def test_a_container_without_a_gpu_is_none_of_our_business(node: Node, hook: Hook) -> None:
    node.container(131, devices=())
    for phase in ("pre-start", "exec-start-pre", "post-start", "pre-stop", "post-stop", "exec-stop-post"):
        done = hook(phase, vmid=131, INVOCATION_ID=INVOCATION)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert hook.records(131) == []


def test_a_container_whose_configuration_is_gone_is_still_finished(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    engine()
    hook("pre-stop")
    container.stop()
    node.path("/etc/pve/lxc/129.conf").unlink(missing_ok=True)
    node.path(f"/etc/pve/nodes/{node.hostname}/lxc/129.conf").unlink(missing_ok=True)
    hook("post-stop", INVOCATION_ID=INVOCATION)
    assert hook.report()["verdict"] == "released"


def test_memory_that_does_not_come_back_is_reported_and_the_stop_goes_on(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    engine()
    hook("pre-stop")
    node.control(leak_mib=3000)
    container.stop()
    assert hook("post-stop", INVOCATION_ID=INVOCATION).returncode == 0
    report = hook.report()
    assert (report["verdict"], report["reason"]) == ("held", "ghost-memory")


def test_ghost_memory_from_before_the_container_is_not_blamed_on_it(node: Node, hook: Hook) -> None:
    node.control(ghost_mib={50: 900})
    container = node.container(129)
    other = node.container(130).spawn_holder(open=("/dev/nvidia0",), alloc=("50:100:compute",))
    container.spawn_holder(open=("/dev/nvidia0",), alloc=("50:2048:compute",))
    hook("pre-stop")
    container.stop()
    hook("post-stop", INVOCATION_ID=INVOCATION)
    assert hook.report()["verdict"] == "released"
    assert lives(other)


def test_a_silent_driver_costs_a_bounded_time_and_the_verdict(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    hook.configure("hook: {budget: 3}\n")
    engine()
    hook("pre-stop")
    node.control(hang="nvmlInit")
    container.stop()
    assert hook("post-stop", timeout=60, INVOCATION_ID=INVOCATION).returncode == 0
    report = hook.report()
    assert (report["verdict"], report["reason"]) == ("unknown", "driver-silent")


def test_a_broken_configuration_falls_back_to_the_defaults(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    node.write("/etc/pve-gpu-release/config.yaml", "hook: {on_dirty: maybe}\n")
    engine()
    assert hook("pre-stop").returncode == 0
    container.stop()
    assert hook("post-stop", INVOCATION_ID=INVOCATION).returncode == 0
    assert hook.report()["verdict"] == "released"
    assert hook("pre-start").returncode == 0


def test_a_shutdown_that_was_given_up_keeps_its_snapshot_for_the_stop(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    of_unit(node, INVOCATION)
    first = engine()
    hook("pre-stop")
    first.kill(signal.SIGKILL)
    second = engine()
    hook("pre-stop")
    snapshot = hook.remembered("snapshots")
    assert snapshot is not None and {h["pid"] for h in snapshot["holders"]} == {first.pid, second.pid}


def test_an_lxc_start_by_hand_is_named_by_its_init(node: Node, container: Container, hook: Hook) -> None:
    """INVOCATION_ID is the login session's then, the same for every stop in it."""
    container.stop()
    for pid in ("4711", "4712"):
        hook("post-stop", INVOCATION_ID=INVOCATION, LXC_PID=pid)
    assert hook.triggers() == ["hook-post-stop", "hook-post-stop"]


def test_the_callers_limit_on_descriptors_is_not_ours(
    node: Node, container: Container, hook: Hook, engine: Callable[..., HolderHandle]
) -> None:
    """A hookscript has whatever the shell that typed `pct stop` has."""
    engine()
    command = f"ulimit -Sn 12; exec '{sys.executable}' -I -S -c \"$1\" 129 pre-stop"
    done = node.run(["/bin/sh", "-c", command, "sh", RUN], cwd="/")
    assert done.returncode == 0 and "hold GPUs" in done.stdout, done.stdout + done.stderr
