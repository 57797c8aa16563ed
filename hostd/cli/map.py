"""`pve-gpu-release map VMID PID`: container pid -> host pid, every PID-namespace level shown."""

from __future__ import annotations

import argparse

from hostd.cli.common import add_common_options, print_json, vmid
from hostd.errors import UsageError
from hostd.model import Process

NAME = "map"
HELP = "Map a pid of a container to the host's, through NSpid; every PID-namespace level is shown."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmid", type=vmid, metavar="VMID", help="container id")
    parser.add_argument("pid", type=vmid, metavar="PID", help="pid as the container sees it, at any level")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    """Prints every process of the container that has this number at some level; 2 when there is none."""
    from hostd import terminal
    from hostd.cli.render import table
    from hostd.engine import require_root
    from hostd.wire import SCHEMA, clean

    require_root()
    found = find(args.vmid, args.pid)
    if not found:
        raise UsageError(
            f"cannot map pid {args.pid}: container {args.vmid} has no such process",
            next_step=f"pct exec {args.vmid} -- ps -e lists its processes",
            vmid=args.vmid,
        )
    if args.json:
        matches = [
            {"pid": p.pid, "ns_pids": list(p.ns_pids), "start_time": p.start_time, "comm": clean(p.comm)} for p in found
        ]
        print_json({"schema": SCHEMA, "vmid": args.vmid, "ns_pid": args.pid, "matches": matches})
    elif args.quiet:
        print("\n".join(str(p.pid) for p in found))
    else:
        rows = [
            [f"host {p.pid}", *(" > ".join(map(str, p.ns_pids)).split("\0")), terminal.escape(p.comm)] for p in found
        ]
        print("\n".join(table(rows)))
    return 0


def find(number: int, pid: int) -> list[Process]:
    """The container's processes that have `pid` at some namespace level below ours, shallowest level first."""
    from hostd.engine import find_subject
    from hostd.observe import ContainerView, open_sources
    from hostd.system.pve import Pve

    sources = open_sources(nvml_deadline_s=1.0, read_deadline_s=1.0)
    view = ContainerView(sources, number)
    try:
        find_subject(sources, number, Pve())
        matches = [p for p in view.members().processes.values() if pid in p.ns_pids]
        return sorted(matches, key=lambda p: (p.ns_pids.index(pid), p.pid))
    finally:
        view.close()
        sources.close()
