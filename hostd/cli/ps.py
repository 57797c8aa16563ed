"""`pve-gpu-release ps [VMID...]`: who holds what, by container and GPU."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from hostd import terminal
from hostd.cli import remote
from hostd.cli.common import add_common_options, named_config, print_json, require_root, vmid
from hostd.cli.render import count, gpu_name, gpu_names, memory_text, mib, paint_bold, table, unowned_mib, where_text

NAME = "ps"
HELP = "Show who holds which GPU on this node: containers and the host. Nothing is signalled."
Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmids", nargs="*", type=vmid, metavar="VMID", help="only these containers")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Exit status 0 when everything could be looked at, 4 when not, 8 for a container that does not exist."""
    require_root()
    args.vmids = list(dict.fromkeys(args.vmids))
    result = look(args)
    if args.json:
        print_json(result)
    elif not args.quiet:
        _print(result, args.vmids, verbose=args.verbose)
    return 4 if result["blind_spots"] else 0


def look(args: argparse.Namespace) -> Json:
    """The node's holders as `ps --json` gives them, by the daemon or here. Raises ConfigError."""
    config = named_config(args.config)
    if remote.wanted(args):
        try:
            return remote.ask("Observe", {"vmids": args.vmids})
        except remote.DaemonUnavailable:
            pass
    from hostd.nodeview import observe
    from hostd.sources import open_sources

    sources = open_sources(nvml_deadline_s=config.nvml.deadline_s if config else 10.0, read_deadline_s=1.0)
    try:
        sources.nvml.start()
        return observe(sources, tuple(args.vmids))
    finally:
        sources.close()


def _print(result: Json, vmids: list[int], *, verbose: bool) -> None:
    colour = terminal.wants_colour(sys.stdout)
    names = gpu_names(result["gpus"])
    owners = sorted({h["vmid"] for h in result["holders"]}, key=lambda v: (v is None, v or 0))
    for owner in owners:
        holders = [h for h in result["holders"] if h["vmid"] == owner]
        title = f"container {owner}" if owner is not None else "host"
        print(paint_bold(f"{title}: {count(len(holders), 'holder')}", colour))
        print("\n".join(table([_row(h, names, verbose) for h in holders], indent="  ")))
    if not owners:
        print(f"no holder {'of ' + ', '.join(map(str, vmids)) if vmids else 'on this node'}")
    for gpu in result["gpus"]:
        unowned = unowned_mib(gpu)
        extra = f", {mib(unowned)} by nobody alive" if unowned else ""
        problem = f", {terminal.escape(gpu['error'])}" if gpu["error"] else ""
        print(
            f"{gpu_name(gpu)}  {gpu['name']}  {gpu['pci_bus_id']}  {mib(gpu['used_mib'])} in use"
            f" + {mib(gpu['reserved_mib'])} reserved{extra}{problem}"
        )
    for spot in result["blind_spots"]:
        print(f"could not read {terminal.escape(spot['what'])}: {terminal.escape(spot['error'])}", file=sys.stderr)


def _row(holder: Json, names: dict[int, str], verbose: bool) -> list[str]:
    inside = "/".join(map(str, holder["ns_pids"]))
    command = terminal.escape(holder["cmdline"] or holder["comm"])
    row = [
        f"pid {holder['pid']}" + (f" [{inside}]" if inside else ""),
        terminal.escape(holder["comm"]),
        where_text(holder, names),
        memory_text(holder),
        "+".join(holder["evidence"]),
        terminal.escape(holder["unit"] or "-"),
        terminal.shorten(command, 200 if verbose else 48),
    ]
    return [*row, _more(holder), terminal.escape(holder["cgroup"])] if verbose else row


def _more(holder: Json) -> str:
    """Since when it runs and what it uses, for -v."""
    from hostd.describe import age, describe

    found = describe(holder["pid"], holder["start_time"])
    if not found:
        return "-"
    parent = f", parent {terminal.escape(found['parent'])}" if found["parent"] else ""
    return f"up {age(found['started'])}, {found['cpu_s']:.0f} s CPU, {found['rss_mib']:,} MiB RAM{parent}"

