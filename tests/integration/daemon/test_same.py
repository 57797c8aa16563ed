"""Every verb says the same and exits the same with the daemon and without it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from tests.embedded.node import HolderHandle
from tests.integration.daemon.conftest import Daemon
from tests.integration.product import Product

pytestmark = [pytest.mark.embedded, pytest.mark.root]
LOOKS = (
    "129 -n", "129 -n --json", "129 -n -v", "verify 129", "verify 129 --json", "ps", "ps 129", "ps --json", "map 129 2",
    "map 129 2 --json", "131", "131 --json", "129 --gpu 7", "129 --gpu 7 --json", "129 --pid 9999", "verify 131",
    "map 131 1", "verify 129 131", "129 131 -n --json", "129 -n --pid 2 --pid 9999", "verify 129 --pid 2,host:1 --json",
)  # fmt: skip


def outcome(product: Product, *words: str) -> tuple[int, list[str]]:
    """Exit status and text; what differs from run to run is masked."""
    done = product.run(*words)
    text = re.sub(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}", "UUID", done.out + "-- stderr --\n" + done.err)
    return done.status, [re.sub(r"\d+([.,:]\d+)*", "N", line) for line in text.splitlines()]


@pytest.mark.parametrize("words", LOOKS)
def test_a_look(daemon: Daemon, product: Product, engine: Callable[..., HolderHandle], words: str) -> None:
    engine()
    assert outcome(product, *words.split()) == outcome(product, *words.split(), "--no-daemon")


@pytest.mark.parametrize("form", ["", "--json", "-q", "-v", "--now", "--gpu 0", "--no-verify-memory"])
def test_a_release(daemon: Daemon, product: Product, engine: Callable[..., HolderHandle], form: str) -> None:
    said = []
    for where in ((), ("--no-daemon",)):
        holder = engine(ignore_term=form == "-v")
        said.append(outcome(product, "129", "--grace", "0.2", *form.split(), *where))
        holder.wait_gone()
    assert said[0] == said[1]
    assert said[0][0] == 0


def test_a_refusal(daemon: Daemon, product: Product, node: object) -> None:
    assert outcome(product, "129", "--timeout", "x") == outcome(product, "129", "--timeout", "x", "--no-daemon")
