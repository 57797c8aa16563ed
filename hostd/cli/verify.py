"""`pve-gpu-release verify [VMID...]`: judge only, no action. The same code as a dry run."""

from __future__ import annotations

import argparse
import sys

from hostd.cli import release, remote
from hostd.cli.common import add_common_options, add_selectors, failed, named_config, print_json, require_root, vmid
from hostd.cli.render import Renderer
from hostd.errors import PgrError, UnreadableError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Json = dict[str, Any]

NAME = "verify"
HELP = "Look at containers and judge: released, held or unknown. Nothing is signalled. Without VMID: every container."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmids", nargs="*", type=vmid, metavar="VMID", help="container id (default: every container)")
    add_selectors(parser)
    parser.add_argument(
        "--no-verify-memory", action="store_true", help="accept 'no holder left' when the driver cannot confirm it"
    )
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    require_root()
    named_config(args.config)
    numbers = list(dict.fromkeys(args.vmids)) or all_containers()
    if not numbers:
        return no_containers(args)
    renderer = Renderer(sys.stdout, sys.stderr, quiet=args.quiet or args.json, verbose=args.verbose)
    results = []
    for number in numbers:
        result = verify_one(number, args, renderer)
        results.append(result)
        if not args.json:
            renderer.report(result)
    return release.finish(results, args, several=len(args.vmids) != 1)


def verify_one(number: int, args: argparse.Namespace, renderer: Renderer) -> Json:
    from hostd.wire import parse_options

    given: Json = {"verify_memory": not args.no_verify_memory, "gpu": args.gpu, "pid": args.pid}
    try:
        if remote.wanted(args):
            try:
                return remote.verify({"vmid": number, **given}, renderer.event)
            except remote.DaemonUnavailable:
                pass
        limits = release.configured(args.config, number).limits
        options = parse_options({**given, "dry_run": True, "trigger": "verify"}, limits)
        return release.in_process(number, options, renderer.event, renderer.note)
    except (PgrError, OSError, MemoryError) as exc:
        return failed(exc, number)


def all_containers() -> list[int]:
    """Containers with a cgroup or a configuration on this node. Raises UnreadableError: a part of them is not all."""
    from hostd.system.cgroupfs import Cgroupfs, find_mount
    from hostd.system.pve import Pve
    from hostd.verdicts import say

    running, blind = Cgroupfs(find_mount()).containers()
    for spot in blind:
        message, step = say("cannot-look", detail=f"{spot.what}: {spot.error}")
        raise UnreadableError(message, next_step=step)
    return sorted({*running, *Pve().containers()})


def no_containers(args: argparse.Namespace) -> int:
    """Nobody is there to hold a GPU: released, as for a container that holds none."""
    from hostd.wire import SCHEMA

    message = "there is no container on this node, so none holds a GPU"
    if args.json:
        print_json({"schema": SCHEMA, "verdict": "released", "message": message, "releases": []})
    elif not args.quiet:
        print(f"released: {message}")
    return 0
