"""Gone is not freed: what the memory figures add to a verdict, and whose memory it is."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node

from .conftest import ALL_NODES, ONE_GPU
from .product import Product, dead, finish, held_mib, lives, parsed, wait_for_rung

Engine = Callable[..., HolderHandle]
OTHERS = {51: 2048}


# --- memory that comes back ------------------------------------------------------------------------------------------


@pytest.mark.case("slow-drain")
def test_memory_that_falls_in_steps_is_waited_for(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    """Longer than `drain_grace` in all, but never that long without a step."""
    node.control(free_delay_ms=300, fall_mib_per_ms=20, fall_step_mib=2000)
    holder = engine()
    answer = product.release(129).must_be(expected)
    assert answer.gpu(50)["used_mib_after"] == 0 and dead(holder)
    assert answer.json["duration_ms"] >= 2000


def test_high_bar1_use_with_nobody_there_is_said_and_changes_nothing(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    node.control(bar1_used_mib={50: 5000, 51: 6000})
    engine(open=ALL_NODES, alloc=("50:1000:compute", "51:1000:compute"))
    message = product.release(129).must_be("released").message
    assert "GPU 0 has 5,000 MiB of BAR1 in use" in message and "6,000" not in message, "GPU 1 has a client"


@pytest.mark.case("reserve")
def test_the_drivers_reserve_is_no_use_of_memory(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    node.control(reserve_mib=615, context_mib=8)
    engine()
    answer = product.release(129).must_be(expected)
    assert answer.gpu(50)["used_mib_after"] == 0 and answer.gpu(50)["reserved_mib"] == 615


def test_memory_that_fell_before_we_came_but_is_not_down_yet_is_waited_for(
    node: Node, product: Product, engine: Engine
) -> None:
    """Somebody killed the job a moment ago; nobody holds the GPU now and 42 GB are on their way out."""
    node.control(fall_mib_per_ms=20, fall_step_mib=500)
    holder = engine()
    holder.kill()
    holder.wait_gone()
    answer = product.release(129).must_be("nothing-held")
    assert not answer.json["was_held"] and answer.json["rungs"] == [] and answer.gpu(50)["used_mib_after"] == 0


def test_contexts_that_no_list_shows_are_tolerated(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    node.control(context_mib=8)
    more = [node.container(140 + n).spawn_holder(open=ONE_GPU, alloc=("50:100:compute",)) for n in range(3)]
    engine()
    assert product.release(129).must_be("released").gpu(50)["used_mib_after"] == 324
    assert lives(*more)


# --- memory that does not --------------------------------------------------------------------------------------------


@pytest.mark.case("ghost")
def test_memory_that_stays_with_no_client_is_held(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    node.control(leak_mib={50: 500}, bar1_used_mib={50: 5000})
    holder = engine()
    answer = product.release(129).must_be(expected)
    assert answer.fates() == {holder.pid: "exited"} and answer.gpu(50)["ghost_mib"] == 500
    assert "500 MiB on GPU 0" in answer.message and "5,000 MiB of BAR1" in answer.message


def test_memory_that_the_driver_goes_on_charging_to_the_dead_is_ghost_memory(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    node.control(leak_mib={50: 500}, list_draining=1)
    engine()
    assert product.release(129).must_be("ghost-memory").gpu(50)["ghost_mib"] == 500


def test_ghost_memory_on_the_second_gpu_alone_is_seen(node: Node, product: Product, engine: Engine) -> None:
    node.control(leak_mib={51: 300})
    engine(open=ALL_NODES, alloc=("50:1000:compute", "51:1000:compute"))
    answer = product.release(129).must_be("ghost-memory")
    assert (answer.gpu(50)["ghost_mib"], answer.gpu(51)["ghost_mib"]) == (0, 300) and "GPU 1" in answer.message


@pytest.mark.case("ghost-before")
@pytest.mark.parametrize("held", [True, False], ids=["with a holder", "nothing held"])
def test_ghost_memory_from_before_on_a_gpu_of_its_own_is_held_and_said_to_be_old(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str, held: bool
) -> None:
    node.control(ghost_mib={50: 700})
    holders = [engine()] if held else []
    answer = product.release(129).must_be(expected)
    assert "700 MiB on GPU 0" in answer.message and "before" in answer.message
    assert dead(*holders) and answer.json["was_held"] is held


@pytest.mark.case("foreign-ghost")
def test_ghost_memory_from_before_on_a_shared_gpu_is_only_reported(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    node.control(ghost_mib={51: 700})
    engine(open=ALL_NODES, alloc=("51:1000:compute",))
    answer = product.release(129).must_be(expected)
    assert answer.gpu(51)["ghost_mib"] == 700 and held_mib(node) == OTHERS


def test_ghost_memory_on_top_of_older_ghost_memory_is_ours(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    node.control(ghost_mib={51: 700}, leak_mib={51: 200})
    engine(open=ALL_NODES, alloc=("51:1000:compute",))
    answer = product.release(129).must_be("ghost-memory")
    assert "200 MiB on GPU 1" in answer.message


def test_ghost_memory_of_a_gpu_that_is_not_the_containers_is_no_business_of_its(node: Node, product: Product) -> None:
    node.control(ghost_mib={51: 700})
    container = node.container(129, devices=("nvidia0", "nvidiactl", "nvidia-uvm"))
    container.spawn_holder(open=ONE_GPU, alloc=("50:1000:compute",))
    answer = product.release(129).must_be("released")
    assert [g["minor"] for g in answer.json["gpus"]] == [50]


def test_a_gpu_only_in_the_configuration_is_looked_at(node: Node, product: Product) -> None:
    node.control(ghost_mib={51: 700})
    node.container(129)
    assert "GPU 1" in product.release(129).must_be("ghost-memory-before").message


def test_a_gpu_only_in_a_snapshot_of_the_configuration_is_not_the_containers(node: Node, product: Product) -> None:
    """The configuration is read up to the first section: what follows are snapshots (DESIGN 12)."""
    node.control(ghost_mib={51: 700})
    node.container(129, config="arch: amd64\ndev0: /dev/nvidia0\n\n[before]\ndev0: /dev/nvidia1\n")
    answer = product.release(129).must_be("nothing-held")
    assert [g["minor"] for g in answer.json["gpus"]] == [50]


def test_everything_that_a_holder_had_open_is_verified(node: Node, product: Product) -> None:
    """The driver lists it on GPU 0 alone; a leak on GPU 1, which it had open too, is seen."""
    container = node.container(129, config=False)
    node.configure(129, "arch: amd64\n")
    node.control(ghost_mib={51: 700})
    container.spawn_holder(open=ALL_NODES, alloc=("50:1000:compute",))
    answer = product.release(129).must_be("ghost-memory-before")
    assert [g["minor"] for g in answer.json["gpus"]] == [50, 51]


@pytest.mark.case("draining")
def test_memory_that_still_falls_at_the_time_limit(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    """The steps are rarer than one a second; at the limit that is still falling."""
    node.control(fall_mib_per_ms=0.5, fall_step_mib=600)
    product.configure("ladder: {drain_grace: 5}\n")
    holder = engine()
    answer = product.release(129, "--timeout", "2.5").must_be(expected)
    assert dead(holder) and answer.gpu(50)["ghost_mib"] > 1000 and answer.fates() == {holder.pid: "exited"}


# --- others ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("shared-gpu")
def test_another_container_on_the_same_gpu_keeps_process_and_memory(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle], expected: str
) -> None:
    other = node.container(140).spawn_holder(open=ONE_GPU, alloc=("50:2048:compute",), children=1)
    engine()
    answer = product.release(129).must_be(expected)
    (seen,) = answer.gpu(50)["other_holders"]
    assert (seen["vmid"], seen["pid"], seen["memory_mib"]) == (140, other.pid, 2048)
    assert answer.gpu(50)["used_mib_after"] == 2048 and lives(other) and held_mib(node) == OTHERS | {50: 2048}


@pytest.mark.case("passed-on")
def test_a_descriptor_passed_to_another_container_keeps_the_memory(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    path = "/run/nvidia-standin/passed"
    receiver = node.container(130).spawn_holder(listen=path)
    sender = engine(connect=path)
    received = receiver.next_report()
    answer = product.release(129).must_be(expected)
    assert answer.fates() == {sender.pid: "exited"} and received.alive()
    (kept,) = answer.gpu(50)["other_holders"]
    assert (kept["pid"], kept["vmid"]) == (received.pid, 130) and f"pid {received.pid}" in answer.message
    assert "container 130" in answer.message and held_mib(node) == {50: 42759}


@pytest.mark.case("taken-over")
def test_a_cuda_ipc_importer_elsewhere_takes_the_memory_over(
    node: Node, product: Product, engine: Engine, expected: str
) -> None:
    exporter = engine()
    importer = node.container(130).spawn_holder(
        open=ONE_GPU, alloc=("50:7:compute",), import_=tuple(exporter.allocations())
    )
    answer = product.release(129).must_be(expected)
    assert answer.fates() == {exporter.pid: "exited"} and importer.alive()
    assert answer.gpu(50)["other_holders"][0]["pid"] == importer.pid and "container 130" in answer.message


def test_a_dead_opener_in_each_of_two_containers(node: Node, product: Product, engine: Engine) -> None:
    ours = engine(alloc=("50:10000:compute",), children=2, die=True)
    theirs = node.container(130).spawn_holder(open=ONE_GPU, alloc=("50:20000:compute",), children=2, die=True)
    answer = product.release(129).must_be("released")
    assert answer.signalled() == {p.pid for p in ours.by_role("child")} and dead(ours)
    assert answer.gpu(50)["used_mib_after"] == 20000 and held_mib(node) == {50: 20000}
    assert all(p.alive() for p in theirs.by_role("child"))
    assert product.release(130).must_be("released").gpu(50)["used_mib_after"] == 0


def test_a_dead_opener_elsewhere_is_no_ghost_memory_of_ours(node: Node, product: Product, engine: Engine) -> None:
    theirs = node.container(130).spawn_holder(open=ONE_GPU, alloc=("50:20000:compute",), children=1, die=True)
    product.release(129).must_be("nothing-held")
    engine()
    answer = product.release(129).must_be("released")
    assert answer.gpu(50)["used_mib_after"] == 20000 and answer.gpu(50)["ghost_mib"] == 0
    assert all(p.alive() for p in theirs.by_role("child"))


def test_memory_that_another_container_allocates_meanwhile_is_not_ours(
    node: Node, product: Product, engine: Engine
) -> None:
    """A new job of 130 of exactly our job's size, started while ours is in its grace: neither ghost nor taken over."""
    ours = engine(ignore_term=True)
    other = node.container(130)
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    new = other.spawn_holder(open=ONE_GPU, alloc=("50:42759:compute",))
    ours.kill()
    done = finish(running)
    answer = parsed(done.status, done.out, done.err).must_be("released")
    assert dead(ours) and lives(new) and answer.gpu(50)["used_mib_after"] == 42759


def test_a_client_of_another_container_that_leaves_meanwhile_changes_nothing(
    node: Node, product: Product, engine: Engine
) -> None:
    ours = engine(ignore_term=True)
    other = node.container(130).spawn_holder(open=ONE_GPU, alloc=("50:42759:compute",))
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    other.kill()
    other.wait_gone()
    ours.kill()
    done = finish(running)
    answer = parsed(done.status, done.out, done.err).must_be("released")
    assert dead(ours) and answer.gpu(50)["used_mib_after"] == 0


@pytest.mark.parametrize("unit", [{}, {"cgroup": "system.slice/job.service"}], ids=["plain", "unit"])
def test_another_container_that_allocates_and_frees_all_the_time_is_no_ghost(
    node: Node, product: Product, engine: Engine, unit: dict[str, str]
) -> None:
    """Its memory is in `used` a moment before or after it is in the list; a single look may see the difference."""
    ours = engine(**unit)
    other = node.container(130)
    churn = other.spawn_holder(open=ONE_GPU, alloc=("50:3000:compute",), respawn=-1)
    stop = threading.Event()

    def kill_again_and_again() -> None:
        while not stop.wait(0.02):
            churn.main.kill()
            churn.next_report()

    thread = threading.Thread(target=kill_again_and_again)
    thread.start()
    try:
        answer = product.release(129)
    finally:
        stop.set()
        thread.join()
    answer.must_be("released")
    assert dead(ours)


# --- a part of the container only ------------------------------------------------------------------------------------


def test_gpu_selects_by_whose_memory_it_is_not_by_what_is_open(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    first = engine(open=ALL_NODES, alloc=("50:1000:compute",))
    second = engine(open=ALL_NODES, alloc=("51:1000:compute",))
    answer = product.release(129, "--gpu", "0").must_be("released")
    assert answer.signalled() == {first.pid} and dead(first) and lives(second)


def test_gpu_leaves_the_data_workers_of_the_other_gpus_job_alone(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    """Forked workers are in no list and have every node open: they are where their living parent is."""
    first = engine(open=ALL_NODES, alloc=("50:1000:compute",), children=2)
    second = engine(open=ALL_NODES, alloc=("51:1000:compute",), children=3, grandchildren=1)
    answer = product.release(129, "--gpu", "0").must_be("released")
    assert answer.signalled() == set(first.pids) and dead(first) and lives(second)


def test_gpu_selects_the_same_after_a_rung_that_was_not_enough(
    node: Node, product: Product, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    """Between TERM and KILL the driver is not asked; the one on the other GPU stays out of it all the same."""
    deaf = engine(open=ALL_NODES, alloc=("50:1000:compute",), ignore_term=True)
    second = engine(open=ALL_NODES, alloc=("51:1000:compute",))
    answer = product.release(129, "--gpu", "0", "--grace", "0.3").must_be("released")
    assert answer.signalled() == {deaf.pid} and dead(deaf) and lives(second)


def test_gpu_selects_the_same_when_the_driver_falls_silent_in_the_middle(node: Node, engine: Engine) -> None:
    """Without lists everybody has every node open; where the driver had placed them before still counts."""
    product = Product(node, "nvml: {deadline: 0.5}\n")
    deaf = engine(open=ALL_NODES, alloc=("50:1000:compute",), ignore_term=True)
    second = engine(open=ALL_NODES, alloc=("51:1000:compute",))
    running = product.start(129, "--gpu", "0", "--grace", "1", "--json")
    wait_for_rung(node)
    node.control(hang="*")
    done = finish(running)
    answer = parsed(done.status, done.out, done.err).must_be("driver-silent")
    assert answer.signalled() == {deaf.pid} and dead(deaf) and lives(second)


@pytest.mark.parametrize("name", ["1", "51", "GPU-c07d94b1-2e8a-47f6-b3d9-51f0a6e83c51", "0000:3b:00.0", "3B:00"])
def test_gpu_by_index_minor_uuid_or_address(product: Product, engine: Engine, name: str) -> None:
    first, second = engine(), engine(open=ALL_NODES, alloc=("51:1000:compute",))
    assert product.release(129, "--gpu", name).must_be("released").signalled() == {second.pid}
    assert lives(first)


def test_gpu_without_holder_of_it_is_verified_too(node: Node, product: Product, engine: Engine) -> None:
    node.control(ghost_mib={51: 700})
    first = engine(open=ONE_GPU)
    assert product.release(129, "--gpu", "0").must_be("released").signalled() == {first.pid}
    product.release(129, "--gpu", "1").must_be("ghost-memory-before")


def test_pid_selects_one_process_and_its_memory_alone(node: Node, product: Product, engine: Engine) -> None:
    first, second = engine(alloc=("50:1000:compute",)), engine(alloc=("50:2000:compute",))
    answer = product.release(129, "--pid", first.main.ns_pid).must_be("released")
    assert answer.signalled() == {first.pid} and lives(second) and answer.gpu(50)["used_mib_after"] == 2000
    answer = product.release(129, "--pid", f"host:{second.pid}").must_be("released")
    assert answer.signalled() == {second.pid}


@pytest.mark.parametrize("again", [True, False], ids=["twice", "comma"])
def test_several_pids_are_released_together_and_the_verdict_is_theirs(
    node: Node, product: Product, engine: Engine, again: bool
) -> None:
    first, second, third = (engine(alloc=(f"50:{mib}:compute",)) for mib in (1000, 2000, 3000))
    names = (str(first.main.ns_pid), f"host:{second.pid}")
    words = [word for name in names for word in ("--pid", name)] if again else ["--pid", ",".join(names)]
    seen = product.ask("verify", 129, *words).must_be("holders-present")
    assert {h["pid"] for h in seen.json["holders"]} == {first.pid, second.pid}
    answer = product.release(129, *words).must_be("released")
    assert answer.signalled() == {first.pid, second.pid} and lives(third) and answer.gpu(50)["used_mib_after"] == 3000


def test_pid_of_a_process_that_holds_nothing(product: Product, container: Container, engine: Engine) -> None:
    holder, idle = engine(), container.spawn_holder(argv=("bash",))
    answer = product.release(129, "--pid", idle.main.ns_pid).must_be("nothing-held")
    assert lives(holder, idle) and answer.json["rungs"] == []
    assert answer.message == "nothing that was selected of container 129 holds a GPU"


@pytest.mark.case("kept-by-rest")
def test_pid_of_an_opener_whose_children_keep_the_memory(node: Node, product: Product, engine: Engine) -> None:
    family = engine(children=2)
    answer = product.release(129, "--pid", family.main.ns_pid)
    assert answer.json["verdict"] == "held" and answer.status == 6 and answer.reason == "held-by-rest"
    children = family.by_role("child")
    assert all(p.alive() for p in children) and str(children[0].pid) in answer.message
    assert answer.signalled() == {family.main.pid} and answer.json["duration_ms"] < 10_000


def test_pid_does_not_follow_a_number_to_another_process(product: Product, engine: Engine) -> None:
    first, second = engine(), engine()
    first.kill()
    first.wait_gone()
    answer = product.ask(129, "--pid", first.main.ns_pid)
    assert answer.must_be("usage").status == 2 and lives(second)
