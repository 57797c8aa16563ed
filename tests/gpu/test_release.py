"""`pve-gpu-release 129` on a real GPU: each case gets the verdict, exit status, reason and figures that it must get,
the driver itself confirms them, and nothing foreign is hurt (issue 2, item 6)."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .channel import wait_readable
from .container import Container, Process, StartFailedError, wait_for_state
from .driver import Gpu
from .world import CONTEXT_MIB, MIB_80_GB, SLACK_MIB, World

DOCKER = "ns/docker/" + "4f" * 32


def before(world: World, gpu: Gpu, at_least_mib: int) -> int:
    """What the GPU uses now; the ground of the test itself: the holder really holds what it should."""
    used = world.driver.used_mib(gpu)
    assert used >= world.machine.idle_mib[gpu.uuid] + at_least_mib, f"{used} MiB\n{world.driver.describe()}"
    return used


# --- plain holders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mib", [64, 8 << 10, MIB_80_GB], ids=["64 MiB", "8 GiB", "80 GB"])
def test_a_plain_holder_is_freed(world: World, mib: int) -> None:
    gpu = world.machine.first
    mib = world.machine.at_most_mib(gpu, mib)
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}={mib}", "--comm", "VLLM::EngineCore")
    used = before(world, gpu, mib)
    done = world.release(case=f"plain holder {mib} MiB")
    world.assert_released(done, [holder], gpu, used)
    entry = done.holder(holder.pid)
    assert entry["comm"] == "VLLM::EngineCor"
    assert entry["user"] == "root"
    assert mib <= entry["memory_mib"] <= mib + CONTEXT_MIB
    assert gpu.minor in entry["gpus"]
    assert set(entry["evidence"]) >= {"fd", "nvml"}
    assert done.steps() == ["term"], "a plain CUDA process ends at SIGTERM"


def test_a_holder_is_freed_without_term_when_told_so(world: World) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=64")
    used = before(world, gpu, 64)
    done = world.release("--now", case="--now")
    world.assert_released(done, [holder], gpu, used)
    assert done.steps() == ["kill"]


def test_nodes_made_by_mknod_are_the_same_gpu(world: World) -> None:
    gpu = world.machine.first
    box = world.container(129, how="mknod")
    holder = box.spawn(f"--gpu={gpu.uuid}=256")
    inside = os.stat(f"/proc/{box.init_pid}/root/dev/nvidiactl")
    outside = os.stat("/dev/nvidiactl")
    assert inside.st_rdev == outside.st_rdev
    assert (inside.st_dev, inside.st_ino) != (outside.st_dev, outside.st_ino), "the node is not one of its own"
    used = before(world, gpu, 256)
    done = world.release(case="mknod-ed nodes")
    world.assert_released(done, [holder], gpu, used)


def test_a_descriptor_without_a_context_is_a_holder(world: World) -> None:
    gpu = world.machine.first
    node = world.machine.node(gpu)
    holder = world.container(129).spawn("--no-cuda", f"--open={node}", "--open=/dev/nvidiactl")
    used = world.driver.used_mib(gpu)
    done = world.release(case="descriptor without a context")
    world.assert_released(done, [holder], gpu, used)
    assert done.holder(holder.pid)["evidence"] == ["fd"]
    assert done.holder(holder.pid)["gpus"] == [gpu.minor], "it counts for every node it has open"


def test_nothing_held_is_said_and_no_such_container_too(world: World) -> None:
    world.container(129)
    done = world.release(case="nothing held").must_end(0, "nothing-held").must_be_complete()
    assert done.report["was_held"] is False
    assert done.report["holders"] == []
    absent = world.run("131", "--json")
    assert absent.status == 8
    assert absent.report["verdict"] is None
    assert absent.report["reason"] == "no-such-container"


def test_looking_changes_nothing_and_agrees_with_the_release(world: World) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=64", nested="init", cgroup=DOCKER)
    used = before(world, gpu, 64)

    listed = world.run("ps", "129", "--json")
    assert listed.status == 0
    assert [h["pid"] for h in listed.report["holders"]] == [holder.pid]
    assert listed.report["holders"][0]["vmid"] == 129
    everyone = {h["pid"]: h["vmid"] for h in world.run("ps", "--json").report["holders"]}
    assert everyone[holder.pid] == 129
    assert [everyone[p.pid] for p in world.foreign] == [None, 130]
    assert everyone[os.getpid()] is None, "this test's own NVML handle"

    judged = world.run("verify", "129", "--json").must_end(3, "holders-present")
    assert judged.holder_pids() == {holder.pid}
    rehearsed = world.run("129", "--dry-run", "--json").must_end(3, "holders-present")
    assert rehearsed.report["dry_run"] is True
    assert rehearsed.holder(holder.pid)["fate"] == "spared"
    mapped = world.run("map", "129", str(holder.ns_pids[0]))
    assert mapped.status == 0
    assert str(holder.pid) in mapped.stdout
    assert holder.is_alive()
    assert holder.check()["intact"] is True

    done = world.release(case="after ps, verify, map, dry run")
    world.assert_released(done, [holder], gpu, used)
    world.run("verify", "129", "--json").must_end(0, "nothing-held")
    assert world.release(case="a second time").must_end(0, "nothing-held").report["was_held"] is False
    world.assert_foreign_untouched()


def test_people_read_the_proof(world: World) -> None:
    gpu = world.machine.first
    world.container(129).spawn(f"--gpu={gpu.uuid}=64", "--comm", "VLLM::EngineCore")
    done = world.run("129")
    assert done.status == 0, done.describe()
    text = done.stdout + done.stderr
    assert "129" in text
    assert "VLLM::EngineCor" in text
    assert "\x1b" not in text, "no escape sequences in a pipe"
    world.assert_free(gpu)
    world.assert_foreign_untouched()
    world.machine.figures.note("what people see:\n" + text)


# --- where the process sits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("nested", ["init", "direct"], ids=["below an init of its own", "as its pid 1"])
def test_a_holder_in_a_nested_pid_namespace_is_freed(world: World, nested: str) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=512", nested=nested, cgroup=DOCKER)
    assert len(holder.ns_pids) == 2
    used = before(world, gpu, 512)
    done = world.release("--grace", "2", case=f"nested PID namespace, {nested}")
    world.assert_released(done, [holder], gpu, used)
    # To a pid 1 without a handler SIGTERM is nothing, from outside its namespace too (pid_namespaces(7)).
    assert done.steps()[-1] == ("term" if nested == "init" else "kill")


def test_a_forked_child_with_a_dead_parent_is_freed(world: World) -> None:
    gpu = world.machine.first
    box = world.container(129)
    parent = box.spawn(f"--gpu={gpu.uuid}=2048", "--fork=2", label="opener")
    children = [box.adopt(parent.channel.expect("child", 10, number=n), parent, f"heir {n}") for n in range(2)]
    parent.kill()
    used = before(world, gpu, 2048)
    listed = world.driver.clients(gpu)
    assert parent.pid in listed, f"the driver names the dead opener (FACTS), not {listed}"
    done = world.release(case="forked children, dead parent")
    world.assert_released(done, children, gpu, used)
    assert parent.pid not in done.holder_pids()
    assert all(gpu.minor in done.holder(child.pid)["gpus"] for child in children)


def test_a_dead_leader_with_live_threads_is_freed(world: World) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=1024", "--dead-leader")
    wait_for_state(holder.pid, "Z")
    assert holder.is_alive()
    assert os.listdir(f"/proc/{holder.pid}/task")
    used = before(world, gpu, 1024)
    done = world.release(case="dead leader, live threads")
    world.assert_released(done, [holder], gpu, used)


# --- how it resists -----------------------------------------------------------------------------------------------


def test_a_holder_that_ignores_term_is_killed(world: World) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=256", "--ignore-term")
    used = before(world, gpu, 256)
    done = world.release("--grace", "1", case="TERM-ignoring")
    world.assert_released(done, [holder], gpu, used)
    assert done.steps() == ["term", "kill"]


def test_a_stopped_holder_is_killed(world: World) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=256", "--stop-self")
    wait_for_state(holder.pid, "T")
    used = before(world, gpu, 256)
    done = world.release("--grace", "1", case="stopped (SIGSTOP)")
    world.assert_released(done, [holder], gpu, used)
    assert done.steps()[-1] == "kill"


def test_pinned_host_memory_is_waited_for(world: World) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=64", f"--pinned={8 << 10}")
    used = before(world, gpu, 64)
    done = world.release(case="8 GiB pinned")
    world.assert_released(done, [holder], gpu, used)


def test_a_deadline_in_the_middle_of_a_drain_is_neither_released_nor_unkillable(world: World) -> None:
    gpu = world.machine.first
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=64", f"--pinned={16 << 10}")
    done = world.release("--now", "--timeout", "1", case="16 GiB pinned, --timeout 1")
    lived = holder.is_alive()
    if not lived and done.status == 0:
        pytest.skip("this machine unpins 16 GiB in less than a second")
    assert done.status in (3, 6), f"status {done.status}, reason {done.report.get('reason')}"
    done.must_end(done.status, "holders-survive", "draining")
    if lived and done.status == 3:
        assert done.holder(holder.pid)["fate"] == "survived"
    holder.wait_gone(60)
    world.driver.wait_used_at_most(gpu, world.machine.idle_mib[gpu.uuid] + SLACK_MIB, 30)
    world.run("verify", "129", "--json").must_end(0, "nothing-held")


# --- what must be left alone --------------------------------------------------------------------------------------


def test_the_other_container_on_the_gpu_keeps_its_memory(world: World) -> None:
    gpu = world.machine.first
    keeper = world.foreign_holder(gpu, 3072)
    alone = world.driver.used_mib(gpu)
    holder = world.container(129).spawn(f"--gpu={gpu.uuid}=4096")
    used = before(world, gpu, 3072 + 4096)
    charge = world.driver.clients(gpu)[keeper.pid]
    rounds = keeper.check()["rounds"]
    done = world.release(case="two containers on one GPU")
    world.assert_released(done, [holder], gpu, used, others_mib=alone - world.machine.idle_mib[gpu.uuid], clients=1)
    assert keeper.pid not in done.holder_pids()
    assert keeper.pid in {other["pid"] for other in done.gpu(gpu)["other_holders"]}
    assert world.driver.clients(gpu)[keeper.pid] == charge, "to the MiB"
    after = keeper.check()
    assert after["intact"] is True
    assert int(str(after["rounds"])) >= int(str(rounds)), "it goes on computing"
    world.assert_foreign_untouched()


def test_only_the_process_asked_for_is_released(world: World) -> None:
    gpu = world.machine.first
    box = world.container(129)
    stays, goes = (box.spawn(f"--gpu={gpu.uuid}={mib}", "--report-signals", label="job") for mib in (512, 256))
    before(world, gpu, 768)
    done = world.release("--now", "--pid", str(goes.ns_pid), case="--pid")
    done.must_end(0, "released")
    assert done.holder(goes.pid)["fate"] == "exited"
    assert not goes.is_alive()
    stays.assert_untouched()
    assert stays.check()["intact"] is True
    nonsense = world.run("129", "--json", "--pid", "99999")
    assert nonsense.status == 2
    stays.assert_untouched()


def test_an_init_that_holds_the_gpu_is_only_ended_when_asked(world: World) -> None:
    gpu = world.machine.first
    box = world.container(129, init_opens=[world.machine.node(gpu)])
    refused = world.release(case="init holds the GPU")
    assert refused.status == 7
    assert refused.report["verdict"] is None
    assert refused.report["reason"] == "would-stop-container"
    assert box.is_running()
    stopped = world.release("--stop", "--grace", "1", case="init holds the GPU, --stop").must_end(0, "released")
    assert not box.is_running()
    assert stopped.holder(box.init_pid)["fate"] == "exited"


def start_ipc(world: World, path: Path, *, namespaces: bool) -> tuple[Process, Process]:
    """An exporter in 129 with 4 GiB and an importer in 130 that has them mapped."""
    gpu = world.machine.first
    exporter = world.container(129).spawn(
        f"--gpu={gpu.uuid}=4096", f"--ipc-export={path}", label="exporter", namespaces=namespaces
    )
    importer = world.boxes[130].spawn(
        f"--ipc-import={path}", "--report-signals", label="importer", namespaces=namespaces
    )
    return exporter, importer


def test_memory_taken_over_through_cuda_ipc_is_reported_and_not_killed(world: World, tmp_path: Path) -> None:
    gpu = world.machine.first
    try:
        exporter, importer = start_ipc(world, tmp_path / "handle", namespaces=True)
        world.notes.append("CUDA IPC works between the PID namespaces of two containers")
    except StartFailedError as exc:
        # CUDA may want one PID namespace for both: then they are containers by cgroup only, as DESIGN 3 counts them.
        world.notes.append(f"CUDA IPC between PID namespaces: {str(exc)[-300:]}")
        world.boxes[129].destroy()
        exporter, importer = start_ipc(world, tmp_path / "handle2", namespaces=False)
    world.machine.figures.note(world.notes[-1])
    world.foreign.append(importer)
    before(world, gpu, 4096)
    done = world.release("--now", case="CUDA IPC importer in 130")
    done.must_end(6, "taken-over").must_be_complete()
    assert done.holder(exporter.pid)["fate"] == "exited"
    assert not exporter.is_alive()
    assert importer.pid in {other["pid"] for other in done.gpu(gpu)["other_holders"]}
    assert world.driver.used_mib(gpu) >= 4096, "the memory stays with the importer (FACTS)"
    assert (world.driver.clients(gpu)[importer.pid] or 0) >= 4096
    world.assert_foreign_untouched()
    world.foreign.remove(importer)
    importer.kill()
    world.driver.wait_used_at_most(gpu, world.machine.idle_mib[gpu.uuid] + SLACK_MIB, 30)


def mps_control() -> str | None:
    """The MPS control daemon's program, where this driver installation has it."""
    places = [shutil.which("nvidia-cuda-mps-control"), "/usr/bin/nvidia-cuda-mps-control"]
    places.append("/usr/local/nvidia/bin/nvidia-cuda-mps-control")
    return next((place for place in places if place and os.access(place, os.X_OK)), None)


def start_mps(box: Container, program: str, directory: Path) -> dict[str, str]:
    """An MPS control daemon in the container -> the environment of its clients."""
    pipes, logs = directory / "mps-pipe", directory / "mps-log"
    pipes.mkdir()
    logs.mkdir()
    env = {"CUDA_MPS_PIPE_DIRECTORY": str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(logs)}
    status, said = box.run([program, "-d"], env=env)
    assert status == 0, said
    deadline = time.monotonic() + 10
    while not (pipes / "control").exists():
        assert time.monotonic() < deadline, f"no control pipe of MPS: {said}"
        time.sleep(0.02)
    return env


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """For MPS's sockets: a path of a unix socket has 107 characters at most."""
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp") as name:
        yield Path(name)


def test_an_mps_server_inside_the_container_is_freed_with_its_clients(world: World, short_directory: Path) -> None:
    program = mps_control()
    if program is None:
        pytest.skip("nvidia-cuda-mps-control is not installed here")
    gpu = world.machine.first
    box = world.container(129)
    env = start_mps(box, program, short_directory)
    try:
        client = box.spawn(f"--gpu={gpu.uuid}=512", label="mps-client", env=env)
    except StartFailedError as exc:
        logs = "\n".join(
            path.read_text(errors="replace")[-2000:] for path in (short_directory / "mps-log").glob("*.log")
        )
        pytest.fail(f"no client of MPS: {exc}\n{logs}")
    used = before(world, gpu, 512)
    listed = world.driver.clients(gpu)
    servers = [pid for pid in box.cgroup.pids() if pid in listed and pid != client.pid]
    assert servers, f"no MPS server among the driver's clients {listed}: the client went past it"
    server_fds = [os.pidfd_open(pid) for pid in servers]
    try:
        done = world.release("--grace", "3", case="MPS server and client in 129")
        world.assert_released(done, [client], gpu, used)
        assert done.holder_pids() >= {client.pid, *servers}
        assert all(wait_readable(fd, 0) for fd in server_fds)
    finally:
        for fd in server_fds:
            os.close(fd)
    assert not world.driver.clients(gpu).keys() & set(servers)


def test_holders_of_every_kind_are_freed_together(world: World) -> None:
    gpu = world.machine.first
    keeper = world.foreign_holder(gpu, 1024)
    alone = world.driver.used_mib(gpu)
    box = world.container(129, how="mknod")
    engine = box.spawn(f"--gpu={gpu.uuid}=4096", "--comm", "VLLM::EngineCore", "--ignore-term", label="engine")
    worker = box.spawn(f"--gpu={gpu.uuid}=1024", nested="init", cgroup=DOCKER, label="worker")
    opener = box.spawn(f"--gpu={gpu.uuid}=512", "--fork=1", label="opener")
    heir = box.adopt(opener.channel.expect("child", 10, number=0), opener, "heir")
    opener.kill()
    leaderless = box.spawn(f"--gpu={gpu.uuid}=256", "--dead-leader", label="leaderless")
    monitor = box.spawn("--no-cuda", f"--open={world.machine.node(gpu)}", "--open=/dev/nvidiactl", label="nvtop")
    used = before(world, gpu, 4096 + 1024 + 512 + 256 + 1024)
    done = world.release("--grace", "1", case="five kinds together, 130 on the same GPU")
    others = alone - world.machine.idle_mib[gpu.uuid]
    holders = [engine, worker, heir, leaderless, monitor]
    world.assert_released(done, holders, gpu, used, others_mib=others, clients=1)
    assert done.holder_pids() == {process.pid for process in holders}
    assert keeper.check()["intact"] is True
    world.assert_foreign_untouched()


@pytest.mark.parametrize("alone", [False, True], ids=["beside a living one", "alone"])
def test_a_holder_that_is_dying_already_is_waited_for(world: World, alone: bool) -> None:
    """`pkill -9` inside, then the release at once: the dying process has no descriptor any more, but the memory."""
    gpu = world.machine.first
    box = world.container(129)
    living = [] if alone else [box.spawn(f"--gpu={gpu.uuid}=64", label="living")]
    dying = box.spawn(f"--gpu={gpu.uuid}=64", f"--pinned={8 << 10}", label="dying")
    dying.send_signal(signal.SIGKILL)
    done = world.release(case="a holder that is dying already" + (", alone" if alone else ""))
    reasons = ("released", "nothing-held") if alone else ("released",)
    done.must_end(0, *reasons)
    world.assert_free(gpu)
    assert not dying.is_alive()
    assert not any(process.is_alive() for process in living)
