"""The installed package on a Proxmox-like node: systemd takes it, containers do not notice it come, change and go."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.node import Container, VirtualNode
from tests.node.standin import GpuHolder
from tests.package.chroot import REPOSITORY
from tests.package.conftest import OLD_VERSION

pytestmark = pytest.mark.node

SNIPPET = "/var/lib/vz/snippets/pve-gpu-release"
NODES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
STUBBORN = "ladder: {grace: 4, kill_grace: 3, drain_grace: 4, timeout: 40}\nnvml: {deadline: 5}\n"
LET_GO = """
import json, socket
request = {"method": "io.pve.GpuRelease.Release", "more": True,
           "parameters": {"vmid": 129, "on_disconnect": "continue"}}
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("/run/pve-gpu-release/io.pve.GpuRelease")
    sock.sendall(json.dumps(request).encode() + b"\\0")
    while b"SIGTERM" not in (part := sock.recv(65536)) and b'"term"' not in part and part:
        pass
"""


@pytest.fixture
def ct(node: VirtualNode) -> Iterator[Container]:
    container = node.add_container(129, gpus=(0, 1), init="tiny")
    container.start()
    yield container


def hold(ct: Container) -> GpuHolder:
    return ct.hold(argv=("train",), open=NODES, alloc=("50:2048:compute",), ignore_term=True)


def apt(node: VirtualNode, *words: str) -> str:
    return node.run(["apt-get", *words, "-y"], env={"DEBIAN_FRONTEND": "noninteractive"}, timeout=180).stdout


def run_autopkgtest(node: VirtualNode, name: str) -> None:
    node.copy_in(REPOSITORY / "packaging/debian/tests", "/root/tests")
    node.run([f"/root/tests/{name}"], timeout=120)


def finished(node: VirtualNode) -> list[dict[str, str]]:
    """Journal entries that end a release with a verdict (an interruption has none)."""
    ends = node.journal(PVE_VMID="129", MESSAGE_ID="1700ee385d79ab1a2256523c971c7702")
    return [entry for entry in ends if "VERDICT" in entry]


@pytest.mark.smoke
def test_life_of_the_package_beside_a_running_container(node: VirtualNode, ct: Container, old_package: Path, package: Path) -> None:
    """Install, use, upgrade, remove with the snippet still set, purge: the container is never touched and always starts."""
    init = ct.init_pid
    node.install_deb(old_package)
    assert OLD_VERSION in node.run(["pve-gpu-release", "--version"]).stdout
    node.install_deb(package)
    for name in ("command", "man-pages", "completion", "zsh-completion", "units"):
        run_autopkgtest(node, name)
    assert ct.init_pid == init and "hookscript" not in ct.config, "the container was touched"

    holder = hold(ct)
    node.write("/etc/pve-gpu-release/config.yaml", STUBBORN)
    node.systemctl("reload", "pve-gpu-hostd")
    report = json.loads(node.run(["pve-gpu-release", "129", "--json"]).stdout)
    assert (report["verdict"], report["was_held"]) == ("released", True)
    holder.wait_gone()
    assert ct.init_pid == init
    assert "released" in node.run(["pve-gpu-release", "explain", "last"]).stdout

    node.copy_in(node.host_path("/usr/lib/pve-gpu-release/hookscripts/pve-gpu-release"), SNIPPET)
    ct.hookscript("local:snippets/pve-gpu-release")
    assert "container(s) 129 -" in apt(node, "remove", "pve-gpu-release")
    assert ct.init_pid == init
    assert node.systemctl("is-active", "pve-gpu-hostd.socket", check=False).stdout.strip() == "inactive"
    ct.stop()
    ct.start()
    assert ct.running, "a snippet without its package kept the container from starting"
    apt(node, "purge", "pve-gpu-release")
    of_the_node = ("/shared", "/var/cache/man", "/etc/systemd/system/pve-gpu-hostd.service.d")  # a drop-in of the stand-in
    left = node.run(["find", "/", "-xdev", "-name", "*pve-gpu*"]).stdout.split()
    assert [path for path in left if not path.startswith(of_the_node) and path != SNIPPET] == []
    assert node.exists(SNIPPET)
    node.install_deb(package)
    assert node.systemctl("is-active", "pve-gpu-hostd.socket").stdout.strip() == "active"


def test_units_that_systemd_has_loaded_outlive_the_files(node: VirtualNode, ct: Container, package: Path) -> None:
    """Between the removal of the files and the reload of systemd the drop-in is still in force."""
    node.install_deb(package)
    ct.stop()
    ct.start()
    assert "exec-start-pre" in "".join(e["MESSAGE"] for e in node.journal(PVE_VMID="129"))
    node.remove("/usr/lib/pve-gpu-release")
    ct.stop()
    ct.start()
    assert ct.running


def test_upgrade_while_a_command_releases(node: VirtualNode, ct: Container, old_package: Path, package: Path) -> None:
    """The daemon goes away under the command, which finishes what it was asked for."""
    node.install_deb(old_package)
    node.write("/etc/pve-gpu-release/config.yaml", STUBBORN)
    holder = hold(ct)
    command = node.popen(["pve-gpu-release", "129", "--json", "--grace", "15"])
    node.wait_until(lambda: node.journal(PVE_VMID="129", RUNG="term"), "SIGTERM", 60)
    before = node.unit("pve-gpu-hostd", "MainPID")
    node.install_deb(package)
    out, err = command.communicate(timeout=60)
    assert command.popen.returncode == 0, out + err
    assert json.loads(out)["verdict"] == "released"
    holder.wait_gone()
    assert node.unit("pve-gpu-hostd", "MainPID") != before
    assert [entry["VERDICT"] for entry in finished(node)] == ["released"]


def test_upgrade_while_the_daemon_releases_for_nobody(node: VirtualNode, ct: Container, old_package: Path, package: Path) -> None:
    """Whoever asked has left (a hook whose budget is spent): the new daemon finishes it under the same id."""
    node.install_deb(old_package)
    node.write("/etc/pve-gpu-release/config.yaml", STUBBORN.replace("grace: 4,", "grace: 15,", 1))
    holder = hold(ct)
    node.python(LET_GO)
    begun = node.journal(PVE_VMID="129", RUNG="term")[0]["PVE_GPU_RELEASE_ID"]
    assert holder.alive()
    node.install_deb(package)
    holder.wait_gone(40)
    node.wait_until(lambda: finished(node), "the end of the release", 60)
    assert [(e["PVE_GPU_RELEASE_ID"], e["VERDICT"]) for e in finished(node)] == [(begun, "released")]


@pytest.mark.parametrize("driver", [True, False], ids=["no library of the driver", "no driver"])
def test_a_node_without_nvidia(package: Path, suite: str, driver: bool) -> None:
    with VirtualNode(suite, driver=driver, nvml="none") as node:
        node.install_deb(package)
        run_autopkgtest(node, "command")
        run_autopkgtest(node, "units")
        container = node.add_container(129, init="tiny")
        container.start()
        done = node.run(["pve-gpu-release", "129"], check=False)
        said = done.stdout + done.stderr
        assert "Traceback" not in said
        if driver:
            assert done.returncode == 4 and "NVML" in said and "next:" in said
        else:
            assert done.returncode == 0 and "no NVIDIA driver is loaded" in said
