"""The entries of a container's life: its stop, its start, the stop watchdog."""

from __future__ import annotations

from collections.abc import Sequence

from hostd.audit.entry import Context, Entry, container_words, count_words, entry_of, gpu_words
from hostd.audit.kinds import (
    CLEARED,
    GATE_BLOCKED,
    GATE_WARNED,
    NODES_MADE,
    PHASE_DONE,
    SNAPSHOT,
    WATCHDOG_ARMED,
    WATCHDOG_REPORT,
    WATCHDOG_UNARMED,
    Priority,
)
from hostd.model import HolderReport, Observation


def snapshot(ctx: Context, observation: Observation) -> Entry:
    """pre-stop: who holds what, before anything is stopped."""
    count = count_words(len(observation.holders), "holder", "holders")
    minors = sorted({minor for holder in observation.holders for minor in holder.gpus})
    return entry_of(
        SNAPSHOT,
        ctx,
        f"{container_words(ctx)}: about to stop; {count} on {gpu_words(minors)}",
        ("HOLDER_PID", [holder.process.pid for holder in observation.holders]),
        ("GPU_MINOR", minors),
        ("GPU_UUID", [gpu.info.uuid for gpu in observation.gpus if gpu.info.minor in minors]),
    )


def cleared(ctx: Context, cgroup: str, processes: Sequence[tuple[int, str]], *, empty: bool) -> Entry:
    """Leftovers in a cgroup of the container were killed; `empty` tells whether it is empty now."""
    who = ", ".join(f"{pid} ({comm})" for pid, comm in processes) or "processes unseen"
    message = f"{container_words(ctx)}: left behind in {cgroup}: {who}; {'cleared' if empty else 'NOT cleared'}"
    return entry_of(
        CLEARED,
        ctx,
        message,
        ("RUNG", "cgroup-kill"),
        ("OUTCOME", "cleared" if empty else "not-cleared"),
        ("HOLDER_CGROUP", cgroup),
        ("HOLDER_PID", [pid for pid, _ in processes]),
        ("HOLDER_COMM", [comm for _, comm in processes]),
        priority=None if empty else Priority.ERR,
    )


def gate(ctx: Context, *, blocked: bool, reason: str, message: str, next_step: str = "") -> Entry:
    """pre-start found a dirty GPU: the start is refused, or goes on with a warning."""
    return entry_of(
        GATE_BLOCKED if blocked else GATE_WARNED,
        ctx,
        f"{container_words(ctx)}: start {'REFUSED' if blocked else 'goes on'}: {message}",
        ("OUTCOME", "blocked" if blocked else "warned"),
        ("REASON", reason),
        ("NEXT_STEP", next_step),
    )


def nodes_made(ctx: Context, paths: Sequence[str]) -> Entry:
    return entry_of(
        NODES_MADE, ctx, f"{container_words(ctx)}: made missing device nodes: {', '.join(paths)}", ("NODE", list(paths))
    )


def phase_done(ctx: Context, outcome: str, duration_s: float, *, detail: str = "") -> Entry:
    """A lifecycle event was dealt with (one record per event, however often it was announced)."""
    message = f"{container_words(ctx)}: {ctx.phase or 'event'}: {outcome}" + (f"; {detail}" if detail else "")
    return entry_of(PHASE_DONE, ctx, message, ("OUTCOME", outcome), ("DURATION_USEC", round(duration_s * 1e6)))


def watchdog_armed(ctx: Context, delay_s: float) -> Entry:
    message = f"{container_words(ctx)}: a stop that takes longer than {delay_s:g} s will be looked at"
    return entry_of(WATCHDOG_ARMED, ctx, message, ("DELAY_MS", round(delay_s * 1000)))


def watchdog_report(ctx: Context, message: str, holders: Sequence[HolderReport] = (), *, next_step: str = "") -> Entry:
    """A stop hangs: who is still there and why (`pct stop` itself says nothing)."""
    stuck = [report.stuck for report in holders if report.stuck is not None]
    return entry_of(
        WATCHDOG_REPORT,
        ctx,
        f"{container_words(ctx)}: {message}",
        ("HOLDER_PID", [report.holder.process.pid for report in holders]),
        ("HOLDER_COMM", [report.holder.process.comm for report in holders]),
        ("STUCK_TID", [task.tid for task in stuck]),
        ("STUCK_WCHAN", [task.wchan for task in stuck]),
        ("STUCK_SINCE", [task.since for task in stuck]),
        ("NEXT_STEP", next_step),
    )


def watchdog_unarmed(ctx: Context, why: str) -> Entry:
    return entry_of(WATCHDOG_UNARMED, ctx, f"{container_words(ctx)}: nobody watches this stop: {why}", ("ERROR", why))
