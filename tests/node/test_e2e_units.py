"""The units and drop-ins as systemd sees them: sandbox, order at boot, device nodes, what is left without the package."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.node.lifecycle import NODES, SNIPPET, World
from tests.node.node import VirtualNode

pytestmark = pytest.mark.node
HIGHEST_EXPOSURE = 3.1
"""CAP_SYSLOG, for the kernel log, is the last tenth."""


@pytest.fixture(scope="module")
def world(require_virtual_node: None) -> Iterator[World]:
    with VirtualNode() as node:
        yield World.make(node)


@pytest.mark.smoke
def test_the_daemons_exposure_stays_low(world: World) -> None:
    text = world.node.run(["systemd-analyze", "security", "--no-pager", "pve-gpu-hostd.service"]).stdout
    match = re.search(r"Overall exposure level for pve-gpu-hostd.service: ([0-9.]+)", text)
    assert match and float(match[1]) <= HIGHEST_EXPOSURE, text


def test_systemd_has_nothing_to_say_about_the_units(world: World) -> None:
    units = ["pve-gpu-hostd.socket", "pve-gpu-hostd.service", "pve-gpu-release-boot.service", "pve-gpu-release-nodes.service"]
    for unit in [*units, "pve-container@129.service", "pve-container-debug@129.service"]:
        done = world.node.run(["systemd-analyze", "verify", "--man=no", unit], check=False)
        ours = [line for line in (done.stdout + done.stderr).splitlines() if "pve-gpu" in line]
        assert ours == []


def test_device_nodes_come_before_the_guests(world: World) -> None:
    assert "pve-guests.service" in world.node.unit("pve-gpu-release-boot.service", "Before")["Before"].split()
    state = world.node.unit("pve-gpu-release-boot.service", "ActiveState", "Result")
    assert state == {"ActiveState": "active", "Result": "success"}


@pytest.mark.smoke
def test_the_sandboxed_daemon_has_missing_nodes_made(world: World) -> None:
    world.begin(running=False)
    world.node.run(["mv", "/dev/nvidia-uvm", "/dev/away"])
    try:
        done = world.ct.start()
        assert "made missing device nodes: /dev/nvidia-uvm" in done.stdout
        assert world.node.run(["stat", "-c", "%F %t", "/dev/nvidia-uvm"]).stdout == "character special file 7\n"
        (entry,) = world.entries("nodes-made")
        assert entry["NODE"] == "/dev/nvidia-uvm"
        world.ct.stop()
    finally:
        world.node.run(["mv", "/dev/away", "/dev/nvidia-uvm"])


def test_a_node_that_cannot_be_made_keeps_nobody_from_starting(world: World) -> None:
    world.begin(running=False)
    ct = world.node.add_container(134, gpus=(0, 1), init="tiny")
    world.node.write(ct.config_path, ct.config.replace("/dev/nvidia0 dev/nvidia0", "/dev/nvidia7 dev/nvidia7"), 0o640)
    ct.hookscript(SNIPPET)
    assert "cannot make /dev/nvidia7" in ct.start().stdout
    ct.stop()


@pytest.mark.parametrize("unprivileged", [False, True])
def test_the_sandbox_sees_and_ends_every_holder(world: World, unprivileged: bool) -> None:
    """Of another uid, in another cgroup, in an unprivileged container: `status` 0 means that nothing was hidden."""
    vmid = 135 + unprivileged
    ct = world.node.add_container(vmid, gpus=(0, 1), how="dev", unprivileged=unprivileged, init="tiny")
    ct.start()
    holders = [
        ct.hold(argv=("job",), open=NODES, alloc=("50:512:compute",), children=1, uid=1000, ignore_term=True),
        ct.hold(argv=("stray",), open=NODES, alloc=("51:512:compute",), ignore_term=True),
    ]
    world.node.move([p.outer_pid for p in holders[1].alive()], "user.slice/stray.scope")
    done = world.node.run(["pve-gpu-release", str(vmid), "--now"], check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for holder in holders:
        assert not holder.alive()
        holder.end()
        world.node.standin.holders.remove(holder)
    ct.stop()


def test_the_drop_in_is_harmless_without_the_package(world: World) -> None:
    world.begin(running=False)
    world.node.run(["mv", "/usr/lib/pve-gpu-release", "/usr/lib/away"])
    try:
        world.node.systemctl("start", world.ct.unit)
        world.ct.wait_ready()
        world.node.systemctl("stop", world.ct.unit)
        assert world.node.unit(world.ct.unit, "Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}
    finally:
        world.node.run(["mv", "/usr/lib/away", "/usr/lib/pve-gpu-release"])
