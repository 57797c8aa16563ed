"""A daemon that stands still, and answers that a container tries to make too long."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node
from tests.integration.conftest import ONE_GPU
from tests.integration.product import Product, dead, finish, wait_for_rung

from .conftest import Daemon

Engine = Callable[..., HolderHandle]


@pytest.mark.parametrize("who", ["daemon", "worker"])
def test_who_waits_for_a_daemon_that_stands_still_is_told_and_can_leave(
    node: Node, daemon: Daemon, product: Product, engine: Engine, who: str
) -> None:
    engine(ignore_term=True)
    running = product.start(129, "--grace", "60")
    wait_for_rung(node)
    stopped = [daemon.pid] if who == "daemon" else daemon.children_of_kind("worker")
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert running.popen.stderr is not None
        line = running.popen.stderr.readline()
        while line and "the daemon is silent" not in line:
            line = running.popen.stderr.readline()
        assert "the daemon is silent" in line
        running.popen.send_signal(signal.SIGINT)  # asks for the end of the release, and waits for its report
        time.sleep(0.5)
        assert running.popen.poll() is None
        running.popen.send_signal(signal.SIGINT)
        begun = time.monotonic()
        done = finish(running)
        assert time.monotonic() - begun < 15  # the silence would be waited for 25 s
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert done.status == 130 and "not waited for the daemon's answer" in done.out, done


def test_command_lines_made_long_cost_nobody_an_answer(daemon: Daemon, product: Product, container: Container) -> None:
    """300 holders with 16 KiB of control characters each, six bytes apiece in JSON: more than a message may have."""
    crowd = container.spawn_holder(argv=("job", "\x01" * 16_000), open=ONE_GPU, crowd=300)
    seen = product.ask("ps")
    assert seen.status == 0 and len(seen.json["holders"]) > 300
    answer = product.ask(129, "--now").must_be("released")
    assert dead(crowd) and len(answer.json["holders"]) > 300
    assert max(len(json.dumps(holder)) for holder in answer.json["holders"]) < 32 << 10
    assert product.ask("verify", 129).must_be("nothing-held").status == 0
