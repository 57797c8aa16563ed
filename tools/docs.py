"""Writes the pages of docs/ that are made from code: `python tools/docs.py` (a test compares them)."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from hostd.doctor.kinds import KINDS  # noqa: E402
from hostd.doctor.runner import CHECKS  # noqa: E402
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


def doctor() -> str:
    """docs/doctor.md: every finding of `doctor`."""
    rows = "\n".join(
        f"| `{k.code}` | {k.severity} | {cell(k.what)} | {cell(k.meaning)} | {cell(k.evidence)} | {cell(k.mend)} |"
        for k in KINDS.values()
    )
    checks = "\n".join(f"| `{c.name}` | {cell(c.title)} | {c.deadline_s:g} |" for c in CHECKS)
    return f"""\
# doctor

Made from `hostd/doctor/kinds.py` and `hostd/doctor/runner.py` by `python tools/docs.py`; do not edit.

`pve-gpu-release doctor [--json] [-v] [-q]` looks for what on this node would break the promise. It changes nothing. Run
it as root on the host itself.

| exit status | meaning |
| --- | --- |
| 0 | fine: neither error nor warning (notes do not count), and everything could be looked at |
| 3 | at least one error or warning, also when something else could not be looked at |
| 4 | no error and no warning, but something could not be looked at: see `could_not_look` |
| 9 | not root |

* **error**: the promise is broken here, or will be with the next start. **warning**: it is weaker than promised.
  **note**: good to know.
* Checks run one after the other, each in a helper process with a deadline: a hanging `/etc/pve`, driver or storage costs
  that time and is reported as what could not be looked at. A driver in which a call is stuck is not asked again.
* `-v` also lists what is fine and what does not apply; `-q` prints errors and warnings only, one line each.
* `--json`: `schema` (1), `findings[]` with `code, severity, vmid, what, evidence, mend`, `could_not_look[]` with
  `check, what, error`, `checks[]`, `duration_ms`.

## Findings

Words in braces stand for what was found.

| code | severity | what it says | what it means | what was looked at | what mends it |
| --- | --- | --- | --- | --- | --- |
{rows}

## Checks

| check | fine means | deadline, s (without reading the facts it needs) |
| --- | --- | --- |
{checks}
"""


PAGES = {"docs/verdicts.md": verdicts, "docs/doctor.md": doctor}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())
