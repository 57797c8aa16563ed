"""What the daemon's sandbox leaves it of the driver: nodes of one that was loaded after its start, and the kernel's log."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.node import VirtualNode
from tests.node.standin import STATE

pytestmark = pytest.mark.node
SERVICE = "pve-gpu-hostd.service"
OPEN = "echo $$ > /sys/fs/cgroup/system.slice/pve-gpu-hostd.service/cgroup.procs && exec 3< /dev/nvidia0"


@pytest.fixture(scope="module")
def node(require_virtual_node: None) -> Iterator[VirtualNode]:
    with VirtualNode() as booted:
        booted.install_product()
        booted.add_container(129, gpus=(0, 1), init="tiny").start()
        yield booted


def main_pid(node: VirtualNode) -> int:
    return int(node.unit(SERVICE, "MainPID")["MainPID"])


def test_a_driver_that_is_loaded_later_is_open_to_the_daemon(node: VirtualNode) -> None:
    """systemd resolves DeviceAllow=char-nvidia when it starts the service: the daemon has itself started again."""
    loaded = node.read(f"{STATE}/devices")
    node.write(f"{STATE}/devices", "".join(line for line in loaded.splitlines(True) if "nvidia" not in line))
    node.systemctl("restart", SERVICE)
    early = main_pid(node)
    node.write(f"{STATE}/devices", loaded)
    assert node.run(["sh", "-c", OPEN], check=False).returncode != 0, "the filter is that of the start"
    assert node.run(["pve-gpu-release", "verify", "129"]).returncode == 0  # done without the daemon, meanwhile
    node.wait_until(lambda: main_pid(node) not in (0, early), "the new daemon")
    assert node.run(["sh", "-c", OPEN], check=False).returncode == 0
    later = main_pid(node)
    assert node.run(["pve-gpu-release", "verify", "129"]).returncode == 0 and main_pid(node) == later
    assert node.unit(SERVICE, "Result") == {"Result": "success"}


def test_the_kernel_log_is_read_in_the_sandbox(node: VirtualNode) -> None:
    """kernel.dmesg_restrict is 1 on Debian and Proxmox VE; nspawn gives a node no /dev/kmsg."""
    assert node.read("/proc/sys/kernel/dmesg_restrict") == "1\n"
    node.run(["mknod", "-m", "600", "/dev/kmsg", "c", "1", "11"])
    node.systemctl("restart", SERVICE)
    try:
        holder = node.containers[129].hold(open=("/dev/nvidia0", "/dev/nvidiactl"), alloc=("50:512:compute",))
        done = node.run(["pve-gpu-release", "129", "-v", "--now"])
        holder.end()
        node.standin.holders.remove(holder)
        assert "kernel log was not read" not in done.stdout + done.stderr
    finally:
        node.remove("/dev/kmsg")
