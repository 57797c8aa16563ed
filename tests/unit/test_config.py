"""The configuration file: what it may say, what it may not, and that nothing in it ends in a traceback."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from argparse import ArgumentParser
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostd import config
from hostd.cli import check_config
from hostd.config import BrokenConfigError, Config, OnDirty, ResetPolicy
from hostd.configkeys import KEYS, default_yaml, reference_rows
from hostd.configvalues import effective_values
from hostd.errors import ConfigError
from hostd.ladder import Limits

ROOT = Path(__file__).resolve().parents[2]


def problems(text: str | bytes) -> list[str]:
    with pytest.raises(BrokenConfigError) as caught:
        config.parse(text.encode() if isinstance(text, str) else text, "config.yaml")
    return list(caught.value.problems)


def uncommented(text: str) -> str:
    return re.sub(r"(?m)^#(?=(  )?[a-z])", "", text)


# --- the shipped file ----------------------------------------------------------------------------------------------


def test_the_shipped_file_is_the_built_in_defaults() -> None:
    shipped = (ROOT / "etc/config.yaml").read_text()
    assert shipped == default_yaml()
    assert config.parse(shipped.encode()) == Config()


def test_the_shipped_file_with_every_setting_in_force_changes_nothing() -> None:
    import yaml

    text = uncommented(default_yaml())
    assert config.parse(text.encode()) == Config()
    data = yaml.safe_load(text)
    named = {f"{head}.{leaf}" for head, section in data.items() if head != "containers" for leaf in section}
    assert named == {key.path for key in KEYS}
    assert data["containers"] == {}


def test_every_limit_of_the_ladder_can_be_configured() -> None:
    assert {f.name for f in fields(Limits)} == {
        *(
            key.path.split(".")[1] + ("_s" if key.kind == "seconds" else "")
            for key in KEYS
            if "ladder." in key.path
        )
    } - {"stop_units", "reset"} | {"nvml_deadline_s"}


def test_every_key_reaches_its_setting() -> None:
    """Set each key alone to something else than its default and see it, and only it, in what is in force."""
    other = {"seconds": "7.5", "number": "1", "mib": "1024", "yes-no": "true", "units": "[dcgm-exporter]"}
    for key in KEYS:
        head, _, leaf = key.path.partition(".")
        text = other.get(key.kind) or next(choice for choice in key.choices if choice != key.default)
        changed = effective_values(config.parse(f"{head}: {{{leaf}: {text}}}".encode()))
        before = effective_values(Config())
        assert [path for path in before if before[path] != changed[path]] == [key.path]


def test_the_reference_has_every_key_with_its_default_and_meaning() -> None:
    rows = reference_rows()
    assert [row.path for row in rows] == [key.path for key in KEYS]
    assert all(row.type and row.meaning and row.default for row in rows)


# --- values --------------------------------------------------------------------------------------------------------


def test_a_container_has_its_overrides_and_the_rest_of_the_file() -> None:
    loaded = config.parse(
        b"ladder: {grace: 20, stop_units: true}\nhook: {on_dirty: block}\n"
        b"containers:\n  129:\n    ladder: {grace: 60, reset: auto}\n    hook: {min_free_mib: 40000}\n  130:\n"
    )
    own, other = loaded.for_container(129), loaded.for_container(999)
    assert (own.limits.grace_s, own.limits.kill_grace_s, own.stop_units, own.reset) == (60, 5, True, ResetPolicy.AUTO)
    assert (own.hook.min_free_mib, own.hook.on_dirty) == (40000, OnDirty.BLOCK)
    assert (other.limits.grace_s, other.reset, other.hook.min_free_mib) == (20, ResetPolicy.NEVER, 0)
    assert loaded.for_container(130) == other
    assert (loaded.nvml.deadline_s, loaded.reset.services) == (10, config.ResetSettings().services)


def test_sections_that_are_empty_or_all_comments_are_the_defaults() -> None:
    assert config.parse(b"ladder:\n#  grace: 3\nhook: ~\ncontainers:\n") == Config()
    assert config.parse(b"") == config.parse(b"\n  # x\n\t\n") == config.parse(b"---\n") == Config()


def test_service_names_get_their_suffix() -> None:
    loaded = config.parse(b"reset: {services: [dcgm-exporter, a@b.service, dcgm-exporter]}")
    assert loaded.reset.services == ("dcgm-exporter.service", "a@b.service")


def test_a_byte_order_mark_and_crlf_do_no_harm() -> None:
    assert config.parse("\ufeffladder:\r\n  grace: 3\r\n".encode()).ladder.limits.grace_s == 3


# --- mistakes ------------------------------------------------------------------------------------------------------

SECONDS = "expected a number of seconds > 0 and <= 86400"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("ladder:\n  grace: ten", f"cannot read ladder.grace: {SECONDS}, got 'ten' (config.yaml, line 2)"),
        (
            "ladder: {grace: '10'}",
            f"cannot read ladder.grace: {SECONDS}, got the quoted text '10' (config.yaml, line 1)",
        ),
        ("ladder: {grace: }", f"cannot read ladder.grace: {SECONDS}, got nothing (config.yaml, line 1)"),
        ("ladder: {grace: [1]}", f"cannot read ladder.grace: {SECONDS}, got a list (config.yaml, line 1)"),
        ("ladder: {grase: 1}", "unknown key ladder.grase; did you mean ladder.grace? (config.yaml, line 1)"),
        (
            "ladder: {budget: 1}",
            "unknown key ladder.budget; did you mean hook.budget? (config.yaml, line 1)",
        ),
        ("grace: 1", "unknown key grace; did you mean ladder.grace? (config.yaml, line 1)"),
        ("hook:\n  buget: 1", "unknown key hook.buget; did you mean hook.budget? (config.yaml, line 2)"),
        ("ladder: {buget: 1}", "unknown key ladder.buget; did you mean hook.budget? (config.yaml, line 1)"),
        ("kill-grace: 1", "unknown key kill-grace; did you mean ladder.kill_grace? (config.yaml, line 1)"),
        ("hook: {On-Dirty: warn}", "unknown key hook.On-Dirty; did you mean hook.on_dirty? (config.yaml, line 1)"),
        ("129: {}", "unknown key 129; did you mean containers.129? (config.yaml, line 1)"),
        (
            "ladder.grace: 5",
            "unknown key ladder.grace; write it as ladder: and below it, indented, grace: (config.yaml, line 1)",
        ),
        (
            "containers: {129: {ladder: {grase: 1}}}",
            "unknown key containers.129.ladder.grase; did you mean containers.129.ladder.grace? (config.yaml, line 1)",
        ),
        ("hook: {xyzzy: 1}", "hook.xyzzy; known here: budget, pre_start_budget, on_dirty, min_free_mib, "
         "watchdog_delay, watchdog_interval (config.yaml, line 1)"),
        ("lader: {}", "unknown key lader; did you mean ladder? (config.yaml, line 1)"),
        (
            "ladder: {grace: 1, grace: 2}",
            "cannot read ladder.grace: given twice, first in line 1 (config.yaml, line 1)",
        ),
        ("ladder: {}\nladder: {}", "cannot read ladder: given twice, first in line 1 (config.yaml, line 2)"),
        ("ladder: 5", "cannot read ladder: expected `key: value` lines, got '5' (config.yaml, line 1)"),
        ("- 1", "cannot read the file: expected `key: value` lines, got a list (config.yaml, line 1)"),
        (
            "hook: {on_dirty: blok}",
            "cannot read hook.on_dirty: expected warn or block, got 'blok' (config.yaml, line 1)",
        ),
        (
            "containers: {12: {}}",
            "cannot read containers: expected a container id from 100 to 999999999, got '12' (config.yaml, line 1)",
        ),
        (
            "containers: {129: {}, '129': {}}",
            "cannot read containers.129: given twice, first in line 1 (config.yaml, line 1)",
        ),
        (
            "containers: {129: {budget: 1}}",
            "unknown key containers.129.budget; did you mean containers.129.hook.budget? "
            "(config.yaml, line 1)",
        ),
        (
            "containers: {129: {nvml: {deadline: 1}}}",
            "unknown key containers.129.nvml; known here: ladder, hook (config.yaml, line 1)",
        ),
        (
            "reset:\n  services:\n  - a\n  - --root=/x",
            "cannot read reset.services: expected a list of systemd service names, got '--root=/x' "
            "(config.yaml, line 4)",
        ),
        (
            "a: 1\n---\nb: 1",
            "expected a single document in the stream but found another document (config.yaml, line 2)",
        ),
        ("ladder:\n\tgrace: 1", "cannot start any token; indent with spaces (config.yaml, line 2)"),
        ("a: &x {}\nb: *x", "anchors and aliases (& and *) are not supported here (config.yaml, line 1)"),
        ("a: !!python/name:os.system x", "tags (!...) are not supported here (config.yaml, line 1)"),
        ("ladder: {grace: 1\n", "(config.yaml, line 2)"),
        ("ladder: {\x1b]0;x: 1}", "character U+001B is not allowed (config.yaml, line 1)"),
        ("? {a: b}\n: c", "cannot read the file: expected a key, got a section (config.yaml, line 1)"),
    ],
)
def test_a_mistake_is_named_with_key_and_line(text: str, problem: str) -> None:
    assert len(found := problems(text)) == 1
    assert found[0].endswith(problem)


@pytest.mark.parametrize(
    "value",
    ["0", "-1", "+5", ".inf", "-.inf", ".nan", "nan", "1e3", "010", "0x10", "1_000", "1:30", "true", "null", "86401",
     "9" * 400, "1.", ".5", "1.5.5", "١٠", "10s", "{}", "[]", "''", "2001-01-01"],
)  # fmt: skip
def test_what_is_no_number_of_seconds(value: str) -> None:
    assert "ladder.grace" in problems(f"ladder: {{grace: {value}}}")[0]


@pytest.mark.parametrize("value", ["1.5", "-1", "true", "16777217", "99999999999999999999", "1e3", "many"])
def test_what_is_no_number_of_mib(value: str) -> None:
    assert "hook.min_free_mib" in problems(f"hook: {{min_free_mib: {value}}}")[0]


@pytest.mark.parametrize("value", ["1", "0", "maybe", "'true'", "[]"])
def test_what_is_neither_true_nor_false(value: str) -> None:
    assert "expected true or false" in problems(f"ladder: {{stop_units: {value}}}")[0]


def test_all_mistakes_are_reported_in_the_order_of_the_file() -> None:
    found = problems("ladder: {grace: x, timeout: y}\nhook: {z: 1}\ncontainers: {129: {ladder: {grace: 0}}}\n")
    assert [re.search(r"(?:read|key) (\S+?)[:;]", problem)[1] for problem in found] == [  # type: ignore[index]
        "ladder.grace",
        "ladder.timeout",
        "hook.z",
        "containers.129.ladder.grace",
    ]


def test_the_message_is_one_line_and_says_how_many_more_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(b"a: 1\nb: 1\nc: 1\n")
    assert "\n" not in caught.value.message
    assert caught.value.message.endswith("(and 2 more)")


def test_hostile_text_in_the_file_is_escaped_in_the_message() -> None:
    assert "'\\u202egrace'" in problems("ladder: {grace: '\u202egrace'}")[0]


def test_a_file_full_of_mistakes_ends_the_list() -> None:
    found = problems("\n".join(f"k{i}: 1" for i in range(1000)))
    assert len(found) == 51
    assert found[-1].endswith("the rest is not listed")


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 500_000,
        b"{a: " * 200_000,
        b"- " * 400_000,
        b"? " * 400_000,
        b"a: &a [x, x]\n" + b"".join(b"b%d: &b%d [*a, *a, *a]\n" % (i, i) for i in range(1000)),
        b"x" * (1 << 20),
        b"ladder: {grace: " + b"9" * 900_000 + b"}",
        b"a:\n" * 250_000,
        b"a: 1\n" * 200_000,
        b"containers: {" + b",".join(b"%d: {ladder: {grace: 1}}" % i for i in range(100, 30_000)) + b"}",
        b'"' + b"\\n" * 400_000,
        b"%TAG ! x\n" * 100_000,
    ],
)
def test_a_bomb_is_a_mistake_within_seconds(text: bytes) -> None:
    begun = time.monotonic()
    assert problems(text)
    assert time.monotonic() - begun < 20


def test_a_file_that_is_too_large_is_not_read() -> None:
    assert "larger than 1 MiB" in problems(b"#" * ((1 << 20) + 1))[0]


def test_what_is_not_utf_8_is_named_by_line() -> None:
    assert problems(b"# ok\nladder: {grace: \xff}\n") == ["cannot read config.yaml: not UTF-8 text (line 2)"]
    assert problems("ladder: {}".encode("utf-16"))


# --- files ---------------------------------------------------------------------------------------------------------


def test_a_missing_file_is_the_defaults_unless_it_was_named(tmp_path: Path) -> None:
    path = str(tmp_path / "none.yaml")
    assert config.load(path) == Config()
    with pytest.raises(BrokenConfigError, match="no such file"):
        config.load(path, must_exist=True)


def test_a_directory_or_a_fifo_is_a_mistake_and_never_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("fifo", "."):
        with pytest.raises(BrokenConfigError, match="not a regular file"):
            config.load(str(tmp_path / name))


def test_the_hook_goes_on_with_the_defaults_and_says_why(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("ladder: {grace: x}\nfoo: 1\n")
    loaded, found = config.load_or_default(str(path))
    assert loaded == Config()
    assert len(found) == 3
    assert found[-1] == "the built-in defaults are used"
    path.write_text("ladder: {grace: 3}\n")
    assert config.load_or_default(str(path))[1] == []


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_without_yaml_the_defaults_hold_and_a_notice_says_so(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("ladder: {grace: 3}\n")
    out = run_python(
        "import sys; sys.modules['yaml'] = None\n"
        "from hostd import config\n"
        "c = config.load(sys.argv[1]); print(c.ladder.limits.grace_s, *c.notices)\n"
        "print(config.load_or_default(sys.argv[1])[1])",
        str(path),
    )
    assert out.startswith("10.0 cannot read ")
    assert out.count("python3-yaml is not installed; the built-in defaults are used") == 2


@pytest.mark.parametrize("text", [None, "# nothing but comments\n\n"])
def test_yaml_is_not_imported_for_a_file_that_says_nothing(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "config.yaml"
    if text is not None:
        path.write_text(text)
    out = run_python(
        "import sys\nfrom hostd import config\nconfig.load_or_default(sys.argv[1])\n"
        "print([m for m in sys.modules if m == 'yaml' or m.startswith('hostd.config')])",
        str(path),
    )
    assert out == "['hostd.config']\n"


def test_the_message_of_an_error_is_a_sentence_for_every_verb() -> None:
    with pytest.raises(ConfigError) as caught:
        config.parse(b"ladder: {grase: 1}", "config.yaml")
    assert caught.value.message == "unknown key ladder.grase; did you mean ladder.grace? (config.yaml, line 1)"


# --- fuzz ----------------------------------------------------------------------------------------------------------

PIECES = [
    "ladder:", "hook:", "containers:", "129:", "grace: 5", "  grace: 5", "on_dirty: block", "{", "}", "[", "]", ",",
    ":",
    "- ", "? ", "&a", "*a", "<<: *a", "!!int", "!x", "---", "...", "%YAML 1.1", "\t", "\n", "\n  ", "\n    ", "'", '"',
    "|", ">", "#", "\x00", "\x1b", "\ufeff", "\u2028", "\x85", "\ud7ff", "\U0010ffff", ".nan", ".inf", "-1", "1e999",
    "0x", "~", "null", "true", "=", "@", "`", "\\", "\\x", "2001-01-01", "reset: {services: [a]}", "é", "𝟙",
]  # fmt: skip


def survives(data: bytes) -> None:
    try:
        assert isinstance(config.parse(data), Config)
    except BrokenConfigError as exc:
        assert exc.problems
        assert all(problem.startswith(("cannot read ", "unknown key ")) or "mistakes" in problem for problem in exc.problems)
        assert all(problem.isprintable() for problem in exc.problems)


def mutations(seed: int, count: int) -> list[bytes]:
    chance = random.Random(seed)
    base = "ladder:\n  grace: 10\n  reset: auto\nhook: {on_dirty: warn}\ncontainers:\n  129:\n    hook: {budget: 3}\n"
    made = []
    for number in range(count):
        text = base if number % 3 else ""
        for _ in range(chance.randint(1, 8)):
            at = chance.randint(0, len(text))
            cut = at + (chance.randint(0, 6) if chance.random() < 0.5 else 0)
            text = text[:at] + chance.choice(PIECES) + text[cut:]
        data = bytearray(text.encode("utf-8", "surrogatepass"))
        if number % 7 == 0 and data:
            data[chance.randrange(len(data))] = chance.randrange(256)
        made.append(bytes(data))
    return made


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_mangled_files_are_a_configuration_or_a_list_of_mistakes(seed: int) -> None:
    for data in mutations(seed, 2600):
        survives(data)


@settings(max_examples=500, deadline=None)
@given(st.one_of(st.binary(max_size=200), st.lists(st.sampled_from(PIECES), max_size=30).map("".join).map(str.encode)))
def test_any_bytes_are_a_configuration_or_a_list_of_mistakes(data: bytes) -> None:
    survives(data)


# --- the verb ------------------------------------------------------------------------------------------------------


def check(*words: str) -> int:
    parser = ArgumentParser()
    check_config.add_arguments(parser)
    return check_config.run(parser.parse_args(words))


def test_check_config_says_ok_and_what_is_in_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("hook: {budget: 30}\ncontainers: {129: {ladder: {grace: 60}}}\n")
    assert check(str(path)) == 0
    assert capsys.readouterr().out == f"OK: {path}, 1 container with overrides\n"
    assert check("-v", str(path)) == 0
    out = capsys.readouterr().out.splitlines()
    assert "hook.budget = 30" in out
    assert "reset.services = [nvidia-persistenced.service, nvidia-dcgm.service]" in out
    assert [line for line in out if line.startswith("containers.")] == ["containers.129.ladder.grace = 60"]
    assert check("--json", str(path)) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["settings"]["hook.budget"] == 30
    assert data["containers"]["129"]["ladder.grace"] == 60


def test_check_config_lists_every_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("a: 1\nb: 2\n")
    assert check(str(path)) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert check("--json", str(path)) == 2
    assert len(json.loads(capsys.readouterr().out)["errors"]) == 2
    assert check(str(tmp_path / "none")) == 2
