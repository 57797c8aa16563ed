"""Everything that `doctor` can find, as data: code, severity, what is said, the command that mends it.

One table per module of checks. A row is added here before a check can report it; docs/doctor.md is made from the rows.
"""

from __future__ import annotations

from hostd.doctor.finding import Finding, Kind
from hostd.doctor.kinds import containers, devices, driver, hooks, node, product
from hostd.doctor.shell import word

KINDS: dict[str, Kind] = {row.code: row for part in (node, driver, devices, containers, hooks, product) for row in part.ROWS}


class _Blank(dict[str, object]):
    def __missing__(self, key: str) -> str:
        return f"<{key}>"


class _Words(_Blank):
    """Every fact as one word of the shell."""

    def __getitem__(self, key: str) -> object:
        return word(super().__getitem__(key))


def found(code: str, evidence: str, *, vmid: int | None = None, **facts: object) -> Finding:
    """A finding of that kind with its facts filled in: as they are in what it says, as words of the shell in what mends
    it."""
    kind = KINDS[code]
    values = _Blank(facts)
    if vmid is not None:
        values["vmid"] = vmid
    return Finding(
        code, kind.severity, kind.what.format_map(values), evidence, kind.mend.format_map(_Words(values)), vmid
    )
