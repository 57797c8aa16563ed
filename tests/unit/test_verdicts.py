"""The verdict table is the contract's, its page is up to date, and every situation of it is proven by a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from hostd.model import Verdict
from hostd.verdicts import EXIT_PRECEDENCE, REASONS, exit_status, say, worst
from tests.verdict_cases import CASES
from tools.docs import verdicts

ROOT = Path(__file__).resolve().parents[2]
DESIGN_5 = (1, 5, 3, 6, 4, 7, 9, 8, 75, 0)
"""Several containers: the worst wins, in this order (DESIGN 5)."""
BY_VERDICT = {Verdict.RELEASED: {0}, Verdict.HELD: {3, 5, 6}, Verdict.UNKNOWN: {4}, None: {1, 2, 7, 8, 9, 75, 130}}


def test_docs_verdicts_md_is_what_the_table_says() -> None:
    assert (ROOT / "docs/verdicts.md").read_text() == verdicts(), "run python tools/docs.py"


@pytest.mark.parametrize("row", REASONS.values(), ids=lambda row: row.code)
def test_a_reason_has_a_status_of_its_verdict_and_says_what_to_do(row: object) -> None:
    from hostd.verdicts import Reason

    assert isinstance(row, Reason)
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*", row.code) and row.exit_status in BY_VERDICT[row.verdict]
    assert row.message and not row.message.endswith(".")
    if row.verdict in (Verdict.HELD, Verdict.UNKNOWN):
        assert row.next_step, "an administrator needs a next step"


def test_the_worst_status_wins_in_the_contracts_order() -> None:
    assert [s for s in EXIT_PRECEDENCE if s in DESIGN_5] == list(DESIGN_5)
    assert {row.exit_status for row in REASONS.values()} <= set(EXIT_PRECEDENCE)
    for number, status in enumerate(DESIGN_5):
        assert worst([*DESIGN_5[number:]]) == status
    assert worst([]) == 0 and exit_status("no such reason") == 1


def test_what_is_not_known_is_shown_as_a_gap_and_never_raises() -> None:
    message, step = say("unkillable", vmid=129)
    assert "129" in message and "<wchan>" in message and step


def test_braces_in_a_name_are_only_characters() -> None:
    assert say("would-stop-container", vmid=129, pid=4, comm="{vmid} {0} %s")[0].count("{vmid} {0} %s") == 1


@pytest.mark.parametrize("key", CASES)
def test_a_case_ends_with_a_reason_of_the_table(key: str) -> None:
    situation, reason = CASES[key]
    assert reason in REASONS and situation


# --- every case is proven ---------------------------------------------------------------------------------------------


def marked() -> Iterator[tuple[str, str]]:
    """(case key, test) of every @pytest.mark.case below tests/, on functions, parameters and modules alike."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.case":
                (argument,) = node.args
                assert isinstance(argument, ast.Constant), f"{path}:{node.lineno}: a case is named by its key"
                yield str(argument.value), f"{path.relative_to(ROOT)}:{node.lineno}"


def test_every_case_has_an_integration_test_and_every_mark_a_case() -> None:
    found = dict(marked())
    assert set(CASES) - set(found) == set(), "cases without a test"
    assert set(found) - set(CASES) == set(), "marks without a case"


def test_every_reason_has_a_case_or_says_why_not() -> None:
    without = set(REASONS) - {reason for _, reason in CASES.values()}
    assert without == set(NO_CASE), "a reason needs a situation in tests/verdict_cases.py"


NO_CASE = {
    "internal-error": "a bug",
    "cannot-look": "no cgroup v2, no /proc, no lock: tests/unit/test_lock.py",
    "holder-appeared": "between the last round and the last look: tests/unit/test_judge.py",
    "gpu-free": "`wait`, no release: tests/unit/test_wait.py",
    "gpu-in-containers": "`handover`, no release: tests/unit/test_handover.py",
}
