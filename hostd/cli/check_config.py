"""`pve-gpu-release check-config [FILE]`: is the configuration right, and what is in force?"""

from __future__ import annotations

import argparse
import sys

from hostd import config as settings
from hostd.cli.common import file_name, print_json
from hostd.configkeys import as_yaml
from hostd.configvalues import effective_values
from hostd.errors import UnreadableError, UsageError
from hostd.terminal import escape
from hostd.verdicts import exit_status

NAME = "check-config"
HELP = "Check the configuration file: every mistake with its line, or what is in force."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", nargs="?", type=file_name, metavar="FILE", help=f"default: {settings.DEFAULT_PATH}")
    parser.add_argument("--config", type=file_name, metavar="FILE", help="the same, as the other verbs take it")
    parser.add_argument("-v", "--verbose", action="store_true", help="print every setting that is in force")
    parser.add_argument("--json", action="store_true", help="one JSON object for programs")


def run(args: argparse.Namespace) -> int:
    """0 when the file can be used, 2 with every mistake when not, 4 without yaml. A missing default file: the defaults."""
    if args.file and args.config:
        raise UsageError("cannot check two files at once", next_step="pve-gpu-release check-config FILE")
    named = args.file or args.config
    path = named or settings.DEFAULT_PATH
    try:
        config = settings.load(path, must_exist=named is not None)
    except settings.BrokenConfigError as exc:
        if args.json:
            print_json({"schema": 1, "file": path, "ok": False, "errors": list(exc.problems)})
        else:
            print(*exc.problems, sep="\n", file=sys.stderr)
        return exit_status(exc.reason)
    if config.notices:  # without yaml nothing was checked: neither right nor wrong
        raise UnreadableError(config.notices[0].partition(";")[0], next_step="apt install python3-yaml")
    if args.json:
        print_json(
            {
                "schema": 1,
                "file": path,
                "ok": True,
                "errors": [],
                "notices": [],
                "settings": effective_values(config),
                "containers": {str(vmid): effective_values(config, vmid) for vmid in config.containers},
            }
        )
        return 0
    _print_people(path, config, verbose=args.verbose)
    return 0


def _print_people(path: str, config: settings.Config, *, verbose: bool) -> None:
    count = len(config.containers)
    own = f", {count} container{'s' if count != 1 else ''} with overrides" if count else ""
    print(f"OK: {escape(path)}{own}")
    if not verbose:
        return
    everywhere = effective_values(config)
    for key, value in everywhere.items():
        print(f"{key} = {as_yaml(value)}")
    for vmid in config.containers:
        for key, value in effective_values(config, vmid).items():
            if value != everywhere[key]:
                print(f"containers.{vmid}.{key} = {as_yaml(value)}")
