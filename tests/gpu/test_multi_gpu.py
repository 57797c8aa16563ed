"""Two real GPUs (or more): what is said about *which* GPU is right (issue 7). Uses the first and the last GPU.

A CUDA process opens every GPU node it can see, also when it uses only one GPU (FACTS): descriptors do not tell.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from . import product
from .container import gpu_descriptors, nvidia_majors
from .driver import Gpu
from .world import CONTEXT_MIB, SLACK_MIB, World

pytestmark = pytest.mark.gpus(2)


def charge(world: World, gpu: Gpu, pid: int) -> int:
    """What the driver charges to this pid there."""
    return world.driver.clients(gpu).get(pid) or 0


def test_a_holder_has_every_gpu_node_open(world: World) -> None:
    """The ground of this file: otherwise it would prove nothing."""
    one, two = world.machine.first, world.machine.last
    holder = world.container(129).spawn(f"--gpu={two.uuid}=64")
    opened = {str(path.readlink()) for path in Path(f"/proc/{holder.pid}/fd").iterdir()}
    assert {world.machine.node(one), world.machine.node(two)} <= opened
    assert gpu_descriptors(holder.pid, nvidia_majors()) >= 4
    assert holder.pid not in world.driver.clients(one)


def test_memory_is_attributed_to_the_gpu_that_holds_it_and_gpu_selects_by_that(world: World) -> None:
    one, two = world.machine.first, world.machine.last
    box = world.container(129)
    both = box.spawn(f"--gpu={one.uuid}=1024", f"--gpu={two.uuid}=2048", label="both")
    second = box.spawn(f"--gpu={two.uuid}=4096", label="second")
    ones, twos = world.driver.used_mib(one), world.driver.used_mib(two)

    listed = {h["pid"]: h for h in world.run("ps", "129", "--json").report["holders"]}
    assert sorted(listed[both.pid]["gpus"]) == sorted([one.minor, two.minor])
    assert listed[second.pid]["gpus"] == [two.minor]
    assert 4096 <= listed[second.pid]["memory_mib"] <= 4096 + CONTEXT_MIB
    expected = charge(world, one, both.pid) + charge(world, two, both.pid)
    assert abs(listed[both.pid]["memory_mib"] - expected) <= 2

    kept = charge(world, two, second.pid)
    done = world.release("--now", "--gpu", one.uuid, case="--gpu first: holder on both goes").must_end(0, "released")
    assert done.holder_pids() == {both.pid}
    assert done.holder(both.pid)["fate"] == "exited"
    world.assert_figures(done, one, ones)
    world.assert_free(one)
    assert second.is_alive()
    assert second.check()["intact"] is True
    assert charge(world, two, second.pid) == kept

    again = world.release("--now", "--gpu", one.uuid, case="--gpu first: nobody left there").must_end(0)
    assert second.pid not in again.holder_pids()
    assert second.is_alive()

    left = world.driver.used_mib(two)
    assert left < twos
    last = world.release("--now", "--gpu", two.uuid, case="--gpu last")
    world.assert_released(last, [second], two, left)


def test_every_gpu_of_a_holder_is_verified_by_itself(world: World) -> None:
    one, two = world.machine.first, world.machine.last
    holder = world.container(129).spawn(f"--gpu={one.uuid}=2048", f"--gpu={two.uuid}=8192")
    ones, twos = world.driver.used_mib(one), world.driver.used_mib(two)
    done = world.release(case="contexts on two GPUs")
    world.assert_released(done, [holder], one, ones)
    world.assert_released(done, [holder], two, twos)


def test_a_dead_opener_on_one_gpu_while_another_container_computes_on_the_other(world: World) -> None:
    one, two = world.machine.first, world.machine.last
    keeper = world.foreign_holder(one, 1024)
    kept = charge(world, one, keeper.pid)
    box = world.container(129)
    parent = box.spawn(f"--gpu={two.uuid}=4096", "--fork=1", label="opener")
    child = box.adopt(parent.channel.expect("child", 10, number=0), parent, "heir")
    parent.kill()
    used = world.driver.used_mib(two)
    assert parent.pid in world.driver.clients(two)

    listed = {h["pid"]: h for h in world.run("ps", "129", "--json").report["holders"]}
    assert listed[child.pid]["gpus"] == [two.minor], "what the dead opener held was on the last GPU only"
    done = world.release(case="dead opener on the last GPU, 130 on the first")
    world.assert_released(done, [child], two, used)
    assert charge(world, one, keeper.pid) == kept
    assert keeper.check()["intact"] is True
    world.assert_foreign_untouched()


def test_the_other_container_keeps_its_memory_to_the_mib(world: World) -> None:
    one, two = world.machine.first, world.machine.last
    keeper = world.foreign_holder(two, 3072)
    kept = charge(world, two, keeper.pid)
    alone = world.driver.used_mib(two)
    box = world.container(129)
    first = box.spawn(f"--gpu={one.uuid}=2048", label="first")
    both = box.spawn(f"--gpu={one.uuid}=512", f"--gpu={two.uuid}=1024", label="both")
    ones, twos = world.driver.used_mib(one), world.driver.used_mib(two)
    done = world.release(case="129 on both GPUs, 130 on the last")
    world.assert_released(done, [first, both], one, ones)
    others = alone - world.machine.idle_mib[two.uuid]
    world.assert_released(done, [both], two, twos, others_mib=others, clients=1)
    assert keeper.pid in {other["pid"] for other in done.gpu(two)["other_holders"]}
    assert charge(world, two, keeper.pid) == kept
    assert keeper.check()["intact"] is True
    world.assert_foreign_untouched()


def names(gpu: Gpu, text: str) -> bool:
    """True when the text names this GPU, in whatever spelling."""
    patterns = (rf"GPU {gpu.index}\b", rf"nvidia{gpu.minor}\b", re.escape(gpu.uuid), re.escape(gpu.pci_bus_id[-7:]))
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def test_the_verdict_waits_for_the_slower_gpu_and_names_it_meanwhile(world: World) -> None:
    one, two = world.machine.first, world.machine.last
    box = world.container(129)
    quick = box.spawn(f"--gpu={one.uuid}=1024", label="quick")
    slow = box.spawn(f"--gpu={two.uuid}=256", f"--pinned={16 << 10}", label="slow")
    idle = world.machine.idle_mib

    def look() -> tuple[int, int]:
        return world.driver.used_mib(one), world.driver.used_mib(two)

    seen = product.watch("129", "--now", sample=look)
    world.runs.append(seen.run)
    world.assert_foreign_untouched()
    assert seen.run.status == 0, seen.run.describe()
    assert not quick.is_alive()
    assert not slow.is_alive()
    one_free = next(when for when, (used, _) in seen.samples if used <= idle[one.uuid] + SLACK_MIB)
    two_held = [when for when, (_, used) in seen.samples if used > idle[two.uuid] + SLACK_MIB]
    assert two_held, "the slower GPU was never seen in use"
    assert one_free < two_held[-1], "the ground: the first GPU was free before the last one"
    assert seen.run.ended_at >= two_held[-1], "it ended before the slower GPU was free"
    world.assert_free(one)
    world.assert_free(two)
    waiting = seen.text_until(two_held[-1])
    world.notes.append(f"printed while waiting: {waiting!r}")
    world.machine.figures.add(
        "wait",
        "129 --now, last GPU with 16 GiB pinned",
        f"{(two_held[-1] - seen.samples[0][0]) * 1000:.0f}",
        f"{(seen.run.ended_at - seen.samples[0][0]) * 1000:.0f}",
        f"{(seen.run.ended_at - two_held[-1]) * 1000:.0f}",
    )
    assert names(two, waiting), f"what it waits for is not named: {waiting!r}"


def meant_by(world: World, number: int) -> list[Gpu]:
    """The GPUs that a bare number may mean: by NVML index or by minor."""
    return [gpu for gpu in world.machine.gpus if number in (gpu.index, gpu.minor)]


def test_every_way_to_select_a_gpu_means_the_same(world: World) -> None:
    one, two = world.machine.first, world.machine.last
    box = world.container(129)
    first = box.spawn(f"--gpu={one.uuid}=512", label="first")
    second = box.spawn(f"--gpu={two.uuid}=1024", label="second")
    for gpu, holder in ((one, first), (two, second)):
        spellings = [gpu.uuid, gpu.pci_bus_id, gpu.pci_bus_id.lower(), gpu.pci_bus_id.lower()[-12:]]
        spellings += [str(n) for n in {gpu.index, gpu.minor} if len(meant_by(world, n)) == 1]
        for spelling in spellings:
            done = world.run("129", "--dry-run", "--json", "--gpu", spelling).must_end(3, "holders-present")
            assert done.holder_pids() == {holder.pid}, spelling
            assert [entry["uuid"] for entry in done.report["gpus"]] == [gpu.uuid], spelling
    nobody = world.run("129", "--dry-run", "--json", "--gpu", "GPU-00000000-0000-0000-0000-000000000000")
    assert nobody.status == 2
    for number in range(min(8, max(gpu.minor for gpu in world.machine.gpus) + 2)):
        if len(meant := meant_by(world, number)) != 1:
            said = world.run("129", "--dry-run", "--json", "--gpu", str(number))
            assert said.status == 2, f"number {number} means {meant}"
            assert all(gpu.uuid in said.stdout + said.stderr for gpu in meant)
    used = world.driver.used_mib(two)
    done = world.release("--now", "--gpu", two.pci_bus_id, case="--gpu by PCI address")
    world.assert_released(done, [second], two, used)
    assert first.is_alive()
    used = world.driver.used_mib(one)
    selector = str(one.index) if len(meant_by(world, one.index)) == 1 else one.uuid
    done = world.release("--now", "--gpu", selector, case="--gpu by number")
    world.assert_released(done, [first], one, used)
