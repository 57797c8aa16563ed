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


STORM = """
import os, resource, time
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
for _ in range(min(hard, 20_000) - 100): os.dup(0)
print("ready", flush=True)
for _ in range(3):
    if os.fork() == 0: break
while True:
    if os.fork(): time.sleep(0.02); os._exit(0)
"""


def test_processes_that_come_faster_than_they_are_read_do_not_hold_a_look_up(
    product: Product, container: Container
) -> None:
    """No holder at all, some 20,000 descriptors each: every list has new ones that take longer than they live."""
    running = container.popen(["/usr/bin/python3", "-I", "-c", STORM])
    assert running.popen.stdout is not None and running.popen.stdout.readline() == "ready\n"
    try:
        answer = product.ask(129, "--timeout", "3", timeout=120)
        assert answer.json["duration_ms"] < 20_000 and answer.json["rungs"] == []
        answer.must_be("blind-spots")
    finally:
        (container.payload / "cgroup.kill").write_text("1")
        running.popen.communicate()


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
