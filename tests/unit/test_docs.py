"""The documentation says what is so: generated pages, links, every reason and exit status, every command it shows."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from hostd.cli.main import VERBS, split_verb
from hostd.cli.parser import Parser
from hostd.service.interface import ERRORS, ONLY_HERE
from hostd.verdicts import EXIT_PRECEDENCE, REASONS
from tests.product_command import ROOT
from tools.docs import PAGES

PEOPLE = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(path: Path) -> Iterator[str]:
    """Every `pve-gpu-release ...` in a code block or in backquotes."""
    text = path.read_text()
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            found = re.search(r"(?:^|[ #!;]|/usr/sbin/)(pve-gpu-release(?: [^#;|&)]*)?)", line.split("   ")[0])
            if found and not line.startswith(("usage", "apt")):
                yield found[1].strip()
    yield from (found.strip() for found in re.findall(r"`(pve-gpu-release [^`]+)`", text))


def is_placeholder(line: str) -> bool:
    """A line with words in capitals or dots stands for many commands."""
    if any(mark in line for mark in ("[", "(", "<", "...", "pve-gpu-release_")):
        return True
    return re.search(r" (RELEASE_ID|ID|VERB|VMID)\b", line) is not None


@pytest.mark.parametrize("name", PAGES)
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert (ROOT / name).read_text() == PAGES[name](), f"run python tools/docs.py: {name} is old"


def reasons_in_code() -> Iterator[tuple[str, str]]:
    """(file, reason) of every reason that hostd/ writes down: `say("x")`, `reason="x"`, {"reason": "x"} and alike."""
    for path in sorted((ROOT / "hostd").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            given: list[ast.expr | None] = []
            if isinstance(node, ast.Call):
                given += [word.value for word in node.keywords if word.arg == "reason"]
                name = node.func.id if isinstance(node.func, ast.Name) else ""
                given += {"say": node.args[:1], "facts_of": node.args[:1]}.get(name, [])
            elif isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                given += [v for k, v in pairs if isinstance(k, ast.Constant) and k.value == "reason"]
            found = [v.value for v in given if isinstance(v, ast.Constant) and isinstance(v.value, str) and v.value]
            yield from ((str(path.relative_to(ROOT)), reason) for reason in found)


def test_every_reason_that_can_be_sent_is_documented() -> None:
    found = set(reasons_in_code())
    assert {"stopping", "worker-lost", "busy"} <= {reason for _path, reason in found}
    pages = (ROOT / "docs/verdicts.md").read_text()
    for path, reason in found:
        assert reason in REASONS or reason in ONLY_HERE, (path, reason)
        assert f"| `{reason}` |" in pages, (path, reason)
    described = (ROOT / "docs/api.md").read_text()
    assert all(f'"{reason}"' in described for reason in ONLY_HERE)
    assert {kind("x").reason for kind in ERRORS.values()} <= set(REASONS)


def test_every_reason_has_its_entry_in_the_operations_guide() -> None:
    headings = re.findall(r"^### ([a-z-]+)$", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
    assert sorted(REASONS) == sorted(h for h in headings if h in REASONS)


def test_every_exit_status_has_its_entry_in_the_operations_guide() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    table = {int(n) for n in re.findall(r"^\| (\d+) \|", text, re.MULTILINE)}
    assert table == {row.exit_status for row in REASONS.values()}


def test_the_readme_names_every_exit_status() -> None:
    section = (ROOT / "README.md").read_text().partition("## Exit status")[2]
    table = re.search(r"^\|(( \d+ \|)+)$", section, re.MULTILINE)
    assert table and {int(n) for n in re.findall(r"\d+", table[1])} == {row.exit_status for row in REASONS.values()}


def test_the_order_of_exit_statuses_is_the_table_s() -> None:
    order = ", ".join(map(str, EXIT_PRECEDENCE))
    assert f"the worst status wins ({order})" in (ROOT / "docs/operations.md").read_text()


def anchors(path: Path) -> set[str]:
    """Of the headings of a page, as GitHub makes them: small letters, no marks, a hyphen for a blank, numbers for doubles."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found.add(anchor if anchor not in found else next(f"{anchor}-{n}" for n in range(1, 99) if f"{anchor}-{n}" not in found))
    return found


@pytest.mark.parametrize("path", PEOPLE, ids=lambda p: p.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", path.read_text()):
        page = path.parent / target if target else path
        assert page.exists(), f"{path.name} links to {target}"
        assert not anchor or anchor in anchors(page), f"{path.name} links to {target}#{anchor}: no such heading"


def test_an_anchor_is_what_github_makes_of_a_heading(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# `on_dirty`: warn, or [block](x.md)?\n```\n# no heading\n```\n## A/B\n## A/B\n")
    assert anchors(page) == {"on_dirty-warn-or-block", "ab", "ab-1"}


@pytest.mark.parametrize("path", PEOPLE, ids=lambda p: p.name)
def test_commands_shown_are_understood(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for line in commands(path):
        words = shlex.split(line)[1:]
        if not words or is_placeholder(line):
            continue
        verb, rest = split_verb(words)
        assert verb in VERBS, f"{path.name}: {line}"
        if {"--help", "--version"} & set(rest):
            continue
        module = import_module(f"hostd.cli.{verb.replace('-', '_')}")
        parser = Parser(prog="pve-gpu-release")
        module.add_arguments(parser)
        try:
            parser.parse_args(rest)
        except SystemExit:
            pytest.fail(f"{path.name} shows {line!r}: {capsys.readouterr().err}")
