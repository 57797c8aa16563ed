"""The oneshot units that make device nodes, in the embedded node. `nvidia-modprobe` is a stand-in: there is no module."""

from __future__ import annotations

import stat
import sys

import pytest

from tests.embedded.node import Node
from tests.product_command import ROOT

pytestmark = [pytest.mark.embedded, pytest.mark.root]
RUN = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from hostd.nodes import entry; sys.exit(entry())"
MODPROBE = """#!/bin/sh
echo "$*" >> /run/cold/log
[ -e /run/cold/broken ] && { echo "modprobe: FATAL: Module nvidia not found"; exit 1; } >&2
[ -e /run/cold/driver ] && { mv /run/cold/driver /proc/driver/nvidia; cat /run/cold/devices > /proc/devices; }
while [ $# -gt 0 ]; do
    case $1 in
        -u) mknod -m 666 /dev/nvidia-uvm c 7 50; mknod -m 666 /dev/nvidia-uvm-tools c 7 51 ;;
        -c) shift; mknod -m 666 "/dev/nvidia$1" c 4 "$1" ;;
    esac
    shift
done
exit 0
"""


@pytest.fixture
def cold(node: Node) -> Node:
    """A node after a cold boot: the driver's module is not loaded yet, and there are no nodes."""
    for name in ("upper", "work"):
        node.path(f"/run/cold/{name}").mkdir(parents=True)
    options = "lowerdir=/usr/bin,upperdir=/run/cold/upper,workdir=/run/cold/work"
    node.init.mount("bin", "/usr/bin", "overlay", 0, options)
    node.write("/usr/bin/nvidia-modprobe", MODPROBE, 0o755)
    loaded = node.read("/proc/devices")
    node.write("/run/cold/devices", loaded)
    node.path("/proc/devices").write_text("".join(x for x in loaded.splitlines(True) if "nvidia" not in x))
    done = node.run(["sh", "-c", "cp -a /proc/driver/nvidia /run/cold/driver && rm -rf /proc/driver/nvidia /dev/nvidia*"])
    assert done.returncode == 0, done.stderr
    return node


def test_a_cold_boot_has_a_node_for_every_gpu(cold: Node) -> None:
    """Which GPUs there are is known only when the driver is loaded."""
    done = cold.run([sys.executable, "-I", "-c", RUN])
    assert done.returncode == 0 and done.stderr == "", done
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia50", "nvidia51"):
        assert stat.S_ISCHR(cold.path(f"/dev/{name}").stat().st_mode), name
    assert cold.run([sys.executable, "-I", "-c", RUN]).stdout == ""


def test_a_driver_that_cannot_be_loaded_is_said_and_holds_nobody_up(cold: Node) -> None:
    cold.write("/run/cold/broken", "")
    done = cold.run([sys.executable, "-I", "-c", RUN])
    assert done.returncode == 0 and "Module nvidia not found" in done.stderr


def test_nodes_that_are_there_do_not_keep_the_driver_from_being_loaded(cold: Node) -> None:
    cold.run(["sh", "-c", "mknod /dev/nvidiactl c 4 255; mknod /dev/nvidia-uvm c 7 50; mknod /dev/nvidia-uvm-tools c 7 51"])
    assert cold.run([sys.executable, "-I", "-c", RUN]).returncode == 0
    assert "-u" in cold.read("/run/cold/log") and cold.path("/dev/nvidia51").exists()
