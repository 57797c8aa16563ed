"""Names and command lines come from inside containers: no control character of theirs reaches a terminal or a log line."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable

from tests.embedded.node import Container, HolderHandle, Node

from .conftest import ONE_GPU
from .product import Product, dead, lives
from .terminal import Terminal

Engine = Callable[..., HolderHandle]

COMMS = (
    "a) R 1 1 (",
    "x\x1b[2J\x1b[31m",
    "nl\nreleased: ok",
    "tab\there\r\b\x07",
    '","verdict":"re',
    "\x9b31mC1",
    "bidi\u202egnp",
    os.fsdecode(b"\xff\xfe\x80bytes"),
    "{vmid} %s {0}",
    "\x7f\x00del"[:1],
)
ARGV = (
    "\x1b]0;owned\x07",
    "two\nlines",
    "\x00"[:0],
    '"}]}',
    "\u202e\u2066\u200b",
    os.fsdecode(b"\xff\xfe"),
    "x" * 5000,
)
ALLOWED = re.compile(r"\x1b\[K|\r|\n|\x1b\[[0-9;]*m")
"""What the product itself writes to a terminal: erase the line, return, colours."""


def raw_controls(text: str) -> list[str]:
    """Characters that would do something to a terminal or a log instead of being shown."""
    rest = text.replace("\n", "")
    return [c for c in rest if not c.isprintable()]


def test_text_has_no_raw_control_character_and_json_parses(node: Node, product: Product, engine: Engine) -> None:
    holders = [engine(comm=comm, argv=ARGV, ignore_term=True) for comm in COMMS]
    first = holders[0].main.ns_pid
    for words in (["ps"], ["ps", "129"], ["ps", "-v"], ["verify", "129"], ["129", "-n", "-v"], ["map", "129", first]):
        answer = product.run(*words)
        assert raw_controls(answer.out + answer.err) == [], words
        out = product.run(*words, "--json").out
        assert out.isascii() and json.loads(out)["schema"] == 1, words
    answer = product.release(129, "-n").must_be("holders-present")
    for holder, comm in zip(holders, COMMS, strict=True):
        found = answer.holder(holder.pid)
        assert found["state"] == "S" and found["ns_pids"] == [holder.main.ns_pid], ascii(comm)
    answer = product.run("129", "--grace", "0.2", "-v")
    assert raw_controls(answer.out + answer.err) == [] and answer.status == 0 and dead(*holders)


def test_a_name_that_looks_like_a_verdict_does_not_make_a_line(product: Product, engine: Engine) -> None:
    engine(comm="\nreleased: x", argv=("a\nreleased: all is well",))
    out = product.run("129", "-n").out
    assert not [line for line in out.splitlines() if line.startswith("released")]


def test_hostile_cgroup_names(product: Product, container: Container, engine: Engine) -> None:
    cgroup = "system.slice/\x1b[2J\u202e" + os.fsdecode(b"\xff") + ".service"
    holder = engine(cgroup=cgroup, respawn=-1)
    answer = product.run("129", "-v", "--grace", "0.2")
    assert raw_controls(answer.out + answer.err) == []
    found = product.ask(129, "-n").json["holders"][0]
    assert found["unit"].endswith(".service") and "\x1b[2J" in found["unit"] and "\\xff" in found["unit"]
    holder.kill()


def test_refusals_and_errors_escape_names_too(product: Product, container: Container) -> None:
    init = container.become_holder(argv=("init",), comm="i\x1b[2J\nx", open=ONE_GPU)
    for words in (["129"], ["129", "-q"]):
        answer = product.run(*words)
        assert answer.status == 7 and raw_controls(answer.out + answer.err) == []
        assert len((answer.out + answer.err).splitlines()) <= 6
    assert lives(init)
    for words in (["129", "--gpu", "\x1b[2J\n"], ["129", "--pid", "\x1b[2J"], ["\x1b[2J"], ["129", "--\x1b[2J"]):
        answer = product.run(*words)
        assert answer.status == 2 and raw_controls(answer.out + answer.err) == [], words


def test_an_unkillable_task_is_shown_without_raw_characters(
    product: Product, container: Container, engine: Engine
) -> None:
    with container.frozen_fs() as frozen:
        stuck = engine(comm="\x1b[2Jstuck\n", touch=frozen.path("x"))
        frozen.freeze()
        stuck.trigger()
        stuck.main.wait_stuck()
        answer = product.run("129", "--now", "-v")
        assert answer.status == 5 and raw_controls(answer.out + answer.err) == []
    stuck.wait_gone()


def test_a_terminal_gets_only_what_the_product_means(node: Node, product: Product, engine: Engine) -> None:
    holder = engine(comm="\x1b[2J\x1b]0;x", argv=ARGV, ignore_term=True)
    with Terminal(node, [*product.command, "129", "--grace", "1.5"]) as terminal:
        text, status = terminal.finish()
    assert status == 0 and dead(holder)
    assert raw_controls(ALLOWED.sub("", text)) == [] and "\x1b[2J" not in text
    assert "waiting for pid" in text or "TERM to" in text, "what is waited for is visible while it is waited for"


def test_a_hostname_of_the_configuration_is_escaped(node: Node, product: Product, container: Container) -> None:
    node.configure(129, "arch: amd64\nhostname: x\x1b[2J\n")
    for words in (["129"], ["ps"], ["verify"]):
        assert raw_controls(product.run(*words).out) == []
