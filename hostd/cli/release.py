"""`pve-gpu-release VMID...`: release the GPUs that containers hold, verify, report."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable
from typing import Any

from hostd.cli.common import add_common_options, fail, print_json, seconds, vmid
from hostd.cli.render import Renderer
from hostd.errors import InterruptedRelease, PgrError
from hostd.ladder import Limits, Options
from hostd.stream import EventListener
from hostd.wire import error_dict, releases_dict, status_of

NAME = "release"
HELP = (
    "Free the NVIDIA GPUs that containers hold: find every holder from the host, end it, prove that the memory is back."
)
Json = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmids", nargs="+", type=vmid, metavar="VMID", help="container id, such as 129")
    parser.add_argument("-n", "--dry-run", action="store_true", help="show who would be signalled; no signal is sent")
    parser.add_argument("--now", action="store_true", help="skip SIGTERM and its grace")
    parser.add_argument(
        "--grace", type=seconds, metavar="S", help="seconds after SIGTERM without progress (default 10)"
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="limit on one release in seconds (default 150)")
    parser.add_argument("--gpu", metavar="SEL", help="only this GPU: NVML index, minor, UUID or PCI address")
    parser.add_argument("--pid", metavar="PID", help="only this process: its pid in the container, or host:PID")
    parser.add_argument("--stop", action="store_true", help="may stop the container if its init is a holder")
    parser.add_argument(
        "--no-verify-memory", action="store_true", help="accept 'no holder left' when the driver cannot confirm it"
    )
    parser.add_argument("--no-wait", action="store_true", help="exit 75 instead of waiting for a release in flight")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    from hostd.engine import require_root

    require_root()
    renderer = Renderer(sys.stdout, sys.stderr, quiet=args.quiet or args.json, verbose=args.verbose)
    results: list[Json] = []
    for number in dict.fromkeys(args.vmids):
        result = release_one(number, args, renderer)
        results.append(result)
        if not args.json:
            renderer.report(result)
        if result["reason"] == "interrupted":
            break
    if args.json:
        print_json(results[0] if len(args.vmids) == 1 else releases_dict(results))
    elif args.quiet:
        for result in results:
            renderer.problem(result)
    return status_of(results[0] if len(results) == 1 else releases_dict(results))


def options_from(args: argparse.Namespace, limits: Limits, *, dry_run: bool, trigger: str) -> Options:
    """The command line over the configured limits."""
    from dataclasses import replace

    if args.grace is not None:
        limits = replace(limits, grace_s=args.grace)
    if args.timeout is not None:
        limits = replace(limits, timeout_s=args.timeout)
    return Options(
        limits=limits,
        now=args.now,
        dry_run=dry_run,
        stop=args.stop,
        verify_memory=not args.no_verify_memory,
        gpu=args.gpu,
        pid=args.pid,
        trigger=trigger,
        wait=not args.no_wait,
    )


def configured(args: argparse.Namespace, number: int) -> Limits:
    """The limits of a container by the configuration file. Raises ConfigError."""
    from hostd.config import DEFAULT_PATH, load

    config = load(args.config or DEFAULT_PATH, must_exist=args.config is not None)
    return config.for_container(number).limits


def release_one(number: int, args: argparse.Namespace, renderer: Renderer) -> Json:
    """One container: by the daemon when there is one, else here. Never raises PgrError: it becomes the result."""
    try:
        options = options_from(args, configured(args, number), dry_run=args.dry_run, trigger="cli")
        return in_process(number, options, renderer.event, renderer.note)
    except PgrError as exc:
        return error_dict(exc, number)


def in_process(
    number: int, options: Options, emit: Callable[[Json], None], note: Callable[[str], None], release_id: str = ""
) -> Json:
    """The whole release in this process, under the same lock as the daemon's."""
    import os

    from hostd.audit import entries_dropped
    from hostd.cancel import Cancel
    from hostd.engine import Surroundings, perform
    from hostd.observe import open_sources
    from hostd.system.journal import Journal

    cancel = Cancel()
    cancel.install(signal.SIGINT, signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal must not stop a release in the middle
    sources = open_sources(
        nvml_deadline_s=options.limits.nvml_deadline_s, read_deadline_s=options.limits.read_deadline_s
    )
    journal = Journal(on_drop=entries_dropped)

    def waits(pid: int, since_s: float) -> None:
        if since_s < 1:
            owner = f" (pid {pid})" if pid else ""
            note(f"container {number}: waiting for another release of it{owner}")

    around = Surroundings(
        listener=EventListener(emit),
        journal=journal,
        caller_uid=os.getuid(),
        caller_pid=os.getpid(),
        on_wait=waits,
    )
    try:
        return perform(sources, number, options, around, cancel, release_id=release_id)
    except InterruptedRelease as exc:
        return error_dict(exc, number)
    finally:
        sources.close()
        journal.close()
        cancel.close()


__all__ = ["HELP", "NAME", "add_arguments", "fail", "run"]
