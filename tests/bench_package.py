"""Start-up of the installed package in a node with systemd, `make bench-package` (DESIGN 11, rows 5, 6 and 7).

`python -m tests.bench_package [SUITE...]`; both suites by default. Ratios are to `python3 -I -c pass` of the same interpreter.
"""

from __future__ import annotations

import sys

from tests.node.node import VirtualNode
from tests.startup import Took, whole_processes

PYTHON = "/usr/bin/python3"
TOOL = "/usr/sbin/pve-gpu-release"
HOOK = "/usr/lib/pve-gpu-release/hookscripts/pve-gpu-release"
IDLE, STOPPED = "129", "131"
"""A running container that holds nothing; one that does not run."""
COMMANDS = {
    "python3 -I -c pass": [PYTHON, "-I", "-c", "pass"],
    f"pve-gpu-release {IDLE}": [TOOL, IDLE, "-q"],
    f"pve-gpu-release {IDLE} --no-daemon": [TOOL, IDLE, "-q", "--no-daemon"],
    "hookscript pre-stop": [HOOK, IDLE, "pre-stop"],
    "hookscript post-stop": [HOOK, STOPPED, "post-stop"],
    "hookscript pre-start": [HOOK, STOPPED, "pre-start"],
    "hookscript post-start": [HOOK, IDLE, "post-start"],
}
GOALS = {f"pve-gpu-release {IDLE} --no-daemon": 15}
GOAL = 5


def measure(suite: str) -> dict[str, Took]:
    with VirtualNode(suite) as node:
        node.install_product()
        for vmid in (IDLE, STOPPED):
            container = node.add_container(int(vmid), gpus=(0, 1), init="tiny")
            if vmid == IDLE:
                container.start()
        node.run([TOOL, IDLE, "-q"])  # starts the daemon
        return whole_processes(lambda argv, text: node.run(argv, input=text, timeout=300).stdout, PYTHON, COMMANDS, 30)


def show(suite: str, rows: dict[str, Took]) -> None:
    base = rows["python3 -I -c pass"]
    print(f"\n{suite}, installed package, nothing held   best ms  median ms   ratio of best, of medians")
    for name, took in rows.items():
        goal = "" if took is base else f"  (goal {GOALS.get(name, GOAL)})"
        ratios = f"{took.best / base.best:4.1f} x {took.median / base.median:5.1f} x"
        print(f"  {name:<38} {took.best:7.1f} {took.median:10.1f}   {ratios}{goal}")


def main(suites: list[str]) -> int:
    for suite in suites or ["bookworm", "trixie"]:
        show(suite, measure(suite))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
