"""`--gpu SEL --all-containers`: one GPU freed from every container, for a VM."""

from __future__ import annotations

import os
import pty
import select

import pytest

from tests.embedded.node import Container, Node
from tests.integration.conftest import ONE_GPU
from tests.integration.product import Product
from tests.integration.restless import restless

PCI = "0000:18:00.0"


def jobs_on(node: Node) -> dict[int, list[int]]:
    """Containers 129 (memory on GPU 0), 130 (memory on GPU 1, GPU 0 merely open), 131 (GPU 1 only)."""
    return {
        129: node.container(129).spawn_holder(open=ONE_GPU, alloc=("50:4000:compute",)).pids,
        130: node.container(130)
        .spawn_holder(open=("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"), alloc=("51:5000:compute",))
        .pids,
        131: node.container(131).spawn_holder(open=("/dev/nvidia1", "/dev/nvidiactl"), alloc=("51:10:compute",)).pids,
    }


def alive(node: Node, pid: int) -> bool:
    return node.path(f"/proc/{pid}").exists()


@pytest.mark.case("handover")
def test_every_container_that_has_it_open_is_freed_of_it(node: Node, product: Product, expected: str) -> None:
    held = jobs_on(node)
    answer = product.ask("--gpu", PCI, "--all-containers", "--yes")
    assert answer.status == 0, answer.out
    releases = answer.json["releases"]
    assert [(r["vmid"], r["reason"]) for r in releases] == [(129, "released"), (130, "released"), (None, expected)]
    assert not alive(node, held[129][0]) and not alive(node, held[130][0]) and alive(node, held[131][0])
    assert product.ask("--gpu", PCI, "--all-containers").must_be(expected).status == 0, "nothing left: nobody is asked"


@pytest.mark.case("handover-refused")
def test_without_a_terminal_and_without_yes_nothing_is_done(node: Node, product: Product, expected: str) -> None:
    held = jobs_on(node)
    answer = product.ask("--gpu", PCI, "--all-containers")
    assert (answer.status, answer.reason) == (7, expected)
    assert "129, 130" in answer.message and "--yes" in answer.json["next_step"]
    shown = product.ask("--gpu", PCI, "--all-containers", "--dry-run")
    assert shown.status == 3 and all(alive(node, pids[0]) for pids in held.values())


@pytest.mark.parametrize("said", ["n", "y"])
def test_on_a_terminal_it_names_each_and_asks(node: Node, product: Product, said: str) -> None:
    held = jobs_on(node)
    ours, theirs = pty.openpty()
    try:
        running = product.start("--gpu", PCI, "--all-containers", stdin=theirs, stdout=theirs, stderr=theirs)
        text = b""
        while b"[y/N]" not in text:
            assert select.select([ours], [], [], 20)[0], text
            text += os.read(ours, 4096)
        assert f"container 129 has GPU 0 open: pid {held[129][0]}".encode() in text
        assert f"container 130 has GPU 0 open: pid {held[130][0]}".encode() in text
        assert b"from containers 129, 130?" in text
        os.write(ours, said.encode() + b"\n")
        status = running.popen.wait(timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)
    assert status == (0 if said == "y" else 7)
    assert alive(node, held[129][0]) == (said == "n")


@pytest.mark.case("handover-host")
def test_a_process_of_the_host_is_named_and_left(node: Node, product: Product, expected: str) -> None:
    host = node.spawn_holder(open=("/dev/nvidia0",), comm="nvidia-persiste")
    held = jobs_on(node)
    answer = product.ask("--gpu", "0", "--all-containers", "--yes")
    assert answer.status == 3 and answer.json["releases"][-1]["reason"] == expected
    assert f"pid {host.pid} (nvidia-persiste)" in answer.json["releases"][-1]["message"]
    assert host.alive() and not alive(node, held[129][0])


@pytest.mark.case("handover-vfio")
@pytest.mark.parametrize("driver", ["vfio-pci", ""])
def test_a_gpu_of_a_vm_is_not_ours(node: Node, product: Product, expected: str, driver: str) -> None:
    node.init.mount("pci", "/sys/bus/pci/devices", "tmpfs")
    node.write("/sys/bus/pci/devices/0000:5e:00.0/vendor", "0x10de\n")
    node.write("/sys/bus/pci/devices/0000:5e:00.0/class", "0x030200\n")
    if driver:
        node.path("/sys/bus/pci/devices/0000:5e:00.0/driver").symlink_to(f"../../drivers/{driver}")
    answer = product.ask("--gpu", "5e:00.0", "--all-containers").must_be(expected)
    assert (driver or "no driver") in answer.message


def test_one_that_moves_faster_than_a_look_is_no_idle_gpu(product: Product, container: Container) -> None:
    """A VM's start would hang in the driver's unbind (CASES)."""
    with restless(container, "chain"):
        reasons = {product.ask("--gpu", PCI, "--all-containers", "--yes", "--dry-run").status for _ in range(6)}
        assert reasons <= {3, 4}


def test_a_silent_driver_is_no_idle_gpu(node: Node, product: Product) -> None:
    node.control(error="nvmlInit=18")
    product.ask("--gpu", PCI, "--all-containers").must_be("cannot-look")
    accepted = product.ask("--gpu", PCI, "--all-containers", "--no-verify-memory")
    assert accepted.must_be("gpu-idle").status == 0


def test_nonsense(product: Product) -> None:
    for words in ([], ["--now"], ["--all-containers"], ["129", "--gpu", "0", "--all-containers"]):
        answer = product.run(*words)
        assert answer.status == 2, words
    answer = product.run("--gpu", "9", "--all-containers")
    assert answer.status == 2 and "no such GPU" in answer.err
