"""The command line as a clumsy or a hostile user meets it: broken configurations, lost output, odd surroundings."""

from __future__ import annotations

import json
import os
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hostd import audit
from tests.embedded.node import Container, HolderHandle, Node, wait_until
from tests.unit import trail

from .conftest import ALL_NODES
from .product import Answer, Product, dead, finish, parsed, written_ahead
from .terminal import Terminal

Engine = Callable[..., HolderHandle]
FILE = "/run/asked.yaml"

TAKE_A_CONFIGURATION = [
    ["129"],
    ["129", "--dry-run"],
    ["--gpu", "0", "--all-containers", "--yes"],
    ["ps"],
    ["ps", "129"],
    ["verify"],
    ["verify", "129"],
    ["map", "129", "1"],
    ["status"],
    ["wait", "129"],
    ["doctor"],
    ["hook", "status"],
    ["hook", "enable", "129"],
    ["check-config"],
]


@pytest.mark.parametrize("text", [None, "ladder: {grase: 1}\n"], ids=["missing", "unknown key"])
def test_a_configuration_that_was_asked_for_must_be_right_for_every_verb(
    node: Node, product: Product, engine: Engine, text: str | None
) -> None:
    holder = engine()
    if text is not None:
        node.write(FILE, text)
    for words in TAKE_A_CONFIGURATION:
        answer = product.run(*words, "--config", FILE)
        lines = answer.err.splitlines()
        assert (answer.status, answer.out) == (2, ""), (words, answer)
        assert 1 <= len(lines) <= 2 and "asked.yaml" in lines[0], (words, answer)
        assert lines[1:] in ([], [f"  next: pve-gpu-release check-config {FILE}"]), (words, answer)
        answer = product.ask(*words, "--config", FILE)
        assert answer.status == 2 and answer.err == "", (words, answer)
        assert answer.json.get("reason") == "config-error" or answer.json["errors"], (words, answer)
    assert holder.alive()


def test_a_configuration_that_was_asked_for_is_not_silently_the_defaults_without_yaml(
    node: Node, product: Product, container: Container
) -> None:
    node.write(FILE, "ladder: {grace: 60}\n")
    code = "import sys; sys.modules['yaml'] = None; from hostd.cli.main import entry; entry()"
    for words, status in ((["129", "--config", FILE], 2), (["check-config", FILE], 4), (["129"], 0)):
        done = node.run([product.command[0], "-c", code, *words], env={"PYTHONPATH": str(Path(__file__).parents[2])})
        assert done.returncode == status, done
        assert ("python3-yaml is not installed" in done.stderr) == (status != 0), done


def test_a_right_one_is_used(node: Node, product: Product, container: Container) -> None:
    node.write(FILE, "nvml: {deadline: 3}\n")
    for words in TAKE_A_CONFIGURATION:
        assert product.run(*words, "--config", FILE).status != 2, words


# --- output that is lost -----------------------------------------------------------------------------------------------

VERBS: list[tuple[list[str], bool]] = [
    (["ps"], True),
    (["ps", "--json"], True),
    (["status"], True),
    (["status", "--json"], True),
    (["map", "129", "1"], True),
    (["map", "129", "1", "--json"], True),
    (["log", "--file", "/run/export"], True),
    (["explain", "last", "--file", "/run/export"], True),
    (["verify"], False),
    (["verify", "--json"], False),
    (["129", "-n"], False),
    (["129", "-n", "--json"], False),
    (["wait", "129"], False),
    (["wait", "129", "--json"], False),
    (["doctor"], False),
    (["doctor", "--json"], False),
    (["hook", "status", "129"], False),
    (["check-config", "-v"], False),
    (["12"], False),
    (["129", "--nonsense"], False),
]
"""(command line, does it nothing but show)"""


def test_lost_output_ends_nothing_and_changes_no_verdict(node: Node, product: Product, container: Container) -> None:
    node.write("/run/export", exported())
    command = shlex.join(product.command)
    for words, only_shows in VERBS:
        normal = product.run(*words)
        closed = node.run(["sh", "-c", f"exec {command} {' '.join(words)} | true"])
        piped = into_closed_pipe(node, product, words)
        assert (closed.returncode, piped.status) == (0, normal.status), words
        assert "cannot write" not in piped.err and "Traceback" not in piped.err, words
        full = node.run(["sh", "-c", f"exec {command} {' '.join(words)} >/dev/full"])
        assert full.returncode == (1 if only_shows and normal.status == 0 else normal.status), (words, full)
        said = full.stderr.count("pve-gpu-release: cannot write the output: No space left on device\n")
        assert said == bool(normal.out) and "internal error" not in full.stderr, (words, full)
        both = node.run(["sh", "-c", f"exec {command} {' '.join(words)} >/dev/full 2>/dev/full"])
        assert both.returncode == full.returncode, (words, both)
        none = node.run(["sh", "-c", f"exec {command} {' '.join(words)} <&- >&- 2>&-"])
        assert none.returncode == normal.status, (words, none)


def into_closed_pipe(node: Node, product: Product, words: list[str]) -> Answer:
    reader, writer = os.pipe()
    os.close(reader)
    running = product.start(*words, stdout=writer)
    os.close(writer)
    return finish(running)


def exported() -> str:
    """The audit trail of one release, as `journalctl -o export` writes it."""
    entries: list[audit.Entry] = []
    trail.tell(audit.Trail(entries.append), trail.report(), trail.holder())
    head = "__REALTIME_TIMESTAMP=1796069701000000\n__MONOTONIC_TIMESTAMP=1\n_UID=0\n"
    return "".join(head + "".join(f"{name}={value}\n" for name, value in entry) + "\n" for entry in entries)


# --- interruptions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--json"], ["-q"]], ids=["text", "json", "quiet"])
def test_a_lost_error_stream_keeps_no_container_from_its_release(
    node: Node, product: Product, engine: Engine, words: list[str]
) -> None:
    """The first container's complaint cannot be written; the second one is released all the same."""
    holder = engine()
    reader, writer = os.pipe()
    os.close(reader)
    running = product.start(12, 129, *words, stdout=writer, stderr=writer)
    os.close(writer)
    assert running.popen.wait(timeout=60) == 8 and dead(holder)


@pytest.mark.parametrize("words", [[], ["--json"]], ids=["text", "json"])
def test_ctrl_c_ends_the_whole_run_and_says_what_was_done_before(
    node: Node, product: Product, engine: Engine, words: list[str]
) -> None:
    first = engine()
    second = node.container(130).spawn_holder(open=ALL_NODES, alloc=("51:100:compute",), ignore_term=True)
    running = product.start(129, 130, "--grace", "60", *words)
    first.wait_gone()
    wait_until(lambda: begun(node, 130), "TERM to 130")
    running.process.kill(signal.SIGINT)
    done = finish(running)
    assert done.status == 130 and second.alive() and "Traceback" not in done.err
    if words:
        found = parsed(done.status, done.out, done.err).json["releases"]
        assert [r["reason"] for r in found] == ["released", "interrupted"]
    else:
        assert "released: container 129" in done.out and "interrupted" in done.out and "more holder" not in done.out


def begun(node: Node, vmid: int) -> bool:
    """A release of this container has written down that it sends a signal."""
    records = [json.loads(path.read_text()) for path in node.path("/run/pve-gpu-release/releases").glob("*.json")]
    return any(record["vmid"] == vmid and '"step": "term"' in json.dumps(record) for record in records)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_between_two_containers_begins_no_other_release(
    node: Node, product: Product, engine: Engine, number: signal.Signals
) -> None:
    """It comes when the first one's report is already written."""
    for _ in range(5):
        first = engine()
        second = node.container(130).spawn_holder(open=ALL_NODES, alloc=("51:100:compute",), ignore_term=True)
        running = product.start(129, 130, "--grace", "60", "--json")
        first.wait_gone()
        wait_until(lambda: '"verdict": "released"' in written_ahead(node), "the first one's report")
        running.process.kill(number)
        done = finish(running)
        assert done.status == 130 and second.alive(), done
        assert parsed(done.status, done.out, done.err).json["releases"][0]["reason"] == "released"
        second.kill()
        for path in node.path("/run/pve-gpu-release/releases").glob("*.json"):
            path.unlink()


def test_ctrl_c_in_a_handover_leaves_the_other_containers_alone(node: Node, product: Product, engine: Engine) -> None:
    first = engine(ignore_term=True)
    second = node.container(130).spawn_holder(open=ALL_NODES, alloc=("50:100:compute",))
    running = product.start("--gpu", "0", "--all-containers", "--yes", "--grace", "60", "--json")
    wait_until(lambda: begun(node, 129), "TERM to 129")
    running.process.kill(signal.SIGINT)
    done = finish(running)
    found = parsed(done.status, done.out, done.err).json["releases"]
    assert done.status == 130 and first.alive() and second.alive()
    assert [(r["vmid"], r["reason"]) for r in found] == [(129, "interrupted")]


def test_the_question_of_a_handover_is_no_part_of_its_json(node: Node, product: Product, engine: Engine) -> None:
    """Answered with bytes that are no text, which is a no."""
    holder = engine()
    command = shlex.join([*product.command, "--gpu", "0", "--all-containers", "--json"])
    with Terminal(node, ["sh", "-c", f"{command} >/run/answer; echo status $?"]) as terminal:
        assert "y/N" in terminal.read_until("[y/N]")
        terminal.type(b"\xff\n")
        terminal.read_until("status 7")
    assert json.loads(node.read("/run/answer"))["reason"] == "refused" and holder.alive()


def test_the_live_view_takes_any_key_and_leaves_the_terminal_as_it_was(node: Node, product: Product) -> None:
    for keys in (b"\xff\xfe\x1b[Aq", b"Q", b"\x03"):
        with Terminal(node, [*product.command, "status", "--watch", "--interval", "0"]) as terminal:
            terminal.read_until("q ends it")
            terminal.type(keys)
            text, status = terminal.finish()
        assert status == 0 and text.endswith("\x1b[?25h\x1b[?1049l"), text[-300:]


ANY = [["129"], ["129", "-n"], ["ps"], ["status"], ["verify"], ["wait", "129"], ["doctor"]]


@pytest.mark.parametrize("words", ANY, ids=" ".join)
def test_ctrl_c_at_any_moment(node: Node, product: Product, container: Container, words: list[str]) -> None:
    """Never a traceback, never two objects, never a status of its own; and nothing is left running."""
    for json_too in (False, True):
        for delay_ms in range(20, 320, 60):
            running = product.start(*words, *(["--json"] if json_too else []))
            time.sleep(delay_ms / 1000)  # any moment: that it is another one each time is the point
            running.process.kill(signal.SIGINT)
            done = finish(running)
            if done.status == -signal.SIGINT or ("KeyboardInterrupt" in done.err and "interrupt.py" not in done.err):
                continue  # the interpreter itself had not begun with us yet: our handler is not in it
            assert done.status in (0, 3, 4, 130) and "Traceback" not in done.err, f"{delay_ms} ms: {done}"
            assert "internal error" not in done.out + done.err, (delay_ms, done)
            if json_too:
                parsed(done.status, done.out, done.err)


# --- surroundings ------------------------------------------------------------------------------------------------------


def test_without_home_language_or_terminal(node: Node, product: Product, engine: Engine) -> None:
    """As cron and a hook start it, and in the plainest locale: names are escaped, nothing fails."""
    engine(argv=("größe\x1b[2J…",))
    for env in (["LANG=C"], ["LC_ALL=POSIX"], ["PYTHONIOENCODING=ascii"], ["PYTHONCOERCECLOCALE=0", "PYTHONUTF8=0", "LC_ALL=C"]):
        for words in (["ps"], ["ps", "--json"], ["status"], ["129", "-n"]):
            done = node.run(["env", "-i", *env, *product.command, *words])
            assert done.returncode in (0, 3) and "\x1b" not in done.stdout and done.stderr == "", done


def test_a_container_that_is_named_twice_is_shown_once(product: Product, engine: Engine) -> None:
    engine()
    assert product.run("ps", 129, 129) == product.run("ps", "0129")


def test_no_containers_at_all(node: Node, product: Product) -> None:
    answer = product.run("verify")
    assert (answer.status, answer.err) == (0, "") and "there is no container on this node" in answer.out
    answer = product.ask("verify")
    assert (answer.status, answer.json["verdict"], answer.json["releases"]) == (0, "released", [])
    assert "no container" in answer.json["message"]
    assert product.run("verify", "-q").out == ""


@pytest.mark.parametrize("width", ["1", "10", "40"])
def test_a_narrow_terminal(node: Node, product: Product, engine: Engine, width: str) -> None:
    engine(ignore_term=True)
    words = ["env", f"COLUMNS={width}", *product.command, "129", "--grace", "0.5"]
    with Terminal(node, words) as terminal:
        text, status = terminal.finish()
    assert status == 0 and "Traceback" not in text and "released" in text


def test_a_huge_command_line_is_answered_shortly(node: Node, product: Product) -> None:
    many = [str(number) for number in range(100_000, 101_500)]
    for words in (["ps", *many], ["x" * 100_000], ["129", "--gpu", "9" * 100_000], ["129", *["--" + "y" * 1000] * 50]):
        answer = product.run(*words, timeout=60)
        assert answer.status in (2, 8) and len(answer.err) < 1000, answer.err[:2000]
