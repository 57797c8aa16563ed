"""The reset rung, against a stand-in `nvidia-smi`: refused for others, carried out, and always undone."""

from __future__ import annotations

import json

import pytest

from tests.embedded.node import Container, Node, wait_until
from tests.integration.conftest import ONE_GPU
from tests.integration.product import Product

from .workshop import Workshop

PERSISTENCED = "nvidia-persistenced.service"
DCGM = "nvidia-dcgm.service"
GPU0, GPU1 = "GPU-6a1f0e52-93c4-4d0b-8f2e-0d5c7b1a2e50", "GPU-c07d94b1-2e8a-47f6-b3d9-51f0a6e83c51"


@pytest.fixture
def workshop(node: Node) -> Workshop:
    shop = Workshop(node)
    shop.service(PERSISTENCED)
    shop.service(DCGM, "inactive")
    node.control(ghost_mib={50: 5000}, persistence={50: 1, 51: 1})
    return shop


@pytest.fixture(autouse=True)
def configured(node: Node, container: Container) -> None:
    """Container 129 has only GPU 0 in its configuration."""
    node.configure(129, "dev0: /dev/nvidia0\ndev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\n")


def assert_as_before(workshop: Workshop) -> None:
    assert workshop.is_active(PERSISTENCED) and not workshop.is_active(DCGM)
    gpus = {g["minor"]: g for g in workshop.node.nvml()["gpus"]}
    assert gpus[50]["persistence"] == gpus[51]["persistence"] == 1
    assert workshop.records() == []


@pytest.mark.case("reset")
def test_ghost_memory_is_reset_away_and_everything_put_back(
    product: Product, container: Container, workshop: Workshop, expected: str
) -> None:
    holder = container.spawn_holder(open=ONE_GPU, alloc=("50:42759:compute",))
    workshop.node.control(ghost_mib={50: 5000}, leak_mib=700)
    answer = product.release(129, "--reset").must_be(expected)
    assert answer.steps() == ["term", "reset"] and not holder.alive()
    assert f"{GPU0} reset" in answer.message
    assert workshop.log("smi") == [f"--gpu-reset -i {GPU0}"] and workshop.log("open") == []
    assert workshop.log("systemctl")[1:] == [
        f"stop {PERSISTENCED}",
        f"is-active --quiet {DCGM}",
        f"start {PERSISTENCED}",
    ]
    assert_as_before(workshop)


def test_without_reset_it_is_only_said(product: Product, workshop: Workshop) -> None:
    answer = product.release(129).must_be("ghost-memory-before")
    assert workshop.log("smi") == [] and "--reset" in answer.json["next_step"]
    details = " / ".join(answer.json["details"])
    assert "5,000 MiB in use with no live client, first seen 20" in details
    assert "nobody is attached" in details and "the driver recommends nothing" in details
    again = product.release(129).must_be("ghost-memory-before")
    assert again.json["details"] == answer.json["details"], "first seen stays"


def test_configured_auto_resets_too(product: Product, workshop: Workshop) -> None:
    product.configure("ladder: {reset: auto, drain_grace: 1}\n")
    product.release(129).must_be("nothing-held")
    assert workshop.log("smi") == [f"--gpu-reset -i {GPU0}"]
    assert_as_before(workshop)


@pytest.mark.case("reset-refused")
@pytest.mark.parametrize("who", ["container", "descriptor", "host"])
def test_anybody_else_on_the_gpu_refuses_it(
    node: Node, product: Product, workshop: Workshop, expected: str, who: str
) -> None:
    where = node if who == "host" else node.container(130)
    alloc = () if who == "descriptor" else ("50:100:compute",)
    other = where.spawn_holder(open=ONE_GPU, alloc=alloc, comm="other-job")
    holder = node.container(131).spawn_holder(open=("/dev/nvidia1", "/dev/nvidiactl"))
    mine = node.container(132).spawn_holder(open=ONE_GPU, alloc=("50:4000:compute",))
    node.control(leak_mib=500)
    answer = product.release(132, "--reset").must_be(expected)
    assert f"pid {other.pid} (other-job)" in answer.message
    assert str(holder.pid) not in answer.message and not mine.alive()
    assert workshop.log("smi") == [] and workshop.log("systemctl") == []
    assert other.alive() and answer.json["holders"], "what was done before is told"
    assert_as_before(workshop)


@pytest.mark.parametrize("words", [("--gpu", "0"), ("--pid",)], ids=["gpu", "pid"])
def test_what_was_not_selected_refuses_it_or_is_left_out(
    node: Node, product: Product, container: Container, workshop: Workshop, words: tuple[str, ...]
) -> None:
    """Both GPUs are the container's; its other job goes on, and a GPU that was not selected is not reset."""
    node.configure(129, "dev0: /dev/nvidia0\ndev1: /dev/nvidiactl\ndev2: /dev/nvidia-uvm\ndev3: /dev/nvidia1\n")
    mine = container.spawn_holder(open=ONE_GPU, alloc=("50:4000:compute",))
    where = ONE_GPU if words == ("--pid",) else ("/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
    other = container.spawn_holder(
        open=where, alloc=("50:100:compute" if where is ONE_GPU else "51:100:compute",), comm="job"
    )
    node.control(ghost_mib={50: 5000, 51: 3000}, leak_mib=500, persistence={50: 1, 51: 1})
    chosen = (*words, f"host:{mine.pid}") if words == ("--pid",) else words
    answer = product.release(129, "--now", "--reset", *chosen)
    assert other.alive() and not mine.alive()
    if words == ("--pid",):
        answer.must_be("reset-refused")
        assert f"pid {other.pid} (job) of container 129" in answer.message and workshop.log("smi") == []
    else:
        assert workshop.log("smi") == [f"--gpu-reset -i {GPU0}"], answer.out


def test_auto_leaves_the_verdict_when_it_is_refused(node: Node, product: Product, workshop: Workshop) -> None:
    product.configure("ladder: {reset: auto, drain_grace: 1}\n")
    node.container(130).spawn_holder(open=("/dev/nvidia0",))
    answer = product.release(129).must_be("ghost-memory-before")
    assert "would hit others" in answer.json["rungs"][0]["note"]
    assert workshop.log("smi") == []


def test_a_linked_gpu_is_in_the_radius(node: Node, product: Product, workshop: Workshop) -> None:
    node.control(nvlink="50:51")
    other = node.container(130).spawn_holder(open=("/dev/nvidia1",), alloc=("51:100:compute",), comm="neighbour")
    answer = product.release(129, "--reset").must_be("reset-refused")
    assert "GPU 0, GPU 1" in answer.message and f"pid {other.pid} (neighbour) of container 130" in answer.message
    other.kill()
    other.wait_gone()
    product.release(129, "--reset").must_be("nothing-held")
    assert workshop.log("smi") == [f"--gpu-reset -i {GPU0},{GPU1}"]
    assert_as_before(workshop)


def test_a_declared_service_is_no_obstacle(node: Node, product: Product, workshop: Workshop) -> None:
    daemon = node.spawn_holder(open=("/dev/nvidia0",), comm="persistenced", cgroup=f"/system.slice/{PERSISTENCED}")
    answer = product.release(129, "--reset")
    assert workshop.log("smi") == [f"--gpu-reset -i {GPU0}"], answer.out
    answer.must_be("ghost-memory-before")
    assert "in use by another process" in answer.message, "the stand-in service did not really stop"
    assert daemon.alive()
    assert_as_before(workshop)


@pytest.mark.case("reset-fails")
@pytest.mark.parametrize("mode", ["inuse", "unsupported"])
def test_a_reset_that_nvidia_smi_refuses(product: Product, workshop: Workshop, expected: str, mode: str) -> None:
    workshop.mode(mode)
    answer = product.release(129, "--reset").must_be(expected)
    assert "nvidia-smi refused the reset (exit status" in answer.message
    assert_as_before(workshop)


def test_a_gpu_that_is_not_well_after_it(product: Product, workshop: Workshop) -> None:
    workshop.mode("sick")
    answer = product.release(129, "--reset")
    assert answer.status == 0 or answer.reason.startswith("ghost"), answer.out
    assert "the driver still asks for a reboot of the node" in answer.message
    assert "reboot" in answer.json["next_step"]
    assert_as_before(workshop)


def test_a_driver_that_asks_for_a_reboot_is_not_reset(node: Node, product: Product, workshop: Workshop) -> None:
    node.control(recovery_action={50: 2})
    answer = product.release(129, "--reset").must_be("ghost-memory-before")
    assert "a reboot of the node" in answer.message and "reboot the node" in answer.json["next_step"]
    assert workshop.log("smi") == [] and workshop.log("systemctl") == []


def test_a_service_that_does_not_start_again_is_said_and_tried_again(
    node: Node, product: Product, workshop: Workshop
) -> None:
    node.write("/run/workshop/no-start", "")
    answer = product.release(129, "--reset")
    assert f"cannot start {PERSISTENCED} again" in answer.message and workshop.records()
    node.path("/run/workshop/no-start").unlink()
    product.release(129)
    assert_as_before(workshop)


@pytest.mark.parametrize("step", ["is-active", "stop", "smi", "start"])
def test_killed_in_the_middle_of_a_step(product: Product, workshop: Workshop, step: str) -> None:
    workshop.pause(step)
    running = product.start(129, "--reset")
    workshop.wait_paused()
    running.kill()
    running.process.wait_gone()
    assert workshop.records(), "what has to be undone is written down before it is done"
    if step == "smi":
        product.release(129)
        assert workshop.records(), "nothing is undone under an nvidia-smi that is still at work"
    workshop.go_on()
    wait_until(lambda: not tools(workshop), "the orphaned program has ended")
    product.release(129)
    assert_as_before(workshop)


@pytest.mark.parametrize("at", ["off", "health", "back"])
def test_killed_while_the_driver_is_asked(node: Node, product: Product, workshop: Workshop, at: str) -> None:
    if at == "off":
        node.control(hang="nvmlDeviceSetPersistenceMode")
    else:
        workshop.pause("smi")
    running = product.start(129, "--reset")
    if at == "off":
        wait_until(lambda: "true" in records_text(workshop), "the record names the persistence mode")
    else:
        workshop.wait_paused()
        node.control(hang="nvmlDeviceGetCount" if at == "health" else "nvmlDeviceSetPersistenceMode")
        workshop.go_on()
        wait_until(lambda: not tools(workshop), "nvidia-smi has ended")
    running.kill()
    running.process.wait_gone()
    node.control(hang=None, ghost_mib=None)
    product.release(129)
    assert_as_before(workshop)


def records_text(workshop: Workshop) -> str:
    directory = workshop.node.path("/run/pve-gpu-release/resets")
    return "".join(p.read_text() for p in directory.glob("*.json")) if directory.is_dir() else ""


def tools(workshop: Workshop) -> list[str]:
    """Stand-in programs that run in the node."""
    done = workshop.node.run(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
    return [word for word in ("/usr/bin/nvidia-smi ", "/usr/bin/systemctl ") if f"/bin/sh {word}" in done.stdout]


def test_the_oneshot_unit_looks_again_by_itself(node: Node, product: Product, workshop: Workshop) -> None:
    """What the daemon's unit runs: a request on paper, an outcome on paper."""
    request = {"release_id": "0a0a", "vmid": 129, "wanted": ["0000:18:00.0"], "services": [PERSISTENCED], "at": 0}
    node.write("/run/pve-gpu-release/resets/0a0a.json", json.dumps(request))
    other = node.container(130).spawn_holder(open=("/dev/nvidia0",))
    words = [*product.command[:2], "-m", "hostd.reset", "perform", "0a0a"]
    assert node.run(words).returncode == 0
    outcome = json.loads(node.read("/run/pve-gpu-release/resets/0a0a.json"))["outcome"]
    assert outcome["refused"] and f"pid {other.pid}" in outcome["text"] and workshop.log("smi") == []
    other.kill()
    other.wait_gone()
    node.write("/run/pve-gpu-release/resets/0a0a.json", json.dumps(request))
    assert node.run(words).returncode == 0
    assert json.loads(node.read("/run/pve-gpu-release/resets/0a0a.json"))["outcome"]["done"]
    assert workshop.log("smi") == [f"--gpu-reset -i {GPU0}"]
