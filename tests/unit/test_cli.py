"""Arguments, exit statuses and text of the command line; what it does is in tests/integration."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from typing import Any

import pytest

from hostd.cli.common import fail, positive_seconds, seconds, status_of, vmid
from hostd.cli.main import VERBS, main, split_verb
from hostd.cli.render import Renderer, count, mib, table
from hostd.cli.render import seconds as shown_seconds
from hostd.errors import BusyError, NoSuchContainerError, UsageError
from hostd.wire import error_dict, report_dict
from tests.product_command import command

from .test_wire import report


@pytest.mark.parametrize(
    ("argv", "verb", "rest"),
    [
        (["129"], "release", ["129"]),
        (["129", "ps"], "release", ["129", "ps"]),
        (["ps"], "ps", []),
        (["--json", "ps", "129"], "ps", ["--json", "129"]),
        (["--config", "ps", "129"], "release", ["--config", "ps", "129"]),
        (["--gpu", "verify", "129"], "release", ["--gpu", "verify", "129"]),
        (["--", "ps"], "release", ["--", "ps"]),
        (["-n", "129"], "release", ["-n", "129"]),
        (["verify", "--gpu", "0"], "verify", ["--gpu", "0"]),
        ([], "release", []),
    ],
)
def test_the_verb_is_the_first_word_that_is_no_options_value(argv: list[str], verb: str, rest: list[str]) -> None:
    assert split_verb(argv) == (verb, rest)


@pytest.mark.parametrize("text", ["1", "129", "999999999", "0129"])
def test_a_container_id(text: str) -> None:
    assert vmid(text) == int(text)


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "1.5", "129x", "１２９", "²", "1000000000", "0x81", "129 ", "9" * 5000]
)
def test_no_container_id(text: str) -> None:
    import argparse

    with pytest.raises((argparse.ArgumentTypeError, ValueError)):
        vmid(text)


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("1.5", 1.5), ("10s", 10), ("86400", 86400), (".5", 0.5)])
def test_seconds(text: str, value: float) -> None:
    assert seconds(text) == value
    if value:
        assert positive_seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "-1", "nan", "inf", "1e9", "ten", "1m", "86401"])
def test_no_seconds(text: str) -> None:
    import argparse

    for kind in (seconds, positive_seconds):
        with pytest.raises(argparse.ArgumentTypeError):
            kind(text)


def test_a_time_limit_of_0_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["129", "--timeout", "0"])
    assert caught.value.code == 2 and len(capsys.readouterr().err.splitlines()) == 1


def test_without_arguments_it_explains_itself_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    text = capsys.readouterr().out
    assert all(name in text for name in VERBS) and "Exit status" in text
    assert main(["--help"]) == 0 and main(["--version"]) == 0


def test_a_mistyped_verb_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verfiy"]) == 2
    assert "did you mean 'verify'" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "release"])
def test_every_verb_has_help(verb: str) -> None:
    done = subprocess.run([*command(), verb, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage:") and done.stderr == ""


def test_an_error_is_said_in_one_line_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    error = NoSuchContainerError("no container \x1b[2J129", next_step="pct list", vmid=129)
    assert fail(error, as_json=False) == 8
    captured = capsys.readouterr()
    assert captured.err == "pve-gpu-release: no container \\x1b[2J129\n  next: pct list\n" and captured.out == ""


def test_an_error_is_json_for_programs_but_not_for_wrong_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    assert fail(BusyError("busy"), as_json=True, vmid=129) == 75
    assert '"reason": "busy"' in capsys.readouterr().out
    assert fail(UsageError("cannot select"), as_json=True) == 2
    assert capsys.readouterr().out == ""


def test_the_status_of_a_result() -> None:
    assert status_of(report_dict(report())) == 5 and status_of(error_dict(BusyError("busy"), 1)) == 75


# --- text --------------------------------------------------------------------------------------------------------------


def rendered(result: dict[str, Any], **options: bool) -> str:
    out = io.StringIO()
    Renderer(out, io.StringIO(), **options).report(result)
    return out.getvalue()


def test_a_report_for_people_has_the_proof_who_is_left_and_what_to_do() -> None:
    text = rendered(report_dict(report()))
    assert "GPU 0  1 MiB -> 2 MiB in use" in text and "not touched: container 130 pid 7" in text
    assert "unkillable: pid 11 (p11), state S, task 11 waits in os_acquire_mutex" in text
    assert "held: message" in text and "next: next" in text


def test_quiet_says_only_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert rendered(report_dict(report()), quiet=True) == ""
    assert capsys.readouterr().err == "message\n"


@pytest.mark.parametrize("result", [report_dict(report()), error_dict(BusyError("busy"), 129)], ids=["report", "error"])
def test_a_reader_that_went_away_is_no_failure(result: dict[str, Any]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        Renderer(out, io.StringIO()).report(result)


def test_words() -> None:
    assert (count(1, "holder"), count(2, "holder")) == ("1 holder", "2 holders")
    assert (mib(None), mib(42759)) == ("? MiB", "42,759 MiB")
    assert (shown_seconds(84.2), shown_seconds(1300)) == ("84 ms", "1.3 s")
    assert table([["a", "bb"], ["ccc", "d"]]) == ["a    bb", "ccc  d"] and table([]) == []


# --- the process -------------------------------------------------------------------------------------------------------


def test_tracebacks_stay_off_the_terminal() -> None:
    """A bug becomes exit status 1 and one line."""
    code = "import hostd.cli.main as m; m.main = lambda argv: 1 // 0; m.entry()"
    done = subprocess.run([sys.executable, "-c", code, "129"], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.splitlines()[0].startswith(
        "pve-gpu-release: internal error: ZeroDivisionError"
    )
    assert "Traceback" not in done.stderr


def test_a_closed_pipe_is_told_as_a_shell_would() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command(), "--help"], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert done.returncode == 141 and done.stderr == ""


def test_missing_streams_are_made_before_anything_is_opened() -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closed, *command(), "--help"]).returncode == 0
