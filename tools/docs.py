"""Writes the pages of docs/ that are made from code: `python tools/docs.py` (a test compares them)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hostd.verdicts import EXIT_PRECEDENCE, REASONS  # noqa: E402
from tests.verdict_cases import CASES  # noqa: E402


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def verdicts() -> str:
    """docs/verdicts.md: every reason, and every situation of the contract with the reason it ends in."""
    reasons = "\n".join(
        f"| `{r.code}` | {r.verdict or '-'} | {r.exit_status} | {cell(r.message)} | {cell(r.next_step) or '-'} |"
        for r in REASONS.values()
    )
    cases = "\n".join(
        f"| `{key}` | {cell(text)} | `{reason}` | {REASONS[reason].verdict or '-'} | {REASONS[reason].exit_status} |"
        for key, (text, reason) in CASES.items()
    )
    order = ", ".join(map(str, EXIT_PRECEDENCE))
    return f"""\
# Verdicts

Made from `hostd/verdicts.py` and `tests/verdict_cases.py` by `python tools/docs.py`; do not edit.
What to do about each reason is in the [operations guide](operations.md).

Several objections, or several containers: the worst exit status wins, in the order {order}.

## Reasons

| reason | verdict | exit | message | next step |
| --- | --- | --- | --- | --- |
{reasons}

## Situations

| case | situation | reason | verdict | exit |
| --- | --- | --- | --- | --- |
{cases}
"""


PAGES = {"docs/verdicts.md": verdicts}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())
