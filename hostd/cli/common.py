"""What every verb shares: options, output, the root check. Cheap to import: it is on the path of every run."""

from __future__ import annotations

import os
import sys

from hostd.errors import NotPermittedError, PgrError, UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    Json = dict[str, Any]

DEFAULT_CONFIG = "/etc/pve-gpu-release/config.yaml"


def add_output_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object for programs (schema 1)")
    group.add_argument(
        "-q", "--quiet", action="store_true", help="only say what is wrong; the exit status says the rest"
    )
    group.add_argument("-v", "--verbose", action="store_true", help="more detail: cgroups, kernel stacks, blind spots")


def add_common_options(parser: argparse.ArgumentParser) -> None:
    add_output_options(parser)
    group = parser.add_argument_group("where it runs")
    group.add_argument("--config", metavar="FILE", help=f"instead of {DEFAULT_CONFIG}")
    group.add_argument("--no-daemon", action="store_true", help="do the work in this process, not in pve-gpu-hostd")


def bad_argument(message: str) -> Exception:
    """What argparse turns into a usage error. It is not imported before: plain command lines do without (`quick`)."""
    from argparse import ArgumentTypeError

    return ArgumentTypeError(message)


def vmid(text: str) -> int:
    """A container id as argparse type."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 999_999_999:
        raise bad_argument(f"{text!r} is not a container id (a number such as 129)")
    return int(text)


def seconds(text: str) -> float:
    """A duration in seconds as argparse type: 0 or more, finite."""
    try:
        value = float(text.removesuffix("s"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400:
        raise bad_argument(f"{text!r} is not a number of seconds from 0 to 86400")
    return value


def require_root() -> None:
    """Raises NotPermittedError unless we are root: /proc/PID/fd of others needs ptrace rights (FACTS)."""
    if os.geteuid() != 0:
        from hostd.verdicts import say

        message, step = say("not-root", uid=os.geteuid())
        raise NotPermittedError(message, next_step=step)


def positive_seconds(text: str) -> float:
    """As `seconds`, without 0: a limit of nothing is no limit and no release either."""
    value = seconds(text)
    if not value:
        raise bad_argument("0 is no time limit (more than 0 seconds)")
    return value


def print_json(value: Json) -> None:
    import json

    print(json.dumps(value, indent=2, ensure_ascii=True), flush=True)


def status_of(result: Json) -> int:
    """The exit status of a report, an error or a collection of them; the common one without importing the table."""
    if result.get("verdict") == "released" and "releases" not in result:
        return 0
    from hostd.wire import status_of

    return status_of(result)


def fail(error: PgrError, *, as_json: bool, vmid: int | None = None) -> int:
    """Says what went wrong, where the caller looks for it, and returns the exit status."""
    from hostd import terminal
    from hostd.verdicts import exit_status

    if as_json and not isinstance(error, UsageError):
        from hostd.wire import error_dict

        print_json(error_dict(error, vmid))
    else:
        print(f"pve-gpu-release: {terminal.escape(error.message)}", file=sys.stderr)
        if error.next_step:
            print(f"  next: {terminal.escape(error.next_step)}", file=sys.stderr)
    return exit_status(error.reason)
