"""Arguments, exit statuses and text of the command line; what it does is in tests/integration."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hostd.cli.common import fail, positive_seconds, seconds, status_of, vmid
from hostd.cli.main import VERBS, _run, main, split_verb
from hostd.cli.output import Output
from hostd.cli.parser import Parser, module_of, parse
from hostd.cli.release import release_one
from hostd.cli.render import Renderer, count, mib, table
from hostd.cli.render import seconds as shown_seconds
from hostd.cli.verify import verify_one
from hostd.errors import BusyError, ConfigError, InterruptedRelease, NoSuchContainerError, PgrError, UsageError
from hostd.wire import error_dict, report_dict
from tests.product_command import ROOT, command

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


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["verfiy"], "; did you mean 'verify'?"),
        (["check-confg"], "; did you mean 'check-config'?"),
        (["stauts1"], "; did you mean 'status'?"),
        (["--json", "--config", "x", "doktor"], "; did you mean 'doctor'?"),
        (["129x"], ""),
        (["129,130"], "; did you mean 129 130?"),
        (["129 130"], "; did you mean 129 130?"),
        (["0x81"], ""),
        (["１２９"], ""),
        (["help", "explian"], "; did you mean 'explain'?"),
    ],
)
def test_a_mistyped_verb_is_guessed(capsys: pytest.CaptureFixture[str], words: list[str], hint: str) -> None:
    assert main([word for word in words if word != "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and "a verb" in err and (hint or "verb (see --help)") in err
    assert ("did you mean" in err) == bool(hint)
    if "--json" in words:
        assert main(words) == 2
        assert hint in json.loads(capsys.readouterr().out)["message"]


def test_a_verb_behind_a_container_is_told_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["129", "ps"])
    assert "did you mean pve-gpu-release ps ...?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["129", "--dryrun"], "unknown option '--dryrun'; did you mean --dry-run?"),
        (["129", "--tim", "3"], "unknown option '--tim'; did you mean --timeout?"),
        (["--no-deamon", "129"], "unknown option '--no-deamon'; did you mean --no-daemon?"),
        (["129", "--gpus=0"], "unknown option '--gpus'; did you mean --gpu?"),
        (["129", "--xyzzy"], "unknown option '--xyzzy' (see"),
        (["ps", "--jsn"], "did you mean --json?"),
        (["map", "--verbos"], "did you mean --verbose?"),
        (["status", "--wach"], "did you mean --watch?"),
        (["verify", "--no-verify-mem"], "did you mean --no-verify-memory?"),
        (["wait", "--fre", "1"], "did you mean --free?"),
        (["log", "--folow"], "did you mean --follow?"),
        (["explain", "--fille", "x"], "did you mean --file?"),
        (["check-config", "--verbos"], "did you mean --verbose?"),
        (["hook", "status", "--al"], "did you mean --all?"),
        (["doctor", "--conifg", "x"], "did you mean --config?"),
        (["hook", "enabel", "129"], "'enabel' is not one of enable, disable, status; did you mean 'enable'?"),
        (["hook"], "required: enable|disable|status (see"),
        (["hook", "--all"], "required: enable|disable|status (see"),
        (["129", "-x"], "unknown option '-x' (see"),
        (["129", "-nqx"], "unknown option '-x' (see"),
        (["129", "--json=1"], "--json takes no value, not '1' either"),
        (["129", "--help-me"], "unknown option '--help-me'"),
        (["129", "130,131"], "'130,131' is not a container id; did you mean 130 131?"),
        (["log", "-o", "jsn"], "did you mean 'json'?"),
    ],
)
def test_a_mistyped_option_is_guessed(capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert caught.value.code == 2 and out == "" and len(err.splitlines()) == 1 and says in err


def test_pid_may_be_given_again_and_takes_several() -> None:
    words = ["129", "--pid", "2", "130", "--pid=3,host:4"]
    assert parse("release", words).pid == "2,3,host:4" and parse("release", words).vmids == [129, 130]
    assert parse("verify", ["--pid", "2,3", "129"]).pid == "2,3"


NONSENSE = [
    *(["129", "--pid", text] for text in ("x", "", "0", "-1", "host:", "host:0", "host:host:1", "²", "4194305", "1_0")),
    *(["129", "--pid", text] for text in ("1,", ",1", "1,x", "1, 2")),
    *(["129", "--gpu", text] for text in ("", " ", "nvidia0", "-1", "1234567", "GPU-", "3b:00.9", "²")),
    *(["129", "--grace", text] for text in ("nan", "inf", "-1", "", "s", "1_0", "１", "infinity", "1e5", "0x1")),
    *(["129", "--timeout", text] for text in ("0", "0.0", "-0", "1e-999", "nan")),
    *(["129", "--gpu", "0", "--gpu", "1"], ["verify", "129", "--pid", "1", "--pid", "x"]),
    *(["129", "--config", ""], ["check-config", ""], ["log", "--file", ""], ["explain", "x", "--file", ""]),
    *(["map", "129", text] for text in ("0", "x", "host:1", "4194305")),
    *(["wait", "--gpu", "x"], ["wait", "129", "--free", ""], ["wait", "129", "--free", "-1"], ["wait", "129", "--timeout", "x"]),
    *(["hook", "enable", "129", "--chain-limit", text] for text in ("0", "1.5", "-1", "")),
    *(["status", "--interval", "nan"], ["9" * 5000], ["129", "9" * 5000]),
]


@pytest.mark.parametrize("words", NONSENSE, ids=lambda words: " ".join(words)[:40])
def test_nonsense_is_refused_before_anything_is_looked_at(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    try:
        status: object = main(words)
    except SystemExit as exc:
        status = exc.code
    out, err = capsys.readouterr()
    assert status == 2 and out == "" and len(err.splitlines()) == 1 and len(err) < 500, err


@pytest.mark.parametrize(
    "words", [["--since", ""], ["--since", "soon"], ["-n", "-5"], ["--release", "xyz"], ["--release", ""]]
)
def test_nonsense_of_log(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["log", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("pve-gpu-release: cannot ") and len(err.splitlines()) <= 2


@pytest.mark.parametrize("words", [["129", "--grace", "\udcff"], ["\udcff"], ["129", "--\udcff"], ["hook", "\udcff"]])
def test_bytes_that_are_no_text_are_shown_as_bytes(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    try:
        main(words)
    except SystemExit:
        pass
    err = capsys.readouterr().err
    assert "\\xff" in err and "udcff" not in err


def test_every_error_of_the_command_line_is_json_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["129", "--pid", "x"], ["129", "--dryrun"], ["ps", "x"], ["stauts"], ["hook"], ["--"], ["help", "x"]):
        try:
            status: object = main(["--json", *words] if words[0] != "help" else [*words, "--json"])
        except SystemExit as exc:
            status = exc.code
        out, err = capsys.readouterr()
        assert (status, err, json.loads(out)["reason"]) == (2, "", "usage"), words


@pytest.mark.parametrize("words", [["enable"], ["disable"], ["enable", "129", "--all"]])
def test_hook_asks_which_containers(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["hook", *words]) == 2
    assert capsys.readouterr().err.startswith(f"pve-gpu-release: cannot {words[0]}: ")


def test_a_plain_command_line_does_without_what_only_a_mistake_needs() -> None:
    code = "import sys; from hostd.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    for words in (["999999999"], ["999999999", "--json", "--now"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=ROOT)
        loaded = set(done.stdout.split())
        assert "hostd.cli.release" in loaded and not loaded & {"argparse", "difflib", "gettext", "shutil", "subprocess"}


def every_valued_option() -> set[str]:
    found: set[str] = set()
    for verb in VERBS:
        parser = Parser()
        module_of(verb).add_arguments(parser)
        found |= {name for a in parser._actions if a.nargs is None and a.option_strings for name in a.option_strings}
    return found


def test_the_verb_is_found_behind_every_option_that_takes_a_value() -> None:
    for option in every_valued_option() - {"-n"}:
        assert split_verb([option, "status", "ps"])[0] == "ps", option


def test_help_of_a_verb_in_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        try:
            status: object = main([*words])
        except SystemExit as exc:
            status = exc.code
        assert not status, words
        return capsys.readouterr().out

    assert shown("help") == shown("--help") == shown("-h")
    for verb in VERBS:
        assert shown("help", verb) == shown(verb, "--help") == shown(verb, "help") != "", verb


@pytest.mark.parametrize("words", [["help", "129"], ["help", "ps", "status"], ["help", "help"]])
def test_help_of_what_is_no_verb(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_description_begins_as_a_sentence() -> None:
    assert [verb for verb in VERBS if not module_of(verb).HELP[0].isupper() or not module_of(verb).HELP.endswith(".")] == []


@pytest.mark.parametrize("verb", [v for v in VERBS if v != "release"])
def test_every_verb_has_help(verb: str) -> None:
    done = subprocess.run([*command(), verb, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("usage:") and done.stderr == ""


def test_an_error_is_said_in_one_line_with_the_next_step(capsys: pytest.CaptureFixture[str]) -> None:
    error = NoSuchContainerError("no container \x1b[2J129", next_step="pct list", vmid=129)
    assert fail(error, as_json=False) == 8
    captured = capsys.readouterr()
    assert captured.err == "pve-gpu-release: no container \\x1b[2J129\n  next: pct list\n" and captured.out == ""


@pytest.mark.parametrize(
    ("error", "status"),
    [(BusyError("busy"), 75), (UsageError("cannot select"), 2), (ConfigError("cannot read x"), 2), (PgrError("bug"), 1)],
)
def test_every_error_is_one_object_for_programs(
    capsys: pytest.CaptureFixture[str], error: PgrError, status: int
) -> None:
    assert fail(error, as_json=True, vmid=129) == status
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == "" and found["schema"] == 1 and found["verdict"] is None
    assert (found["reason"], found["vmid"], found["message"]) == (error.reason, 129, error.message)


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
    out = Output(writer)
    Renderer(out, io.StringIO()).report(result)  # type: ignore[arg-type]
    os.close(writer)
    assert isinstance(out.lost, BrokenPipeError)


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


@pytest.mark.parametrize("what", ["OSError(errno.EMFILE, 'Too many open files')", "BlockingIOError(errno.EAGAIN, 'x')",
                                  "OSError(errno.ENOMEM, 'x')", "OSError(errno.ENFILE, 'x')", "MemoryError()"])  # fmt: skip
def test_a_process_that_has_nothing_left_could_not_look(what: str) -> None:
    """No descriptor, process or memory: no bug of ours, and nothing was found out."""
    code = f"import errno, hostd.cli.main as m\ndef main(argv): raise {what}\nm.main = main; m.entry()"
    done = subprocess.run([sys.executable, "-c", code, "129", "--json"], capture_output=True, text=True)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["reason"], answer["verdict"]) == (4, "cannot-look", "unknown") and done.stderr == ""


@pytest.mark.parametrize("verb", ["release", "verify"])
def test_of_several_containers_the_one_that_could_not_be_looked_at_is_a_result_too(
    monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def out_of(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("hostd.cli.release.in_process", out_of)
    args = parse(verb, ["129", "--no-daemon"])
    one = {"release": release_one, "verify": verify_one}[verb]
    found = one(129, args, Renderer(io.StringIO(), io.StringIO()))
    assert (found["vmid"], found["reason"], status_of(found)) == (129, "cannot-look", 4)


def test_a_verb_of_one_container_names_it_in_its_error(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(args: object) -> int:
        raise InterruptedRelease("interrupted")

    assert _run(interrupted, parse("wait", ["129", "--json"])) == 130
    assert json.loads(capsys.readouterr().out)["vmid"] == 129


@pytest.mark.parametrize("words", [["help", "ps", "verify"], ["help", "ps", "129"]])
def test_a_word_that_is_a_verb_is_no_typo_of_itself(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(words) == 2
    err = capsys.readouterr().err
    assert f"'{words[2]}' is " in err and "did you mean" not in err


SHOWN: list[list[str]] = [["-h"], ["--version"], ["help", "ps"], *([verb, "-h"] for verb in VERBS)]


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_closed_pipe_does_no_harm(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*command(), *words], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("words", SHOWN, ids=" ".join)
def test_a_full_disk_is_a_failure_of_what_only_shows(words: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*command(), *words], stdout=full, stderr=subprocess.PIPE, text=True)
    said = "pve-gpu-release: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_full_disk_changes_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "bad").write_text("x: 1\n")
    with open("/dev/full", "w") as full:
        for file, status in (("bad", 2), ("none", 2)):
            words = ["check-config", "--json", str(tmp_path / file)]
            done = subprocess.run([*command(), *words], stdout=full, stderr=subprocess.PIPE, text=True)
            assert done.returncode == status and done.stderr.endswith("No space left on device\n")
        (tmp_path / "good").write_text("ladder: {grace: 3}\n")
        done = subprocess.run([*command(), "check-config", str(tmp_path / "good")], stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 0 and b"cannot write" in done.stderr


def test_a_pipe_that_somebody_made_non_blocking_gets_everything() -> None:
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    out = Output(writer)
    with subprocess.Popen(["wc", "-c"], stdin=reader, stdout=subprocess.PIPE) as counting:
        os.close(reader)
        for _ in range(100):
            out.write("x" * 10_000)
        out.flush()
        os.close(writer)
        assert counting.stdout is not None and int(counting.stdout.read()) == 1_000_000
    assert out.lost is None


def test_what_the_encoding_lacks_is_written_as_an_escape() -> None:
    reader, writer = os.pipe()
    out = Output(writer, "ascii")
    out.write("größe … \udcff")
    out.flush()
    assert os.read(reader, 100) == b"gr\\xf6\\xdfe \\u2026 \\udcff"
    os.close(reader)
    os.close(writer)


def test_an_interruption_and_a_bug_are_json_for_programs() -> None:
    for what, status, reason in (("KeyboardInterrupt", 130, "interrupted"), ("KeyError", 1, "internal-error")):
        code = f"import hostd.cli.main as m\ndef main(argv): raise {what}\nm.main = main; m.entry()"
        done = subprocess.run([sys.executable, "-c", code, "129", "--json"], capture_output=True, text=True)
        assert (done.returncode, json.loads(done.stdout)["reason"], done.stderr) == (status, reason, "")


def test_missing_streams_are_made_before_anything_is_opened() -> None:
    closed = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    assert subprocess.run([*closed, *command(), "--help"]).returncode == 0
