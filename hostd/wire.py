"""Reports and observations as JSON, schema 1 of DESIGN 5: the only place where dataclasses become dicts.

Text from inside containers is passed on as it is, made valid UTF-8 only (`surrogateescape` bytes become U+FFFD-free
`\\xNN`): JSON escapes control characters itself. Surfaces for people use `terminal.escape`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hostd.errors import PgrError, UsageError
from hostd.ladder import Limits, Options
from hostd.model import (
    BlindSpot,
    Evidence,
    GpuReport,
    GpuState,
    Holder,
    HolderReport,
    Observation,
    Process,
    Report,
    RungRecord,
    Stuck,
)
from hostd.verdicts import REASONS, worst

SCHEMA = 1
TEXT_BYTES = 4096
"""Of one text that a container chooses (command line, cgroup, unit), as ASCII JSON says it: `\u0001` takes six."""
ALL_TEXTS_BYTES = 2 << 20
"""Of all texts of one kind in one message: with many holders each gets less, but never less than LEAST_TEXT_BYTES."""
LEAST_TEXT_BYTES = 64
Json = dict[str, Any]


def clean(text: str) -> str:
    """Valid Unicode: bytes that were not UTF-8 become `\\xNN`, other lone surrogates `\\uNNNN`."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return "".join(c if not "\ud800" <= c <= "\udfff" else _lone(ord(c)) for c in text)
    return text


def _lone(code: int) -> str:
    return f"\\x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"\\u{code:04x}"


def process_dict(process: Process) -> Json:
    """A process of `map`."""
    return {
        "pid": process.pid,
        "ns_pids": list(process.ns_pids),
        "start_time": process.start_time,
        "comm": clean(process.comm),
        "cgroup": clean(process.cgroup),
    }


def short(text: str, room: int = TEXT_BYTES) -> str:
    """`clean`, and cut with "..." at `room` bytes of JSON."""
    if len(text) * 12 <= room:
        return clean(text)
    known = clean(text[:room])
    size = 0
    for at, c in enumerate(known):
        size += 1 if " " <= c <= "~" and c not in '"\\' else 2 if c in '"\\' else 6 if c < "\U00010000" else 12
        if size > room:
            return known[:at] + "..."
    return known if len(text) <= room else known + "..."


def room_each(holders: int) -> int:
    """For each text of so many holders in one message."""
    return min(TEXT_BYTES, max(LEAST_TEXT_BYTES, ALL_TEXTS_BYTES // max(holders, 1)))


def seen_holders(holders: Iterable[Holder]) -> list[Json]:
    """Holders of any container, with room for each."""
    found = list(holders)
    room = room_each(len(found))
    return [holder_dict(h, room) | {"vmid": h.vmid} for h in found]


def holder_dict(holder: Holder, room: int = TEXT_BYTES) -> Json:
    """What programs see of a holder; `room` is for each of its texts."""
    process = holder.process
    return {
        "pid": process.pid,
        "ns_pids": list(process.ns_pids),
        "start_time": process.start_time,
        "comm": clean(process.comm),
        "cmdline": short(holder.cmdline, room),
        "user": short(holder.user, room),
        "cgroup": short(process.cgroup, room),
        "unit": short(holder.supervisor.name, room) if holder.supervisor else "",
        "state": process.state,
        "evidence": [e.value for e in Evidence if e in holder.evidence],
        "gpus": list(holder.gpus),
        "memory_mib": holder.memory_mib,
        "inherited_from": holder.inherited_from,
    }


def holder_report_dict(report: HolderReport, room: int = TEXT_BYTES) -> Json:
    result = holder_dict(report.holder, room) | {"fate": report.fate.value}
    if report.stuck is not None:
        result["stuck"] = stuck_dict(report.stuck)
    return result


def stuck_dict(stuck: Stuck) -> Json:
    return {
        "tid": stuck.tid,
        "state": stuck.state,
        "wchan": clean(stuck.wchan),
        "stack": clean(stuck.stack),
        "kill_pending": stuck.kill_pending,
        "since": stuck.since,
    }


def gpu_report_dict(report: GpuReport, room: int = TEXT_BYTES) -> Json:
    info = report.info
    return {
        "index": info.index,
        "minor": info.minor,
        "uuid": info.uuid,
        "pci_bus_id": info.pci_bus_id,
        "name": info.name,
        "used_mib_before": report.used_mib_before,
        "used_mib_after": report.used_mib_after,
        "reserved_mib": report.reserved_mib,
        "ghost_mib": report.ghost_mib,
        "bar1_used_mib_after": report.bar1_used_mib_after,
        "recovery_action": report.recovery_action,
        "other_holders": [holder_dict(h, room) | {"vmid": h.vmid} for h in report.other_holders],
    }


def gpu_state_dict(state: GpuState) -> Json:
    """A GPU of `ps --json` and `status --json`."""
    info = state.info
    return {
        "index": info.index,
        "minor": info.minor,
        "uuid": info.uuid,
        "pci_bus_id": info.pci_bus_id,
        "name": info.name,
        "total_mib": state.total_mib,
        "used_mib": state.used_mib,
        "reserved_mib": state.reserved_mib,
        "ghost_mib": state.ghost_mib,
        "bar1_used_mib": state.bar1_used_mib,
        "dead_clients": [{"pid": c.pid, "used_mib": c.used_mib, "heir": c.heir.value} for c in state.dead_clients],
        "error": state.error,
    }


def rung_dict(rung: RungRecord) -> Json:
    return {
        "step": rung.step.value,
        "at_ms": rung.at_ms,
        "targets": rung.targets,
        "sent": rung.sent,
        "gone": rung.gone,
        "waited_ms": rung.waited_ms,
        "note": rung.note,
    }


def blind_spot_dict(spot: BlindSpot) -> Json:
    return {"source": spot.source, "what": clean(spot.what), "error": clean(spot.error)}


def report_dict(report: Report) -> Json:
    """One release (DESIGN 5). A refusal or an error has `verdict: null`."""
    room = room_each(len(report.holders) + sum(len(g.other_holders) for g in report.gpus))
    return {
        "schema": SCHEMA,
        "release_id": report.release_id,
        "vmid": report.vmid,
        "trigger": report.trigger,
        "verdict": report.verdict.value if report.verdict else None,
        "reason": report.reason,
        "message": clean(report.message),
        "was_held": report.was_held,
        "dry_run": report.dry_run,
        "started": report.started,
        "duration_ms": report.duration_ms,
        "holders": [holder_report_dict(h, room) for h in report.holders],
        "gpus": [gpu_report_dict(g, room) for g in report.gpus],
        "rungs": [rung_dict(r) for r in report.rungs],
        "blind_spots": [blind_spot_dict(b) for b in report.blind_spots],
        "details": [clean(text) for text in report.details],
        "next_step": clean(report.next_step),
    }


def error_dict(error: PgrError, vmid: int | None = None) -> Json:
    """A refusal or an error before or instead of a release: no verdict, unless not being able to look is one."""
    return {
        "schema": SCHEMA,
        "vmid": vmid if vmid is not None else error.vmid,
        "verdict": row.verdict.value if (row := REASONS.get(error.reason)) and row.verdict else None,
        "reason": error.reason,
        "message": clean(error.message),
        "next_step": clean(error.next_step),
    }


def releases_dict(reports: Iterable[Json]) -> Json:
    """Several containers: the worst status decides the common verdict."""
    releases = list(reports)
    status = worst([status_of(r) for r in releases])
    decisive = next((r for r in releases if status_of(r) == status), None)
    return {"schema": SCHEMA, "verdict": decisive["verdict"] if decisive else None, "releases": releases}


def status_of(result: Json) -> int:
    """The exit status of a report, an error or a collection of them."""
    if "releases" in result:
        return worst([status_of(r) for r in result["releases"]])
    row, verdict = REASONS.get(result.get("reason", "")), result.get("verdict")
    if row is not None and row.verdict == verdict:
        return row.exit_status
    if row is not None and verdict in ("released", None):
        return 4  # it contradicts itself: nothing is proven
    return _STATUS_OF_VERDICT.get(str(verdict), 1)  # the reason is one of another version


_STATUS_OF_VERDICT = {"released": 0, "held": 3, "unknown": 4}


def observed_event(observation: Observation, holders: Iterable[Holder]) -> Json:
    return {
        "event": "observed",
        "holders": seen_holders(holders),
        "gpus": [gpu_state_dict(g) for g in observation.gpus],
        "blind_spots": [blind_spot_dict(b) for b in observation.blind_spots],
    }


def rung_event(name: str, rung: RungRecord) -> Json:
    return {"event": name, "rung": rung_dict(rung)}


def waiting_event(what: str, since_s: float) -> Json:
    return {"event": "waiting", "what": clean(what), "since_s": round(since_s, 1)}


def ps_dict(observations: Iterable[Holder], gpus: Iterable[GpuState], blind: Iterable[BlindSpot]) -> Json:
    return {
        "schema": SCHEMA,
        "holders": seen_holders(observations),
        "gpus": [gpu_state_dict(g) for g in gpus],
        "blind_spots": [blind_spot_dict(b) for b in blind],
    }


_FLAGS = ("now", "dry_run", "stop", "stop_units", "reset", "verify_memory", "wait")
_TEXTS = ("gpu", "pid", "trigger")
_SECONDS = ("grace_s", "timeout_s")


def options_dict(options: Options) -> Json:
    """The options of a release as Varlink's ReleaseOptions has them."""
    result: Json = {name: getattr(options, name) for name in (*_FLAGS, *_TEXTS)}
    return result | {name: getattr(options.limits, name) for name in _SECONDS}


def parse_options(values: Json, limits: Limits) -> Options:
    """The inverse, over configured `limits`; absent or null: as configured. Raises UsageError naming the key."""
    known = {*_FLAGS, *_TEXTS, *_SECONDS}
    for name in values:
        if name not in known:
            raise UsageError(f"cannot use options.{name}: no such option")
    picked: Json = {}
    for name, kinds in (*((n, (bool,)) for n in _FLAGS), *((n, (str,)) for n in _TEXTS)):
        value = values.get(name)
        if value is None:
            continue
        if not isinstance(value, kinds):
            raise UsageError(f"cannot use options.{name}: expected {kinds[0].__name__}, got {value!r}")
        picked[name] = value
    for name in _SECONDS:
        number = values.get(name)
        if number is None:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= 86_400:
            raise UsageError(f"cannot use options.{name}: expected seconds from 0 to 86400, got {number!r}")
        if name == "timeout_s" and not number:
            raise UsageError("cannot use options.timeout_s: expected more than 0 seconds")
        limits = replace(limits, grace_s=number) if name == "grace_s" else replace(limits, timeout_s=number)
    return Options(limits=limits, **picked)


__all__ = [
    "Observation",
    "error_dict",
    "options_dict",
    "parse_options",
    "ps_dict",
    "releases_dict",
    "report_dict",
    "status_of",
]
