"""Jobs that a real systemd in the container starts again: named, asked to stop, and never called released meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.node import Container, VirtualNode

pytestmark = pytest.mark.node

JOB = """\
[Service]
ExecStart=/bin/bash -c 'exec 3<>/dev/nvidia0 4<>/dev/nvidiactl; exec sleep 1000'
Restart=always
RestartSec=100ms
[Install]
WantedBy=default.target
"""
STUBBORN = JOB.replace("[Service]\n", "[Unit]\nRefuseManualStop=yes\n[Service]\n")
CONFIG = "ladder: {grace: 3, kill_grace: 2, drain_grace: 2, timeout: 40}\nnvml: {deadline: 4}\n"


@pytest.fixture(scope="module")
def node(require_virtual_node: None) -> Iterator[VirtualNode]:
    with VirtualNode(os.environ.get("PGR_SUITE", "bookworm")) as booted:
        booted.install_product()
        booted.write("/etc/pve-gpu-release/config.yaml", CONFIG)
        booted.systemctl("restart", "pve-gpu-hostd.service", check=False)
        yield booted


@pytest.fixture(scope="module", params=[False, True], ids=["privileged", "unprivileged"])
def ct(node: VirtualNode, request: pytest.FixtureRequest) -> Iterator[Container]:
    """A container with systemd, booted, with another service in it."""
    container = node.add_container(130 if request.param else 129, gpus=(0,), unprivileged=request.param)
    container.start()
    container.wait_booted()
    unit(container, "other.service", "[Service]\nExecStart=/bin/sleep 1000\n")
    yield container
    assert container.attach(["systemctl", "is-active", "other.service"]).stdout.strip() == "active"
    container.stop()


def unit(container: Container, name: str, text: str) -> None:
    write(container, f"/etc/systemd/system/{name}", text)
    container.attach(["systemctl", "daemon-reload"])
    container.attach(["systemctl", "start", name])


def write(container: Container, path: str, text: str) -> None:
    container.attach(["/bin/sh", "-c", 'mkdir -p "${1%/*}"; printf %s "$2" > "$1"', "sh", path, text])


def state(container: Container, name: str) -> str:
    return str(container.attach(["systemctl", "is-active", name], check=False).stdout).strip()


def release(node: VirtualNode, *words: object) -> tuple[int, dict[str, Any]]:
    done: subprocess.CompletedProcess[str] = node.run(
        ["pve-gpu-release", *map(str, words), "--json"], check=False, timeout=90
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize("where", [[], ["--no-daemon"]], ids=["daemon", "here"])
def test_a_restarting_unit_is_named_then_stopped_in_order(node: VirtualNode, ct: Container, where: list[str]) -> None:
    unit(ct, "vllm.service", JOB)
    status, report = release(node, ct.vmid, *where)
    assert (status, report["reason"]) == (3, "respawned"), report
    assert "vllm.service" in report["message"]
    assert f"pct exec {ct.vmid} -- systemctl stop vllm.service" in report["next_step"]
    assert state(ct, "vllm.service") in ("active", "activating")
    status, report = release(node, ct.vmid, "--stop-units", *where)
    assert (status, report["reason"]) == (0, "released"), report
    assert [r["step"] for r in report["rungs"]] == ["stop-unit"], report["rungs"]
    assert report["rungs"][0]["note"] == "systemd stops vllm.service"
    assert state(ct, "vllm.service") == "inactive"


def test_a_unit_that_refuses_to_be_stopped_is_killed_but_its_systemd_brings_it_back(
    node: VirtualNode, ct: Container
) -> None:
    """`RefuseManualStop=yes`: systemd says no, and starts it again after every kill. Said, bounded, never success."""
    unit(ct, "stubborn.service", STUBBORN)
    status, report = release(node, ct.vmid, "--stop-units")
    assert (status, report["reason"]) == (3, "respawned"), report
    assert "stubborn.service" in report["message"]
    assert "cgroup-kill" in [r["step"] for r in report["rungs"]]
    ct.attach(["rm", "/etc/systemd/system/stubborn.service"])
    ct.attach(["systemctl", "daemon-reload"])
    ct.attach(["systemctl", "kill", "-s", "KILL", "stubborn.service"], check=False)
    assert state(ct, "stubborn.service") != "active"


def test_a_unit_of_a_user_manager(node: VirtualNode, ct: Container) -> None:
    """The container has no libpam-systemd: what it would do for user@1000.service is written down here."""
    write(ct, "/etc/pam.d/systemd-user", "account required pam_permit.so\nsession required pam_permit.so\n")
    write(ct, "/etc/systemd/system/user@.service.d/run.conf", "[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n")
    script = "id ml || useradd -u 1000 -m ml; install -d -m 700 -o ml -g ml /run/user/1000; systemctl daemon-reload"
    ct.attach(["/bin/sh", "-c", script])
    write(ct, "/home/ml/.config/systemd/user/ml.service", JOB)
    wants = "/home/ml/.config/systemd/user/default.target.wants"
    ct.attach(["/bin/sh", "-c", f"mkdir {wants}; ln -s ../ml.service {wants}/; chown -R ml /home/ml"])
    node.run(["chmod", "666", "/dev/nvidia0", "/dev/nvidiactl"])
    started = ct.attach(["systemctl", "start", "user@1000.service"], check=False)
    if started.returncode:
        pytest.skip(f"no user manager in this container: {ct.attach(['journalctl', '-n', '20'], check=False).stdout}")
    node.wait_until(lambda: any("user@1000" in c for c in cgroups(node, ct)), "ml.service", 60)
    status, report = release(node, ct.vmid, "--stop-units")
    assert (status, report["reason"]) == (0, "released"), report
    assert [r["step"] for r in report["rungs"]] == ["stop-unit"], report["rungs"]
    assert report["rungs"][0]["note"] == "systemd stops ml.service"


def cgroups(node: VirtualNode, ct: Container) -> list[str]:
    """Of the container's holders."""
    done = node.run(["pve-gpu-release", "ps", str(ct.vmid), "--json"], check=False)
    return [holder["cgroup"] for holder in json.loads(done.stdout)["holders"]]
