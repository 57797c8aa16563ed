"""Holders that move faster than a look: an answer may be `held` or `unknown`, never that the GPU is free."""

from __future__ import annotations

import pytest

from tests.embedded.node import Container

from .conftest import ONE_GPU
from .product import Product
from .restless import restless

OPEN_PATH_ONLY = """
import os, sys, time
held = os.open(sys.argv[1], os.O_PATH)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("mode", ["chain", "move", "tasks"])
def test_a_holder_that_is_faster_than_a_look_is_never_called_nothing(
    product: Product, container: Container, mode: str
) -> None:
    with restless(container, mode):
        answers = [product.ask("verify", 129) for _ in range(6)]
        assert {answer.status for answer in answers} <= {3, 4}, answers
        assert {answer.reason for answer in answers} <= {"holders-present", "driver-only-holder", "blind-spots"}


@pytest.mark.parametrize("mode", ["move", "tasks"])
def test_one_that_keeps_its_pid_is_ended_once_a_look_has_met_it(
    product: Product, container: Container, mode: str
) -> None:
    with restless(container, mode) as running:
        for _ in range(40):
            if product.ask(129, "--now").reason == "released":
                break
        assert not running.process.alive()
        product.ask("verify", 129).must_be("nothing-held")


def test_a_descriptor_that_only_names_the_node_holds_nothing(product: Product, container: Container) -> None:
    """O_PATH: the driver has never heard of it (open(2)); killing for it would be a wrong kill."""
    running = container.popen(["/usr/bin/python3", "-I", "-c", OPEN_PATH_ONLY, ONE_GPU[0]])
    assert running.popen.stdout is not None and running.popen.stdout.readline() == "ready\n"
    product.ask(129, "--now").must_be("nothing-held")
    assert running.process.alive()
    running.popen.kill()


def test_one_that_opens_for_ioctl_only_is_a_holder(product: Product, container: Container) -> None:
    """Access mode 3 shows neither read nor write in the link's mode, as O_PATH does, yet the driver has opened it."""
    code = OPEN_PATH_ONLY.replace("os.O_PATH", "3")
    running = container.popen(["/usr/bin/python3", "-I", "-c", code, ONE_GPU[0]])
    assert running.popen.stdout is not None and running.popen.stdout.readline() == "ready\n"
    product.ask(129, "--now").must_be("released")
    assert not running.process.alive()
