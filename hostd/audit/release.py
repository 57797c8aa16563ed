"""The entries of a release: what it saw, did and decided."""

from __future__ import annotations

from collections.abc import Iterable

from hostd.audit.entry import (
    Context,
    Entry,
    Fact,
    container_words,
    count_words,
    entry_of,
    figure_words,
    gpu_words,
    holder_facts,
    identity_facts,
    mib_words,
    process_words,
)
from hostd.audit.kinds import (
    ABANDONED,
    BLIND_SPOT,
    FINISHED,
    FOREIGN_SEEN,
    GPU_VERIFIED,
    HOLDER_FATE,
    HOLDER_FOUND,
    RECORD_MISSING,
    REFUSED,
    RESUMED,
    RUNG_BEGUN,
    RUNG_DONE,
    STARTED,
    Priority,
)
from hostd.model import BlindSpot, Fate, GpuInfo, GpuReport, Holder, HolderReport, Report, RungRecord, Verdict
from hostd.verdicts import exit_status


def started(ctx: Context, report: Report) -> Entry:
    who = f" (uid {ctx.caller_uid})" if ctx.caller_uid is not None else ""
    what = "dry run" if report.dry_run else "release"
    message = (
        f"{container_words(ctx)}: {what} {report.release_id[:8]} begins, asked for by {report.trigger or 'nobody'}{who}"
    )
    return entry_of(STARTED, ctx, message, ("STARTED", report.started))


def holder_found(ctx: Context, holder: Holder, gpus: Iterable[GpuInfo] = ()) -> Entry:
    """A process of the container that holds a GPU, and how we know."""
    seen_by = ", ".join(sorted(holder.evidence))
    parts = [
        f"{container_words(ctx)}: {process_words(holder)} holds {gpu_words(holder.gpus)}",
        mib_words(holder.memory_mib),
    ]
    message = " ".join(part for part in parts if part) + f"; seen by {seen_by}"
    if holder.inherited_from is not None:
        message += f", inherited from pid {holder.inherited_from}, which is gone"
    if holder.supervisor is not None:
        message += f"; run by {holder.supervisor.name}"
    return entry_of(HOLDER_FOUND, ctx, message, *holder_facts(holder, gpus))


def foreign_seen(ctx: Context, holder: Holder, gpus: Iterable[GpuInfo] = ()) -> Entry:
    """Somebody else's process on a GPU of this container: seen, left alone."""
    owner = f"container {holder.vmid}" if holder.vmid is not None else "the host"
    message = (
        f"{container_words(ctx)}: {process_words(holder)} of {owner} is on {gpu_words(holder.gpus)} too; left alone"
    )
    return entry_of(FOREIGN_SEEN, ctx, message, ("HOLDER_VMID", holder.vmid), *holder_facts(holder, gpus))


def blind_spot(ctx: Context, spot: BlindSpot) -> Entry:
    message = f"{container_words(ctx)}: cannot read {spot.what} ({spot.source}): {spot.error}"
    return entry_of(
        BLIND_SPOT, ctx, message, ("BLIND_SPOT", f"{spot.source}: {spot.what}: {spot.error}"), ("CODE", spot.code)
    )


def rung_begun(ctx: Context, rung: RungRecord, targets: Iterable[Holder] = ()) -> Entry:
    """Intent, sent before the first signal."""
    names = {holder.process.pid: holder.process.comm for holder in targets}
    who = ", ".join(f"{pid} ({names[pid]})" if pid in names else str(pid) for pid in rung.targets)
    message = f"{container_words(ctx)}: {rung.step}"
    if rung.targets:
        message += f" for {count_words(len(rung.targets), 'process', 'processes')}: {who}"
    return entry_of(
        RUNG_BEGUN, ctx, message, ("RUNG", rung.step), ("HOLDER_PID", rung.targets), ("RUNG_AT_MS", rung.at_ms)
    )


def rung_done(ctx: Context, rung: RungRecord) -> Entry:
    """Outcome: signals accepted, processes gone and time waited are three facts."""
    total = len(rung.targets)
    outcome = "all-gone" if rung.gone >= total else "some-gone" if rung.gone else "none-gone"
    message = (
        f"{container_words(ctx)}: {rung.step}: {rung.sent} sent, {rung.gone} of {total} gone after {rung.waited_ms} ms"
    )
    if rung.note:
        message += f"; {rung.note}"
    return entry_of(
        RUNG_DONE,
        ctx,
        message,
        ("RUNG", rung.step),
        ("OUTCOME", outcome),
        ("HOLDER_PID", rung.targets),
        ("SENT", rung.sent),
        ("GONE", rung.gone),
        ("WAITED_MS", rung.waited_ms),
        ("RUNG_AT_MS", rung.at_ms),
        ("NOTE", rung.note),
    )


_FATE_PRIORITY = {
    Fate.SURVIVED: Priority.WARNING,
    Fate.UNKILLABLE: Priority.ERR,
    Fate.RESPAWNED: Priority.WARNING,
}


def fate(ctx: Context, report: HolderReport) -> Entry:
    holder, stuck = report.holder, report.stuck
    message = f"{container_words(ctx)}: {process_words(holder)}: {report.fate}"
    facts: list[Fact] = [("OUTCOME", report.fate), *identity_facts(holder)]
    if stuck is not None:
        message += f"; task {stuck.tid} in state {stuck.state}, waiting in {stuck.wchan or 'an unknown place'}"
        facts += [
            ("STUCK_TID", stuck.tid),
            ("STUCK_STATE", stuck.state),
            ("STUCK_WCHAN", stuck.wchan),
            ("STUCK_STACK", " < ".join(line.strip() for line in stuck.stack.splitlines() if line.strip())),
            ("STUCK_KILL_PENDING", stuck.kill_pending),
            ("STUCK_SINCE", stuck.since),
        ]
    return entry_of(HOLDER_FATE, ctx, message, *facts, priority=_FATE_PRIORITY.get(report.fate))


def gpu_verified(ctx: Context, gpu: GpuReport) -> Entry:
    """The driver's word on one GPU after the release; figures are MiB, and missing where the driver gave none."""
    used = f"{figure_words(gpu.used_mib_before)} used before, {figure_words(gpu.used_mib_after)} after"
    message = f"{container_words(ctx)}: nvidia{gpu.info.minor} ({gpu.info.name}): {used}"
    if gpu.ghost_mib:
        message += f", {gpu.ghost_mib} MiB with no live client"
    if gpu.other_holders:
        message += f"; also on it: {', '.join(process_words(holder) for holder in gpu.other_holders)}"
    known = gpu.used_mib_after is not None
    return entry_of(
        GPU_VERIFIED,
        ctx,
        message,
        ("OUTCOME", "measured" if known else "no-figures"),
        ("GPU_UUID", gpu.info.uuid),
        ("GPU_MINOR", gpu.info.minor),
        ("GPU_INDEX", gpu.info.index),
        ("GPU_PCI", gpu.info.pci_bus_id),
        ("GPU_NAME", gpu.info.name),
        ("VRAM_BEFORE", gpu.used_mib_before),
        ("VRAM_AFTER", gpu.used_mib_after),
        ("VRAM_RESERVED", gpu.reserved_mib),
        ("VRAM_GHOST", gpu.ghost_mib),
        ("BAR1_AFTER", gpu.bar1_used_mib_after),
        ("OTHER_PID", [holder.process.pid for holder in gpu.other_holders]),
        priority=None if known else Priority.WARNING,
    )


def finished(ctx: Context, report: Report) -> Entry:
    """The verdict; or, when there is none, why the release was refused."""
    status = exit_status(report.reason)
    kind = FINISHED if report.verdict is not None or report.reason in ("interrupted", "internal-error") else REFUSED
    priority = Priority.NOTICE if report.verdict is Verdict.RELEASED else Priority.WARNING
    if status in (1, 5):
        priority = Priority.ERR
    return entry_of(
        kind,
        ctx,
        report.message or f"{container_words(ctx)}: {report.verdict or 'no verdict'} ({report.reason})",
        ("VERDICT", report.verdict),
        ("REASON", report.reason),
        ("NEXT_STEP", report.next_step),
        ("DETAIL", list(report.details)),
        ("EXIT_STATUS", status),
        ("WAS_HELD", report.was_held),
        ("DURATION_USEC", report.duration_ms * 1000),
        ("STARTED", report.started),
        ("GPU_UUID", [gpu.info.uuid for gpu in report.gpus]),
        ("GPU_MINOR", [gpu.info.minor for gpu in report.gpus]),
        ("HOLDER_PID", [holder.holder.process.pid for holder in report.holders]),
        priority=priority,
    )


def resumed(ctx: Context, was_at: str) -> Entry:
    """The daemon died in the middle of this release and finishes it now; `was_at` = the last thing written ahead."""
    return entry_of(
        RESUMED, ctx, f"{container_words(ctx)}: release was cut off at {was_at}; going on with it", ("WAS_AT", was_at)
    )


def abandoned(ctx: Context, was_at: str, why: str) -> Entry:
    """A release that was cut off and is not finished by us."""
    message = f"{container_words(ctx)}: release was cut off at {was_at} and is not finished: {why}"
    return entry_of(ABANDONED, ctx, message, ("WAS_AT", was_at), ("REASON", "cut-off"), ("ERROR", why))


def record_missing(ctx: Context, error: str) -> Entry:
    message = f"{container_words(ctx)}: cannot write the record of this release ahead ({error}); it goes on without"
    return entry_of(RECORD_MISSING, ctx, message, ("ERROR", error))
