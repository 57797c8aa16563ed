"""`pve-gpu-release --gpu SEL --all-containers`: one GPU, freed from every container, for a VM that is about to start."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

from hostd import terminal
from hostd.cli.common import failed, loaded, require_root
from hostd.cli.release import finish, given_options, in_process, interruptible, new_release_id, options_for
from hostd.cli.render import Renderer
from hostd.errors import PgrError, RefusedError
from hostd.handover import OpenGpu, look_at_gpu, people

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from typing import Any

    Json = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """Names every container, asks (or takes --yes), frees the GPU from each, looks again."""
    require_root()
    renderer = Renderer(sys.stdout, sys.stderr, quiet=args.quiet or args.json, verbose=args.verbose)
    there = look(args)
    results: list[Json] = []
    if there.containers:
        for vmid, holders in sorted(there.containers.items()):
            renderer.note(f"container {vmid} has {there.name} open: {people(holders)}")
        if not args.dry_run:
            confirm(there, args.yes)
        for vmid in sorted(there.containers):
            results.append(interruptible(_release, vmid, there, args, renderer))
            if not args.json:
                renderer.report(results[-1])
            if results[-1]["reason"] == "interrupted":
                return finish(results, args, several=True)
        there = look(args)
    results.append(conclusion(there, not args.no_verify_memory))
    if not args.json:
        renderer.report(results[-1])
    return finish(results, args, several=len(results) > 1)


def look(args: argparse.Namespace) -> OpenGpu:
    from hostd.sources import open_sources

    config = loaded(args.config)
    sources = open_sources(nvml_deadline_s=config.nvml.deadline_s, read_deadline_s=1.0)
    try:
        return look_at_gpu(sources, args.gpu)
    finally:
        sources.close()


def confirm(there: OpenGpu, yes: bool) -> None:
    """Raises RefusedError unless somebody agrees."""
    if yes:
        return
    vmids = ", ".join(map(str, sorted(there.containers)))
    if not (terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stderr)):
        raise RefusedError(
            f"refused: this would end the processes of containers {vmids} on {there.name}, and nobody is there to ask",
            next_step="with --yes it is done without asking, with --dry-run it is only shown",
        )
    many = "s" if len(there.containers) > 1 else ""
    print(f"Free {there.name} from container{many} {vmids}? [y/N] ", end="", file=sys.stderr, flush=True)
    if os.read(sys.stdin.fileno(), 1000).strip().lower() not in (b"y", b"yes"):
        raise RefusedError(f"refused: {there.name} was not freed, as answered")


def _release(vmid: int, there: OpenGpu, args: argparse.Namespace, renderer: Renderer) -> Json:
    assert there.info is not None
    given = given_options(args) | {"gpu": there.info.uuid or there.info.pci_bus_id}
    try:
        options = replace(options_for(vmid, given, args), open_nodes=True)
        return in_process(vmid, options, renderer.event, renderer.note, new_release_id())
    except (PgrError, OSError, MemoryError) as exc:
        return failed(exc, vmid)


def conclusion(there: OpenGpu, verify_memory: bool) -> Json:
    """The last word, on the GPU itself: in the shape of a report."""
    from hostd.verdicts import REASONS, say
    from hostd.wire import SCHEMA, clean

    facts: dict[str, object] = {"gpus": there.name, "driver": there.driver}
    if there.info is None:
        reason = "gpu-not-ours"
    elif there.containers:
        reason = "gpu-in-containers"
        facts["others"] = "; ".join(f"container {v}: {people(there.containers[v])}" for v in sorted(there.containers))
    elif there.host:
        reason, facts["others"] = "gpu-host-holds", people(there.host)
    elif spots := [s for s in there.blind_spots if verify_memory or s.source != "nvml"]:
        spot = spots[0]
        reason, facts["detail"] = "cannot-look", f"{spot.what}: {spot.error}"
    else:
        reason = "gpu-idle"
    message, step = say(reason, **facts)
    verdict = REASONS[reason].verdict
    return {
        "schema": SCHEMA,
        "vmid": None,
        "verdict": verdict.value if verdict else None,
        "reason": reason,
        "message": clean(message),
        "holders": [],
        "gpus": [],
        "rungs": [],
        "blind_spots": [],
        "next_step": clean(step),
    }
