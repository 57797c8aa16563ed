"""Ctrl-C, closed pipes, closed terminals: what was signalled is said, nothing is left half done without a word."""

from __future__ import annotations

import json
import os
import shlex
import signal
from collections.abc import Callable
from typing import Any

import pytest

from tests.embedded.node import HolderHandle, Node, wait_until

from .product import Product, dead, finish, held_mib, lives, parsed, wait_for_rung, written_ahead
from .terminal import Terminal

Engine = Callable[..., HolderHandle]


@pytest.mark.case("ctrl-c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_the_grace_says_what_was_signalled(
    node: Node, product: Product, engine: Engine, expected: str, number: signal.Signals
) -> None:
    deaf, obedient = engine(ignore_term=True), engine()
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    obedient.wait_gone()
    running.process.kill(number)
    done = finish(running)
    answer = parsed(done.status, done.out, done.err).must_be(expected)
    assert str(deaf.pid) in answer.message and "term" in answer.message and lives(deaf)
    assert answer.json["rungs"][0]["sent"] == 2 and answer.json["rungs"][0]["gone"] == 1
    assert answer.fates() == {deaf.pid: "survived", obedient.pid: "exited"}


def test_ctrl_c_on_a_terminal(node: Node, product: Product, engine: Engine) -> None:
    deaf = engine(ignore_term=True)
    with Terminal(node, [*product.command, "129", "--grace", "60"]) as terminal:
        wait_for_rung(node)
        terminal.read_until("TERM")
        terminal.type(b"\x03")
        text, status = terminal.finish()
    assert status == 130 and "already sent: term" in text and str(deaf.pid) in text and lives(deaf)
    assert "Traceback" not in text


def test_ctrl_c_while_the_driver_is_waited_for_ends_in_bounded_time(
    node: Node, product: Product, engine: Engine
) -> None:
    product.configure("nvml: {deadline: 2}\n")
    node.control(hang="nvmlInit")
    holder = engine()
    running = product.start(129, "--json")
    wait_until(lambda: '"release_id"' in written_ahead(node), "the release has begun")
    running.process.kill(signal.SIGINT)
    done = finish(running, timeout=60)
    answer = parsed(done.status, done.out, done.err).must_be("interrupted")
    assert lives(holder) and "nothing had been signalled" in answer.message


def test_a_second_ctrl_c_does_not_wait(node: Node, product: Product, engine: Engine) -> None:
    product.configure("nvml: {deadline: 600}\nladder: {timeout: 1000}\n")
    node.control(hang="nvmlInit")
    holder = engine()
    running = product.start(129, "--json")
    wait_until(lambda: '"release_id"' in written_ahead(node), "the release has begun")
    asleep = running.process.times_asleep()
    running.process.kill(signal.SIGINT)
    wait_until(lambda: running.process.times_asleep() > asleep, "it waits for the driver again")
    running.process.kill(signal.SIGINT)
    done = finish(running, timeout=60)
    assert done.status == 130 and "Traceback" not in done.err and lives(holder)
    parsed(done.status, done.out, done.err).must_be("interrupted")


def test_interrupted_in_the_middle_the_next_release_finishes(node: Node, product: Product, engine: Engine) -> None:
    deaf = engine(ignore_term=True)
    running = product.start(129, "--grace", "60", "--json")
    wait_for_rung(node)
    running.process.kill(signal.SIGINT)
    assert finish(running).status == 130
    product.release(129, "--grace", "0.2").must_be("released")
    assert dead(deaf) and held_mib(node) == {}


def test_a_killed_release_leaves_lock_and_driver_free(node: Node, product: Product, engine: Engine) -> None:
    deaf = engine(ignore_term=True)
    running = product.start(129, "--grace", "60")
    wait_for_rung(node)
    running.process.kill(signal.SIGKILL)
    finish(running)
    product.release(129, "--no-wait", "--grace", "0.2").must_be("released")
    assert dead(deaf)


@pytest.mark.parametrize("words", [[], ["--json"], ["-v"], ["-q"]], ids=["text", "json", "verbose", "quiet"])
def test_a_closed_pipe_does_not_end_the_release(node: Node, product: Product, engine: Engine, words: list[str]) -> None:
    reader, writer = os.pipe()
    holder = engine(term_ms=300)
    running = product.start(129, *words, stdout=writer, stderr=writer)
    os.close(writer)
    os.close(reader)
    running.popen.wait(timeout=60)
    assert dead(holder) and held_mib(node) == {}
    record = last_record(node)
    assert record["report"]["reason"] == "released"
    assert running.popen.returncode == 0


@pytest.mark.parametrize("words", [[], ["--json"], ["-q"]], ids=["text", "json", "quiet"])
def test_a_closed_terminal_does_not_end_the_release(
    node: Node, product: Product, engine: Engine, words: list[str]
) -> None:
    """SIGHUP, and nobody to write to."""
    deaf = engine(ignore_term=True)
    with Terminal(node, [*product.command, "129", "--grace", "1", *words]) as terminal:
        wait_for_rung(node)
        terminal.hang_up()
        deaf.wait_gone()
        wait_until(lambda: written_ahead(node) != "" and last_record(node)["report"] is not None, "the release is finished")
    assert last_record(node)["report"]["reason"] == "released" and held_mib(node) == {}


def test_stopped_output_does_not_hold_up_the_signals(node: Node, product: Product, engine: Engine) -> None:
    """A full pipe that nobody reads (`| less`, not scrolled): holders end all the same."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    holder = engine()
    running = product.start(129, "--json", stdout=writer)
    os.close(writer)
    holder.wait_gone()
    os.set_blocking(reader, False)
    while running.popen.poll() is None:
        try:
            os.read(reader, 65536)
        except BlockingIOError:
            continue
    os.close(reader)
    assert running.popen.returncode == 0 and held_mib(node) == {}


def test_without_standard_streams(node: Node, product: Product, engine: Engine) -> None:
    """`pve-gpu-release 129 >&- 2>&- <&-`"""
    holder = engine()
    command = shlex.join(product.command)
    done = node.run(["sh", "-c", f"exec {command} 129 <&- >&- 2>&-"])
    assert dead(holder) and last_record(node)["report"]["reason"] == "released"
    assert done.returncode == 0


def test_output_to_a_full_device(node: Node, product: Product, engine: Engine) -> None:
    holder = engine()
    command = shlex.join(product.command)
    done = node.run(["sh", "-c", f"exec {command} 129 >/dev/full 2>/dev/full"])
    assert dead(holder) and last_record(node)["report"]["reason"] == "released"
    assert done.returncode == 0, "the verdict's status, whatever became of the text"


def test_a_full_run_does_not_stop_a_release(node: Node, product: Product, engine: Engine) -> None:
    node.path("/run/pve-gpu-release").mkdir()
    node.init.mount("small", "/run/pve-gpu-release", "tmpfs", 0, "size=4k,nr_inodes=2,mode=700")
    node.write("/run/pve-gpu-release/filler", b"x" * 4096)
    holder = engine()
    answer = product.release(129).must_be("released")
    assert dead(holder) and answer.json["rungs"]


def last_record(node: Node) -> dict[str, Any]:
    paths = list(node.path("/run/pve-gpu-release/releases").glob("*.json"))
    newest = max(paths, key=lambda path: path.stat().st_mtime_ns)
    found: dict[str, Any] = json.loads(newest.read_text())
    return found
