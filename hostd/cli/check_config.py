"""`pve-gpu-release check-config [FILE]`: is the configuration right, and what is in force?"""

from __future__ import annotations

import argparse
import sys

from hostd import config as settings
from hostd.terminal import escape, tolerate
from hostd.verdicts import exit_status

NAME = "check-config"
HELP = "check the configuration file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", metavar="FILE", help=f"default: {settings.DEFAULT_PATH}")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every setting that is in force")
    parser.add_argument("--json", action="store_true", help="one JSON object for programs")


def run(args: argparse.Namespace) -> int:
    """0 when the file can be used, 2 with every mistake when not. A missing default file means the defaults."""
    named = args.file or getattr(args, "config", None)
    path = named or settings.DEFAULT_PATH
    tolerate(sys.stdout)
    tolerate(sys.stderr)
    try:
        config = settings.load(path, must_exist=named is not None)
    except settings.BrokenConfigError as exc:
        if args.json:
            _print_json({"schema": 1, "file": path, "ok": False, "errors": list(exc.problems)})
        else:
            print(*exc.problems, sep="\n", file=sys.stderr)
        return exit_status(exc.reason)
    if args.json:
        _print_json(
            {
                "schema": 1,
                "file": path,
                "ok": True,
                "errors": [],
                "notices": list(config.notices),
                "settings": settings.effective_values(config),
                "containers": {str(vmid): settings.effective_values(config, vmid) for vmid in config.containers},
            }
        )
        return 0
    for notice in config.notices:
        print(f"note: {notice}", file=sys.stderr)
    _print_people(path, config, verbose=args.verbose)
    return 0


def _print_people(path: str, config: settings.Config, *, verbose: bool) -> None:
    count = len(config.containers)
    own = f", {count} container{'s' if count != 1 else ''} with overrides" if count else ""
    print(f"OK: {escape(path)}{own}")
    if not verbose:
        return
    everywhere = settings.effective_values(config)
    for key, value in everywhere.items():
        print(f"{key} = {settings.as_yaml(value)}")
    for vmid in config.containers:
        for key, value in settings.effective_values(config, vmid).items():
            if value != everywhere[key]:
                print(f"containers.{vmid}.{key} = {settings.as_yaml(value)}")


def _print_json(data: dict[str, object]) -> None:
    import json

    print(json.dumps(data))
