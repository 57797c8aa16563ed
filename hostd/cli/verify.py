"""`pve-gpu-release verify [VMID...]`: judge only, no action. The same code as a dry run."""

from __future__ import annotations

import argparse
import sys

from hostd.cli import release
from hostd.cli.common import add_common_options, print_json, vmid
from hostd.cli.render import Renderer
from hostd.errors import PgrError
from hostd.ladder import Options
from hostd.wire import error_dict, releases_dict, status_of

NAME = "verify"
HELP = "Look at containers and judge: released, held or unknown. Nothing is signalled. Without VMID: every container."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmids", nargs="*", type=vmid, metavar="VMID", help="container id (default: all that have run)")
    parser.add_argument("--gpu", metavar="SEL", help="only this GPU: NVML index, minor, UUID or PCI address")
    parser.add_argument(
        "--no-verify-memory", action="store_true", help="accept 'no holder left' when the driver cannot confirm it"
    )
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    from hostd.engine import require_root

    require_root()
    renderer = Renderer(sys.stdout, sys.stderr, quiet=args.quiet or args.json, verbose=args.verbose)
    results = []
    for number in dict.fromkeys(args.vmids) or all_containers():
        try:
            options = Options(
                limits=release.configured(args, number),
                dry_run=True,
                verify_memory=not args.no_verify_memory,
                gpu=args.gpu,
                trigger="verify",
            )
            result = release.in_process(number, options, renderer.event, renderer.note)
        except PgrError as exc:
            result = error_dict(exc, number)
        results.append(result)
        renderer.report(result)
    if args.json:
        print_json(results[0] if len(args.vmids) == 1 else releases_dict(results))
    return status_of(results[0] if len(results) == 1 else releases_dict(results))


def all_containers() -> list[int]:
    """Containers with a cgroup or a configuration on this node."""
    from hostd.system.cgroupfs import Cgroupfs, find_mount
    from hostd.system.pve import Pve

    running, _ = Cgroupfs(find_mount()).containers()
    return sorted({*running, *Pve().containers()})
