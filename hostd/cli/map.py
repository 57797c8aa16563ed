"""`pve-gpu-release map VMID PID`: container pid -> host pid, every PID-namespace level shown."""

from __future__ import annotations

import argparse

from hostd.cli import remote
from hostd.cli.common import add_common_options, named_config, pid, print_json, require_root, vmid
from hostd.errors import UsageError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

NAME = "map"
HELP = "Map a pid of a container to the host's, through NSpid; every PID-namespace level is shown."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmid", type=vmid, metavar="VMID", help="container id")
    parser.add_argument("pid", type=pid, metavar="PID", help="pid as the container sees it, at any level")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Prints every process of the container that has this number at some level; 2 when there is none."""
    from hostd import terminal
    from hostd.cli.render import table

    require_root()
    named_config(args.config)
    result = find(args)
    matches = result["matches"]
    if not matches:
        raise UsageError(
            f"cannot map pid {args.pid}: container {args.vmid} has no such process",
            next_step=f"pct exec {args.vmid} -- ps -e lists its processes",
            vmid=args.vmid,
        )
    if args.json:
        print_json({"schema": 1, **result})
    elif args.quiet:
        print("\n".join(str(m["pid"]) for m in matches))
    else:
        rows = [
            [f"host {m['pid']}", *[f"container {' > '.join(map(str, m['ns_pids']))}"], terminal.escape(m["comm"])]
            for m in matches
        ]
        print("\n".join(table(rows)))
    return 0


def find(args: argparse.Namespace) -> Json:
    if remote.wanted(args):
        try:
            return remote.ask("Map", {"vmid": args.vmid, "pid": args.pid})
        except remote.DaemonUnavailable:
            pass
    from hostd.nodeview import find_pid
    from hostd.sources import open_sources

    sources = open_sources(nvml_deadline_s=1.0, read_deadline_s=1.0)
    try:
        return {"vmid": args.vmid, "ns_pid": args.pid, "matches": find_pid(sources, args.vmid, args.pid)}
    finally:
        sources.close()
