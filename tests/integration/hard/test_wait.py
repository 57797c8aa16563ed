"""`wait`: returns at the right moment, and says why it does not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node
from tests.integration.product import Product

Engine = Callable[..., HolderHandle]


def test_a_free_gpu_is_free_at_once(product: Product, container: Container) -> None:
    answer = product.ask("wait", "--gpu", "0", "--free", "100G").must_be("gpu-free")
    assert answer.json["waited_ms"] < 5000 and answer.json["gpus"][0]["free_mib"] > 100 * 1024
    product.ask("wait", 129).must_be("nothing-held")


@pytest.mark.parametrize("words", [("129",), ("--gpu", "50"), ("--gpu", "18:00.0", "--free", "139G")])
def test_it_returns_when_a_drain_is_over(
    node: Node, product: Product, container: Container, engine: Engine, words: tuple[str, ...]
) -> None:
    """The holder is gone, its memory falls for some two seconds."""
    node.control(free_delay_ms=200, fall_mib_per_ms=20, fall_step_mib=1000, reserve_mib=615)
    holder = engine()
    began = time.monotonic()
    if "--gpu" in words:
        holder.kill()
        holder.wait_gone()
    waiting = product.start("wait", *words, "--timeout", "30")
    assert waiting.popen.stdout is not None
    assert waiting.popen.stdout.readline().startswith("waiting: ")
    holder.kill()
    out, err = waiting.popen.communicate(timeout=40)
    took = time.monotonic() - began
    assert waiting.popen.returncode == 0, out + err
    used = next(g for g in node.nvml()["gpus"] if g["minor"] == 50)["memory_v2"]["used"]
    if "--gpu" in words:
        assert took > 2.0, "it returned before the memory was back"
        assert used <= 16


@pytest.mark.case("wait-in-use")
def test_memory_that_somebody_uses_is_short(product: Product, engine: Engine, expected: str) -> None:
    holder = engine()
    product.ask("wait", "--gpu", "0", "--timeout", "5").must_be("gpu-free")
    answer = product.ask("wait", "--gpu", "0", "--free", "120G", "--timeout", "0.3").must_be(expected)
    assert f"pid {holder.pid}" in answer.message and "122,880 MiB wanted" in answer.message
    assert holder.alive()


@pytest.mark.case("wait-stale")
def test_memory_of_nobody_is_stale(node: Node, product: Product, container: Container, expected: str) -> None:
    node.control(ghost_mib={51: 700})
    answer = product.ask("wait", "--gpu", "1", "--timeout", "0.3").must_be(expected)
    assert "700 MiB still in use by no live process" in answer.message
    product.ask("wait", "--gpu", "0", "--timeout", "5").must_be("gpu-free")


def test_memory_of_a_dead_opener_is_not_said_to_be_nobodys(
    product: Product, container: Container, engine: Engine
) -> None:
    """Its child lives, has the descriptors and is in no list of the driver."""
    family = engine(children=1, die=True)
    answer = product.ask("wait", "--gpu", "0", "--timeout", "0.5")
    assert f"dead pid {family.main.pid}, or who has its descriptors" in answer.message and answer.status == 6


def test_a_container_that_holds_is_named_with_its_holders(product: Product, engine: Engine) -> None:
    holder = engine()
    answer = product.ask("wait", 129, "--timeout", "0.3").must_be("holders-present")
    assert str(holder.pid) in answer.message and answer.json["waited_ms"] >= 300


def test_a_silent_driver_is_no_free_gpu(node: Node, product: Product, container: Container) -> None:
    product.configure("nvml: {deadline: 0.5}\n")
    node.control(hang="nvmlInit")
    product.ask("wait", "--gpu", "0", "--timeout", "0.5").must_be("cannot-look")
    assert product.ask("wait", 129, "--timeout", "0.5").status == 4


def test_a_driver_that_hangs_does_not_hold_it_beyond_its_limit(node: Node, product: Product, container: Container) -> None:
    product.configure("nvml: {deadline: 30}\n")
    node.control(hang="nvmlInit")
    for words in (("--gpu", "0"), (129,)):
        begun_s = time.monotonic()
        assert product.ask("wait", *words, "--timeout", "1").status == 4
        assert time.monotonic() - begun_s < 15


def test_nonsense(product: Product, container: Container) -> None:
    for words in (
        ["wait"],
        ["wait", "129", "--gpu", "0"],
        ["wait", "--gpu", "9"],
        ["wait", "--gpu", "0", "--free", "x"],
    ):
        assert product.run(*words).status == 2, words
    assert product.run("wait", "777").status == 8
