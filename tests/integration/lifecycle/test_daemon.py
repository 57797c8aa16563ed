"""The same events through the daemon: accepted, watched, taken over when it goes."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.embedded.node import Container, HolderHandle, Node
from tests.embedded.scope import Running
from tests.integration.product import dead, lives

from .conftest import HOOK_QUICK, INVOCATION, REPOSITORY, STORE, Hook, of_unit, until

pytestmark = pytest.mark.embedded
Start = Callable[[], Running]
Engine = Callable[..., HolderHandle]


def reports(hook: Hook) -> int:
    watched = hook.remembered("watch")
    return int(watched["reports"]) if watched else 0


def test_the_daemon_does_the_work_and_watches_the_stop(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    of_unit(node, INVOCATION)
    daemon()
    engine(ignore_term=True)
    done = hook("pre-stop")
    assert "nobody watches" not in done.stdout
    container.stop()
    hook("post-stop", INVOCATION_ID=INVOCATION)
    hook("exec-stop-post", INVOCATION_ID=INVOCATION)
    (record,) = hook.records()
    assert record["owner"] == "daemon" and record["trigger"] == "hook-post-stop"
    assert record["report"]["verdict"] == "released"


def test_a_stop_that_takes_long_is_reported_and_nothing_is_signalled_while_init_lives(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    daemon()
    holder = engine()
    lock = node.path("/run/lock/lxc/pve-config-129.lock")
    lock.parent.mkdir(parents=True)
    lock.touch()
    take = "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, 2); print('held', flush=True); time.sleep(600)"
    stopping = node.popen([sys.executable, "-I", "-c", take, "/run/lock/lxc/pve-config-129.lock"])
    assert stopping.popen.stdout is not None and stopping.popen.stdout.readline() == "held\n"
    hook("pre-stop")
    until(lambda: reports(hook) >= 2, "two reports")
    watched = hook.remembered("watch")
    assert watched is not None and "nothing is signalled" in watched["message"] and not watched["signalled"]
    assert lives(holder)
    stopping.process.kill()
    stopping.popen.communicate()
    until(lambda: hook.remembered("watch") is None, "the watch to end: nobody is stopping it any more")
    assert lives(holder) and hook.remembered("snapshots") is None


def test_holders_are_signalled_once_the_init_is_gone(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    daemon()
    engine()
    left = node.spawn_holder(argv=("agent",), open=("/dev/nvidia0",), cgroup="lxc/129", ignore_term=True)
    hook("pre-stop")
    container.init_process.kill(signal.SIGKILL)
    left.wait_gone()
    until(lambda: (hook.remembered("watch") or {}).get("signalled") or hook.remembered("snapshots") is None, "the watch")


def test_the_watch_signals_nobody_of_a_run_that_began_after_it_judged(node: Node, hook: Hook) -> None:
    """Its look may wait for seconds for what is stuck; by then the container may be down and started again."""
    first = node.container(129)
    watch = node.popen([sys.executable, "-I", "-c", WATCH], cwd="/")
    until(node.path("/run/judged").exists, "the judgement")
    first.stop()
    again = node.container(129)
    job = again.spawn_holder(open=("/dev/nvidia0",), alloc=("50:1000:compute",))
    guest = node.spawn_holder(argv=("agent",), open=("/dev/nvidia0",), cgroup="lxc/129/ns/x")
    node.write("/run/go", "")
    said, _ = watch.popen.communicate(timeout=60)
    assert said.strip() == "[]" and lives(job, guest)


WATCH = f"""
import os, sys, time
sys.path.insert(0, {str(REPOSITORY)!r})
from hostd.lifecycle.clearing import Taken
from hostd.sources import open_sources
from hostd.stopwatch import signal_holders
sources = open_sources(nvml_deadline_s=5, read_deadline_s=5)
taken = Taken.now(sources, 129)
open("/run/judged", "w").close()
while not os.path.exists("/run/go"):
    time.sleep(0.01)
print(signal_holders(sources, 129, taken))
sources.close()
"""


def test_a_stuck_task_is_named_with_the_way_out(daemon: Start, container: Container, hook: Hook, node: Node) -> None:
    daemon()
    frozen = container.frozen_fs()
    holder = container.spawn_holder(open=("/dev/nvidia0",), alloc=("50:1024:compute",), touch=frozen.path("x"))
    frozen.freeze()
    holder.trigger()
    holder.main.wait_stuck()
    hook("pre-stop")
    container.init_process.kill(signal.SIGKILL)

    def named() -> Any:
        watched = hook.remembered("watch")
        return watched if watched and "cannot die" in watched["message"] else None

    watched = until(named, "the stuck task")
    assert f"pid {holder.pid} (state D" in watched["message"] and "thawed" in watched["next_step"]
    began = time.monotonic()
    hook("exec-stop-post", INVOCATION_ID=INVOCATION)
    assert time.monotonic() - began < 15
    why = next(h["stuck"] for h in hook.report()["holders"] if h["pid"] == holder.pid)
    assert why["since"].endswith("Z") and why["since"][:10] <= time.strftime("%Y-%m-%d", time.gmtime())
    frozen.thaw()
    holder.wait_gone()


def test_a_daemon_that_is_killed_in_the_middle_leaves_the_work_to_the_hook(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    running = daemon()
    engine()
    hook("pre-stop")
    node.control(fall_mib_per_ms=15, fall_step_mib=1000)
    container.stop()
    post_stop = hook.start("post-stop", INVOCATION_ID=INVOCATION)
    until(lambda: hook.records(), "the record written ahead")
    running.process.kill(signal.SIGKILL)
    _, err = post_stop.popen.communicate(timeout=60)
    assert post_stop.popen.returncode == 0 and err == ""
    (record,) = hook.records()
    assert record["report"]["verdict"] == "released" and record["owner"] == "hook"


def test_a_daemon_that_is_stopped_in_the_middle_leaves_the_work_to_the_hook(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    running = daemon()
    engine()
    hook("pre-stop")
    node.control(fall_mib_per_ms=15, fall_step_mib=1000)
    container.stop()
    post_stop = hook.start("post-stop", INVOCATION_ID=INVOCATION)
    until(lambda: hook.records(), "the record written ahead")
    running.process.kill(signal.SIGTERM)
    post_stop.popen.communicate(timeout=60)
    (record,) = hook.records()
    assert record["report"]["verdict"] == "released"


def test_daemon_and_hook_killed_in_the_middle_are_finished_by_the_next_daemon(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    running = daemon()
    engine()
    hook("pre-stop")
    node.control(fall_mib_per_ms=15, fall_step_mib=1000)
    container.stop()
    post_stop = hook.start("post-stop", INVOCATION_ID=INVOCATION)
    until(lambda: hook.records(), "the record written ahead")
    post_stop.process.kill()
    running.process.kill(signal.SIGKILL)
    running.popen.communicate()
    daemon()
    until(lambda: hook.records()[0]["report"], "the record to be finished")
    (record,) = hook.records()
    assert record["report"]["verdict"] == "released" and record["trigger"] == "hook-post-stop"


def test_a_restarted_daemon_watches_the_stops_of_its_predecessor(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    first = daemon()
    engine()
    hook("pre-stop")
    first.process.kill(signal.SIGKILL)
    first.popen.communicate()
    node.path(f"{STORE}/watch/129.json").unlink(missing_ok=True)
    container.init_process.kill(signal.SIGKILL)
    daemon()
    until(lambda: (hook.remembered("snapshots") or {}).get("over"), "the watch to see that it has stopped")
    hook("post-stop", INVOCATION_ID=INVOCATION)  # after a long unmount: what was held is known all the same
    assert hook.report()["was_held"] and hook.remembered("snapshots") is None


def test_a_hung_daemon_never_hangs_the_hook(daemon: Start, container: Container, hook: Hook, engine: Engine) -> None:
    running = daemon()
    engine()
    hook("pre-stop")
    container.stop()
    running.process.kill(signal.SIGSTOP)
    began = time.monotonic()
    assert hook("post-stop", INVOCATION_ID=INVOCATION).returncode == 0
    assert time.monotonic() - began < 12
    running.process.kill(signal.SIGCONT)
    (record,) = hook.records()
    assert record["owner"] == "hook" and record["report"]["verdict"] == "released"


def test_over_the_budget_the_stop_goes_on_and_so_does_the_daemon(
    daemon: Start, container: Container, hook: Hook, node: Node, engine: Engine
) -> None:
    hook.configure(HOOK_QUICK.replace("budget: 8", "budget: 1", 1))
    daemon()
    engine()
    hook("pre-stop")
    node.control(fall_mib_per_ms=3, fall_step_mib=300)
    container.stop()
    began = time.monotonic()
    done = hook("post-stop", INVOCATION_ID=INVOCATION)
    assert done.returncode == 0 and time.monotonic() - began < 10
    assert "pve-gpu-hostd goes on" in done.stdout
    until(lambda: hook.records()[0]["report"], "the daemon to finish")
    assert hook.report()["verdict"] == "released"


LOCK = """
import fcntl, os, sys
os.makedirs("/run/pve-gpu-release/locks", exist_ok=True)
fd = os.open("/run/pve-gpu-release/locks/129.lock", os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.readline()
"""


def test_another_release_in_flight_costs_a_stop_its_budget_once_and_the_record_still_comes(
    daemon: Start, node: Node, hook: Hook
) -> None:
    hook.configure(HOOK_QUICK.replace("budget: 8", "budget: 1", 1))
    of_unit(node, INVOCATION)
    daemon()
    container = node.container(129)
    container.spawn_holder(open=("/dev/nvidia0",), alloc=("50:42000:compute",))
    hook("pre-stop")
    other = node.popen([sys.executable, "-I", "-c", LOCK], stdin=subprocess.PIPE)
    assert other.popen.stdout is not None and other.popen.stdout.readline() == "locked\n"
    container.stop()
    begun = time.monotonic()
    assert "goes on" in hook("post-stop", INVOCATION_ID=INVOCATION).stdout
    first = time.monotonic() - begun
    hook("exec-stop-post", INVOCATION_ID=INVOCATION)
    assert first < 8 and time.monotonic() - begun - first < first, "the second call of the same stop waits for nobody"
    assert hook.records() == []
    other.popen.communicate("\n", timeout=60)
    until(lambda: hook.records() and hook.records()[0]["report"], "the daemon to finish")
    assert hook.triggers() == ["hook-post-stop"] and hook.report()["verdict"] == "released"


def test_a_container_without_a_gpu_is_silent_through_the_daemon(daemon: Start, node: Node, hook: Hook) -> None:
    daemon()
    node.container(131, devices=())
    for phase in ("pre-start", "exec-start-pre", "post-start", "pre-stop", "post-stop", "exec-stop-post"):
        done = hook(phase, vmid=131, INVOCATION_ID=INVOCATION)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert hook.records(131) == []


def test_background_work_never_touches_a_container_that_runs_again(
    daemon: Start, node: Node, hook: Hook
) -> None:
    """The stop's release still waits for memory when the container is started by hand."""
    hook.configure(HOOK_QUICK.replace("budget: 8", "budget: 1", 1))
    daemon()
    first = node.container(129)
    first.spawn_holder(open=("/dev/nvidia0",), alloc=("50:42000:compute",))
    hook("pre-stop")
    node.control(fall_mib_per_ms=10, fall_step_mib=1000)
    first.stop()
    hook("post-stop", INVOCATION_ID=INVOCATION)
    assert hook.records()[0]["report"] is None
    again = node.container(129)
    job = again.spawn_holder(open=("/dev/nvidia0",), alloc=("50:1000:compute",))
    until(lambda: hook.records()[0]["report"], "the daemon to finish")
    assert lives(job) and hook.report()["rungs"] == []


__all__ = ["dead"]
