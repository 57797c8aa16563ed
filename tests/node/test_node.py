"""The virtual node itself: what it offers to a test, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.node import build
from tests.node.conftest import traces
from tests.node.node import VirtualNode, wait_until
from tests.product_command import ROOT

pytestmark = pytest.mark.node

ASK_THE_DRIVER = """
import json, pynvml
pynvml.nvmlInit()
seen = {}
for index in range(pynvml.nvmlDeviceGetCount()):
    gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
    seen[pynvml.nvmlDeviceGetMinorNumber(gpu)] = sorted(p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu))
print(json.dumps(seen))
"""
BOOT_AND_HANG = """
import sys
from tests.node.node import FrozenFileSystem, VirtualNode
node = VirtualNode()
node.start()
container = node.add_container(129, init="tiny")
container.start()
frozen = FrozenFileSystem(node)
frozen.freeze()
process = node.popen(["touch", "/frozen/x"], cgroup="lxc/129")
node.wait_until(lambda: node.read(f"/proc/{process.pid}/stat").split()[2] == "D", "the touch in D state")
print(node.name, node._keeper.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.smoke
def test_the_node_is_a_whole_system(node: VirtualNode) -> None:
    assert node.run(["systemctl", "is-system-running"]).stdout == "running\n"
    assert node.read("/etc/os-release").count(f"VERSION_CODENAME={node.suite}") == 1
    assert node.run(["stat", "-f", "-c", "%T", "/sys/fs/cgroup"]).stdout == "cgroup2fs\n"
    assert node.run(["hostname"]).stdout == "pve-test\n"
    done = node.run(["cat", "/proc/self/cgroup"])
    assert done.stdout.splitlines()[-1] == "0::/user.slice/user-0.slice/session-1.scope"


def test_a_process_run_in_the_node_has_no_outsider_beside_it_in_its_cgroup(node: VirtualNode) -> None:
    process = node.popen(["sleep", "infinity"], cgroup="some/where")
    node.wait_until(lambda: node.processes("some/where"), "the sleep")
    assert node.run(["cat", "/sys/fs/cgroup/some/where/cgroup.procs"]).stdout.split() == [str(process.pid)]
    process.kill()


def test_the_journal_is_real_and_can_be_asked_by_field(node: VirtualNode) -> None:
    before = node.cursor()
    node.run(["logger", "--journald"], input="MESSAGE=from the test\nPVE_VMID=129\n")
    (entry,) = node.journal(since=before, PVE_VMID=129)
    assert entry["MESSAGE"] == "from the test" and entry["_UID"] == "0"


@pytest.mark.smoke
@pytest.mark.parametrize("unprivileged", [False, True], ids=["privileged", "unprivileged"])
@pytest.mark.parametrize("how", ["entry", "dev"])
def test_a_holder_inside_is_known_to_the_driver_by_its_host_pid(
    node: VirtualNode, how: str, unprivileged: bool
) -> None:
    container = node.add_container(129, gpus=(0, 1), how=how, unprivileged=unprivileged)
    container.start()
    inside = os.stat(container.root / "dev/nvidia1")
    assert stat.S_ISCHR(inside.st_mode) and inside.st_rdev == os.makedev(4, 51)
    same = os.path.samestat(inside, os.stat(node.host_path("/dev/nvidia1")))
    assert same == (how == "entry")  # devN: is a node of its own
    holder = container.hold(open=("/dev/nvidia1", "/dev/nvidia-uvm"), alloc=("51:4096:compute",), ignore_term=True)
    assert json.loads(node.python(ASK_THE_DRIVER).stdout) == {"50": [], "51": [holder.pid]}
    assert holder.pid in container.processes()
    container.stop()
    holder.wait_gone()
    assert json.loads(node.python(ASK_THE_DRIVER).stdout) == {"50": [], "51": []}


def test_a_holder_may_sit_in_a_nested_namespace_and_in_a_unit_of_the_container(node: VirtualNode) -> None:
    container = node.add_container(129, gpus=(0,), init="tiny")
    container.start()
    nested = ["unshare", "--pid", "--fork", "--mount-proc"]
    holder = container.hold(prefix=nested, cgroup="system.slice/vllm.service", open=("/dev/nvidia0",))
    assert node.processes("lxc/129/ns/system.slice/vllm.service") == [holder.pid]
    assert holder.main.ns_pid == 1


def test_ten_containers_start_and_stop_at_once(node: VirtualNode) -> None:
    containers = [node.add_container(200 + number, gpus=(0,), init="tiny") for number in range(10)]
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda container: container.start(), containers))
        assert [container.running for container in containers] == [True] * 10
        list(pool.map(lambda container: container.stop(), containers))
    assert [task.status for task in node.tasks()] == ["TASK OK"] * 20
    assert not any(node.cgroup_exists(container.cgroup) for container in containers)


def test_pvesh_answers_what_proxmoxer_asks(node: VirtualNode) -> None:
    node.add_container(129, gpus=(0,), how="dev")
    node.write("/var/lib/vz/snippets/hook", "#!/bin/sh\n", 0o755)
    assert [entry["vmid"] for entry in node.pvesh("get", "/nodes/pve-test/lxc")] == [129]
    storages = node.pvesh("get", "/nodes/pve-test/storage", "-content", "snippets")
    assert [entry["storage"] for entry in storages] == ["local"]
    listing = node.pvesh("get", "/nodes/pve-test/storage/local/content", "-content", "snippets")
    assert [entry["volid"] for entry in listing] == ["local:snippets/hook"]
    node.pvesh("set", "/nodes/pve-test/lxc/129/config", "-hookscript", "local:snippets/hook")
    assert node.pvesh("get", "/nodes/pve-test/lxc/129/config")["hookscript"] == "local:snippets/hook"
    refused = node.run(
        ["pvesh", "set", "/nodes/pve-test/lxc/129/config", "-hookscript", "local:snippets/no"], check=False
    )
    assert refused.returncode == 255 and "script 'local:snippets/no' does not exist" in refused.stderr
    node.pvesh("set", "/nodes/pve-test/lxc/129/config", "-delete", "hookscript")
    assert "hookscript" not in node.pct("config", 129).stdout


def test_only_debian_13_has_proxmoxers_local_backend(node: VirtualNode) -> None:
    """proxmoxer 1.2.0 of Debian 12 knows https, openssh and ssh_paramiko; `local` came later."""
    source = "from proxmoxer import ProxmoxAPI; print(ProxmoxAPI(backend='local').nodes.get()[0]['node'])"
    done = node.python(source, check=False)
    assert done.stdout == ("pve-test\n" if node.suite != "bookworm" else "")


def test_files_and_onboot_containers_survive_a_reboot(node: VirtualNode) -> None:
    node.write("/root/kept", "yes")
    node.write("/run/lost", "yes")
    container = node.add_container(129, init="tiny", gpus=(0,), how="dev", options={"onboot": "1"})
    for clean in (True, False):
        node.reboot(clean)
        assert node.read("/root/kept") == "yes" and not node.exists("/run/lost")
        assert container.running
    assert len(node.run(["journalctl", "--list-boots", "--quiet"]).stdout.splitlines()) >= 3


def test_device_nodes_may_be_missing_until_somebody_makes_them(require_virtual_node: None) -> None:
    with VirtualNode(nodes=False) as node:
        container = node.add_container(129, init="tiny", gpus=(0,), how="dev")
        done = node.pct("start", 129, check=False)
        assert done.returncode == 255 and not container.running
        node.run(["nvidia-modprobe", "-c", "0", "-u"])
        container.start()


def test_a_node_without_nvidia(require_virtual_node: None) -> None:
    with VirtualNode(driver=False) as node:
        assert "nvidia" not in node.read("/proc/devices")
        assert "NVMLError_LibraryNotFound" in node.python(ASK_THE_DRIVER, check=False).stderr


@pytest.mark.smoke
def test_the_product_is_installed_as_its_package(node: VirtualNode) -> None:
    node.install_product()
    assert "VMID" in node.run(["pve-gpu-release", "--help"]).stdout
    files = node.run(["dpkg", "-S", "/usr/sbin/pve-gpu-release", "/usr/lib/pve-gpu-release/hostd"]).stdout.splitlines()
    assert [line.partition(":")[0] for line in files] == ["pve-gpu-release"] * 2


def test_two_nodes_side_by_side_know_nothing_of_each_other(node: VirtualNode) -> None:
    with VirtualNode() as other:
        ours, theirs = node.add_container(129, init="tiny"), other.add_container(129, init="tiny")
        ours.start()
        assert not theirs.running
        theirs.start()
        theirs.stop()
        assert ours.running


# ---- however it ends ---------------------------------------------------------------------------------------------------


@pytest.fixture
def abandoned(require_virtual_node: None) -> tuple[subprocess.Popen[str], str, int]:
    """Another process with a booted node, a container and a task in D state: (process, node's name, keeper's pid)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", BOOT_AND_HANG], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout
    name, keeper_pid = process.stdout.readline().split()
    return process, name, int(keeper_pid)


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_killed_test_leaves_nothing(abandoned: tuple[subprocess.Popen[str], str, int]) -> None:
    process, name, _ = abandoned
    assert traces(name)
    end(process)
    wait_until(lambda: not traces(name), "the keeper to clear up", 60)


def test_what_a_killed_keeper_leaves_goes_with_the_next_start(
    abandoned: tuple[subprocess.Popen[str], str, int],
) -> None:
    process, name, keeper_pid = abandoned
    os.kill(keeper_pid, signal.SIGKILL)
    end(process)
    with VirtualNode():
        wait_until(lambda: not traces(name), "the sweep", 60)


def test_an_interrupted_build_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGR_NODE_CACHE", str(tmp_path))
    for name in (".build-bookworm-cut", ".build-trixie-other", "bookworm-0123", "bookworm-4567"):
        (tmp_path / name).mkdir()
    old = time.time() - 7200
    os.utime(tmp_path / "bookworm-0123", (old, old))
    build.remove_leftovers("bookworm")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".build-trixie-other", "bookworm-4567"]
