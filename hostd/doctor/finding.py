"""The words of `doctor` as types. No I/O, standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from hostd.errors import PgrError

if TYPE_CHECKING:
    from hostd.doctor.facts import Facts


class Severity(StrEnum):
    """`error`: the promise is broken here, or will be with the next start; `warning`: it is weaker than promised;
    `note`: good to know, changes nothing of the exit status."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True, slots=True)
class Kind:
    """One thing that `doctor` can find. `what` and `mend` are templates for `str.format_map`."""

    code: str
    severity: Severity
    check: str
    """Name of the check that looks for it."""
    what: str
    mend: str
    """The command that mends it, or what to do where no command does."""
    meaning: str
    """For docs/doctor.md: why it matters."""
    evidence: str
    """For docs/doctor.md: what was looked at."""


@dataclass(frozen=True, slots=True)
class Finding:
    code: str
    severity: Severity
    what: str
    evidence: str
    mend: str
    vmid: int | None = None


@dataclass(frozen=True, slots=True)
class Blind:
    """Something that a check could not look at; the check has gone on without it."""

    what: str
    error: str


class CannotLookError(PgrError):
    """A fact that checks are made from cannot be had."""

    reason = "cannot-look"


@dataclass(frozen=True, slots=True)
class Skipped:
    """The check does not apply on this node."""

    why: str


Results = Iterator[Finding | Blind | Skipped]


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `needs` are names of facts that are gathered before `look` runs in its helper process."""

    name: str
    title: str
    """What is so when it finds nothing (`ok` lines of -v)."""
    look: Callable[[Facts], Results]
    needs: tuple[str, ...] = ()
    deadline_s: float = 5.0


@dataclass(slots=True)
class Outcome:
    """What one check brought."""

    check: str
    title: str
    findings: list[Finding] = field(default_factory=list)
    blind: list[Blind] = field(default_factory=list)
    failed: bool = False
    """It could not look at all."""
    skipped: str = ""
    """Why it does not apply here; empty when it does."""


Json = dict[str, Any]
