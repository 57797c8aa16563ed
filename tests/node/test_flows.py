"""The node behaves as measured with the real `pct`: one test for each row of PCT_FLOWS section 4, and sections 2, 3, 6.

The hookscript and the drop-in are the recorder's, not the product's.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.node.node import Container, NodeError, NodeProcess, VirtualNode
from tests.node.recorder import Event, Recorder

pytestmark = pytest.mark.node

STOPPED_NORMALLY = ["pre-stop", "post-stop", "ExecStopPost"]
STARTED_NORMALLY = ["pre-start", "ExecStartPre", "post-start"]


@pytest.fixture
def recorder(node: VirtualNode) -> Recorder:
    return Recorder(node)


@pytest.fixture
def ct(node: VirtualNode, recorder: Recorder) -> Container:
    """Container 129 with systemd inside, not started; everything that happens to it is recorded."""
    container = node.add_container(129)
    recorder.attach(container)
    return container


@pytest.fixture
def tiny(node: VirtualNode, recorder: Recorder) -> Container:
    """Container 129 with the C init."""
    container = node.add_container(129, init="tiny")
    recorder.attach(container)
    return container


@pytest.fixture
def running(ct: Container, recorder: Recorder) -> Container:
    """The same, booted, with an empty record."""
    ct.start()
    ct.wait_booted()
    recorder.forget()
    return ct


@pytest.fixture
def running_tiny(tiny: Container, recorder: Recorder) -> Container:
    tiny.start()
    recorder.forget()
    return tiny


@pytest.fixture
def stuck(tiny: Container, recorder: Recorder) -> Iterator[Stuck]:
    """Container 129 running with a process in D state; thawed at the end at the latest."""
    with tiny.node.frozen() as frozen:
        tiny.node.write(tiny.config_path, tiny.config + "lxc.mount.entry: /frozen frozen none bind,create=dir\n", 0o640)
        tiny.start()
        recorder.forget()
        frozen.freeze()
        process = tiny.attach_popen(["touch", "/frozen/x"])
        attached = tiny.node.wait_until(lambda: touching(tiny), "the touch in D state")
        yield Stuck(tiny, frozen.thaw, attached)
        frozen.thaw()
        process.kill()


class Stuck:
    def __init__(self, container: Container, thaw: object, pid: int) -> None:
        self.container, self.thaw, self.pid = container, thaw, pid


def touching(container: Container) -> int:
    """The host pid of the container's process in D state, or 0."""
    for pid in container.node.host_processes(container.cgroup):
        if state(pid) == "D":
            return pid
    return 0


def state(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def log_of(container: Container) -> str:
    return container.node.read(f"/run/pve/ct-{container.vmid}.stderr")


def squatter(node: VirtualNode, cgroup: str) -> NodeProcess:
    """A process of the host in a cgroup of the container."""
    process = node.popen(["sleep", "infinity"], cgroup=cgroup)
    host_pid = process.host_pid
    node.wait_until(lambda: host_pid in node.host_processes(cgroup), "the squatter in its cgroup")
    return process


def settled(recorder: Recorder, container: Container, expected: list[str]) -> list[str]:
    """The recorded names once as many as expected are there and the unit is at rest."""
    container.node.wait_until(lambda: len(recorder.names(container.vmid)) >= len(expected), f"{expected}", 60)
    return recorder.names(container.vmid)


def stop_post(recorder: Recorder) -> Event:
    return recorder.wait_for(129, "ExecStopPost")


# ---- starting and stopping ----------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_pct_start_runs_pre_start_then_the_drop_in_then_post_start(ct: Container, recorder: Recorder) -> None:
    ct.start()
    assert recorder.names(129) == STARTED_NORMALLY
    assert ct.running
    assert ct.node.tasks()[-1].status == "TASK OK"


@pytest.mark.smoke
def test_pct_stop_runs_pre_stop_post_stop_and_leaves_no_cgroup(running: Container, recorder: Recorder) -> None:
    running.stop()
    assert settled(recorder, running, STOPPED_NORMALLY) == STOPPED_NORMALLY
    assert stop_post(recorder).ct == 0
    assert not running.node.cgroup_exists("lxc/129")
    assert not running.node.cgroup_exists("lxc.monitor/129")


@pytest.mark.smoke
def test_pct_shutdown_runs_the_same_phases_as_stop(running: Container, recorder: Recorder) -> None:
    running.shutdown()
    assert settled(recorder, running, STOPPED_NORMALLY) == STOPPED_NORMALLY


def test_a_guest_too_slow_for_shutdown_ends_later_and_post_stop_comes_then(
    running_tiny: Container, recorder: Recorder
) -> None:
    (running_tiny.root / "etc/slow").touch()
    began = time.monotonic()
    done = running_tiny.node.pct("shutdown", 129, "--timeout", 1, check=False)
    assert done.returncode == 255
    assert "command 'lxc-stop -n 129 --nokill --timeout 1' failed: exit code 1" in done.stdout
    assert "container did not stop" in done.stderr
    assert 6.5 < time.monotonic() - began < 30  # timeout + (timeout + 5)
    assert recorder.names(129) == ["pre-stop"]
    (running_tiny.root / "etc/slow").unlink()
    assert settled(recorder, running_tiny, STOPPED_NORMALLY) == STOPPED_NORMALLY


def test_shutdown_with_force_kills_the_slow_guest(running_tiny: Container, recorder: Recorder) -> None:
    (running_tiny.root / "etc/slow").touch()
    running_tiny.shutdown("--timeout", "1", "--forceStop", "1")
    assert settled(recorder, running_tiny, STOPPED_NORMALLY) == STOPPED_NORMALLY


@pytest.mark.smoke
def test_pct_reboot_stops_and_starts_and_pre_start_does_not_wait_for_the_unit(
    running: Container, recorder: Recorder
) -> None:
    recorder.on("ExecStopPost", "until grep -q pre-start /shared/events.jsonl; do sleep 0.02; done")
    running.reboot()
    names = recorder.names(129)
    assert [name for name in names if name.startswith("p")] == ["pre-stop", "post-stop", "pre-start", "post-start"]
    assert [name for name in names if name.startswith("Exec")] == ["ExecStopPost", "ExecStartPre"]
    assert recorder.events(129, "pre-start")[0].unit_state.startswith("deactivating/")


@pytest.mark.smoke
def test_reboot_from_inside_runs_no_hookscript_phase(running: Container, recorder: Recorder) -> None:
    before = running.host_init_pid
    running.attach(["systemctl", "reboot"], check=False)
    assert settled(recorder, running, ["ExecStopPost", "ExecStartPre"]) == ["ExecStopPost", "ExecStartPre"]
    running.node.wait_until(lambda: running.init_pid, "the container to run again")
    assert running.host_init_pid != before
    assert [event.environment["SERVICE_RESULT"] for event in recorder.events(129, "ExecStopPost")] == ["success"]
    assert len(running.node.tasks()) == 1  # the start


@pytest.mark.smoke
def test_poweroff_from_inside_runs_post_stop_and_makes_no_task(running: Container, recorder: Recorder) -> None:
    running.attach(["systemctl", "poweroff"], check=False)
    assert settled(recorder, running, ["post-stop", "ExecStopPost"]) == ["post-stop", "ExecStopPost"]
    assert stop_post(recorder).environment["EXIT_STATUS"] == "0"
    assert len(running.node.tasks()) == 1


def test_init_killed_looks_like_a_clean_stop(running: Container, recorder: Recorder) -> None:
    import os

    os.kill(running.host_init_pid, signal.SIGKILL)
    assert settled(recorder, running, ["post-stop", "ExecStopPost"]) == ["post-stop", "ExecStopPost"]
    running.node.wait_unit(running.unit, "inactive")


@pytest.mark.smoke
def test_monitor_killed_runs_only_the_drop_in_and_the_next_start_works(running: Container, recorder: Recorder) -> None:
    running.node.run(["kill", "-9", running.monitor_pid])
    event = stop_post(recorder)
    assert recorder.names(129) == ["ExecStopPost"]
    assert (event.environment["SERVICE_RESULT"], event.environment["EXIT_STATUS"]) == ("signal", "KILL")
    running.node.wait_unit(running.unit, "failed")
    running.node.wait_empty("lxc/129")
    assert running.node.cgroup_exists("lxc/129") and running.node.cgroup_exists("lxc.monitor/129")
    running.start()
    assert running.running


def test_systemctl_start_runs_only_the_drop_in(ct: Container, recorder: Recorder) -> None:
    ct.node.systemctl("start", ct.unit)
    ct.node.wait_until(lambda: ct.running, "the container to run")
    assert recorder.names(129) == ["ExecStartPre"]


def test_systemctl_stop_runs_post_stop_only(running: Container, recorder: Recorder) -> None:
    running.node.systemctl("stop", running.unit)
    assert recorder.names(129) == ["post-stop", "ExecStopPost"]
    assert recorder.events(129, "post-stop")[0].unit_state == "deactivating/stop"


def test_systemctl_restart_runs_post_stop_and_the_drop_in(running: Container, recorder: Recorder) -> None:
    running.node.systemctl("restart", running.unit)
    assert recorder.names(129) == ["post-stop", "ExecStopPost", "ExecStartPre"]
    running.node.wait_until(lambda: running.running, "the container to run")


@pytest.mark.parametrize("words", [["-k"], []], ids=["lxc-stop -k", "lxc-stop"])
def test_lxc_stop_runs_post_stop_only(running: Container, recorder: Recorder, words: list[str]) -> None:
    running.node.run(["lxc-stop", "-n", "129", *words])
    assert settled(recorder, running, ["post-stop", "ExecStopPost"]) == ["post-stop", "ExecStopPost"]


def test_lxc_start_by_hand_is_outside_the_unit(ct: Container, recorder: Recorder) -> None:
    ct.node.run(["lxc-start", "-n", "129"])
    assert ct.running and recorder.names(129) == []
    ct.stop()
    assert recorder.names(129) == ["pre-stop", "post-stop"]
    assert ct.node.unit(ct.unit, "ActiveState")["ActiveState"] == "inactive"


def test_start_debug_uses_another_unit_and_shows_what_post_stop_prints(node: VirtualNode, recorder: Recorder) -> None:
    ct = node.add_container(129)
    ct.hookscript("local:snippets/record")
    node.write(
        "/etc/systemd/system/pve-container@.service.d/60-record.conf",
        "[Service]\nExecStartPre=/shared/record %i ExecStartPre\n",
    )
    node.systemctl("daemon-reload")
    recorder.on("post-stop", "echo seen-in-debug")
    ct.start("--debug")
    assert recorder.names(129) == ["pre-start", "post-start"]
    assert node.unit("pve-container-debug@129", "ActiveState")["ActiveState"] == "active"
    ct.stop()
    assert "produced output: seen-in-debug" in log_of(ct)


# ---- leftovers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cgroup", ["lxc/129", "lxc/129/ns/x", "lxc.monitor/129"])
def test_a_leftover_process_makes_the_start_fail_without_saying_why(
    ct: Container, recorder: Recorder, cgroup: str
) -> None:
    leftover = squatter(ct.node, cgroup)
    done = ct.node.pct("start", 129, check=False)
    assert done.returncode == 255
    assert "startup for container '129' failed" in done.stderr
    assert "Script exited with status 16" in done.stdout and "Failed to run lxc.hook.pre-start" in log_of(ct)
    assert settled(recorder, ct, ["", "", ""]) == ["pre-start", "ExecStartPre", "ExecStopPost"]
    assert stop_post(recorder).environment["SERVICE_RESULT"] == "exit-code"
    assert recorder.events(129, "ExecStartPre")[0].ct == (0 if "monitor" in cgroup else 1)
    assert leftover.poll() is None
    leftover.kill()
    ct.start()


def test_a_drop_in_that_kills_the_cgroup_first_makes_the_start_work(ct: Container, recorder: Recorder) -> None:
    leftover = squatter(ct.node, "lxc/129")
    recorder.on(
        "ExecStartPre",
        "cd /sys/fs/cgroup/lxc/$1; echo 1 > cgroup.kill; while grep -q 'populated 1' cgroup.events; do :; done",
    )
    ct.start()
    assert recorder.names(129) == STARTED_NORMALLY
    leftover.kill()


@pytest.mark.smoke
def test_an_attached_process_dies_with_the_container(running: Container, recorder: Recorder) -> None:
    attached = running.attach_popen(["sleep", "infinity"])
    running.node.wait_until(lambda: running.node.processes("lxc/129/ns/.lxc"), "the attached process")
    running.stop()
    assert attached.wait(10) == 137
    assert settled(recorder, running, STOPPED_NORMALLY) == STOPPED_NORMALLY
    assert stop_post(recorder).ct == 0


def test_a_process_attached_without_the_pid_namespace_never_enters_the_cgroup(
    running: Container, recorder: Recorder
) -> None:
    attached = running.attach_popen(["sleep", "infinity"], options=["-s", "MOUNT|NETWORK|IPC|UTSNAME"])
    running.node.wait_until(lambda: attached.host_pid, "the attached process")
    assert running.node.processes("lxc/129/ns/.lxc") == []
    running.stop()
    assert attached.poll() is None
    running.start()
    attached.kill()


@pytest.mark.parametrize("cgroup", ["lxc/129", "lxc/129/ns/x"])
def test_a_foreign_process_in_the_cgroup_survives_the_stop_unnoticed(
    running: Container, recorder: Recorder, cgroup: str
) -> None:
    foreign = squatter(running.node, cgroup)
    done = running.stop()
    assert done.stdout + done.stderr == "" and running.node.tasks()[-1].status == "TASK OK"
    assert settled(recorder, running, STOPPED_NORMALLY) == STOPPED_NORMALLY
    assert recorder.events(129, "post-stop")[0].ct == 1 and stop_post(recorder).ct == 1
    assert foreign.poll() is None
    assert running.node.pct("start", 129, check=False).returncode == 255
    foreign.kill()


def test_pct_reboot_with_a_foreign_process_leaves_the_container_down(running: Container, recorder: Recorder) -> None:
    foreign = squatter(running.node, "lxc/129")
    done = running.node.pct("reboot", 129, check=False)
    assert done.returncode == 255 and not running.running
    names = settled(recorder, running, [""] * 6)
    assert sorted(names) == sorted(
        ["pre-stop", "post-stop", "pre-start", "ExecStopPost", "ExecStartPre", "ExecStopPost"]
    )
    foreign.kill()


@pytest.mark.smoke
def test_reboot_from_inside_with_a_foreign_process_leaves_it_silently_down(
    running: Container, recorder: Recorder
) -> None:
    foreign = squatter(running.node, "lxc/129")
    running.attach(["systemctl", "reboot"], check=False)
    assert settled(recorder, running, [""] * 3) == ["ExecStopPost", "ExecStartPre", "ExecStopPost"]
    running.node.wait_unit(running.unit, "failed")
    assert not running.running and len(running.node.tasks()) == 1
    foreign.kill()


def test_a_foreign_process_in_the_monitors_cgroup_blocks_the_next_start(running: Container, recorder: Recorder) -> None:
    foreign = squatter(running.node, "lxc.monitor/129")
    running.stop()
    assert settled(recorder, running, STOPPED_NORMALLY) == STOPPED_NORMALLY
    assert stop_post(recorder).ct == 0 and running.node.cgroup_exists("lxc.monitor/129")
    assert running.node.pct("start", 129, check=False).returncode == 255
    foreign.kill()


# ---- a task that cannot die ---------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_pct_stop_hangs_on_a_stuck_task_and_term_does_not_end_it(stuck: Stuck, recorder: Recorder) -> None:
    pct = stuck.container.node.popen(["pct", "stop", "129"])
    recorder.wait_for(129, "pre-stop")
    stuck.container.node.wait_until(lambda: sigkill_pending(stuck.pid), "SIGKILL to arrive")
    pct.signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        pct.wait(1)
    assert recorder.names(129) == ["pre-stop"]
    stuck.thaw()  # type: ignore[operator]
    out, err = pct.communicate()
    assert pct.wait() == 0, err
    assert "command 'lxc-stop -n 129 --kill' failed: received interrupt" in out
    assert settled(recorder, stuck.container, STOPPED_NORMALLY) == STOPPED_NORMALLY


def sigkill_pending(pid: int) -> bool:
    with open(f"/proc/{pid}/status") as status:
        lines = [line for line in status if line.startswith(("SigPnd", "ShdPnd"))]
    return any(int(line.split()[1], 16) & 1 << signal.SIGKILL - 1 for line in lines)


@pytest.mark.parametrize(
    ("words", "afterwards"),
    [
        (["shutdown", "129", "--timeout", "1", "--forceStop", "1"], STOPPED_NORMALLY),
        (["reboot", "129", "--timeout", "1"], STOPPED_NORMALLY),
    ],
    ids=["shutdown", "reboot"],
)
def test_other_stops_give_up_on_a_stuck_task(
    stuck: Stuck, recorder: Recorder, words: list[str], afterwards: list[str]
) -> None:
    done = stuck.container.node.pct(*words, check=False)
    assert done.returncode == 255
    assert "failed: got timeout" in done.stdout and "container did not stop" in done.stderr
    assert recorder.names(129) == ["pre-stop"]
    stuck.thaw()  # type: ignore[operator]
    assert settled(recorder, stuck.container, afterwards) == afterwards
    assert not stuck.container.running


def test_init_killed_beside_a_stuck_task_looks_like_running_until_the_thaw(stuck: Stuck, recorder: Recorder) -> None:
    node = stuck.container.node
    node.run(["kill", "-9", stuck.container.init_pid])
    node.wait_until(lambda: len(stuck.container.processes()) == 1, "all but the stuck task to die")
    assert stuck.container.running and recorder.names(129) == []
    stuck.thaw()  # type: ignore[operator]
    assert settled(recorder, stuck.container, ["", ""]) == ["post-stop", "ExecStopPost"]


def test_monitor_killed_beside_a_stuck_task_leaves_it_for_good(stuck: Stuck, recorder: Recorder) -> None:
    node = stuck.container.node
    node.run(["kill", "-9", stuck.container.monitor_pid])
    stop_post(recorder)
    assert recorder.names(129) == ["ExecStopPost"]
    node.wait_until(lambda: len(stuck.container.processes()) == 1, "all but the stuck task to die")
    assert node.pct("start", 129, check=False).returncode == 255


def test_systemctl_stop_with_a_stuck_task_takes_twice_the_limit(stuck: Stuck, recorder: Recorder) -> None:
    recorder.drop_in("TimeoutStopSec=1\n")
    began = time.monotonic()
    stuck.container.node.systemctl("stop", stuck.container.unit, check=False)
    assert recorder.names(129) == ["ExecStopPost"]
    assert time.monotonic() - began > 2
    event = stop_post(recorder)
    assert event.environment["SERVICE_RESULT"] == "timeout" and event.ct >= 1


# ---- the post-stop side goes wrong -------------------------------------------------------------------------------------


def busy(container: Container) -> NodeProcess:
    """A process in the monitor's mount namespace with its working directory on the root file system."""
    rootfs = f"/var/lib/lxc/{container.vmid}/rootfs"
    process = container.node.popen(
        ["nsenter", "-t", container.monitor_pid, "-m", "sh", "-c", f"cd {rootfs} && exec sleep infinity"]
    )
    container.node.wait_until(
        lambda: "sleep" in container.node.read(f"/proc/{process.pid}/comm"), "the sleep in the root file system"
    )
    return process


@pytest.mark.smoke
def test_a_busy_root_file_system_skips_post_stop_and_the_task_is_ok(running: Container, recorder: Recorder) -> None:
    process = busy(running)
    running.stop()
    assert settled(recorder, running, ["", ""]) == ["pre-stop", "ExecStopPost"]
    assert stop_post(recorder).environment["SERVICE_RESULT"] == "success"
    assert running.node.tasks()[-1].status == "TASK OK" and "Script exited with status 32" in log_of(running)
    process.kill()


def test_a_busy_root_file_system_keeps_a_reboot_from_inside_down(running: Container, recorder: Recorder) -> None:
    process = busy(running)
    running.attach(["systemctl", "reboot"], check=False)
    assert settled(recorder, running, [""]) == ["ExecStopPost"]
    running.node.wait_unit(running.unit, "inactive")
    assert not running.running and recorder.names(129) == ["ExecStopPost"]
    process.kill()


def test_pct_stop_waits_as_long_as_a_hung_post_stop(running_tiny: Container, recorder: Recorder) -> None:
    recorder.drop_in("TimeoutStopSec=1\n")
    running_tiny.node.run(["mkfifo", "/shared/gate"])
    recorder.on("post-stop", "cat /shared/gate > /dev/null")
    pct = running_tiny.node.popen(["pct", "stop", "129"])
    recorder.wait_for(129, "post-stop")
    with pytest.raises(subprocess.TimeoutExpired):
        pct.wait(3)
    running_tiny.node.run(["sh", "-c", ": > /shared/gate"])
    assert pct.communicate()[1] == "" and pct.wait() == 0
    assert settled(recorder, running_tiny, STOPPED_NORMALLY) == STOPPED_NORMALLY


def test_systemctl_stop_kills_the_monitor_of_a_hung_post_stop_but_not_the_hook(
    running_tiny: Container, recorder: Recorder
) -> None:
    recorder.drop_in("TimeoutStopSec=1\n")
    recorder.on("post-stop", "exec sleep 1000")
    running_tiny.node.systemctl("stop", running_tiny.unit, check=False)
    assert recorder.names(129) == ["post-stop", "ExecStopPost"]
    assert stop_post(recorder).environment["SERVICE_RESULT"] == "timeout"
    assert running_tiny.node.processes("lxc.pivot")
    running_tiny.start()


# ---- starts that go wrong ----------------------------------------------------------------------------------------------


def test_a_unit_that_fails_before_lxc_start_still_gets_post_start(node: VirtualNode, recorder: Recorder) -> None:
    ct = node.add_container(129)
    recorder.attach(ct, drop_in=False)
    node.remove("/run/pve")
    done = node.pct("start", 129, check=False)
    assert done.returncode == 255
    assert "problem with monitor socket, but continuing anyway: got timeout" in done.stdout
    assert "unable to get PID for CT 129 (not running?)" in done.stderr
    assert recorder.names(129) == ["pre-start", "post-start"]


def test_a_start_while_the_old_unit_is_in_a_long_post_stop(running_tiny: Container, recorder: Recorder) -> None:
    """The old monitor lives on in its post-stop hook: the unit counts as active, nothing is started."""
    node = running_tiny.node
    node.run(["mkfifo", "/shared/gate"])
    recorder.on("post-stop", "cat /shared/gate > /dev/null")
    running_tiny.attach(["/opt/standin/tiny-init", "poweroff"], check=False)
    recorder.wait_for(129, "post-stop")
    done = node.pct("start", 129, check=False)
    assert done.returncode == 255
    assert "problem with monitor socket, but continuing anyway: got timeout" in done.stdout
    assert "unable to get PID for CT 129 (not running?)" in done.stderr
    assert recorder.names(129) == ["post-stop", "pre-start", "post-start"]
    node.run(["sh", "-c", ": > /shared/gate"])
    stop_post(recorder)


def test_a_missing_init_means_no_post_start_but_post_stop(node: VirtualNode, recorder: Recorder) -> None:
    ct = node.add_container(129, raw=["lxc.init.cmd: /nonexistent"])
    recorder.attach(ct)
    done = node.pct("start", 129, check=False)
    assert done.returncode == 255 and "startup for container '129' failed" in done.stderr
    names = settled(recorder, ct, [""] * 4)
    assert sorted(names) == sorted(["pre-start", "ExecStartPre", "post-stop", "ExecStopPost"])
    assert stop_post(recorder).environment["SERVICE_RESULT"] == "exit-code"


def test_an_init_that_exits_at_once_gets_all_of_the_start_phases(node: VirtualNode, recorder: Recorder) -> None:
    ct = node.add_container(129, raw=["lxc.init.cmd: /bin/true"])
    recorder.attach(ct)
    recorder.on("post-start", "while grep -q . /sys/fs/cgroup/lxc/$1/ns/cgroup.procs 2>/dev/null; do :; done")
    done = node.pct("start", 129, check=False)
    assert done.returncode == 255 and "unable to get PID for CT 129 (not running?)" in done.stderr
    assert sorted(settled(recorder, ct, [""] * 5)) == sorted([*STARTED_NORMALLY, "post-stop", "ExecStopPost"])


@pytest.mark.smoke
def test_a_failing_exec_start_pre_fails_the_start(ct: Container, recorder: Recorder) -> None:
    recorder.on("ExecStartPre", "exit 1")
    done = ct.node.pct("start", 129, check=False)
    assert done.returncode == 255
    assert "Job for pve-container@129.service failed" in done.stdout
    assert "command 'systemctl start pve-container@129' failed: exit code 1" in done.stderr
    assert settled(recorder, ct, [""] * 3) == ["pre-start", "ExecStartPre", "ExecStopPost"]
    assert "EXIT_CODE" not in stop_post(recorder).environment


def test_a_failing_exec_start_pre_leaves_a_reboot_from_inside_down(running: Container, recorder: Recorder) -> None:
    recorder.on("ExecStartPre", "exit 1")
    running.attach(["systemctl", "reboot"], check=False)
    assert settled(recorder, running, [""] * 3) == ["ExecStopPost", "ExecStartPre", "ExecStopPost"]
    running.node.wait_unit(running.unit, "failed")
    assert not running.running


def test_a_failing_exec_stop_post_only_marks_the_unit(running: Container, recorder: Recorder) -> None:
    recorder.on("ExecStopPost", "exit 1")
    running.stop()
    running.node.wait_unit(running.unit, "failed")
    running.start()


# ---- how one phase is executed (section 2) ------------------------------------------------------------------------------


@pytest.mark.smoke
def test_the_context_of_each_phase_is_as_measured(ct: Container, recorder: Recorder) -> None:
    host = ct.node.run(["readlink", "/proc/self/ns/mnt", "/proc/self/ns/net"]).stdout.split()
    ct.node.run(["pct", "start", "129"], cwd="/var", env={"SECRET": "from the shell"})
    ct.wait_booted()
    ct.stop()
    settled(recorder, ct, [""] * 6)
    for name in ("pre-start", "post-start", "pre-stop"):
        (event,) = recorder.events(129, name)
        assert event.argv == ["/var/lib/vz/snippets/record", "129", name]
        assert event.cgroup == "/user.slice/user-0.slice/session-1.scope" and [event.mount_ns, event.net_ns] == host
        assert event.stdin == "b''" and event.umask == 0o022 and not event.lock_free
        assert event.environment["LC_ALL"] == "C" and event.environment["PATH"] == "/sbin:/bin:/usr/sbin:/usr/bin"
        assert event.ignored & 1 << signal.SIGTTOU - 1
    assert recorder.events(129, "pre-start")[0].environment["SECRET"] == "from the shell"
    assert recorder.events(129, "pre-start")[0].cwd == "/var"
    (event,) = recorder.events(129, "post-stop")
    assert event.cgroup == "/lxc.pivot" and event.mount_ns != host[0] and event.net_ns == host[1] and event.cwd == "/"
    assert "lxc-pve-poststop-hook" in event.parent and not event.lock_free and "HOME" not in event.environment
    assert event.environment["LXC_TARGET"] == "stop" and event.environment["LC_ALL"] == "C" and event.stdin == "b''"
    assert not event.ignored & 1 << signal.SIGTTOU - 1
    for name in ("ExecStartPre", "ExecStopPost"):
        (event,) = recorder.events(129, name)
        assert event.cgroup.startswith("/system.slice/system-pve\\x2dcontainer.slice/pve-container@129.service")
        assert event.mount_ns == host[0]


def test_a_task_of_the_daemon_runs_in_its_service_and_speaks_only_to_the_log(ct: Container, recorder: Recorder) -> None:
    recorder.on("pre-start", "printf 'no newline at the end'")
    assert ct.node.pct_in_daemon("start", 129) == 0
    assert recorder.events(129, "pre-start")[0].cgroup.startswith("/system.slice/run-")
    assert ct.node.tasks()[-1].log == "no newline at the endTASK OK\n"


def test_output_goes_to_terminal_and_log_unchanged(ct: Container, recorder: Recorder) -> None:
    recorder.on(
        "post-start",
        "printf 'out\\033[31m\\377\\n'; echo err >&2; head -c 1M /dev/zero; head -c 1M /dev/zero >&2; printf unfinished",
    )
    done = ct.start()
    assert len(done.stdout) > 2000000 and "out\x1b[31m\udcff\n" in done.stdout and "err\n" in done.stdout
    assert ct.node.tasks()[-1].log.endswith("\nTASK OK\n")


@pytest.mark.parametrize("kept", ["<&- 2>&-", "<&- >&-"], ids=["stdout kept", "stderr kept"])
def test_a_background_child_that_keeps_an_output_holds_the_phase(ct: Container, recorder: Recorder, kept: str) -> None:
    ct.node.run(["mkfifo", "/shared/gate"])
    recorder.on("pre-start", f"(cat /shared/gate >/dev/null; exec sleep 0) {kept} &")
    pct = ct.node.popen(["pct", "start", "129"])
    recorder.wait_for(129, "pre-start")
    with pytest.raises(subprocess.TimeoutExpired):
        pct.wait(1)
    ct.node.run(["sh", "-c", ": > /shared/gate"])
    pct.communicate()
    assert pct.wait() == 0


def test_a_background_child_without_outputs_ends_with_the_task_unless_in_a_session_of_its_own(
    ct: Container, recorder: Recorder
) -> None:
    recorder.on("post-start", "sleep 1000 <&- >&- 2>&- & setsid sleep 1000 <&- >&- 2>&- & echo")
    ct.start()
    left = ct.node.run(["pgrep", "-x", "sleep"]).stdout.split()
    assert len(left) == 1
    ct.node.run(["kill", *left])


@pytest.mark.parametrize(("script", "reason"), [("exit 3", "exit code 3"), ("kill -9 $$", "got signal 9")])
def test_a_failing_pre_start_aborts_the_start(ct: Container, recorder: Recorder, script: str, reason: str) -> None:
    recorder.on("pre-start", script)
    done = ct.node.pct("start", 129, check=False)
    expected = (
        f"hookscript error for 129 on pre-start: command '/var/lib/vz/snippets/record 129 pre-start' failed: {reason}"
    )
    assert done.returncode == 255 and expected in done.stderr
    assert recorder.names(129) == ["pre-start"]
    assert ct.node.tasks()[-1].status == f"TASK ERROR: {expected}"


def test_other_failing_phases_only_warn_and_post_stop_not_even_that(ct: Container, recorder: Recorder) -> None:
    for name in ("post-start", "pre-stop", "post-stop"):
        recorder.on(name, "exit 5")
    assert "hookscript error for 129 on post-start" in ct.start().stdout
    done = ct.stop()
    assert "hookscript error for 129 on pre-stop" in done.stdout and "post-stop" not in done.stdout + done.stderr
    assert "hookscript error" not in log_of(ct)
    assert [task.status for task in ct.node.tasks()] == ["TASK OK", "TASK OK"]


@pytest.mark.parametrize(
    ("content", "mode", "reason"),
    [
        (None, 0o755, "script 'local:snippets/record' does not exist"),
        ("", 0o644, "script 'local:snippets/record' is not executable"),
        ("#!/bin/sh\r\n", 0o755, "open3: exec of"),
        ("#!/nonexistent\n", 0o755, "open3: exec of"),
        ("echo without shebang $2 >> /shared/plain\n", 0o755, None),
        ("", 0o755, None),
    ],
    ids=["missing", "not executable", "CRLF", "no interpreter", "no shebang", "empty"],
)
def test_odd_scripts(ct: Container, content: str | None, mode: int, reason: str | None) -> None:
    path = "/var/lib/vz/snippets/record"
    ct.node.remove(path)
    if content is not None:
        ct.node.write(path, content, mode)
    done = ct.node.pct("start", 129, check=False)
    assert done.returncode == (255 if reason else 0), done
    assert reason is None or reason in done.stderr


@pytest.mark.parametrize("phase", ["pre-start", "pre-stop"])
def test_term_to_pct_interrupts_the_hook(ct: Container, recorder: Recorder, phase: str) -> None:
    if phase == "pre-stop":
        ct.start()
    recorder.on(phase, "exec sleep 1000")
    pct = ct.node.popen(["pct", "start" if phase == "pre-start" else "stop", "129"])
    recorder.wait_for(129, phase)
    pct.signal(signal.SIGTERM)
    out, err = pct.communicate()
    assert f"hookscript error for 129 on {phase}: command" in out + err and "received interrupt" in out + err
    assert pct.wait() == (255 if phase == "pre-start" else 0)
    assert ct.node.run(["pgrep", "-x", "sleep"], check=False).stdout == ""
    assert not ct.running


def test_an_unprivileged_container_behaves_the_same(node: VirtualNode, recorder: Recorder) -> None:
    ct = node.add_container(130, unprivileged=True, gpus=(0,), how="dev")
    recorder.attach(ct)
    ct.start()
    ct.stop()
    assert settled(recorder, ct, [""] * 6) == [] or recorder.names(130) == [*STARTED_NORMALLY, *STOPPED_NORMALLY]


def test_pct_set_waits_for_the_lock_and_gives_up(ct: Container) -> None:
    holder = ct.node.popen(["flock", "/run/lock/lxc/pve-config-129.lock", "-c", "echo locked; exec sleep 1000"])
    assert holder.popen.stdout and holder.popen.stdout.readline() == "locked\n"
    with pytest.raises(NodeError, match=r"can't lock file '/run/lock/lxc/pve-config-129.lock' - got timeout"):
        ct.node.pct("set", 129, "-onboot", "1")
    holder.kill()
