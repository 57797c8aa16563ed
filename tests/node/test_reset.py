"""The reset rung with a real systemd: the daemon's sandbox leaves it to a oneshot unit. `nvidia-smi` is a stand-in."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.node import VirtualNode

pytestmark = pytest.mark.node

CONFIG = "ladder: {grace: 3, kill_grace: 2, drain_grace: 1, timeout: 60}\nnvml: {deadline: 4}\n"
PERSISTENCED = "[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n"
SMI = """#!/bin/sh
echo "$*" >> /run/smi.log
while [ -e /run/smi.pause ]; do touch /run/smi.paused; sleep 0.01; done
sed -i '/^ghost_mib/d' /run/nvidia-standin/control
echo done
"""


@pytest.fixture(scope="module")
def machine(require_virtual_node: None) -> Iterator[VirtualNode]:
    with VirtualNode(os.environ.get("PGR_SUITE", "bookworm")) as booted:
        booted.install_product()
        booted.write("/etc/pve-gpu-release/config.yaml", CONFIG)
        booted.systemctl("restart", "pve-gpu-hostd.service", check=False)
        booted.write("/usr/bin/nvidia-smi", SMI, 0o755)
        booted.write("/etc/systemd/system/nvidia-persistenced.service", PERSISTENCED)
        booted.systemctl("daemon-reload")
        booted.systemctl("start", "nvidia-persistenced.service")
        booted.add_container(129, gpus=(0,), init="tiny").start()
        yield booted


@pytest.fixture
def ghostly(machine: VirtualNode) -> Iterator[VirtualNode]:
    machine.control(ghost_mib={50: 3000}, persistence={50: 1})
    machine.remove("/run/smi.log")
    yield machine
    machine.clear_control()


def release(node: VirtualNode, *words: str) -> tuple[int, dict[str, Any]]:
    done = node.run(["pve-gpu-release", "129", "--json", *words], check=False, timeout=120)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def persistenced_since(node: VirtualNode) -> str:
    return str(node.unit("nvidia-persistenced.service", "ActiveState", "ExecMainPID"))


@pytest.mark.parametrize("where", [[], ["--no-daemon"]], ids=["daemon", "here"])
def test_ghost_memory_is_reset_away(ghostly: VirtualNode, where: list[str]) -> None:
    before = persistenced_since(ghostly)
    cursor = ghostly.cursor()
    status, report = release(ghostly, "--reset", *where)
    assert status == 0, report
    assert [r["step"] for r in report["rungs"]] == ["reset"] and "reset" in report["message"], report
    assert ghostly.read("/run/smi.log").startswith("--gpu-reset -i GPU-")
    assert "active" in persistenced_since(ghostly) and persistenced_since(ghostly) != before, "stopped and started"
    unit = f"pve-gpu-release-reset@{report['release_id']}.service"
    ran = [e for e in ghostly.journal(since=cursor, _SYSTEMD_UNIT=unit) if "stopping nvidia-pers" in e["MESSAGE"]]
    assert bool(ran) == (not where), "the daemon leaves it to its unit, the command line does it itself"
    assert not ghostly.run(["sh", "-c", "ls /run/pve-gpu-release/resets/*.json"], check=False).stdout


def test_a_refusal_comes_back_from_the_daemon(ghostly: VirtualNode) -> None:
    holder = ghostly.popen(["/bin/bash", "-c", "exec 3<>/dev/nvidia0; echo up; exec sleep 1000"])
    try:
        status, report = release(ghostly, "--reset")
        assert (status, report["reason"]) == (7, "reset-refused") and f"pid {holder.pid}" in report["message"]
        assert not ghostly.exists("/run/smi.log")
    finally:
        holder.signal(signal.SIGKILL)
        holder.communicate()


def test_the_unit_finishes_though_the_daemon_is_killed(ghostly: VirtualNode) -> None:
    ghostly.write("/run/smi.pause", "")
    caller = ghostly.popen(["pve-gpu-release", "129", "--reset", "--json"])
    ghostly.wait_until(lambda: ghostly.exists("/run/smi.paused"), "the reset is at work", 60)
    ghostly.run(["systemctl", "kill", "-s", "KILL", "pve-gpu-hostd.service"])
    caller.signal(signal.SIGKILL)
    caller.communicate()
    ghostly.remove("/run/smi.pause")
    ghostly.wait_until(lambda: "'active'" in persistenced_since(ghostly), "the service is back", 60)
    done = "grep -L outcome /run/pve-gpu-release/resets/*.json 2>/dev/null"
    ghostly.wait_until(
        lambda: not ghostly.run(["sh", "-c", done], check=False).stdout, "nothing is left to be undone", 20
    )
