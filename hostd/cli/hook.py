"""`pve-gpu-release hook enable|disable|status VMID...|--all`: the hookscript of containers."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

from hostd import terminal
from hostd.cli.common import (
    add_output_options,
    bad_argument,
    file_name,
    named_config,
    print_json,
    require_root,
    shown,
    vmid,
    whole,
)
from hostd.errors import NoSuchContainerError, PgrError, UsageError
from hostd.snippet import CHAIN_LIMIT_S, Change, LocalApi, Snippets, chained_volume, is_our_name
from hostd.verdicts import exit_status, worst

Json = dict[str, Any]
NAME = "hook"
HELP = (
    "Set our hookscript on containers, take it off, or show which container has it. With the systemd drop-in of the "
    "package it keeps GPUs from staying held over a stop, however a container stopped."
)
INTERMIXED = True
"""Options may stand between the action and the containers."""
UNITS = ("pve-container@.service", "pve-container-debug@.service")
DROP_IN = "50-pve-gpu-release.conf"
UNIT_FOLDERS = ("/etc/systemd/system", "/run/systemd/system", "/usr/lib/systemd/system", "/lib/systemd/system")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = ("enable", "disable", "status")
    parser.add_argument("action", choices=actions, metavar="|".join(actions), help="what to do")
    parser.add_argument("vmids", nargs="*", default=[], type=vmid, metavar="VMID", help="container id")
    parser.add_argument(
        "--all",
        action="store_true",
        help="every container of this node with a GPU in its configuration; disable, status: or with our hookscript",
    )
    parser.add_argument(
        "--chain", action="store_true", help="a container's other hookscript stays: ours runs first and then calls it"
    )
    parser.add_argument(
        "--chain-limit",
        type=chain_limit,
        metavar="S",
        help=f"limit on the chained hookscript, whole seconds (default {CHAIN_LIMIT_S})",
    )
    parser.add_argument("--storage", metavar="NAME", help="storage for the snippet (default: one that allows snippets)")
    parser.add_argument("--config", type=file_name, metavar="FILE", help=argparse.SUPPRESS)
    add_output_options(parser)


def chain_limit(text: str) -> int:
    """As argparse type: what timeout(1) takes and the snippet is read back by; its 0 would be no limit at all."""
    number = whole(text.removesuffix("s"))
    if not 1 <= number <= 86_400:
        raise bad_argument(f"{shown(text)} is not a number of whole seconds from 1 to 86400")
    return number


def run(args: argparse.Namespace) -> int:
    require_root()
    named_config(args.config)
    if args.action == "status":
        return show(args)
    numbers = chosen(args)
    snippets = Snippets(LocalApi(), storage=args.storage)
    if args.action == "enable":
        return each(numbers, args, lambda n: snippets.enable(n, chain=args.chain, limit_s=args.chain_limit))
    return each(numbers, args, snippets.disable)


def chosen(args: argparse.Namespace) -> list[int]:
    """The containers that were named. Raises UsageError for none or both."""
    if bool(args.vmids) == args.all:
        problem = "either containers or --all" if args.all else "say which containers, or --all"
        raise UsageError(f"cannot {args.action}: {problem}", next_step=f"pve-gpu-release hook {args.action} 129")
    return list(dict.fromkeys(args.vmids)) or concerned(args.action)


def concerned(action: str) -> list[int]:
    """Containers of this node with a GPU in their configuration, and, but to enable, those that have our hookscript: a
    GPU may have been taken away since. Raises UnreadableError."""
    from hostd.system.pve import Pve

    pve = Pve()
    found = []
    for number in pve.containers():
        config = pve.read_container(number)
        if config is None:
            continue
        if config.wants_gpu or (action != "enable" and is_our_name(config.hookscript)):
            found.append(number)
    return found


def each(numbers: list[int], args: argparse.Namespace, change: Callable[[int], Change]) -> int:
    """Every container is attempted; the worst status wins."""
    statuses, results = [], []
    for number in numbers:
        try:
            done = change(number)
        except PgrError as exc:
            statuses.append(exit_status(exc.reason))
            results.append({"vmid": number, "outcome": "failed", "message": exc.message, "next_step": exc.next_step})
            if not args.json:
                print(f"pve-gpu-release: {terminal.escape(exc.message)}", file=sys.stderr)
                if exc.next_step:
                    print(f"  next: {terminal.escape(exc.next_step)}", file=sys.stderr)
            continue
        statuses.append(0)
        results.append({"vmid": number, "outcome": done.outcome, "message": done.message, "volume": done.volume})
        if not args.json and not args.quiet:
            print(terminal.escape(done.message))
    if not numbers and not args.json:
        print("no container of this node has a GPU in its configuration")
    if args.json:
        print_json({"schema": 1, "containers": results})
    return worst(statuses)


# --- status ------------------------------------------------------------------------------------------------------------


def show(args: argparse.Namespace) -> int:
    """0 when every container shown is covered, 3 when one is not, 8 when one does not exist."""
    from hostd.cli.render import table

    numbers = list(dict.fromkeys(args.vmids)) or concerned(args.action)
    drop_ins = {unit: drop_in_state(unit) for unit in UNITS}
    config, problem = read_config(args.config)
    snippets = Snippets(LocalApi())
    rows: list[Json] = []
    statuses = []
    for number in numbers:
        try:
            volume, text, _ = snippets.current(number)
        except NoSuchContainerError as exc:
            statuses.append(exit_status(exc.reason))
            rows.append({"vmid": number, "error": exc.message})
            continue
        rows.append(
            {
                "vmid": number,
                "hookscript": volume or None,
                "state": snippets.state(volume, text),
                "chained": chained_volume(text) or None,
                "drop_in": drop_ins[UNITS[0]],
                "drop_in_debug": drop_ins[UNITS[1]],
                "on_dirty": config.for_container(number).hook.on_dirty.value,
                "min_free_mib": config.for_container(number).hook.min_free_mib,
                "last_release": last_release(number),
            }
        )
        covered = rows[-1]["state"] in ("ours", "chained") and set(drop_ins.values()) == {"installed"}
        statuses.append(0 if covered else 3)
    if args.json:
        print_json({"schema": 1, "config_error": problem, "containers": rows})
    elif not args.quiet:
        lines = [line_of(row) for row in rows]
        head = ["container", "hookscript", "drop-in", "at a dirty GPU", "last release"]
        for line in table([head, *lines]) if lines else ["no container of this node has a GPU in its configuration"]:
            print(line)
        if problem:
            print(f"the configuration is broken, the defaults are shown: {terminal.escape(problem)}")
    return worst(statuses)


def drop_in_state(unit: str) -> str:
    """`installed`, `missing` or `masked`; the first folder that has the file decides (systemd.unit(5))."""
    for folder in UNIT_FOLDERS:
        path = os.path.join(folder, f"{unit}.d", DROP_IN)
        try:
            info = os.stat(path)
        except OSError:
            continue
        return "installed" if info.st_size > 0 and os.path.realpath(path) != os.devnull else "masked"
    return "missing"


def read_config(path: str | None) -> tuple[Any, str]:
    """The configuration, and why it could not be read (the defaults then: the hook does the same)."""
    from hostd.config import DEFAULT_PATH, BrokenConfigError, Config, load

    try:
        config = load(path or DEFAULT_PATH, must_exist=path is not None)
        return config, next(iter(config.notices), "")
    except BrokenConfigError as exc:
        return Config(), exc.problems[0]


def last_release(number: int) -> Json | None:
    from hostd.status import release_summaries
    from hostd.store import KEPT, Store

    found = (r for r in release_summaries(Store(), KEPT) if r["vmid"] == number)
    return next(found, None)


def line_of(row: Json) -> list[str]:
    if "error" in row:
        return [str(row["vmid"]), terminal.escape(row["error"]), "", "", ""]
    hookscript = row["state"]
    if row["state"] == "chained":
        hookscript = f"ours, then {row['chained']}"
    elif row["state"] == "chained-missing":
        hookscript = f"ours, then {row['chained']}, which is not there: it does not start"
    elif row["state"] in ("foreign", "missing"):
        hookscript = f"{row['state']}: {row['hookscript']}"
    drop_in = (
        row["drop_in"] if row["drop_in"] == row["drop_in_debug"] else f"{row['drop_in']}, debug {row['drop_in_debug']}"
    )
    gate = row["on_dirty"] + (f" below {row['min_free_mib']:,} MiB" if row["min_free_mib"] else "")
    last = row["last_release"]
    when = f"{last['started']} {last['trigger']}: {last['verdict'] or last['reason']}" if last else "-"
    return [str(row["vmid"]), terminal.escape(hookscript), drop_in, gate, terminal.escape(when)]
