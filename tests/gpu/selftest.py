"""Does the test ground itself work? Needs root and cgroup v2, no GPU: `python3 -m pytest tests/gpu/selftest.py -q`.

Not collected by default: it uses the same container ids in the same cgroup tree as the real suite.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import container as ground
from .container import Cgroup, Container, Node, StartFailedError, start_on_host, wait_for_state

ZERO = [Node("nvidia0", 1, 5, 0o666, "/dev/zero"), Node("nvidia-caps/nvidia-cap1", 1, 3, 0o400, "/dev/null")]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    before = (Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd")))
    yield
    after = (Path("/proc/self/mountinfo").read_text(), len(os.listdir("/proc/self/fd")))
    assert after == before
    root = ground.find_cgroup2()
    assert not (root / "lxc/129").exists()
    assert not (root / "lxc/130").exists()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.fixture(params=["bind", "mknod"])
def box(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Container]:
    with Container(129, tmp_path, how=request.param, nodes=ZERO) as made:
        yield made


def test_init_is_pid_1_exactly_one_level_below(box: Container) -> None:
    assert ground.ns_pids_of(box.init_pid) == [1]
    assert Path(f"/proc/{box.init_pid}/cgroup").read_text().strip().endswith("/lxc/129/ns")
    assert os.stat(f"/proc/{box.init_pid}/ns/pid").st_ino != os.stat("/proc/self/ns/pid").st_ino
    assert box.is_running()


def test_the_container_has_its_own_dev_and_proc(box: Container) -> None:
    status, text = box.run(["/bin/sh", "-c", "ls -l /dev /dev/nvidia-caps; ls /proc | grep -c '^[0-9]'; exit 7"])
    assert status == 7
    assert "nvidia0" in text
    assert "nvidia-cap1" in text
    assert "tty1" not in text
    assert int(text.split()[-1]) < 10
    root = Path(f"/proc/{box.init_pid}/root")
    assert os.stat(root / "dev/nvidia0").st_rdev == os.makedev(1, 5)


def test_a_holder_reports_its_host_pid_and_opens_nodes(box: Container) -> None:
    holder = box.spawn("--no-cuda", "--open", "/dev/nvidia0", "--comm", "VLLM::EngineCore", "--title", "VLLM::Engine x")
    assert len(holder.ns_pids) == 1
    assert ground.status_line(holder.pid, "Name") == "VLLM::EngineCor"
    assert Path(f"/proc/{holder.pid}/cmdline").read_bytes().rstrip(b"\0") == b"VLLM::Engine x"
    assert ground.gpu_descriptors(holder.pid, {1}) >= 1
    assert holder.check()["intact"] is True
    assert "VLLM::EngineCor" in box.describe()
    holder.send_signal(signal.SIGTERM)
    holder.wait_gone(10)


@pytest.mark.parametrize(("nested", "last"), [("init", 2), ("direct", 1)])
def test_nested_namespaces_are_two_levels_below(box: Container, nested: str, last: int) -> None:
    holder = box.spawn("--no-cuda", nested=nested, cgroup="ns/docker/" + "ab" * 32)
    assert len(holder.ns_pids) == 2
    assert holder.ns_pid == last
    assert Path(f"/proc/{holder.pid}/cgroup").read_text().strip().endswith("/lxc/129/ns/docker/" + "ab" * 32)
    holder.kill()


def test_ignoring_stopped_and_foreign_processes(box: Container, tmp_path: Path) -> None:
    deaf = box.spawn("--no-cuda", "--ignore-term", label="deaf")
    stopped = box.spawn("--no-cuda", "--stop-self", label="stopped")
    wait_for_state(stopped.pid, "T")
    bystander = start_on_host(["--no-cuda", "--report-signals"], label="bystander", directory=tmp_path)
    try:
        for process in (deaf, stopped):
            process.send_signal(signal.SIGTERM)
        bystander.assert_untouched()
        bystander.send_signal(signal.SIGTERM)
        bystander.channel.kept.append(bystander.channel.expect("signal", 5))
        with pytest.raises(AssertionError, match="got signals"):
            bystander.assert_untouched()
        assert deaf.is_alive()
        assert stopped.is_alive()
        assert ground.state_of(stopped.pid) == "T"
    finally:
        bystander.close()


def test_a_forked_child_outlives_its_parent(box: Container) -> None:
    parent = box.spawn("--no-cuda", "--open", "/dev/nvidia0", "--fork", "2", label="opener")
    children = [box.adopt(parent.channel.expect("child", 5, number=n), parent, f"child {n}") for n in range(2)]
    parent.kill()
    assert all(child.is_alive() for child in children)
    assert all(ground.gpu_descriptors(child.pid, {1}) for child in children)


@pytest.mark.parametrize("nested", ["", "init"])
def test_a_dead_leader_with_live_threads(box: Container, nested: str) -> None:
    holder = box.spawn("--no-cuda", "--open", "/dev/nvidia0", "--dead-leader", nested=nested)
    assert ground.state_of(holder.pid) == "Z"
    assert holder.is_alive()
    assert ground.gpu_descriptors(holder.pid, {1}) >= 1
    assert holder.check()["intact"] is True
    holder.send_signal(signal.SIGTERM)
    holder.wait_gone(10)


def test_a_supervisor_starts_its_job_again(box: Container) -> None:
    job = "ns/system.slice/vllm.service"
    boss = box.spawn(
        "--no-cuda", "--open", "/dev/nvidia0", "--supervise", event="supervisor", cgroup=job, nested="init"
    )
    for number in (1, 2, 3):
        worker = box.adopt(boss.channel.expect("ready", 10, round=number), boss, "worker")
        worker.kill()
    boss.channel.expect("ready", 10, round=4)
    assert box.cgroup.populated(job)
    (box.cgroup.path / job / "cgroup.kill").write_text("1")
    boss.wait_gone(10)


def test_a_process_in_the_cgroup_only(box: Container) -> None:
    holder = box.spawn("--no-cuda", namespaces=False)
    assert holder.ns_pids == []
    assert holder.pid in box.cgroup.pids()


def test_init_may_open_a_node(tmp_path: Path) -> None:
    with Container(129, tmp_path, nodes=ZERO, init_opens=["/dev/nvidia0"]) as box:
        assert ground.gpu_descriptors(box.init_pid, {1}) >= 1


def test_two_containers_and_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with Container(129, tmp_path, nodes=ZERO) as one, Container(130, tmp_path, nodes=ZERO) as two:
        keeper = two.spawn("--no-cuda", "--report-signals")
        status, text = one.run(["/no/such/program"])
        assert (status, "FileNotFoundError" in text) == (127, True)
        one.destroy()
        keeper.assert_untouched()


def test_a_holder_that_fails_says_why(box: Container) -> None:
    with pytest.raises(StartFailedError, match="No such file"):
        box.spawn("--no-cuda", "--open", "/dev/no-such-node")


def test_everything_dies_with_the_test_process(tmp_path: Path) -> None:
    code = (
        "import sys, os; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "from gpu.container import Container\n"
        "box = Container(129, Path(sys.argv[2]), nodes=[])\n"
        "holder = box.spawn('--no-cuda', '--ignore-term', nested='init')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    import sys

    subprocess.run([sys.executable, "-c", code, str(ground.HERE.parent), str(tmp_path)], check=False, timeout=60)
    path = ground.find_cgroup2() / "lxc/129"
    assert path.exists()
    cgroup = Cgroup(129)  # a leftover with our mark is cleared away and made anew
    assert cgroup.pids() == []
    cgroup.made_parent = True
    cgroup.destroy()


def test_a_cgroup_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    path = ground.find_cgroup2() / "lxc/129"
    path.mkdir(parents=True)
    try:
        with pytest.raises(RuntimeError, match="not ours"):
            Container(129, tmp_path)
        assert path.exists()
    finally:
        path.rmdir()
        path.parent.rmdir()
