"""Every path on which a container stops or starts: its GPUs are free before it starts again (issue 4, "Must hold")."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.lifecycle import NODES, World, busy, kill_init, print_table
from tests.node.node import VirtualNode

pytestmark = pytest.mark.node

STOPPED = [("hook-post-stop", "released")]
STARTED = [("hook-pre-start", "released")]
STOP_PHASES = ["pre-stop", "post-stop", "exec-stop-post"]
START_PHASES = ["pre-start", "exec-start-pre", "post-start"]


@pytest.fixture(scope="module")
def world(require_virtual_node: None) -> Iterator[World]:
    """One node for all rows; each leaves container 129 running and free."""
    with VirtualNode() as node:
        yield World.make(node)


@pytest.mark.smoke
def test_start(world: World) -> None:
    world.begin(running=False)
    done = world.ct.start()
    assert done.stderr == "" and "holds no GPU" in done.stdout
    world.check("pct start", STARTED, running=True, phases=START_PHASES)


@pytest.mark.smoke
def test_stop(world: World) -> None:
    world.begin()
    world.ct.stop()
    world.check("pct stop", STOPPED, phases=STOP_PHASES)


def test_shutdown(world: World) -> None:
    world.begin()
    world.ct.shutdown()
    world.check("pct shutdown", STOPPED, phases=STOP_PHASES)


def test_shutdown_that_times_out(world: World) -> None:
    world.begin()
    (world.ct.root / "etc/slow").touch()
    assert world.node.pct("shutdown", 129, "--timeout", 1, check=False).returncode == 255
    assert world.records() == [] and world.holders[0].alive()
    reports = world.entries("watchdog-report")
    assert reports and "nothing is signalled" in reports[0]["MESSAGE"]
    (world.ct.root / "etc/slow").unlink()
    world.node.wait_until(lambda: "post-stop" in world.phases(), "the late post-stop", 60)
    world.check("pct shutdown, times out, guest ends later", STOPPED)


def test_shutdown_that_times_out_with_force(world: World) -> None:
    world.begin()
    (world.ct.root / "etc/slow").touch()
    world.ct.shutdown("--timeout", "1", "--forceStop", "1")
    world.check("pct shutdown --forceStop", STOPPED)
    (world.ct.root / "etc/slow").unlink()


def test_start_debug(world: World) -> None:
    world.begin(running=False)
    world.ct.start("--debug")
    assert world.node.unit("pve-container-debug@129", "ActiveState")["ActiveState"] == "active"
    world.check("pct start --debug", STARTED, running=True, phases=START_PHASES)
    world.hold()
    world.cursor = world.node.cursor()
    world.ct.stop()
    world.check("pct stop of a debug start", STOPPED, phases=STOP_PHASES)


@pytest.mark.smoke
def test_systemctl_start(world: World) -> None:
    world.begin(running=False)
    world.node.systemctl("start", world.ct.unit)
    world.check("systemctl start", [("unit-start-pre", "released")], running=True, phases=["exec-start-pre"])


@pytest.mark.smoke
def test_pct_reboot(world: World) -> None:
    world.begin()
    world.ct.reboot()
    world.check("pct reboot", STOPPED + STARTED, running=True, phases=STOP_PHASES + START_PHASES)


@pytest.mark.smoke
def test_reboot_inside(world: World) -> None:
    world.begin()
    world.init("reboot")
    world.check(
        "reboot inside", [("unit-stop-post", "released"), ("unit-start-pre", "released")], running=True,
        phases=["exec-stop-post", "exec-start-pre"],
    )  # fmt: skip


def test_poweroff_inside(world: World) -> None:
    world.begin()
    world.init("poweroff")
    world.check("poweroff inside", STOPPED, phases=["post-stop", "exec-stop-post"])


def test_init_killed(world: World) -> None:
    world.begin()
    kill_init(world.ct)
    world.check("init killed -9", STOPPED, phases=["post-stop", "exec-stop-post"])


@pytest.mark.smoke
def test_monitor_killed(world: World) -> None:
    world.begin()
    world.kill(world.ct.monitor_pid)
    world.check("monitor killed -9", [("unit-stop-post", "released")], phases=["exec-stop-post"])


def test_lxc_stop(world: World) -> None:
    world.begin()
    world.node.run(["lxc-stop", "-n", "129", "-k"])
    world.check("lxc-stop -k", STOPPED, phases=["post-stop", "exec-stop-post"])


def test_systemctl_restart(world: World) -> None:
    world.begin()
    world.node.systemctl("restart", world.ct.unit)
    world.check(
        "systemctl restart", [*STOPPED, ("unit-start-pre", "released")], running=True,
        phases=["post-stop", "exec-stop-post", "exec-start-pre"],
    )  # fmt: skip


def test_systemctl_stop(world: World) -> None:
    world.begin()
    world.node.systemctl("stop", world.ct.unit)
    world.check("systemctl stop", STOPPED, phases=["post-stop", "exec-stop-post"])


def test_lxc_start_by_hand(world: World) -> None:
    """Covered by neither drop-in; pct stop runs the hookscript's phases."""
    world.begin(running=False)
    world.node.run(["lxc-start", "-n", "129"])
    world.hold()
    world.ct.stop()
    world.check("lxc-start by hand, then pct stop", STOPPED, phases=["pre-stop", "post-stop"])


def test_holder_left_by_lxc_attach(world: World) -> None:
    """Attached without the container's PID namespace it is in none of its cgroups: the host's, and left alone."""
    world.begin(holding=False)
    attached = world.ct.hold(argv=("attached",), open=NODES, setsid=True, ignore_term=True, alloc=("50:100:compute",))
    world.holders.append(attached)
    world.ct.stop()
    world.check("stop, holder left by lxc-attach", STOPPED, phases=STOP_PHASES)


@pytest.mark.smoke
def test_busy_root_file_system(world: World) -> None:
    world.begin()
    process = busy(world.ct)
    world.ct.stop()
    world.node.wait_until(lambda: world.records(), "the drop-in's record", 60)
    process.kill()
    world.check("busy rootfs at stop", [("unit-stop-post", "released")], phases=["pre-stop", "exec-stop-post"])


@pytest.mark.parametrize("cgroup", ["lxc/129", "lxc/129/ns/x", "lxc.monitor/129"])
def test_start_with_leftovers(world: World, cgroup: str) -> None:
    world.begin(running=False)
    left = world.squat(cgroup)
    done = world.ct.start()
    above = cgroup.removesuffix("/ns/x")
    assert f"left behind in /{above}: {left.pid} (agent); cleared" in done.stdout
    world.check(f"start, leftover in {cgroup}", STARTED, running=True, phases=START_PHASES)


def test_stop_with_a_leftover(world: World) -> None:
    world.begin()
    world.squat("lxc/129")
    world.ct.stop()
    world.check("stop, host process in lxc/129", STOPPED, phases=STOP_PHASES)


@pytest.mark.smoke
def test_reboot_inside_with_a_leftover(world: World) -> None:
    """Proxmox leaves the container down."""
    world.begin()
    world.squat("lxc/129")
    world.init("reboot")
    world.check(
        "reboot inside, leftover in lxc/129", [("unit-stop-post", "released"), ("unit-start-pre", "released")],
        running=True, phases=["exec-stop-post", "exec-start-pre"],
    )  # fmt: skip


def test_post_start_with_no_container_running(world: World) -> None:
    world.begin(running=False)
    world.node.run(["mv", "/run/pve", "/run/pve.away"])
    try:
        assert world.node.pct("start", 129, check=False).returncode == 255
        # The drop-in fails for want of its error stream, so that Proxmox comes to no post-start; without drop-in it does.
        world.node.run(["/var/lib/vz/snippets/pve-gpu-release", "129", "post-start"])
        ends = [e["OUTCOME"] for e in world.entries("phase-done") if e["PVE_PHASE"] == "post-start"]
        assert ends == ["not-running"]
    finally:
        world.node.run(["mv", "/run/pve.away", "/run/pve"])
    assert world.records()[0] == STARTED[0]
    world.note("start fails before lxc-start")
    world.ct.start()


def test_a_container_without_gpu(world: World) -> None:
    """No record, no word, on every path."""
    cursor = world.node.cursor()
    ct = world.node.add_container(132, init="tiny")
    ct.hookscript("local:snippets/pve-gpu-release")
    said = [ct.start(), ct.reboot(), ct.stop(), ct.start()]
    ct.attach(["/opt/standin/tiny-init", "reboot"], check=False)
    before = ct.monitor_pid
    world.node.wait_until(lambda: ct.monitor_pid not in (0, before), "132 to run again", 60)
    world.kill(ct.monitor_pid)
    world.node.wait_unit(ct.unit, "failed")
    world.node.systemctl("start", ct.unit)
    world.node.systemctl("stop", ct.unit)
    assert [done.stdout + done.stderr for done in said] == [""] * 4
    assert world.node.journal(cursor, PVE_VMID=132) == []


def test_fifty_cycles(world: World) -> None:
    world.begin()
    open_before = world.node.run(["ls", f"/proc/{world.daemon_pid()}/fd"]).stdout
    for _ in range(50):
        world.ct.stop()
        world.ct.start()
    world.forget_holders()
    world.wait_records(50 * (STOPPED + STARTED))
    assert sorted(world.records()) == sorted(50 * (STOPPED + STARTED))
    for folder in ("snapshots", "watch"):
        assert not world.node.exists(f"/run/pve-gpu-release/{folder}/129.json")
    kept = world.node.run(["ls", "/run/pve-gpu-release/releases"]).stdout.split()
    assert len(kept) <= 41 and all(name.endswith(".json") for name in kept)
    assert world.node.run(["ls", f"/proc/{world.daemon_pid()}/fd"]).stdout == open_before
    world.must_be_free()


def test_print_the_table(world: World) -> None:
    print_table("lifecycle-paths", f"One call of the hook that has nothing to do: {world.call_ms:.0f} ms.")
