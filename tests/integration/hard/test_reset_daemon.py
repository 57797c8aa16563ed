"""A daemon that is killed in the middle of a reset: the one that comes next puts everything back."""

from __future__ import annotations

import os
import signal

import pytest

from tests.embedded.node import Container, Node, wait_until
from tests.integration.daemon.conftest import Daemon, daemon, idle_daemon  # noqa: F401
from tests.integration.product import Product

from .test_reset import assert_as_before, configured, tools, workshop  # noqa: F401
from .workshop import Workshop


@pytest.mark.parametrize("step", ["is-active", "stop", "smi", "start"])
def test_the_next_daemon_puts_everything_back(
    node: Node,
    product: Product,
    container: Container,
    workshop: Workshop,  # noqa: F811
    daemon: Daemon,  # noqa: F811
    step: str,
) -> None:
    workshop.pause(step)
    caller = product.start(129, "--reset")
    workshop.wait_paused()
    caller.kill()
    caller.process.wait_gone()
    daemon.kill()
    assert workshop.records()
    workshop.go_on()
    wait_until(lambda: not tools(workshop), "the orphaned program has ended")
    node.control(ghost_mib=None)
    daemon.start()
    wait_until(lambda: not workshop.records(), "the daemon has put everything back")
    assert_as_before(workshop)


def test_a_killed_worker_is_followed_by_one_that_puts_everything_back(
    node: Node,
    product: Product,
    container: Container,
    workshop: Workshop,  # noqa: F811
    daemon: Daemon,  # noqa: F811
) -> None:
    workshop.pause("stop")
    caller = product.start(129, "--reset")
    workshop.wait_paused()
    (worker,) = daemon.children_of_kind("Release")
    os.kill(worker, signal.SIGKILL)
    workshop.go_on()
    out, err = caller.popen.communicate(timeout=60)
    assert "daemon" in out + err
    wait_until(lambda: not workshop.records(), "everything is back")
    assert_as_before(workshop)


def test_a_daemon_that_starts_under_a_reset_at_work_undoes_it_afterwards(
    node: Node,
    product: Product,
    container: Container,
    workshop: Workshop,  # noqa: F811
    daemon: Daemon,  # noqa: F811
) -> None:
    workshop.pause("smi")
    caller = product.start(129, "--reset")
    workshop.wait_paused()
    caller.kill()
    caller.process.wait_gone()
    daemon.kill()
    daemon.start()
    assert workshop.records() and not workshop.is_active("nvidia-persistenced.service")
    workshop.go_on()
    wait_until(lambda: not workshop.records(), "the daemon has looked again")
    assert_as_before(workshop)
