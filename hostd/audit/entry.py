"""One entry as `(field, value)` pairs, and the words that entries share.

Text from inside a container is escaped here, so no value has a newline and no name can forge a field or an entry.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass

from hostd.audit.kinds import IDENTIFIER, Kind, Priority
from hostd.model import GpuInfo, Holder, Report
from hostd.terminal import escape

MAX_TEXT = 2000
"""Characters of one value; command lines and stacks are cut there."""

MAX_REPEATS = 200
"""How often one field stands in an entry; journald takes 1,024 fields in all."""

Entry = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Context:
    """What every entry of one release or one hook phase carries."""

    vmid: int | None = None
    release_id: str = ""
    trigger: str = ""
    phase: str = ""
    caller_uid: int | None = None
    caller_pid: int | None = None
    dry_run: bool = False
    began_s: float | None = None
    """CLOCK_MONOTONIC at the start; entries then say how long after it they were made."""

    @classmethod
    def of(
        cls,
        report: Report,
        *,
        phase: str = "",
        caller_uid: int | None = None,
        caller_pid: int | None = None,
        began_s: float | None = None,
    ) -> Context:
        began = time.monotonic() if began_s is None else began_s
        return cls(report.vmid, report.release_id, report.trigger, phase, caller_uid, caller_pid, report.dry_run, began)


NOWHERE = Context()

Fact = tuple[str, object]


def entry_of(kind: Kind, ctx: Context, message: str, *facts: Fact, priority: Priority | None = None) -> Entry:
    """The pairs of one entry; a list gives a field several times, None and empty text leave it out."""
    at_ms = None if ctx.began_s is None else max(0, round((time.monotonic() - ctx.began_s) * 1000))
    head: tuple[Fact, ...] = (
        ("MESSAGE", message),
        ("MESSAGE_ID", kind.message_id),
        ("PRIORITY", int(kind.priority if priority is None else priority)),
        ("SYSLOG_IDENTIFIER", IDENTIFIER),
        ("SYSLOG_PID", os.getpid()),
        ("PVE_GPU_RELEASE_EVENT", kind.name),
        ("PVE_GPU_RELEASE_ID", ctx.release_id),
        ("PVE_VMID", ctx.vmid),
        ("PVE_PHASE", ctx.phase),
        ("TRIGGER", ctx.trigger),
        ("CALLER_UID", ctx.caller_uid),
        ("CALLER_PID", ctx.caller_pid),
        ("DRY_RUN", True if ctx.dry_run else None),
        ("AT_MS", at_ms),
    )
    pairs: list[tuple[str, str]] = []
    for name, value in (*head, *facts):
        for item in value[:MAX_REPEATS] if isinstance(value, (list, tuple)) else (value,):
            text = _text(item)
            if text:
                pairs.append((name, text))
    return tuple(pairs)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "1" if value else "0"
    # Cut first: escaping makes nothing shorter, and 16 KiB of control characters take milliseconds.
    text = escape((value if isinstance(value, (str, bytes)) else str(value))[: MAX_TEXT + 1])
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


# --- words ---------------------------------------------------------------------------------------------------------


def container_words(ctx: Context) -> str:
    return f"container {ctx.vmid}" if ctx.vmid is not None else "this node"


def process_words(holder: Holder) -> str:
    return f"pid {holder.process.pid} ({holder.process.comm})"


def gpu_words(minors: Iterable[int]) -> str:
    return ", ".join(f"nvidia{minor}" for minor in minors) or "control nodes only"


def mib_words(mib: int | None) -> str:
    return "" if mib is None else f"with {mib} MiB"


def figure_words(mib: int | None) -> str:
    return "an unknown amount" if mib is None else f"{mib} MiB"


def count_words(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


# --- facts ---------------------------------------------------------------------------------------------------------


def identity_facts(holder: Holder) -> tuple[Fact, ...]:
    return (
        ("HOLDER_PID", holder.process.pid),
        ("HOLDER_START", holder.process.start_time),
        ("HOLDER_COMM", holder.process.comm),
    )


def holder_facts(holder: Holder, gpus: Iterable[GpuInfo]) -> tuple[Fact, ...]:
    return (
        *identity_facts(holder),
        ("HOLDER_NSPID", list(holder.process.ns_pids)),
        ("HOLDER_CMDLINE", holder.cmdline),
        ("HOLDER_USER", holder.user),
        ("HOLDER_CGROUP", holder.process.cgroup),
        ("HOLDER_UNIT", holder.supervisor.name if holder.supervisor else None),
        ("HOLDER_STATE", holder.process.state),
        ("HOLDER_MIB", holder.memory_mib),
        ("INHERITED_FROM", holder.inherited_from),
        ("EVIDENCE", sorted(holder.evidence)),
        ("GPU_MINOR", list(holder.gpus)),
        ("GPU_UUID", [gpu.uuid for gpu in gpus if gpu.minor in holder.gpus]),
    )
