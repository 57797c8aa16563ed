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
    from hostd.service.interface import ONLY_HERE

    of_daemon = "\n".join(f"| `{code}` | {cell(text)} |" for code, text in ONLY_HERE.items())
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

## Reasons of the daemon alone

Callers of the [API](api.md) see them; no command ends with one: `pve-gpu-release` does the work without the daemon then. They have no verdict and
no exit status.

| reason | where, and what it says |
| --- | --- |
{of_daemon}

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

Made from `hostd/doctor/kinds/` and `hostd/doctor/runner.py` by `python tools/docs.py`; do not edit.

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
* Checks run one after the other, each in a helper process with a deadline: a hanging `/etc/pve`, driver or storage
  costs that time and is reported as what could not be looked at. A driver in which a call is stuck is not asked again.
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


def configuration() -> str:
    """docs/configuration.md: every key, from the code that reads the file."""
    from hostd.configkeys import default_yaml, reference_rows

    rows = "\n".join(
        f"| `{r.path}` | {cell(r.type)} | `{r.default}` | {r.unit or '-'} | {'yes' if r.per_container else 'no'} "
        f"| {cell(r.meaning)} |"
        for r in reference_rows()
    )
    return f"""\
# Configuration

Made from `hostd/configkeys.py` by `python tools/docs.py`; do not edit.

`/etc/pve-gpu-release/config.yaml`. Everything has a default; a missing file is all defaults. Unknown keys are errors with line and key path:
`pve-gpu-release check-config`. The daemon reads it again on `systemctl reload pve-gpu-hostd` and keeps the last good one when it is broken.
Keys marked "per container" may stand below `containers: {{129: ...}}` too.

| key | what it may be | default | unit | per container | meaning |
| --- | --- | --- | --- | --- | --- |
{rows}

## The file as shipped

```yaml
{default_yaml().rstrip()}
```
"""


def api() -> str:
    """docs/api.md: the interface description as `varlinkctl introspect` shows it."""
    from hostd.service.interface import DESCRIPTION, SOCKET_PATH

    return f"""\
# The daemon's API

Made from `hostd/service/interface.py` by `python tools/docs.py`; do not edit.

[Varlink](https://varlink.org): NUL-terminated JSON on the unix socket `{SOCKET_PATH}` (mode 0600, root only). `varlinkctl` of systemd 257 (Debian 13) is
a ready client:

```
varlinkctl introspect {SOCKET_PATH} io.pve.GpuRelease
varlinkctl call {SOCKET_PATH} io.pve.GpuRelease.Status '{{}}'
varlinkctl call --more {SOCKET_PATH} io.pve.GpuRelease.Release '{{"vmid": 129}}'
```

On Debian 12 any client that can write to a socket:

```
printf '{{"method":"io.pve.GpuRelease.Verify","parameters":{{"vmid":129}}}}\\0' | socat - UNIX-CONNECT:{SOCKET_PATH} | tr '\\0' '\\n'
```

A `Release` with `more` streams its progress; the last reply has the report, which is the object of `pve-gpu-release 129 --json` (schema 1).

```varlink
{DESCRIPTION.rstrip()}
```
"""


PAGES = {
    "docs/verdicts.md": verdicts,
    "docs/configuration.md": configuration,
    "docs/api.md": api,
    "docs/doctor.md": doctor,
}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (ROOT / name).write_text(make())
