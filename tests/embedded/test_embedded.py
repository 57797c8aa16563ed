"""The embedded node tells the truth: proven with real pynvml, /proc and cgroups before the product is tested on it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .build import REPOSITORY
from .node import (
    GPU_NODES,
    MISMATCH,
    NO_V2_MEMORY,
    NOT_LOADED,
    Container,
    Gpu,
    Holder,
    HolderHandle,
    Node,
    NodeError,
    Process,
    cgroup2_mount,
    wait_until,
)

pytestmark = [pytest.mark.embedded, pytest.mark.root, pytest.mark.usefixtures("nothing_left_behind")]
MakeNode = Callable[..., Node]
DEVICES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")
# `pip download nvidia-ml-py==11.525.150`, unpacked there; Debian's python3-pynvml, where it is installed.
OLD_PYNVML = [
    *sorted(REPOSITORY.glob(".build/pynvml-*")),
    *(path.parent for path in Path("/usr/lib/python3/dist-packages").glob("pynvml.py")),
]


def gpu(scope: Node | Container, minor: int = 50, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = next(g for g in scope.nvml(**options)["gpus"] if g.get("minor") == minor)
    return found


def descriptors(process: Process, tid: int | None = None) -> set[tuple[int, int]]:
    """(major, minor) of the character devices that a process or one of its threads has open."""
    directory = process.proc / (f"task/{tid}/fd" if tid else "fd")
    numbers = set()
    for entry in directory.iterdir():
        try:
            numbers.add(os.stat(entry).st_rdev)
        except FileNotFoundError:  # closed while we looked
            continue
    return {(os.major(number), os.minor(number)) for number in numbers if number}


def lives(pid: str) -> bool:
    """Neither gone nor a zombie that this machine's init has not reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


def engine(container: Container, **options: Any) -> HolderHandle:
    return container.spawn_holder(**{"open": DEVICES, "alloc": ("50:42759:compute",), **options})


# -- the machine -------------------------------------------------------------------------------------------------------


def test_node_looks_like_a_proxmox_machine_with_two_gpus(node: Node) -> None:
    devices = node.run(["cat", "/proc/devices"]).stdout
    assert "  4 nvidia\n" in devices and "  7 nvidia-uvm\n" in devices and "tty\n" not in devices.split("\n  5")[0]
    assert "Device Minor:\t 50" in node.read("/proc/driver/nvidia/gpus/0000:18:00.0/information")
    assert node.run(["stat", "-f", "-c", "%T", "/sys/fs/cgroup"]).stdout == "cgroup2fs\n"
    assert node.run(["hostname"]).stdout == "pve8\n"
    assert node.run(["cat", "/proc/1/comm"]).stdout == "init\n"
    assert os.stat(node.path("/dev/nvidia1")).st_rdev == os.makedev(4, 51)


def test_commands_have_their_own_exit_status_streams_and_cgroup(node: Node) -> None:
    done = node.run(["sh", "-c", "cat; echo err >&2; cat /proc/self/cgroup; exit 7"], input="in\n", cgroup="a/b")
    assert (done.returncode, done.stderr) == (7, "err\n")
    assert done.stdout.startswith("in\n") and "0::/a/b\n" in done.stdout
    assert node.run(["sh", "-c", "kill -9 $$"]).returncode == -signal.SIGKILL
    assert node.run(["readlink", "/proc/self/fd/0"]).stdout.startswith("/memfd:")


def test_a_signal_to_the_handle_reaches_the_command(node: Node) -> None:
    running = node.popen(["sh", "-c", "trap 'echo caught; exit 3' INT; echo ready; while :; do sleep 0.01; done"])
    assert running.popen.stdout and running.popen.stdout.readline() == "ready\n"
    running.popen.send_signal(signal.SIGINT)
    assert running.popen.communicate(timeout=60)[0] == "caught\n"
    assert running.popen.returncode == 3


def test_a_command_can_ask_for_its_pid(node: Node) -> None:
    running = node.popen(["cat"], pid=4711, stdin=subprocess.PIPE)
    assert running.pid == 4711
    assert node.run(["cat", "/proc/4711/comm"]).stdout == "cat\n"
    assert node.outer_pid(4711) == running.process.outer_pid


def test_no_process_of_the_machine_can_be_reached(node: Node) -> None:
    seen = node.run(["sh", "-c", "ls -d /proc/[0-9]*"]).stdout.split()
    assert len(seen) <= 4
    assert node.run(["sh", "-c", f"kill -0 {os.getpid()}"]).returncode


@pytest.mark.parametrize("pynvml_path", [None, *map(str, OLD_PYNVML)])
@pytest.mark.parametrize("nvml", ["current", "old"])
def test_every_generation_of_pynvml_loads_the_library(make_node: MakeNode, nvml: str, pynvml_path: str | None) -> None:
    node = make_node(nvml=nvml)
    node.spawn_holder(open=DEVICES, alloc=("50:100:compute",))
    answer = node.nvml(pynvml_path=pynvml_path)
    assert [g["minor"] for g in answer["gpus"]] == [50, 51]
    first = answer["gpus"][0]
    assert first["memory"]["used"] == 715
    if nvml == "current":
        assert first["memory_v2"] == {"total": 143771, "reserved": 615, "free": 143771 - 715, "used": 100}
        assert list(first["compute"].values()) == [100]
    else:
        assert "FunctionNotFound" in first["memory_v2"]
        assert "Mismatch" in first["compute"] or "FunctionNotFound" in first["compute"]


def test_index_order_is_the_order_of_the_gpus_given(make_node: MakeNode) -> None:
    node = make_node(
        [
            Gpu(51, "GPU-b", "00000000:3B:00.0", "/dev/nvidia1", 49140, "NVIDIA RTX A6000"),
            Gpu(50, "GPU-a", "00000000:18:00.0", "/dev/nvidia0"),
        ]
    )
    answer = node.nvml()["gpus"]
    assert [(g["index"], g["minor"], g["uuid"]) for g in answer] == [(0, 51, "GPU-b"), (1, 50, "GPU-a")]
    assert answer[0]["name"] == "NVIDIA RTX A6000" and answer[0]["memory"]["total"] == 49140


def test_a_node_without_driver_or_without_library_says_so(make_node: MakeNode) -> None:
    bare = make_node(driver="none")
    assert "nvidia" not in bare.read("/proc/devices") and not bare.path("/dev/nvidia0").exists()
    assert bare.nvml()["error"].startswith("NVMLError_LibraryNotFound")
    unequipped = make_node(nvml="none")
    assert unequipped.path("/dev/nvidia0").exists()
    assert unequipped.nvml()["error"].startswith("NVMLError_LibraryNotFound")


def test_on_the_mapping_only_node_nothing_has_the_device_open(make_node: MakeNode) -> None:
    node = make_node(driver="zero")
    holder = node.container(129).spawn_holder(map=("/dev/nvidia0",), alloc=("5:100:compute",))
    assert "  1 nvidia\n" in node.read("/proc/devices")
    everybody = node.run(["sh", "-c", "stat -Lc '%t:%T %n' /proc/[0-9]*/fd/*"]).stdout.splitlines()
    assert len(everybody) > 5 and not [line for line in everybody if line.startswith("1:")]
    numbers = {os.stat(entry).st_rdev for entry in (holder.main.proc / "map_files").iterdir()}
    assert os.makedev(1, 5) in numbers
    assert gpu(node, 5)["compute"] == {str(holder.pid): 100}


# -- containers --------------------------------------------------------------------------------------------------------


def test_a_container_has_proxmox_cgroups_and_its_init_is_one_level_below(node: Node, container: Container) -> None:
    status = node.read(f"/proc/{container.init_pid}/status")
    assert f"NSpid:\t{container.init_pid}\t1\n" in status
    assert node.run(["cat", f"/proc/{container.init_pid}/cgroup"]).stdout.endswith("0::/lxc/129/ns\n")
    assert node.run(["cat", f"/proc/{container.monitor.pid}/cgroup"]).stdout.endswith("0::/lxc.monitor/129\n")
    assert node.run(["cat", f"/proc/{container.monitor.pid}/cmdline"]).stdout == "[lxc monitor] /var/lib/lxc 129\0"
    assert container.run(["cat", "/proc/self/cgroup"]).stdout.endswith("0::/init.scope\n")
    assert container.run(["hostname"]).stdout == "ct129\n"
    assert container.run(["cat", "/proc/1/comm"]).stdout == "init\n"
    assert "dev0: /dev/nvidia0\n" in node.run(["cat", "/etc/pve/lxc/129.conf"]).stdout


@pytest.mark.parametrize("nodes", ["mknod", "bind"])
def test_device_nodes_are_the_containers_own_or_the_nodes(node: Node, nodes: str) -> None:
    container = node.container(129, nodes=nodes)
    theirs, host = os.stat(container.path("/dev/nvidia0")), os.stat(node.path("/dev/nvidia0"))
    assert theirs.st_rdev == host.st_rdev
    assert ((theirs.st_dev, theirs.st_ino) == (host.st_dev, host.st_ino)) == (nodes == "bind")
    assert ("lxc.mount.entry" in node.read("/etc/pve/nodes/pve8/lxc/129.conf")) == (nodes == "bind")


def test_attached_and_nested_processes_are_where_proxmox_and_docker_put_them(node: Node, container: Container) -> None:
    attached = container.attach(["cat"], stdin=subprocess.PIPE)
    assert attached.process.cgroup() == "/lxc/129/ns/.lxc"
    inner = container.nested(f"docker/{'ab' * 32}", devices=("nvidia0",))
    holder = inner.spawn_holder(open=("/dev/nvidia0",), alloc=("50:10:compute",), cgroup="")
    status = node.read(f"/proc/{holder.pid}/status")
    pids = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid"))
    assert len(pids) == 3 and pids[0] == str(holder.pid)
    assert holder.main.cgroup() == f"/lxc/129/ns/docker/{'ab' * 32}"
    assert gpu(node)["compute"] == {str(holder.pid): 10}


def test_a_killed_monitor_leaves_the_payload(container: Container) -> None:
    holder = engine(container)
    container.kill_monitor()
    assert holder.main.alive() and container.init_process.alive() and container.populated()


def test_stop_ends_everything_but_processes_of_other_namespaces(container: Container) -> None:
    holder = engine(container)
    container.stop()
    holder.wait_gone()
    assert not container.populated()


def test_a_frozen_container_dies_by_sigkill_and_runs_again_when_thawed(container: Container) -> None:
    first, second = engine(container), engine(container, term_ms=0)
    container.freeze()
    second.main.kill(signal.SIGTERM)
    first.kill()
    first.wait_gone()
    assert second.main.alive()
    container.thaw()
    second.wait_gone()


def test_inits_own_descriptors_make_it_a_holder(node: Node) -> None:
    container = node.container(129)
    holder = container.become_holder(argv=("/app/server",), open=DEVICES, alloc=("50:5:compute",))
    assert holder.pid == container.init_pid
    assert (4, 50) in descriptors(container.init_process)
    assert gpu(node)["compute"] == {str(container.init_pid): 5}


def test_an_unprivileged_container_has_its_own_users(node: Node) -> None:
    container = node.container(129, unprivileged=True)
    holder = engine(container, cgroup="system.slice/vllm.service")
    assert "Uid:\t100000\t100000" in (holder.main.proc / "status").read_text()
    assert os.stat(container.init_process.proc / "ns/user").st_ino != os.stat(node.init_process.proc / "ns/user").st_ino
    assert container.run(["id", "-u"]).stdout == "0\n"
    assert container.run(["cat", "/proc/1/comm"]).stdout == "init\n"
    assert gpu(node)["compute"] == {str(holder.pid): 42759}
    if container.run(["test", "-x", sys.executable]).returncode == 0:  # a Python below /root is not for other users
        assert gpu(container)["compute"] == {str(holder.main.ns_pid): 42759}
    assert "unprivileged: 1" in node.read("/etc/pve/nodes/pve8/lxc/129.conf")
    inner = container.nested(f"docker/{'cd' * 32}", devices=("nvidia0",))
    deep = inner.spawn_holder(open=("/dev/nvidia0",), cgroup="")
    assert deep.main.cgroup() == f"/lxc/129/ns/docker/{'cd' * 32}"
    container.stop()
    holder.wait_gone()
    deep.wait_gone()


def test_what_is_written_in_a_containers_etc_is_its_own(node: Node, container: Container) -> None:
    container.write("/etc/passwd", "evil:x:0:0::/:/bin/sh\n")
    assert container.run(["id", "-un"]).stdout == "evil\n" and node.run(["id", "-un"]).stdout == "root\n"
    assert not container.path("/etc/pve").exists() and "root:x:0" in Path("/etc/passwd").read_text()


def test_namespace_and_cgroup_can_disagree(node: Node, container: Container) -> None:
    outside = container.spawn_holder(open=DEVICES, cgroup="/system.slice/other.service")
    inside = node.spawn_holder(open=DEVICES, cgroup="lxc/129/ns/stray")
    assert (outside.main.cgroup(), inside.main.cgroup()) == ("/system.slice/other.service", "/lxc/129/ns/stray")
    assert len(outside.main.nested_pids()) == 2 and len(inside.main.nested_pids()) == 1


def test_a_stopped_container_leaves_no_cgroup_and_starts_again(node: Node, container: Container) -> None:
    container.stop()
    assert not container.payload.exists() and not (node.cgroup() / "lxc.monitor/129").exists()
    again = node.container(129)
    assert engine(again).main.alive()


# -- who holds what ----------------------------------------------------------------------------------------------------


def test_nvml_names_node_pids_sums_per_process_and_keeps_the_lists_apart(node: Node, container: Container) -> None:
    one = engine(container, alloc=("50:100:compute", "50:20:compute", "51:7:graphics", "50:3:compute,mps"))
    other = engine(node.container(130), alloc=("50:1000:compute",))
    answer = node.nvml()["gpus"]
    assert answer[0]["compute"] == {str(one.pid): 123, str(other.pid): 1000}
    assert answer[0]["mps"] == {str(one.pid): 3} and answer[0]["graphics"] == {}
    assert answer[1]["graphics"] == {str(one.pid): 7} and answer[1]["compute"] == {}
    assert answer[0]["memory_v2"]["used"] == 1123 and answer[0]["memory"]["used"] == 1123 + 615
    one.kill()
    one.wait_gone()
    assert gpu(node)["memory_v2"]["used"] == 1000


def test_in_a_container_the_list_is_shortened_to_what_it_can_see(node: Node, container: Container) -> None:
    mine, other = engine(container), engine(node.container(130))
    assert set(gpu(node)["compute"]) == {str(mine.pid), str(other.pid)}
    assert set(gpu(container)["compute"]) == {str(mine.main.ns_pid)}
    assert gpu(container)["memory_v2"]["used"] == 2 * 42759


def test_init_of_nvml_makes_the_caller_a_holder_until_shutdown(node: Node) -> None:
    script = "import pynvml as n; n.nvmlInit(); print(1); input(); n.nvmlShutdown(); print(2); input()"
    running = node.popen([sys.executable, "-I", "-u", "-c", script], stdin=subprocess.PIPE)
    assert running.popen.stdin and running.popen.stdout
    running.popen.stdout.readline()
    assert descriptors(running.process) == {(4, 50), (4, 51), (4, 55)}
    running.popen.stdin.write("\n")
    running.popen.stdin.flush()
    running.popen.stdout.readline()
    assert descriptors(running.process) == set()
    running.popen.communicate("\n")


def test_after_fork_the_list_names_the_dead_opener_while_children_hold_the_memory(
    node: Node, container: Container
) -> None:
    family = engine(container, children=2, grandchildren=1, die=True)
    opener, children = family.main, family.by_role("child") + family.by_role("grandchild")
    assert not opener.alive() and len(children) == 4 and all(child.alive() for child in children)
    assert gpu(node)["compute"] == {str(opener.pid): 42759}
    assert node.run(["test", "-d", f"/proc/{opener.pid}"]).returncode
    assert all((4, 50) in descriptors(child) for child in children)
    for child in children[:-1]:
        child.kill()
        child.wait_gone()
    assert gpu(node)["compute"] == {str(opener.pid): 42759}
    children[-1].kill()
    children[-1].wait_gone()
    assert gpu(node)["compute"] == {} and gpu(node)["memory_v2"]["used"] == 0


def test_a_dead_leader_shows_nothing_its_live_thread_does(node: Node, container: Container) -> None:
    holder = engine(container, mode="dead-leader")
    assert holder.main.state() == "Z" and holder.main.alive()
    assert list((holder.main.proc / "fd").iterdir()) == []
    threads = [
        int(task.name) for task in (holder.main.proc / "task").iterdir() if int(task.name) != holder.main.outer_pid
    ]
    assert [(4, 50) in descriptors(holder.main, tid) for tid in threads] == [True]
    assert gpu(node)["compute"] == {str(holder.pid): 42759}


def test_a_private_table_is_visible_only_at_its_thread(container: Container) -> None:
    holder = engine(container, mode="private-table", threads=2)
    assert descriptors(holder.main) == set()
    tids = [int(task.name) for task in (holder.main.proc / "task").iterdir()]
    assert sum((4, 50) in descriptors(holder.main, tid) for tid in tids) >= 1


def test_descriptors_in_flight_hold_memory_that_no_table_shows(node: Node, container: Container) -> None:
    holder = engine(container, inflight=True)
    assert descriptors(holder.main) == set()
    assert gpu(node)["compute"] == {str(holder.pid): 42759}
    holder.kill()
    holder.wait_gone()
    assert gpu(node)["memory_v2"]["used"] == 0


def test_descriptors_passed_to_another_container_keep_the_memory(node: Node, container: Container) -> None:
    path = "/run/nvidia-standin/passed"
    receiver = node.container(130).spawn_holder(listen=path)
    sender = engine(container, connect=path)
    received = receiver.next_report()
    assert received.role == "received" and (4, 50) in descriptors(received)
    sender.kill()
    sender.wait_gone()
    assert gpu(node)["compute"] == {str(sender.pid): 42759}


def test_an_importer_is_charged_when_the_exporter_is_gone(node: Node, container: Container) -> None:
    exporter = engine(container)
    importer = node.container(130).spawn_holder(
        open=DEVICES, alloc=("50:7:compute",), import_=tuple(exporter.allocations())
    )
    assert gpu(node)["compute"] == {str(exporter.pid): 42759, str(importer.pid): 7}
    exporter.kill()
    exporter.wait_gone()
    assert gpu(node)["compute"] == {str(importer.pid): 42766}
    importer.kill()
    importer.wait_gone()
    assert gpu(node)["memory_v2"]["used"] == 0


# -- processes ---------------------------------------------------------------------------------------------------------


def test_names_and_command_lines_may_be_hostile(node: Node, container: Container) -> None:
    argv = ("VLLM::EngineCore", "\x1b[2J\n\r", os.fsdecode(b"\xff\xfe"), "")
    holder = engine(container, argv=argv, comm="a) R 1 1 (\n\x1b[")
    assert (holder.main.proc / "cmdline").read_bytes() == b"\0".join(map(os.fsencode, argv)) + b"\0"
    assert (holder.main.proc / "comm").read_bytes() == b"a) R 1 1 (\n\x1b[\n"


def test_term_is_ignored_or_obeyed_slowly(container: Container) -> None:
    deaf, slow = engine(container, ignore_term=True), engine(container, term_ms=50)
    deaf.main.kill(signal.SIGTERM)
    began = time.monotonic()
    slow.main.kill(signal.SIGTERM)
    slow.wait_gone()
    assert time.monotonic() - began >= 0.05 and deaf.main.alive()


def test_a_stopped_holder_is_stopped_and_dies_by_sigkill(container: Container) -> None:
    holder = engine(container, stop=True)
    assert holder.main.state() == "T"
    holder.main.kill(signal.SIGTERM)
    assert holder.main.alive()
    holder.kill()
    holder.wait_gone()


def test_a_supervisor_restarts_its_holder(node: Node, container: Container) -> None:
    family = engine(container, respawn=2, supervisor_comm="vllm.service")
    seen = [family.main]
    for _ in range(2):
        family.main.kill()
        seen.append(family.next_report())
    assert len({process.pid for process in seen}) == 3
    assert gpu(node)["compute"] == {str(seen[-1].pid): 42759}
    family.main.kill()
    family.wait_gone()
    assert family.by_role("supervisor")[0].alive() is False


def test_a_daemon_belongs_to_init(node: Node, container: Container) -> None:
    holder = engine(container, daemon=True, setsid=False)
    assert holder.popen.wait(timeout=60) == 0
    status = container.read(f"/proc/{holder.main.ns_pid}/status")
    assert holder.main.alive() and "PPid:\t1\n" in status


def test_threads_zombies_and_users(container: Container) -> None:
    holder = engine(container, threads=300, zombies=2, uid=1000)
    assert len(list((holder.main.proc / "task").iterdir())) == 301
    assert "Uid:\t1000\t1000" in (holder.main.proc / "status").read_text()
    children = (holder.main.proc / f"task/{holder.main.outer_pid}/children").read_text().split()
    wait_until(lambda: all(Path(f"/proc/{c}/stat").read_text().split()[2] == "Z" for c in children), "zombies")
    assert len(children) == 2


def test_a_holder_that_cannot_start_says_why(container: Container) -> None:
    with pytest.raises(NodeError, match="cannot open /dev/nvidia9: No such file"):
        container.spawn_holder(Holder(open=("/dev/nvidia9",)))


def test_a_recycled_pid_makes_the_list_name_an_innocent_process(node: Node, container: Container) -> None:
    family = engine(container, children=1, die=True)
    innocent = node.popen(["cat"], pid=family.main.pid, stdin=subprocess.PIPE)
    assert gpu(node)["compute"] == {str(innocent.pid): 42759}
    assert descriptors(innocent.process) == set()


def test_a_crowd_makes_the_host_busy(node: Node) -> None:
    began = time.monotonic()
    node.spawn_holder(open=("/dev/null",) * 30, crowd=1000)
    assert len(node.run(["sh", "-c", "ls -d /proc/[0-9]*"]).stdout.split()) > 1000
    assert time.monotonic() - began < 10


def test_a_frozen_file_system_may_be_a_containers_own(container: Container) -> None:
    with container.frozen_fs("/mnt") as frozen:
        holder = engine(container, touch=frozen.path("touched"))
        frozen.freeze()
        holder.trigger()
        holder.main.wait_stuck()
        holder.kill()
        assert container.populated() and holder.main.alive()
    holder.wait_gone()


# -- misbehaviour ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (MISMATCH, "NVMLError_LibRmVersionMismatch"),
        (NOT_LOADED, "NVMLError_DriverNotLoaded"),
        ({"error": "nvmlInit=999"}, "NVMLError_Unknown"),
    ],
)
def test_nvml_can_refuse_to_start(node: Node, settings: dict[str, Any], error: str) -> None:
    node.control(**settings)
    assert node.nvml()["error"].startswith(error)
    node.clear_control()
    assert len(node.nvml()["gpus"]) == 2


def test_a_lost_gpu_still_counts(node: Node) -> None:
    node.control(lost={51: 1})
    first, second = node.nvml()["gpus"]
    assert first["minor"] == 50 and second["error"].startswith("NVMLError_GpuIsLost")
    node.control(lost={51: None}, error={51: "nvmlDeviceGetMemoryInfo=15 nvmlDeviceGetComputeRunningProcesses=15"})
    late = gpu(node, 51)
    assert "GpuIsLost" in late["memory_v2"] and "GpuIsLost" in late["compute"] and late["graphics"] == {}


def test_lists_can_name_impossible_and_foreign_pids(node: Node, container: Container) -> None:
    holder = engine(container)
    node.control(extra_clients={50: "0:1:compute 4294967295:2:compute,mps 31999:3:graphics"})
    first = gpu(node)
    assert first["compute"] == {str(holder.pid): 42759, "0": 1, "4294967295": 2}
    assert first["mps"] == {"4294967295": 2} and first["graphics"] == {"31999": 3}
    assert first["memory_v2"]["used"] == 42759
    node.control(hide_clients="*", extra_clients={50: None})
    assert gpu(node)["compute"] == {} and gpu(node)["memory_v2"]["used"] == 42759


def test_lists_can_grow_between_two_calls(node: Node, container: Container) -> None:
    engine(container)
    node.control(grow=5)
    assert len(gpu(node)["compute"]) == 6
    node.control(grow=50)
    assert "InsufficientSize" in gpu(node)["compute"]
    node.control(grow_times=1)
    answer = gpu(node)
    assert "InsufficientSize" in answer["compute"] and answer["graphics"] == {}


def test_figures_can_be_missing(node: Node, container: Container) -> None:
    holder = engine(container)
    node.control(memory_na=str(holder.pid), **NO_V2_MEMORY)
    first = gpu(node)
    assert first["compute"] == {str(holder.pid): None} and "FunctionNotFound" in first["memory_v2"]
    assert first["memory"]["used"] == 42759 + 615
    node.control(memory_na=None, error=None, mig={50: 1, 51: -1})
    first, second = node.nvml()["gpus"]
    assert first["mig"] == [1, 1] and "NotSupported" in first["memory_v2"] and "NotSupported" in first["memory"]
    assert first["compute"] == {str(holder.pid): None} and "NotSupported" in second["mig"]


def test_modes_ghosts_and_links_are_as_told(node: Node) -> None:
    node.control(
        ghost_mib={50: 300}, bar1_used_mib={50: 5000}, recovery_action={50: 1, 51: -1}, persistence=1, compute_mode=3,
        nvlink="50:51", reserve_mib=100,
    )  # fmt: skip
    first, second = node.nvml()["gpus"]
    assert first["memory_v2"]["used"] == 300 and first["memory"]["used"] == 400 and second["memory_v2"]["used"] == 0
    assert (first["bar1"], second["bar1"]) == (5000, 1)
    assert (first["recovery_action"], second["recovery_action"]) == (1, "error 3")
    assert (first["persistence"], first["compute_mode"], first["nvlink"]) == (1, 3, 1)
    assert first["nvlink_peer"] == second["pci"] == "00000000:3B:00.0"
    script = "import pynvml as n; n.nvmlInit(); n.nvmlDeviceSetPersistenceMode(n.nvmlDeviceGetHandleByIndex(0), 0)"
    node.run([sys.executable, "-I", "-c", script], check=True)
    assert [g["persistence"] for g in node.nvml()["gpus"]] == [0, 1]


def test_memory_can_stay_fall_in_steps_and_leak(node: Node, container: Container) -> None:
    holder = engine(container, alloc=("50:1000:compute",))
    node.control(free_delay_ms=3_600_000)
    holder.kill()
    holder.wait_gone()
    first = gpu(node)
    assert first["memory_v2"]["used"] == 1000 and first["compute"] == {}
    node.control(list_draining=1)
    assert gpu(node)["compute"] == {str(holder.pid): 1000}
    node.control(free_delay_ms=0, list_draining=0, leak_mib={50: 64})
    assert gpu(node)["memory_v2"]["used"] == 64
    node.control(leak_mib={50: None})
    second = engine(container, alloc=("51:1000:compute",))
    node.control(fall_mib_per_ms=2, fall_step_mib=100)
    second.kill()
    second.wait_gone()
    assert gpu(node, 51)["memory_v2"]["used"] > 0
    figures: set[int] = set()
    deadline = time.monotonic() + 10
    while 0 not in figures and time.monotonic() < deadline:
        figures.add(gpu(node, 51)["memory_v2"]["used"])
    assert 0 in figures and all(figure % 100 == 0 for figure in figures)


def test_the_time_of_freeing_counts_from_the_death_of_the_last_holder(node: Node, container: Container) -> None:
    holder = engine(container, alloc=("50:1000:compute",))
    name, began = holder.allocations()[0], time.monotonic()
    holder.kill()
    holder.wait_gone()
    freed = node.path(f"/run/nvidia-standin/alloc/{name}.freed")
    wait_until(lambda: freed.exists() and freed.read_text().endswith("\n"), "the guard has noticed")
    assert began - 0.002 <= int(freed.read_text()) / 1000 <= time.monotonic()


def test_a_hanging_call_can_be_killed_and_ends_when_told(node: Node) -> None:
    node.control(hang="nvmlInit")
    with pytest.raises(subprocess.TimeoutExpired):
        node.nvml(timeout=0.2)
    node.control(hang="nvmlDeviceGetMemoryInfo")
    running = node.popen([sys.executable, "-I", Path(__file__).with_name("probe.py")])
    wait_until(lambda: (4, 50) in descriptors(running.process), "the probe is inside the driver")
    node.clear_control()
    out, _ = running.popen.communicate(timeout=60)
    assert '"minor": 50' in out


@pytest.mark.parametrize(("settings", "status"), [({"crash": "nvmlDeviceGetName"}, -11), ({"exit": "nvmlInit"}, 3)])
def test_a_call_can_end_the_process(node: Node, settings: dict[str, str], status: int) -> None:
    node.control(**settings)
    assert node.run([sys.executable, "-I", Path(__file__).with_name("probe.py")]).returncode == status


def test_init_can_be_slow(node: Node) -> None:
    node.control(init_delay_ms=150)
    began = time.monotonic()
    node.nvml()
    assert time.monotonic() - began > 0.15


# -- frozen file systems -----------------------------------------------------------------------------------------------


def test_a_task_in_d_state_survives_sigkill_until_the_thaw(node: Node, container: Container) -> None:
    with node.frozen_fs() as frozen:
        holder = node.spawn_holder(open=DEVICES, touch=frozen.path("touched"))
        frozen.freeze()
        holder.trigger()
        holder.main.wait_stuck()
        holder.kill()
        with pytest.raises(NodeError):
            holder.wait_gone(timeout_s=0.2)
    holder.wait_gone()


def test_a_write_fault_blocks_readers_of_the_command_line_but_not_of_status(node: Node) -> None:
    with node.frozen_fs() as frozen:
        holder = node.spawn_holder(open=DEVICES, fault=frozen.path("mapped"))
        frozen.freeze()
        holder.trigger()
        holder.main.wait_stuck(2)
        reader = node.popen(["cat", f"/proc/{holder.pid}/cmdline"])
        with pytest.raises(subprocess.TimeoutExpired):
            reader.popen.wait(timeout=0.3)
        assert node.run(["cat", f"/proc/{holder.pid}/status", f"/proc/{holder.pid}/stat"], timeout=60).returncode == 0
        assert (4, 50) in descriptors(holder.main)
    assert reader.popen.communicate(timeout=60)[0] == "python3\0train.py\0"


def test_nvml_itself_can_hang_in_d_state(node: Node) -> None:
    with node.frozen_fs() as frozen:
        node.control(hang_d="nvmlDeviceGetMemoryInfo", hang_d_path=frozen.path("nvml"))
        frozen.freeze()
        running = node.popen([sys.executable, "-I", Path(__file__).with_name("probe.py")])
        running.process.wait_stuck()
        running.process.kill()
        with pytest.raises(NodeError):
            running.process.wait_gone(timeout_s=0.2)
    assert running.popen.wait(timeout=60) == -signal.SIGKILL


# -- the end -----------------------------------------------------------------------------------------------------------


def test_closing_a_node_ends_everything_also_d_state(require_node: None) -> None:
    with Node() as node:
        container = node.container(129)
        frozen = node.frozen_fs()
        holders = [
            engine(container, ignore_term=True),
            engine(container, children=3, die=True),
            node.spawn_holder(open=DEVICES, touch=frozen.path("x")),
        ]
        frozen.freeze()
        holders[-1].trigger()
        holders[-1].main.wait_stuck()
        container.freeze()
        everybody = [process.outer_pid for holder in holders for process in holder.alive()]
    assert not [pid for pid in everybody if Path(f"/proc/{pid}").exists()]


DOOMED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from embedded.node import Node
node = Node()
fs = node.frozen_fs()
ct = node.container(129)
holder = ct.spawn_holder(open=("/dev/nvidia0",), children=2)
stuck = node.spawn_holder(open=("/dev/nvidia0",), touch=fs.path("x"))
fs.freeze()
stuck.trigger()
stuck.main.wait_stuck()
pids = [node.init.outer_pid, stuck.main.outer_pid, *(p.outer_pid for p in holder.processes)]
print(node._directory, node._guard.pid, *pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_when_the_tests_are_killed_the_guard_cleans_up(require_node: None) -> None:
    command = [sys.executable, "-c", DOOMED, str(Path(__file__).resolve().parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    directory, *pids = done.stdout.split()
    wait_until(lambda: not Path(directory).exists(), "cgroup removed")
    wait_until(lambda: not [pid for pid in pids if lives(pid)], "processes gone")


def test_building_a_node_with_a_container_is_cheap(require_node: None) -> None:
    began = time.monotonic()
    with Node() as node:
        node.container(129, GPU_NODES)
    assert time.monotonic() - began < 20
    assert not list(cgroup2_mount().glob(f"pve-gpu-node-{os.getpid()}-*"))
