"""What may go wrong around a stop or a start, and never keeps a container from either (issue 4, "Must hold")."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.lifecycle import CONFIG, NODES, SNIPPET, World, print_table, stuck_holder, waits_in
from tests.node.node import Container, VirtualNode
from tests.node.standin import GpuHolder

pytestmark = pytest.mark.node

STOPPED = [("hook-post-stop", "released")]
STARTED = [("hook-pre-start", "released")]
START_PHASES = ["pre-start", "exec-start-pre", "post-start"]
SILENT = [("hook-post-stop", "unknown"), ("hook-pre-start", "unknown")]


@pytest.fixture(scope="module")
def world(require_virtual_node: None) -> Iterator[World]:
    with VirtualNode() as node:
        yield World.make(node)


@pytest.fixture
def quiet(world: World) -> Iterator[World]:
    """The same, put right again afterwards."""
    yield world
    world.node.clear_control()
    world.configure(CONFIG)


# ---- the gate --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_gate_blocks_and_the_task_says_why(require_virtual_node: None) -> None:
    with VirtualNode() as node:
        world = World.make(node)
        world.begin(running=False)
        world.configure(CONFIG.replace("hook: {", "hook: {on_dirty: block, "))
        world.neighbour_leaves()  # alone on the GPU ghost memory is certain
        node.control(ghost_mib={50: 5000})
        done = node.pct("start", 129, check=False)
        assert done.returncode == 255
        task = node.tasks()[-1]
        refusal = "container 129: start REFUSED: no holder is left, but 5,000 MiB on GPU 0"
        assert refusal in task.log and "next: " in task.log and "exit code 77" in task.status
        (entry,) = world.entries("gate-blocked")
        assert entry["PRIORITY"] == "3" and entry["REASON"] == "ghost-memory"
        assert node.systemctl("start", world.ct.unit, check=False).returncode != 0
        assert len(world.entries("gate-blocked")) == 2 and not world.ct.running
        assert world.records() == [("hook-pre-start", "held"), ("unit-start-pre", "held")]
        world.note("start refused by the gate, then systemctl start")
        node.clear_control()
        world.neighbour_comes()
        world.cursor = node.cursor()
        world.ct.start()
        world.check("start after the gate refused", STARTED, running=True)


# ---- the daemon ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_daemon_down_in_every_phase(quiet: World) -> None:
    world = quiet
    world.begin()
    with world.without_daemon():
        said = world.ct.stop().stdout
        assert "nobody watches this stop" in said
        world.ct.wait_stopped()
        world.ct.start()
        assert not world.node.exists("/run/pve-gpu-release/io.pve.GpuRelease")
    world.check("daemon down: stop, start", STOPPED + STARTED, running=True)


@pytest.mark.parametrize("how", ["-9", "-15"])
def test_daemon_killed_in_the_middle_of_a_stop(quiet: World, how: str) -> None:
    world = quiet
    world.begin()
    world.node.control(fall_mib_per_ms=20, fall_step_mib=2000)
    stop = world.node.popen(["pct", "stop", "129"])
    world.node.wait_until(lambda: world.entries("release-started"), "the release to begin")
    world.node.run(["kill", how, world.daemon_pid()])
    assert stop.wait() == 0
    stop.communicate()
    world.node.clear_control()
    world.check(f"daemon kill {how} in the middle of a stop", STOPPED)


@pytest.mark.parametrize("how", ["-9", "-15"])
def test_daemon_killed_in_the_middle_of_a_start(quiet: World, how: str) -> None:
    """It clears what is left of the last run, and waits for its memory."""
    world = quiet
    world.begin(running=False)
    world.squat("lxc/129", mib=40960)
    world.node.control(fall_mib_per_ms=20, fall_step_mib=2000)
    start = world.node.popen(["pct", "start", "129"])
    world.node.wait_until(lambda: world.entries("release-started"), "the release to begin")
    world.node.run(["kill", how, world.daemon_pid()])
    assert start.wait() == 0
    start.communicate()
    world.node.clear_control()
    world.check(f"daemon kill {how} in the middle of a start", STARTED, running=True, phases=START_PHASES)


def test_a_hung_daemon(quiet: World) -> None:
    world = quiet
    world.begin()
    pid = world.daemon_pid()
    world.node.run(["kill", "-STOP", pid])
    try:
        began = time.monotonic()
        world.ct.stop()
        assert time.monotonic() - began < 25
    finally:
        world.node.run(["kill", "-CONT", pid])
    world.check("daemon stopped by SIGSTOP: stop", STOPPED)


# ---- the driver ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_nvml_hung_in_every_phase(quiet: World) -> None:
    world = quiet
    world.begin()
    world.node.control(hang="nvmlInit")
    began = time.monotonic()
    world.ct.stop()
    world.ct.wait_stopped()
    world.ct.start()
    assert time.monotonic() - began < 60
    assert world.records() == SILENT
    assert [process for holder in world.holders for process in holder.alive()] == []
    assert {e["OUTCOME"] for e in world.entries("gate-warned")} == {"warned"}
    world.node.clear_control()
    world.check("NVML hung: stop, start", SILENT, running=True)


# ---- the configuration -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("daemon", [True, False], ids=["with daemon", "without daemon"])
def test_a_broken_configuration_in_every_phase(quiet: World, daemon: bool) -> None:
    world = quiet
    world.begin()
    world.configure("hook: {on_dirty: maybe}\n")
    if daemon:
        world.ct.stop()
        world.ct.wait_stopped()
        world.ct.start()
    else:
        with world.without_daemon():
            world.ct.stop()
            world.ct.wait_stopped()
            world.ct.start()
        assert any("built-in defaults" in e["MESSAGE"] for e in world.entries("config-failed"))
    world.configure(CONFIG)
    if not daemon:
        world.node.systemctl("reset-failed", "pve-gpu-hostd.service", check=False)
    world.check(f"broken configuration, daemon {daemon}: stop, start", STOPPED + STARTED, running=True)


# ---- a task that cannot die ------------------------------------------------------------------------------------------


def named_by_the_watchdog(world: World, holder: GpuHolder) -> dict[str, Any]:
    """The watchdog's first entry that says what the holder waits for."""

    def named() -> list[dict[str, Any]]:
        return [entry for entry in world.entries("watchdog-report") if "STUCK_WCHAN" in entry]

    report = world.node.wait_until(named, "the watchdog", 60)[0]
    assert report["HOLDER_PID"] == str(holder.pid) and report["STUCK_WCHAN"] == waits_in(holder.main)
    return report


@pytest.mark.smoke
def test_a_stuck_holder_during_stop(require_virtual_node: None) -> None:
    """pct stop hangs without a word: the journal and `status` name pid, wchan and the way out; after the thaw all is
    well."""
    with VirtualNode() as node:
        world = World.make(node)
        with stuck_holder(world) as (frozen, holder):
            stop = node.popen(["pct", "stop", "129"])
            report = named_by_the_watchdog(world, holder)
            assert "cannot die" in report["MESSAGE"] and "thawed" in report["NEXT_STEP"]
            (told,) = json.loads(node.run(["pve-gpu-release", "status", "--json"]).stdout)["stops"]
            assert (told["vmid"], told["next_step"]) == (129, report["NEXT_STEP"])
            said = node.run(["pve-gpu-release", "status"]).stdout
            for word in (f"pid {holder.pid} (state D, waiting in {waits_in(holder.main)})", "next: ", "thawed"):
                assert word in said
            assert stop.poll() is None
            frozen.thaw()
            assert stop.wait(30) == 0
            said, errors = stop.communicate()
            assert said.endswith("they are checked once it has stopped\n") and said.count("\n") == 1 and errors == ""
            world.ct.wait_stopped()
            world.check("D-state holder during pct stop, then thaw", STOPPED)
            assert json.loads(node.run(["pve-gpu-release", "status", "--json"]).stdout)["stops"] == []


def test_a_second_stop_of_a_stuck_holder(require_virtual_node: None) -> None:
    """By systemctl, while pct stop hangs: systemd takes twice its own limit (PCT_FLOWS 4), and we no more than our budget.

    (The limit holds for ExecStopPost= as well: 120 s on Proxmox, and the budget is below it there too.)
    """
    limit_s, budget_s = 6, 3
    with VirtualNode() as node:
        world = World.make(node)
        world.configure(CONFIG.replace("budget: 10, pre", f"budget: {budget_s}, pre"))
        node.write("/etc/systemd/system/pve-container@129.service.d/limit.conf", f"[Service]\nTimeoutStopSec={limit_s}\n")
        node.systemctl("daemon-reload")
        with stuck_holder(world) as (frozen, holder):
            stop = node.popen(["pct", "stop", "129"])
            named_by_the_watchdog(world, holder)
            began = time.monotonic()
            node.systemctl("stop", world.ct.unit, check=False)
            ours_s = time.monotonic() - began - 2 * limit_s
            assert ours_s < budget_s + 3, world.story()
            world.wait_records([("unit-stop-post", "held")])
            (record,) = world.entries("release-finished")
            assert record["REASON"] == "unkillable" and holder.alive()
            frozen.thaw()
            holder.wait_gone()
            stop.wait(30)
            stop.communicate()
            world.check("D-state holder during pct stop, systemctl stop, then thaw", [("unit-stop-post", "held")])


def test_a_stuck_holder_and_a_killed_monitor(require_virtual_node: None) -> None:
    """Nothing of Proxmox runs but the drop-in; it gives up in time, and the next start says who is in the way."""
    with VirtualNode() as node:
        world = World.make(node)
        with stuck_holder(world) as (frozen, holder):
            world.kill(world.ct.monitor_pid)
            world.wait_records([("unit-stop-post", "held")])
            assert world.entries("release-finished")[0]["REASON"] == "unkillable"
            began = time.monotonic()
            done = node.pct("start", 129, check=False)
            assert time.monotonic() - began < 25
            assert f"pid {holder.pid} cannot die" in done.stdout and "NOT cleared" in done.stdout
            frozen.thaw()
            holder.wait_gone()
            node.wait_unit(world.ct.unit, "failed")
            world.cursor = node.cursor()
            world.ct.start()
            world.check("start after a stuck holder thawed", STARTED, running=True)


# ---- the package -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_package_is_gone_and_the_snippet_is_still_set(require_virtual_node: None) -> None:
    with VirtualNode() as node:
        world = World.make(node)
        world.begin()
        node.systemctl("stop", "pve-gpu-hostd.socket", "pve-gpu-hostd.service")
        node.remove("/usr/lib/pve-gpu-release")
        world.ct.stop()
        world.forget_holders()
        done = world.ct.start()
        assert (done.stdout, done.stderr) == ("", "") and world.ct.running
        before = world.ct.monitor_pid
        world.init("reboot")
        node.wait_until(lambda: world.ct.monitor_pid not in (0, before), "129 to run again", 60)
        assert world.records() == []


# ---- many ------------------------------------------------------------------------------------------------------------


def test_ten_containers_stopped_at_once(require_virtual_node: None) -> None:
    with VirtualNode() as node:
        world = World.make(node)
        cursor = node.cursor()
        cts: list[Container] = []
        for vmid in range(140, 150):
            ct = node.add_container(vmid, gpus=(0, 1), init="tiny")
            ct.hookscript(SNIPPET)
            ct.start()
            world.holders.append(ct.hold(argv=("job",), open=NODES, alloc=("50:512:compute",), ignore_term=True))
            cts.append(ct)
        stops = [node.popen(["pct", "stop", ct.vmid]) for ct in cts]
        assert [stop.wait(120) for stop in stops] == [0] * 10
        for stop in stops:
            stop.communicate()
        for ct in cts:
            ct.wait_stopped()
            done = node.journal(cursor, PVE_VMID=ct.vmid, PVE_GPU_RELEASE_EVENT="release-finished")
            found = [(e["TRIGGER"], e["VERDICT"]) for e in done]
            assert found == [*STARTED, *STOPPED], (ct.vmid, [e["MESSAGE"] for e in done])
        assert not [process for holder in world.holders for process in holder.alive()]
        world.begin(running=False)
        world.must_be_free()
        world.forget_holders()


# ---- a clean-up that comes late --------------------------------------------------------------------------------------


def test_a_late_clean_up_touches_nothing_of_the_new_run(quiet: World) -> None:
    """The stop's release still waits for memory in the background when the container runs again."""
    world = quiet
    world.begin()
    world.configure(CONFIG.replace("budget: 10, pre", "budget: 1, pre").replace("pre_start_budget: 10", "pre_start_budget: 1"))
    world.node.control(fall_mib_per_ms=8, fall_step_mib=1000)
    world.ct.stop()
    assert world.records() == []
    world.ct.start()
    job = world.ct.hold(argv=("new",), open=NODES, alloc=("50:100:compute",), ignore_term=True)
    world.wait_records(STOPPED, 60)
    for phase in ("post-stop", "exec-stop-post", "pre-start", "exec-start-pre"):  # late, twice, out of order
        world.node.run(["/var/lib/vz/snippets/pve-gpu-release", "129", phase], check=False)
    assert job.alive() and world.ct.running
    assert world.entries("leftovers-cleared") == []
    world.node.clear_control()
    world.holders.append(job)
    world.cursor = world.node.cursor()
    world.ct.stop()
    world.configure(CONFIG)
    world.check("stop after a late clean-up", STOPPED)


def test_print_the_table() -> None:
    print_table("lifecycle-faults")
