"""Plain command lines of the default verb without argparse: `129`, `129 130 --now --json`. A third of such a run's time.

`tests/unit/test_quick.py` holds both ways of parsing against each other.
"""

from __future__ import annotations

FLAGS = {
    "-n": "dry_run",
    "--dry-run": "dry_run",
    "--now": "now",
    "--stop": "stop",
    "--stop-units": "stop_units",
    "--reset": "reset",
    "--no-verify-memory": "no_verify_memory",
    "--no-wait": "no_wait",
    "--json": "json",
    "-q": "quiet",
    "--quiet": "quiet",
    "-v": "verbose",
    "--verbose": "verbose",
    "--no-daemon": "no_daemon",
}
_TOGGLES = {*FLAGS.values(), "all_containers", "yes"}
_VALUES = ("grace", "timeout", "gpu", "pid", "config")


class Arguments:
    """As argparse's Namespace of the release verb: `vmids`, a flag per option, None for a value that was not given."""

    def __init__(self, vmids: list[int], given: set[str]) -> None:
        self.vmids = vmids
        for name in _TOGGLES:
            setattr(self, name, name in given)
        for name in _VALUES:
            setattr(self, name, None)


def parse(argv: list[str]) -> Arguments | None:
    """The arguments when every word is a container id or a flag without a value; else None: argparse decides."""
    vmids: list[int] = []
    given: set[str] = set()
    for word in argv:
        if word.isascii() and word.isdigit() and 1 <= len(word) <= 9 and int(word) >= 1:
            vmids.append(int(word))
        elif word in FLAGS:
            given.add(FLAGS[word])
        else:
            return None
    return Arguments(vmids, given) if vmids else None
