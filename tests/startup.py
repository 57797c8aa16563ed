"""Wall time of whole processes, measured by a process inside a node: entering the node is not part of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

INSIDE = """
import json, os, statistics, sys, time
commands, times = json.load(sys.stdin)
null = os.open(os.devnull, os.O_RDWR)
out = {name: [] for name in commands}
for _ in range(times):
    for name, argv in commands.items():
        begun = time.perf_counter()
        pid = os.posix_spawn(argv[0], argv, os.environ,
                             file_actions=[(os.POSIX_SPAWN_DUP2, null, n) for n in (0, 1)])
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out[name].append((time.perf_counter() - begun) * 1000)
        if status:
            sys.exit(f"{argv} ended with {status}")
print(json.dumps({name: (min(took), statistics.median(took)) for name, took in out.items()}))
"""


@dataclass(frozen=True)
class Took:
    """Milliseconds."""

    best: float
    median: float


def whole_processes(
    run: Callable[[list[str], str], str], python: str, commands: dict[str, list[str]], times: int
) -> dict[str, Took]:
    """Every command `times` times, in turn. `run(argv, stdin)` runs in the node and returns stdout.

    Raises whatever `run` raises; a command that does not exit with 0 makes it fail.
    """
    text = run([python, "-I", "-c", INSIDE], json.dumps([commands, times]))
    return {name: Took(*figures) for name, figures in json.loads(text).items()}
