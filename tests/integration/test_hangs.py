"""Processes that block whoever reads about them: bounded time, the right blind spots, and none for other people's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node

from .conftest import ONE_GPU
from .hungfuse import HungFuse
from .product import Answer, Product, dead, held_mib, lives

Engine = Callable[..., HolderHandle]


def timed(product: Product, *words: object, within_s: float) -> Answer:
    begun = time.monotonic()
    answer = product.release(*words)
    assert time.monotonic() - begun < within_s, "it hangs"
    return answer


def test_a_holder_whose_command_line_and_maps_block_costs_one_deadline(
    product: Product, container: Container, engine: Engine
) -> None:
    with container.frozen_fs() as frozen:
        stuck, other = engine(fault=frozen.path("page")), engine()
        frozen.freeze()
        stuck.trigger()
        stuck.main.wait_stuck(2)
        answer = timed(product, "verify", 129, within_s=15).must_be("holders-present")
        assert set(answer.fates()) == {stuck.pid, other.pid}
        found = answer.holder(stuck.pid)
        assert found["cmdline"] == "" and found["evidence"] == ["fd", "nvml"] and found["comm"]
        answer = timed(product, 129, "--grace", "0.5", within_s=30).must_be("unkillable")
        assert answer.fates() == {stuck.pid: "unkillable", other.pid: "exited"}
    stuck.wait_gone()


@pytest.mark.case("blocked-maps")
def test_who_shows_no_descriptor_and_cannot_be_read_may_hide_a_mapping(
    node: Node, product: Product, container: Container, engine: Engine, expected: str
) -> None:
    with container.frozen_fs() as frozen:
        stuck = container.spawn_holder(argv=("backup",), fault=frozen.path("page"))
        frozen.freeze()
        stuck.trigger()
        stuck.main.wait_stuck(2)
        holder = engine()
        answer = timed(product, 129, within_s=30).must_be(expected)
        assert answer.signalled() == {holder.pid} and dead(holder) and held_mib(node) == {}
        assert str(stuck.pid) in answer.message and stuck.pid not in answer.signalled()
    assert lives(stuck)


def test_many_that_block_are_bounded_too(product: Product, container: Container, engine: Engine) -> None:
    with container.frozen_fs() as frozen:
        many = [container.spawn_holder(argv=("job",), fault=frozen.path(f"page{n}")) for n in range(6)]
        frozen.freeze()
        for stuck in many:
            stuck.trigger()
        for stuck in many:
            stuck.main.wait_stuck(2)
        holder = engine()
        timed(product, 129, within_s=60).must_be("blind-spots")
        assert dead(holder) and lives(*many)


def test_what_blocks_in_another_container_is_no_blind_spot_of_ours(
    node: Node, product: Product, engine: Engine
) -> None:
    """Listed by the driver, without a visible descriptor and unreadable: it stays the other's live client."""
    other = node.container(130)
    with other.frozen_fs() as frozen:
        stuck = other.spawn_holder(open=ONE_GPU, alloc=("50:2048:compute",), inflight=True, fault=frozen.path("page"))
        frozen.freeze()
        stuck.trigger()
        stuck.main.wait_stuck(2)
        holder = engine()
        answer = timed(product, 129, within_s=30).must_be("released")
        assert dead(holder) and answer.gpu(50)["ghost_mib"] == 0
        assert [h["pid"] for h in answer.gpu(50)["other_holders"]] == [stuck.pid]
    assert lives(stuck)


def test_a_task_that_hangs_in_exit_is_unkillable_though_it_shows_nothing(
    node: Node, product: Product, container: Container, engine: Engine, neighbours: list[HolderHandle]
) -> None:
    """Past exit() /proc shows no descriptor of it any more, and the driver still charges it: a release that hangs."""
    with HungFuse(container, "/run/hung", answers=True):
        stuck, other = engine(open=(*ONE_GPU, "/run/hung/file")), engine()
        answer = timed(product, 129, "--now", within_s=30).must_be("unkillable")
        assert answer.fates() == {stuck.pid: "unkillable", other.pid: "exited"}
        assert answer.holder(stuck.pid)["stuck"]["state"] == "D" and stuck.main.state() == "D"
        assert list((stuck.main.proc / "fd").iterdir()) == []
        again = timed(product, 129, within_s=30).must_be("unkillable")  # nobody has to be signalled to see that
        assert again.signalled() == set() and again.fates() == {stuck.pid: "unkillable"}
    stuck.wait_gone()
    product.release(129).must_be("nothing-held")


def test_a_task_that_hangs_in_exit_and_that_the_driver_forgot_is_unkillable_too(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    with HungFuse(container, "/run/hung", answers=True):
        stuck = engine(open=(*ONE_GPU, "/run/hung/file"))
        node.control(hide_clients={50: stuck.pid})
        answer = timed(product, 129, "--now", within_s=30).must_be("unkillable")
        assert answer.fates() == {stuck.pid: "unkillable"}
    stuck.wait_gone()
