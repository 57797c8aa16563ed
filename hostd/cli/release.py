"""`pve-gpu-release VMID...`: release the GPUs that containers hold, verify, report."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found, unused-ignore]  # `signal` brings `enum` with it
import sys

from hostd.cli import interrupt
from hostd.cli.common import (
    add_common_options,
    add_selectors,
    failed,
    loaded,
    named_config,
    positive_seconds,
    print_json,
    seconds,
    status_of,
    vmid,
)
from hostd.cli.render import Renderer
from hostd.errors import PgrError

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    from hostd.config import ContainerSettings
    from hostd.ladder import Options

    Json = dict[str, Any]

NAME = "release"
INTERMIXED = True
"""`129 --now 130` is two containers."""
HELP = "Free the NVIDIA GPUs that containers hold: find every holder from the host, end it, prove that the memory is back."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("vmids", nargs="*", type=vmid, metavar="VMID", help="container id, such as 129")
    parser.add_argument("-n", "--dry-run", action="store_true", help="show who would be signalled; no signal is sent")
    parser.add_argument("--now", action="store_true", help="skip SIGTERM and its grace")
    parser.add_argument(
        "--grace", type=seconds, metavar="S", help="seconds after SIGTERM without progress (default 10)"
    )
    parser.add_argument(
        "--timeout", type=positive_seconds, metavar="S", help="limit on one release in seconds (default 150)"
    )
    add_selectors(parser)
    parser.add_argument("--stop", action="store_true", help="may stop the container if its init is a holder")
    parser.add_argument(
        "--stop-units",
        action="store_true",
        help="first ask the job's own supervisor (systemd unit, docker) to stop it; kill a job that comes back with "
        "its whole unit",
    )
    parser.add_argument(
        "--reset", action="store_true", help="may reset a GPU that nothing else frees; refused when anyone else is on it"
    )
    parser.add_argument(
        "--all-containers",
        action="store_true",
        help="with --gpu, for a VM that gets the GPU: free it from every container that has it open",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask before --all-containers (for scripts)")
    parser.add_argument(
        "--no-verify-memory", action="store_true", help="accept 'no holder left' when the driver cannot confirm it"
    )
    parser.add_argument("--no-wait", action="store_true", help="exit 75 instead of waiting for a release in flight")
    add_common_options(parser)


def run(args: argparse.Namespace) -> int:
    from hostd.cli.common import require_root

    if args.all_containers or not args.vmids:
        return _all_containers(args)
    require_root()
    named_config(args.config)  # once, before any container
    renderer = Renderer(sys.stdout, sys.stderr, quiet=args.quiet or args.json, verbose=args.verbose)
    results: list[Json] = []
    for number in dict.fromkeys(args.vmids):
        result = interruptible(release_one, number, args, renderer)
        results.append(result)
        if not args.json:
            renderer.report(result)
        if result["reason"] == "interrupted":
            break
    return finish(results, args, several=len(args.vmids) > 1)


def _all_containers(args: argparse.Namespace) -> int:
    from hostd.errors import UsageError

    if not args.all_containers:
        raise UsageError("cannot release: say which container", next_step="pve-gpu-release --help")
    if args.vmids or args.gpu is None or args.pid is not None:
        raise UsageError(
            "cannot release from all containers: that takes --gpu, and neither container ids nor --pid",
            next_step="pve-gpu-release --gpu 0000:3b:00.0 --all-containers",
        )
    from hostd.cli.handover import run

    return run(args)


def finish(results: list[Json], args: argparse.Namespace, *, several: bool) -> int:
    """Prints JSON where it was asked for; the exit status is the worst of all."""
    if several or len(results) != 1:
        from hostd.wire import releases_dict

        whole: Json = releases_dict(results)
    else:
        whole = results[0]
    if args.json:
        print_json(whole)
    return status_of(whole)


def given_options(args: argparse.Namespace) -> Json:
    """What the command line says, as Varlink's ReleaseOptions; what it leaves out is as configured."""
    given: Json = {"trigger": "cli"}
    for name in ("now", "dry_run", "stop", "stop_units", "reset"):
        if getattr(args, name):
            given[name] = True
    if args.no_verify_memory:
        given["verify_memory"] = False
    if args.no_wait:
        given["wait"] = False
    for name, value in (("gpu", args.gpu), ("pid", args.pid), ("grace_s", args.grace), ("timeout_s", args.timeout)):
        if value is not None:
            given[name] = value
    return given


def interruptible(release: Callable[..., Json], number: int, *rest: object) -> Json:
    """One of several releases. Ctrl-C where nothing is in flight (before, between two) begins no other one; it is a result
    like any other, so that what was done before is reported."""
    interrupt.install(signal.SIGINT, signal.SIGTERM)
    try:
        if not interrupt.came:
            return release(number, *rest)
    except BaseException:
        if not interrupt.came:
            raise
    from hostd.wire import error_dict

    later = f"not waited for its end; pve-gpu-release log {number} tells what was done"
    return error_dict(interrupt.error(number, later if interrupt.held else "nothing had been signalled"), number)


def release_one(number: int, args: argparse.Namespace, renderer: Renderer) -> Json:
    """One container: by the daemon when there is one, else here. Never raises PgrError: it becomes the result."""
    from hostd.cli import remote

    given = given_options(args)
    release_id = new_release_id()
    try:
        if remote.wanted(args):
            try:
                return remote.release(number, given, release_id, renderer.event, renderer.warn)
            except remote.DaemonAbsent:
                pass
            except remote.DaemonLost as exc:
                renderer.note(f"the daemon is gone ({exc}); going on without it")
        return _here(number, given, args, renderer, release_id)
    except (PgrError, OSError, MemoryError) as exc:
        return failed(exc, number)


def _here(number: int, given: Json, args: argparse.Namespace, renderer: Renderer, release_id: str) -> Json:
    return in_process(number, options_for(number, given, args), renderer.event, renderer.note, release_id)


def options_for(number: int, given: Json, args: argparse.Namespace) -> Options:
    """What the command line says, over what is configured for the container. Raises ConfigError."""
    from dataclasses import replace

    from hostd.wire import parse_options

    config = loaded(args.config)
    settings = config.for_container(number)
    return replace(
        parse_options({"stop_units": settings.stop_units} | given, settings.limits),
        auto_reset=settings.reset.value == "auto",
        reset_services=config.reset.services,
    )


def configured(path: str | None, number: int) -> ContainerSettings:
    """What is configured for a container. Raises ConfigError."""
    return loaded(path).for_container(number)


def new_release_id() -> str:
    """A random UUID (RFC 9562, version 4), without the cost of importing `uuid`."""
    import os

    raw = bytearray(os.urandom(16))
    raw[6] = raw[6] & 0x0F | 0x40
    raw[8] = raw[8] & 0x3F | 0x80
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def in_process(
    number: int, options: Options, emit: Callable[[Json], None], note: Callable[[str], None], release_id: str = ""
) -> Json:
    """The whole release in this process, under the same lock as the daemon's."""
    import os

    from hostd.system.nvml import Nvml

    nvml = Nvml(options.limits.nvml_deadline_s)
    nvml.start()  # loads the driver's library while the rest of the product is imported

    from hostd.audit import entries_dropped
    from hostd.cancel import Cancel
    from hostd.engine import Surroundings, perform
    from hostd.errors import InterruptedRelease
    from hostd.sources import open_sources
    from hostd.stream import EventListener
    from hostd.system.journal import Journal
    from hostd.wire import error_dict

    cancel = Cancel()
    interrupt.hold(signal.SIGINT, signal.SIGTERM)
    cancel.install(signal.SIGINT, signal.SIGTERM)
    if interrupt.came:
        cancel.requested = True
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost terminal must not stop a release in the middle
    sources = open_sources(
        nvml_deadline_s=options.limits.nvml_deadline_s, read_deadline_s=options.limits.read_deadline_s, nvml=nvml
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
        interrupt.came = interrupt.came or cancel.requested
