"""The audit trail: every decision as one journal entry with a fixed MESSAGE_ID and fields (DESIGN 9).

Pure: functions turn what the release saw, did and decided into `(field, value)` pairs; `hostd/system/journal.py` sends
them. Text from inside a container is escaped here, so no value has a newline and no name can forge a field or an entry.
`etc/catalog/pve-gpu-release.catalog` explains each id to `journalctl -x`; ids never change their meaning.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from hostd.events import Silent
from hostd.model import (
    BlindSpot,
    Fate,
    GpuInfo,
    GpuReport,
    Holder,
    HolderReport,
    Observation,
    ProcessRef,
    Report,
    RungRecord,
    Verdict,
)
from hostd.terminal import escape
from hostd.verdicts import exit_status

IDENTIFIER = "pve-gpu-release"
MAX_TEXT = 2000
"""Characters of one value; command lines and stacks are cut there."""

MAX_REPEATS = 200
"""How often one field stands in an entry; journald takes 1,024 fields in all."""

Entry = tuple[tuple[str, str], ...]


class Priority(IntEnum):
    """syslog(3)."""

    ERR = 3
    WARNING = 4
    NOTICE = 5
    INFO = 6


@dataclass(frozen=True, slots=True)
class Kind:
    """One sort of event."""

    name: str
    message_id: str
    priority: Priority


_P = Priority

STARTED = Kind("release-started", "b4fcccc1aa6a4fa533f22a12ae697957", _P.INFO)
HOLDER_FOUND = Kind("holder-found", "d15090ea4f0aad6e0dba8c43b09513ec", _P.NOTICE)
FOREIGN_SEEN = Kind("foreign-seen", "2ab29310127b4dd89ee4be8b4b26dea6", _P.INFO)
BLIND_SPOT = Kind("blind-spot", "54a793302c701c393d11e11c0d37f06e", _P.WARNING)
RUNG_BEGUN = Kind("rung-begun", "19defdd5486999cb85cbd22b32152ba6", _P.NOTICE)
RUNG_DONE = Kind("rung-done", "e990f9b862490356eeea6ffb27b2ad5d", _P.NOTICE)
HOLDER_FATE = Kind("holder-fate", "3e3b72d920eb9ff941fbc02204b0cb70", _P.INFO)
GPU_VERIFIED = Kind("gpu-verified", "8565bbe8a235338eeffa31520a4518ac", _P.INFO)
FINISHED = Kind("release-finished", "1700ee385d79ab1a2256523c971c7702", _P.NOTICE)
REFUSED = Kind("release-refused", "81429e9ec6137e3d078656104851d0ef", _P.WARNING)
RESUMED = Kind("release-resumed", "7018786e5d8370ff155f6d1b6afb31ea", _P.WARNING)
ABANDONED = Kind("release-abandoned", "74634e3e9bbc9324cb23ad64c5446c80", _P.WARNING)
RECORD_MISSING = Kind("record-missing", "638969f406188672f140fcb0cb95a575", _P.WARNING)
SNAPSHOT = Kind("stop-snapshot", "f1a313acc02123cabe756dce9ba6805d", _P.INFO)
CLEARED = Kind("leftovers-cleared", "ba7feb48de4d8053068199e0a5627a5d", _P.NOTICE)
GATE_WARNED = Kind("gate-warned", "da29a1628005719e95f034ac42597034", _P.WARNING)
GATE_BLOCKED = Kind("gate-blocked", "73648b0d4d288ce3140d003dc6ddb61b", _P.ERR)
NODES_MADE = Kind("nodes-made", "7bcad1ab5d27f678c37c8a3e3bb2334d", _P.NOTICE)
PHASE_DONE = Kind("phase-done", "3c4046af2bf8af2b45b214113abc9a05", _P.INFO)
WATCHDOG_ARMED = Kind("watchdog-armed", "1b5259d75a8bffa8bc4a88809aae2063", _P.INFO)
WATCHDOG_REPORT = Kind("watchdog-report", "2c9ae2c251fd5d4e77a7073d536affe8", _P.WARNING)
WATCHDOG_UNARMED = Kind("watchdog-unarmed", "67c405745d1a8eec91a06e9398708fd8", _P.WARNING)
DAEMON_STARTED = Kind("daemon-started", "07508dfb8934c6c6316d71e607a0ef2f", _P.INFO)
DAEMON_STOPPED = Kind("daemon-stopped", "e0969a3cfe1d62e7995fe7230aad05e2", _P.INFO)
CONFIG_LOADED = Kind("config-loaded", "eb90b544da541a1061fa8fd3e8b010e4", _P.INFO)
CONFIG_FAILED = Kind("config-failed", "0e658fc306ddd297414e061724cfd8d7", _P.ERR)
NVML_WEDGED = Kind("nvml-wedged", "dfc63c11886e553c259f00551a53c62d", _P.ERR)
NVML_RECOVERED = Kind("nvml-recovered", "f760900dd5870d36e9cceb577a56ec4a", _P.NOTICE)
RESET_RECOVERED = Kind("reset-recovered", "5f0b7c0d9a6e4f0fb0a4c6a1d2e37b18", _P.WARNING)
INTERNAL_ERROR = Kind("internal-error", "f4013162948eb0670ef2d03ab5244355", _P.ERR)
ENTRIES_DROPPED = Kind("entries-dropped", "925488969bf446c1de4831d785988764", _P.WARNING)

KINDS = tuple(value for value in globals().values() if isinstance(value, Kind))
BY_MESSAGE_ID = {kind.message_id: kind for kind in KINDS}


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


def _entry(kind: Kind, ctx: Context, message: str, *facts: Fact, priority: Priority | None = None) -> Entry:
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
    text = escape(value if isinstance(value, (str, bytes)) else str(value))
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


# --- a release -----------------------------------------------------------------------------------------------------


def started(ctx: Context, report: Report) -> Entry:
    who = f" (uid {ctx.caller_uid})" if ctx.caller_uid is not None else ""
    what = "dry run" if report.dry_run else "release"
    message = (
        f"{_container(ctx)}: {what} {report.release_id[:8]} begins, asked for by {report.trigger or 'nobody'}{who}"
    )
    return _entry(STARTED, ctx, message, ("STARTED", report.started))


def holder_found(ctx: Context, holder: Holder, gpus: Iterable[GpuInfo] = ()) -> Entry:
    """A process of the container that holds a GPU, and how we know."""
    seen_by = ", ".join(sorted(holder.evidence))
    parts = [f"{_container(ctx)}: {_process(holder)} holds {_gpu_names(holder.gpus)}", _mib_words(holder.memory_mib)]
    message = " ".join(part for part in parts if part) + f"; seen by {seen_by}"
    if holder.inherited_from is not None:
        message += f", inherited from pid {holder.inherited_from}, which is gone"
    if holder.supervisor is not None:
        message += f"; run by {holder.supervisor.name}"
    return _entry(HOLDER_FOUND, ctx, message, *_holder_facts(holder, gpus))


def foreign_seen(ctx: Context, holder: Holder, gpus: Iterable[GpuInfo] = ()) -> Entry:
    """Somebody else's process on a GPU of this container: seen, left alone."""
    owner = f"container {holder.vmid}" if holder.vmid is not None else "the host"
    message = f"{_container(ctx)}: {_process(holder)} of {owner} is on {_gpu_names(holder.gpus)} too; left alone"
    return _entry(FOREIGN_SEEN, ctx, message, ("HOLDER_VMID", holder.vmid), *_holder_facts(holder, gpus))


def blind_spot(ctx: Context, spot: BlindSpot) -> Entry:
    message = f"{_container(ctx)}: cannot read {spot.what} ({spot.source}): {spot.error}"
    return _entry(
        BLIND_SPOT, ctx, message, ("BLIND_SPOT", f"{spot.source}: {spot.what}: {spot.error}"), ("CODE", spot.code)
    )


def rung_begun(ctx: Context, rung: RungRecord, targets: Iterable[Holder] = ()) -> Entry:
    """Intent, sent before the first signal."""
    names = {holder.process.pid: holder.process.comm for holder in targets}
    who = ", ".join(f"{pid} ({names[pid]})" if pid in names else str(pid) for pid in rung.targets)
    message = f"{_container(ctx)}: {rung.step}"
    if rung.targets:
        message += f" for {_count(len(rung.targets), 'process', 'processes')}: {who}"
    return _entry(
        RUNG_BEGUN, ctx, message, ("RUNG", rung.step), ("HOLDER_PID", rung.targets), ("RUNG_AT_MS", rung.at_ms)
    )


def rung_done(ctx: Context, rung: RungRecord) -> Entry:
    """Outcome: signals accepted, processes gone and time waited are three facts."""
    total = len(rung.targets)
    outcome = "all-gone" if rung.gone >= total else "some-gone" if rung.gone else "none-gone"
    message = f"{_container(ctx)}: {rung.step}: {rung.sent} sent, {rung.gone} of {total} gone after {rung.waited_ms} ms"
    if rung.note:
        message += f"; {rung.note}"
    return _entry(
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
    message = f"{_container(ctx)}: {_process(holder)}: {report.fate}"
    facts: list[Fact] = [("OUTCOME", report.fate), *_identity(holder)]
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
    return _entry(HOLDER_FATE, ctx, message, *facts, priority=_FATE_PRIORITY.get(report.fate))


def gpu_verified(ctx: Context, gpu: GpuReport) -> Entry:
    """The driver's word on one GPU after the release; figures are MiB, and missing where the driver gave none."""
    used = f"{_figure(gpu.used_mib_before)} used before, {_figure(gpu.used_mib_after)} after"
    message = f"{_container(ctx)}: nvidia{gpu.info.minor} ({gpu.info.name}): {used}"
    if gpu.ghost_mib:
        message += f", {gpu.ghost_mib} MiB with no live client"
    if gpu.other_holders:
        message += f"; also on it: {', '.join(_process(holder) for holder in gpu.other_holders)}"
    known = gpu.used_mib_after is not None
    return _entry(
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
    return _entry(
        kind,
        ctx,
        report.message or f"{_container(ctx)}: {report.verdict or 'no verdict'} ({report.reason})",
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
    return _entry(
        RESUMED, ctx, f"{_container(ctx)}: release was cut off at {was_at}; going on with it", ("WAS_AT", was_at)
    )


def abandoned(ctx: Context, was_at: str, why: str) -> Entry:
    """A release that was cut off and is not finished by us."""
    message = f"{_container(ctx)}: release was cut off at {was_at} and is not finished: {why}"
    return _entry(ABANDONED, ctx, message, ("WAS_AT", was_at), ("REASON", "cut-off"), ("ERROR", why))


def record_missing(ctx: Context, error: str) -> Entry:
    message = f"{_container(ctx)}: cannot write the record of this release ahead ({error}); it goes on without"
    return _entry(RECORD_MISSING, ctx, message, ("ERROR", error))


# --- lifecycle -----------------------------------------------------------------------------------------------------


def snapshot(ctx: Context, observation: Observation) -> Entry:
    """pre-stop: who holds what, before anything is stopped."""
    count = _count(len(observation.holders), "holder", "holders")
    minors = sorted({minor for holder in observation.holders for minor in holder.gpus})
    return _entry(
        SNAPSHOT,
        ctx,
        f"{_container(ctx)}: about to stop; {count} on {_gpu_names(minors)}",
        ("HOLDER_PID", [holder.process.pid for holder in observation.holders]),
        ("GPU_MINOR", minors),
        ("GPU_UUID", [gpu.info.uuid for gpu in observation.gpus if gpu.info.minor in minors]),
    )


def cleared(ctx: Context, cgroup: str, processes: Sequence[tuple[int, str]], *, empty: bool) -> Entry:
    """Leftovers in a cgroup of the container were killed; `empty` tells whether it is empty now."""
    who = ", ".join(f"{pid} ({comm})" for pid, comm in processes) or "processes unseen"
    message = f"{_container(ctx)}: left behind in {cgroup}: {who}; {'cleared' if empty else 'NOT cleared'}"
    return _entry(
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
    return _entry(
        GATE_BLOCKED if blocked else GATE_WARNED,
        ctx,
        f"{_container(ctx)}: start {'REFUSED' if blocked else 'goes on'}: {message}",
        ("OUTCOME", "blocked" if blocked else "warned"),
        ("REASON", reason),
        ("NEXT_STEP", next_step),
    )


def nodes_made(ctx: Context, paths: Sequence[str]) -> Entry:
    return _entry(
        NODES_MADE, ctx, f"{_container(ctx)}: made missing device nodes: {', '.join(paths)}", ("NODE", list(paths))
    )


def phase_done(ctx: Context, outcome: str, duration_s: float, *, detail: str = "") -> Entry:
    """A lifecycle event was dealt with (one record per event, however often it was announced)."""
    message = f"{_container(ctx)}: {ctx.phase or 'event'}: {outcome}" + (f"; {detail}" if detail else "")
    return _entry(PHASE_DONE, ctx, message, ("OUTCOME", outcome), ("DURATION_USEC", round(duration_s * 1e6)))


def watchdog_armed(ctx: Context, delay_s: float) -> Entry:
    message = f"{_container(ctx)}: a stop that takes longer than {delay_s:g} s will be looked at"
    return _entry(WATCHDOG_ARMED, ctx, message, ("DELAY_MS", round(delay_s * 1000)))


def watchdog_report(ctx: Context, message: str, holders: Sequence[HolderReport] = (), *, next_step: str = "") -> Entry:
    """A stop hangs: who is still there and why (`pct stop` itself says nothing)."""
    stuck = [report.stuck for report in holders if report.stuck is not None]
    return _entry(
        WATCHDOG_REPORT,
        ctx,
        f"{_container(ctx)}: {message}",
        ("HOLDER_PID", [report.holder.process.pid for report in holders]),
        ("HOLDER_COMM", [report.holder.process.comm for report in holders]),
        ("STUCK_TID", [task.tid for task in stuck]),
        ("STUCK_WCHAN", [task.wchan for task in stuck]),
        ("NEXT_STEP", next_step),
    )


def watchdog_unarmed(ctx: Context, why: str) -> Entry:
    return _entry(WATCHDOG_UNARMED, ctx, f"{_container(ctx)}: nobody watches this stop: {why}", ("ERROR", why))


# --- the daemon ----------------------------------------------------------------------------------------------------


def daemon_started(version: str, notes: Sequence[str] = ()) -> Entry:
    message = f"pve-gpu-hostd {version} is ready" + "".join(f"; {note}" for note in notes)
    return _entry(DAEMON_STARTED, NOWHERE, message, ("VERSION", version), ("NOTE", list(notes)))


def reset_recovered(text: str) -> Entry:
    """A reset that was killed: what was put back."""
    return _entry(RESET_RECOVERED, NOWHERE, text)


def daemon_stopped(why: str) -> Entry:
    return _entry(DAEMON_STOPPED, NOWHERE, f"pve-gpu-hostd stops: {why}", ("REASON", why))


def config_loaded(path: str) -> Entry:
    return _entry(CONFIG_LOADED, NOWHERE, f"configuration {path} is in force", ("CONFIG_FILE", path))


def config_failed(path: str, problems: Sequence[str], *, instead: str, ctx: Context = NOWHERE) -> Entry:
    """`instead` = what is in force now: `the last good configuration`, `the built-in defaults`."""
    message = f"cannot use configuration {path}: {problems[0] if problems else 'unknown'}"
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    message += f"; {instead} stays in force"
    return _entry(
        CONFIG_FAILED,
        ctx,
        message,
        ("CONFIG_FILE", path),
        ("ERROR", list(problems)),
        ("NEXT_STEP", "pve-gpu-release check-config"),
    )


def nvml_wedged(pid: int, call: str, since_s: float, ctx: Context = NOWHERE) -> Entry:
    message = (
        f"the NVIDIA driver does not answer: {call} in process {pid} hangs since {since_s:.0f} s; not asking again"
    )
    return _entry(
        NVML_WEDGED, ctx, message, ("NVML_PID", pid), ("NVML_CALL", call), ("WAITED_MS", round(since_s * 1000))
    )


def nvml_recovered(pid: int, ctx: Context = NOWHERE) -> Entry:
    return _entry(NVML_RECOVERED, ctx, f"the NVIDIA driver answers again (process {pid} has ended)", ("NVML_PID", pid))


def internal_error(where: str, traceback: str, ctx: Context = NOWHERE) -> Entry:
    """A bug. The traceback is one escaped line."""
    last = traceback.strip().rpartition("\n")[2]
    return _entry(
        INTERNAL_ERROR,
        ctx,
        f"internal error in {where}: {last}",
        ("ERROR", last),
        ("TRACEBACK", traceback[-MAX_TEXT + 200 :]),
    )


def entries_dropped(count: int) -> Entry:
    """Given to `Journal(on_drop=...)`."""
    message = f"{_count(count, 'entry', 'entries')} of this trail could not be written: the journal did not read"
    return _entry(ENTRIES_DROPPED, NOWHERE, message, ("DROPPED", count))


# --- words ---------------------------------------------------------------------------------------------------------


def _container(ctx: Context) -> str:
    return f"container {ctx.vmid}" if ctx.vmid is not None else "this node"


def _process(holder: Holder) -> str:
    return f"pid {holder.process.pid} ({holder.process.comm})"


def _gpu_names(minors: Iterable[int]) -> str:
    return ", ".join(f"nvidia{minor}" for minor in minors) or "control nodes only"


def _mib_words(mib: int | None) -> str:
    return "" if mib is None else f"with {mib} MiB"


def _figure(mib: int | None) -> str:
    return "an unknown amount" if mib is None else f"{mib} MiB"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _identity(holder: Holder) -> tuple[Fact, ...]:
    return (
        ("HOLDER_PID", holder.process.pid),
        ("HOLDER_START", holder.process.start_time),
        ("HOLDER_COMM", holder.process.comm),
    )


def _holder_facts(holder: Holder, gpus: Iterable[GpuInfo]) -> tuple[Fact, ...]:
    return (
        *_identity(holder),
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


# --- the listener --------------------------------------------------------------------------------------------------


class Trail(Silent):
    """Writes a release down as it happens: give it to `Fanout`, with `Journal.send` as `send`."""

    def __init__(
        self,
        send: Callable[[Entry], None],
        *,
        phase: str = "",
        caller_uid: int | None = None,
        caller_pid: int | None = None,
        began_s: float | None = None,
    ) -> None:
        self._send = send
        self._ctx = Context(phase=phase, caller_uid=caller_uid, caller_pid=caller_pid, began_s=began_s)
        self._seen: set[ProcessRef] = set()
        self._blind: set[BlindSpot] = set()
        self._infos: list[GpuInfo] = []

    @property
    def context(self) -> Context:
        """For entries that belong to this release and that the loop does not know of."""
        return self._ctx

    def started(self, report: Report) -> None:
        ctx = self._ctx
        began = time.monotonic() if ctx.began_s is None else ctx.began_s
        self._ctx = replace(
            ctx,
            vmid=report.vmid,
            release_id=report.release_id,
            trigger=report.trigger,
            dry_run=report.dry_run,
            began_s=began,
        )
        self._send(started(self._ctx, report))

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        """Holders, others and blind spots, each once in a release."""
        self._infos = [gpu.info for gpu in observation.gpus] or self._infos
        chosen = {minor for holder in holders for minor in self._note(holder)}
        for holder in observation.foreign:
            if holder.ref not in self._seen and chosen & set(holder.gpus):
                self._seen.add(holder.ref)
                self._send(foreign_seen(self._ctx, holder, self._infos))
        self._note_blind(observation.blind_spots)

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        targets = tuple(targets)
        for holder in targets:
            self._note(holder)
        self._send(rung_begun(self._ctx, rung, targets))

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        self._send(rung_done(self._ctx, rung))

    def fate(self, report: Report, holder: HolderReport) -> None:
        self._note(holder.holder)
        self._send(fate(self._ctx, holder))

    def finished(self, report: Report) -> None:
        for gpu in report.gpus:
            self._send(gpu_verified(self._ctx, gpu))
        self._note_blind(report.blind_spots)
        self._send(finished(self._ctx, report))

    def _note(self, holder: Holder) -> tuple[int, ...]:
        if holder.ref not in self._seen:
            self._seen.add(holder.ref)
            self._send(holder_found(self._ctx, holder, self._infos))
        return holder.gpus

    def _note_blind(self, spots: Iterable[BlindSpot]) -> None:
        for spot in spots:
            if spot not in self._blind:
                self._blind.add(spot)
                self._send(blind_spot(self._ctx, spot))
