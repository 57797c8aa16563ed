"""Releases written ahead: intent before each rung, outcome after it, in `/run/pve-gpu-release/releases/` (DESIGN 6).

One JSON file per release, replaced atomically. /run is a tmpfs: a reboot leaves nothing. A full /run never stops a
release: the record is then missing and `missing` says why, for the journal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

from hostd.clock import boot_ticks_now
from hostd.events import Silent
from hostd.ladder import Resume
from hostd.lock import RUN_DIR, ensure_run_dir
from hostd.model import Holder, Observation, ProcessRef, Report, RungRecord, Step
from hostd.shapes import REPORT, fits
from hostd.statefile import read_json, write_json
from hostd.wire import report_dict, rung_dict

Json = dict[str, Any]
KEPT = 40
"""Finished records that stay for `status`; older ones are removed."""
MOST = 400
"""Records at all: beyond it the oldest go, finished or not."""
HIGHEST_VMID = 999_999_999
_MAX_BYTES = 64 << 20


class Store:
    """The directory of records. What is no record is never returned; `sweep` removes it."""

    def __init__(self, run_dir: str = RUN_DIR) -> None:
        self._run_dir = run_dir
        self.path = os.path.join(run_dir, "releases")

    def write(self, record: Json) -> None:
        """Replaces one record. Raises OSError (ENOSPC on a full /run)."""
        ensure_run_dir(self._run_dir)
        try:
            os.mkdir(self.path, 0o700)
        except FileExistsError:
            pass
        write_json(self._file(record["release_id"]), record)

    def read(self, release_id: str) -> Json | None:
        """One record; None when there is none or it is no record."""
        try:
            path = self._file(release_id)
        except ValueError:
            return None
        record = read_json(path, _MAX_BYTES)
        return record if is_record(record, release_id) else None

    def all(self) -> list[Json]:
        """Every record, the oldest start first."""
        found = (self.read(name.removesuffix(".json")) for name in self._names() if name.endswith(".json"))
        return sorted((r for r in found if r is not None), key=lambda r: str(r["started"]))

    def open_ones(self) -> list[Json]:
        """The records of releases that have no report yet, the oldest start first."""
        return [record for record in self.all() if record["report"] is None]

    def remove(self, release_id: str) -> None:
        self._unlink(os.path.basename(self._file(release_id)))

    def sweep(self) -> int:
        """Removes what is no record and what a killed writer left behind; how many. For the start of the daemon."""
        removed = 0
        for name in self._names():
            if not self._being_written(name) and self.read(name.removesuffix(".json")) is None:
                removed += self._unlink(name)
        return removed

    def prune(self, keep: int = KEPT, most: int = MOST) -> None:
        """Removes the oldest finished records. Opens none of the newest `keep`: this is on the way of every release."""
        names = self._names()
        if len(names) <= keep:
            return
        names = sorted((n for n in names if n.endswith(".json")), key=self._changed)
        for at, name in enumerate(names[: max(0, len(names) - keep)]):
            record = self.read(name.removesuffix(".json"))
            if record is None or record["report"] is not None or at < len(names) - most:
                self._unlink(name)

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.path)
        except OSError:
            return []

    def _being_written(self, name: str) -> bool:
        parts = name.split(".")
        return len(parts) == 4 and parts[3] == "new" and parts[2].isdecimal() and os.path.exists(f"/proc/{parts[2]}")

    def _changed(self, name: str) -> int:
        try:
            return os.lstat(os.path.join(self.path, name)).st_mtime_ns
        except OSError:
            return 0  # gone meanwhile

    def _unlink(self, name: str) -> bool:
        path = os.path.join(self.path, name)
        try:
            os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        except OSError:
            return False
        return True

    def _file(self, release_id: str) -> str:
        if not 0 < len(release_id) <= 64 or not all(c in "0123456789abcdef-" for c in release_id):
            raise ValueError(f"not a release id: {release_id!r}")
        return os.path.join(self.path, f"{release_id}.json")


def is_record(value: object, release_id: str) -> TypeGuard[Json]:
    """True when everything in it has the type that its readers count on."""
    if not isinstance(value, dict) or value.get("release_id") != release_id:
        return False
    report, event = value.get("report"), value.get("event")
    return (
        _is_int(value.get("vmid"), 1, HIGHEST_VMID)
        and all(isinstance(value.get(key), str) for key in ("started", "owner", "trigger"))
        and _is_int(value.get("pid"), 0, 1 << 22)
        and _is_int(value.get("at_ticks"), 0, 1 << 62)
        and isinstance(value.get("options"), dict)
        and (event is None or isinstance(event, dict))
        and (report is None or fits(report, REPORT))
        and parse_resume(value) is not None
    )


def _is_int(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


class Recorder(Silent):
    """Writes one release ahead as it climbs. Give it to `Fanout` before anything else.

    A release that goes on with an open record keeps what was written there: a second death forgets nothing either.
    """

    def __init__(
        self,
        store: Store,
        owner: str,
        options: Json,
        event: Json | None = None,
        handed_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`event`: the lifecycle event that this release answers, for whoever has to finish it. `handed_over()`: an
        interruption is not its end, a successor goes on with it."""
        self._store = store
        self._owner = owner
        self._options = options
        self._event = event
        self._handed_over = handed_over
        self._record: Json = {}
        self.missing = ""
        """Why the record could not be written at some time; empty when it always was."""

    def started(self, report: Report) -> None:
        before = self._store.read(report.release_id)
        self._record = {
            "release_id": report.release_id,
            "vmid": report.vmid,
            "trigger": report.trigger,
            "dry_run": report.dry_run,
            "started": report.started,
            "owner": self._owner,
            "pid": os.getpid(),
            "at_ticks": boot_ticks_now(),
            "options": self._options,
            "event": self._event,
            "was_held": False,
            "minors": [],
            "baseline_mib": [],
            "sent": [],
            "rungs": [],
            "handed_over": False,
            "report": None,
        }
        if before is not None and before["report"] is None and before["vmid"] == report.vmid:
            kept = ("at_ticks", "was_held", "minors", "baseline_mib", "sent", "rungs")
            self._record |= {key: before[key] for key in kept}
        self._save()

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        minors = set(self._record["minors"]) | {m for h in holders for m in h.gpus}
        self._record["minors"] = sorted(minors)
        self._record["was_held"] = self._record["was_held"] or report.was_held
        if not self._record["baseline_mib"]:
            known = {g.info.minor: g.baseline_mib for g in observation.gpus if g.baseline_mib is not None}
            self._record["baseline_mib"] = sorted(known.items())

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        self._record["sent"] += [[rung.step.value, h.process.pid, h.process.start_time] for h in targets]
        self._record["rungs"].append(rung_dict(rung) | {"done": False})
        self._save()

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        self._record["rungs"][-1] = rung_dict(rung) | {"done": True}
        self._save()

    def finished(self, report: Report) -> None:
        if report.reason == "interrupted" and self._handed_over():
            self._record["handed_over"] = True
            self._save()
            return
        self._record["report"] = report_dict(report)
        self._save()
        self._store.prune()

    def _save(self) -> None:
        try:
            self._store.write(self._record)
        except OSError as exc:
            self.missing = self.missing or str(exc)


def parse_resume(record: Json) -> Resume | None:
    """What to know of an unfinished record to go on with it; None when it does not make sense."""
    try:
        sent = [(str(step), ProcessRef(int(pid), int(start))) for step, pid, start in record["sent"]]
        return Resume(
            release_id=str(record["release_id"]),
            vmid=int(record["vmid"]),
            begun_ticks=int(record["at_ticks"]) if "at_ticks" in record else None,
            termed=frozenset(ref for step, ref in sent if step == Step.TERM.value),
            killed=frozenset(ref for step, ref in sent if step == Step.KILL.value),
            minors=frozenset(int(m) for m in record["minors"]),
            baseline_mib=tuple((int(m), int(mib)) for m, mib in record["baseline_mib"]),
            was_held=bool(record["was_held"]),
            was_at=was_at(record),
            started=str(record["started"]),
            rungs=tuple(_rung(r) for r in record["rungs"]),
        )
    except (KeyError, IndexError, TypeError, ValueError, OverflowError, AttributeError):
        return None


def was_at(record: Json) -> str:
    """How far an unfinished release had come, for people."""
    last = record["rungs"][-1] if record["rungs"] else None
    at = "the first look" if last is None else f"{last['step']}, {'done' if last['done'] else 'begun'}"
    return f"{at} (the daemon was stopped)" if record.get("handed_over") is True else at


def _rung(record: Json) -> RungRecord:
    return RungRecord(
        Step(record["step"]),
        int(record["at_ms"]),
        [int(pid) for pid in record["targets"]],
        int(record["sent"]),
        int(record["gone"]),
        int(record["waited_ms"]),
        str(record["note"]) or ("" if record["done"] else "cut off"),
    )
