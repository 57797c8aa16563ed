"""What every verb shares: options, output, the root check. Cheap to import: it is on the path of every run."""

from __future__ import annotations

import os
import sys

from hostd.errors import NotPermittedError, PgrError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable
    from typing import Any

    from hostd.config import Config

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
    group.add_argument("--config", type=file_name, metavar="FILE", help=f"instead of {DEFAULT_CONFIG}")
    group.add_argument("--no-daemon", action="store_true", help="do the work in this process, not in pve-gpu-hostd")


def add_selectors(parser: argparse.ArgumentParser) -> None:
    """`--gpu` and `--pid`."""
    from hostd.cli.parser import Once, Several

    parser.add_argument(
        "--gpu", action=Once, type=gpu, metavar="SEL", help="only this GPU: NVML index, minor, UUID or PCI address"
    )
    parser.add_argument(
        "--pid",
        action=Several,
        type=pid_selector,
        metavar="PID",
        help="only this process: its pid in the container, or host:PID; several with commas between, or the option again",
    )


def shown(text: str) -> str:
    """A word of the command line as it stands in a message: harmless, of bounded length, in quotes."""
    from hostd.terminal import escape, shorten

    return f"'{shorten(escape(text), 60)}'"


def close_to(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` for what is probably a typo, else nothing."""
    from difflib import get_close_matches

    names = {name.lstrip("-"): name for name in known}  # dashes would make all options look alike
    bare = word[:100].lstrip("-")
    found = [name for name in names if len(bare) > 1 and name.startswith(bare)]
    close = found if len(found) == 1 else get_close_matches(bare, names, 1)
    if not close:
        return ""
    name = names[close[0]]
    return f"; did you mean {name}?" if name.startswith("-") else f"; did you mean {name!r}?"


def bad_argument(message: str) -> Exception:
    """What argparse turns into a usage error. It is not imported before: plain command lines do without (`quick`)."""
    from argparse import ArgumentTypeError

    return ArgumentTypeError(message)


def vmid(text: str) -> int:
    """A container id as argparse type."""
    number = whole(text)
    if not 1 <= number <= 999_999_999:
        from hostd.cli.main import VERBS

        hint = f"; did you mean pve-gpu-release {text} ...?" if text in VERBS else apart(text) or " (a number such as 129)"
        raise bad_argument(f"{shown(text)} is not a container id{hint}")
    return number


def apart(text: str) -> str:
    """A hint for `129,130`; else nothing."""
    parts = text.replace(",", " ").split()
    if len(parts) < 2 or len(text) > 60 or any(whole(part) < 1 for part in parts):
        return ""
    return f"; did you mean {' '.join(parts)}?"


def whole(text: str) -> int:
    """A number in plain digits, -1 for anything else (int() also takes `1_0`, ` 1`, Arabic digits)."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else -1


def pid(text: str) -> int:
    """A process number as argparse type."""
    from hostd.selection import HIGHEST_PID

    number = whole(text)
    if not 1 <= number <= HIGHEST_PID:
        raise bad_argument(f"{shown(text)} is not a pid (a number from 1 to {HIGHEST_PID})")
    return number


def pid_selector(text: str) -> str:
    """What `--pid` may be, as argparse type: whether it names a process is found out later."""
    from hostd.selection import HIGHEST_PID, is_pid_selector

    if not is_pid_selector(text):
        raise bad_argument(
            f"{shown(text)} is not a pid: a number from 1 to {HIGHEST_PID}, or host:NUMBER, or several with commas between"
        )
    return text


def gpu(text: str) -> str:
    """What `--gpu` may be, as argparse type: whether it names a GPU is found out later."""
    from hostd.selection import is_gpu_selector

    if not is_gpu_selector(text):
        raise bad_argument(f"{shown(text)} is not a GPU: an NVML index, a minor, a UUID (GPU-...) or a PCI address")
    return text


def file_name(text: str) -> str:
    """The name of a file as argparse type."""
    if not 1 <= len(text) <= 4096:
        raise bad_argument(f"{shown(text)} is not the name of a file")
    return text


def seconds(text: str) -> float:
    """A duration in seconds as argparse type: 0 or more, finite."""
    digits = text.removesuffix("s")
    try:
        value = float(digits) if digits.isascii() and digits[-1:] in "0123456789." else -1.0
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86_400 or "_" in digits:
        raise bad_argument(f"{shown(text)} is not a number of seconds from 0 to 86400")
    return value


def loaded(path: str | None) -> Config:
    """The configuration that the command line names, or the node's. Raises ConfigError.

    Without a usable yaml module the node's own gives the built-in defaults (DESIGN 10), a file that was asked for an error.
    """
    from hostd.config import DEFAULT_PATH, load
    from hostd.errors import ConfigError

    if path is None:
        return load(DEFAULT_PATH)
    try:
        config = load(path, must_exist=True)
    except ConfigError as exc:
        import shlex

        exc.next_step = f"pve-gpu-release check-config {shlex.quote(path)}"
        raise
    if config.notices:
        raise ConfigError(config.notices[0].partition(";")[0], next_step="apt install python3-yaml")
    return config


def named_config(path: str | None) -> Config | None:
    """The file of `--config`, which must be there and right for every verb; None without one. Raises ConfigError."""
    return None if path is None else loaded(path)


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


def exhausted(exc: BaseException) -> PgrError:
    """What it is told as that no descriptor, process or memory is left here. Raises everything else again."""
    from hostd.errors import UnreadableError, is_exhausted
    from hostd.verdicts import say

    if not is_exhausted(exc):
        raise exc
    detail = (exc.strerror if isinstance(exc, OSError) else "") or "not enough memory"
    message, _ = say("cannot-look", detail=f"{detail} (a limit of whoever started this)")
    return UnreadableError(message, next_step="ulimit -a shows the limits; with more of it, try again")


def failed(exc: BaseException, number: int) -> Json:
    """The result of a container for which there is no report. Raises again what is a bug."""
    from hostd.wire import error_dict

    return error_dict(exc if isinstance(exc, PgrError) else exhausted(exc), number)


def print_json(value: Json) -> None:
    import json

    print(json.dumps(value, indent=2, ensure_ascii=True), flush=True)


def status_of(result: Json) -> int:
    """The exit status of a report, an error or a collection of them; the common one without importing the table."""
    if result.get("verdict") == "released" and result.get("reason") in ("released", "nothing-held"):
        return 0
    from hostd.wire import status_of

    return status_of(result)


def fail(error: PgrError, *, as_json: bool, vmid: int | None = None) -> int:
    """Says what went wrong, where the caller looks for it, and returns the exit status. With `--json` that is an object on
    standard output, whatever went wrong, and nothing else."""
    from hostd import terminal
    from hostd.verdicts import exit_status

    if as_json:
        from hostd.wire import error_dict

        print_json(error_dict(error, vmid))
    else:
        print(f"pve-gpu-release: {terminal.escape(error.message)}", file=sys.stderr)
        if error.next_step:
            print(f"  next: {terminal.escape(error.next_step)}", file=sys.stderr)
    return exit_status(error.reason)
