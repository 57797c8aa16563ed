"""Why a process does not die: read once, when a KILL has brought nothing (DESIGN 4, Unkillable)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hostd.errors import is_gone
from hostd.model import ProcessRef, Stuck
from hostd.system.procfs import Procfs


def stuck_tasks(procfs: Procfs, refs: Iterable[ProcessRef], since: str = "") -> list[Stuck]:
    """For each process one task that keeps SIGKILL pending in D state, the facts the administrator needs.

    `since`: when it was killed, or first seen ending (ISO 8601 UTC); it has not moved after that.

    A process without such a task is not listed: it is merely slow.
    """
    found: list[Stuck] = []
    for ref in refs:
        try:
            tasks = procfs.read_stuck(ref.pid)
        except OSError as exc:
            if is_gone(exc):
                continue
            raise
        worst = next((t for t in tasks if t.kill_pending and t.state == "D"), None)
        if worst is not None:
            found.append(replace(worst, since=since))
    return found
