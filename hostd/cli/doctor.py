"""`pve-gpu-release doctor`: what on this node would break the promise, and the command that mends it."""

from __future__ import annotations

import argparse
import sys
import time

from hostd import terminal
from hostd.cli.common import DEFAULT_CONFIG, add_output_options, file_name, named_config, print_json, require_root
from hostd.cli.render import count

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from hostd.doctor.finding import Finding, Outcome

NAME = "doctor"
HELP = (
    "Look for what on this node would break the promise, with the command that mends it. "
    "Exit status: 0 fine (notes do not count), 3 findings, 4 nothing found but not everything could be looked at, "
    "9 not root."
)
_STYLE = {"error": "red", "warning": "yellow", "note": "cyan"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_output_options(parser)
    parser.add_argument("--config", type=file_name, metavar="FILE", help=f"instead of {DEFAULT_CONFIG}")


def run(args: argparse.Namespace) -> int:
    """Runs every check; a driver that is stuck is not asked."""
    require_root()
    named_config(args.config)
    from hostd.doctor.facts import Facts
    from hostd.doctor.runner import exit_status, result_dict, run_checks

    started_s = time.monotonic()
    outcomes = run_checks(Facts(config_path=args.config or DEFAULT_CONFIG))
    if args.json:
        print_json(result_dict(outcomes, started_s))
    else:
        colour = terminal.wants_colour(sys.stdout)
        print("\n".join(lines(outcomes, quiet=args.quiet, verbose=args.verbose, colour=colour)))
    return exit_status(outcomes)


def lines(outcomes: list[Outcome], *, quiet: bool = False, verbose: bool = False, colour: bool = False) -> list[str]:
    """Findings, the worst first; what could not be looked at; with `verbose` what is fine; one line that sums up.

    All text is escaped. `quiet`: errors and warnings only, one line each, and the sum.
    """
    findings = [finding for outcome in outcomes for finding in outcome.findings]
    shown: list[str] = []
    for severity in ("error", "warning", "note"):
        for finding in findings:
            if finding.severity.value == severity and not (quiet and severity == "note"):
                shown += _finding(finding, quiet, colour)
    shown += _blind(outcomes, colour)
    if verbose and not quiet:
        ok = terminal.paint(f"{'ok':<8}", "green", colour)
        fine = [o for o in outcomes if not o.findings and not o.blind]
        shown += [f"{ok} {o.check}: {o.title}" for o in fine if not o.skipped]
        shown += [f"{'-':<8} {o.check}: does not apply ({terminal.escape(o.skipped)})" for o in fine if o.skipped]
    return [*shown, _summary(outcomes, findings)]


def _finding(finding: Finding, quiet: bool, colour: bool) -> list[str]:
    severity = terminal.paint(f"{finding.severity.value:<8}", _STYLE[finding.severity.value], colour)
    head = f"{severity} {finding.code}: {terminal.escape(finding.what)}"
    if quiet:
        return [head]
    rest = (("seen", finding.evidence), ("mend", finding.mend))
    return [head, *(f"         {word}: {terminal.escape(text)}" for word, text in rest)]


def _blind(outcomes: Iterable[Outcome], colour: bool) -> list[str]:
    """One line for each cause, however many checks it kept from looking."""
    checks: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for blind in outcome.blind:
            what = "" if blind.what == outcome.check else f"{blind.what}: "
            checks.setdefault((what, blind.error), []).append(outcome.check)
    head = terminal.paint("unknown ", "yellow", colour)
    return [
        f"{head} could not look ({', '.join(dict.fromkeys(names))}): {terminal.escape(what + error)}"
        for (what, error), names in checks.items()
    ]


def _summary(outcomes: list[Outcome], findings: list[Finding]) -> str:
    def number(severity: str) -> int:
        return sum(f.severity.value == severity for f in findings)

    blind = sum(bool(o.blind) for o in outcomes)
    parts = [count(number(word), word) for word in ("error", "warning", "note") if number(word)]
    if blind:
        parts.append(f"{count(blind, 'check')} could not look everywhere")
    return f"{count(len(outcomes), 'check')}: {', '.join(parts) or 'all fine'}"
