"""Releases written ahead: intent before each rung, outcome after it, in `/run/pve-gpu-release/releases/` (DESIGN 6).

One JSON file per release, replaced atomically. /run is a tmpfs: a reboot leaves nothing. A full /run never stops a
release: the record is then missing and `missing` says why, for the journal.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from hostd.events import Silent
from hostd.ladder import Resume
from hostd.lock import RUN_DIR, ensure_run_dir
from hostd.model import Holder, Observation, ProcessRef, Report, RungRecord, Step
from hostd.wire import report_dict, rung_dict

Json = dict[str, Any]
KEPT = 40
"""Finished records that stay for `status`; older ones are removed."""
_MAX_BYTES = 4 << 20


class Store:
    """The directory of records."""

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
        final = self._file(record["release_id"])
        temporary = f"{final}.{os.getpid()}.new"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                data = memoryview(json.dumps(record).encode())
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)
            os.rename(temporary, final)
        except OSError:
            try:
                os.unlink(temporary)
            except OSError:
                pass  # it was never made
            raise

    def read(self, release_id: str) -> Json | None:
        """One record; None when there is none or it is no record."""
        try:
            fd = os.open(self._file(release_id), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except (OSError, ValueError):
            return None
        with os.fdopen(fd, "rb") as file:
            try:
                record = json.loads(file.read(_MAX_BYTES))
            except (ValueError, RecursionError, OSError):
                return None
        return record if isinstance(record, dict) and record.get("release_id") == release_id else None

    def all(self) -> list[Json]:
        """Every record, the oldest start first."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        found = (self.read(name.removesuffix(".json")) for name in names if name.endswith(".json"))
        return sorted((r for r in found if r is not None), key=lambda r: str(r.get("started", "")))

    def remove(self, release_id: str) -> None:
        try:
            os.unlink(self._file(release_id))
        except FileNotFoundError:
            pass

    def prune(self, keep: int = KEPT) -> None:
        """Removes the oldest finished records and what a killed writer left behind."""
        done = [r for r in self.all() if r.get("report") is not None]
        for record in done[: max(0, len(done) - keep)]:
            self.remove(record["release_id"])
        for name in os.listdir(self.path) if os.path.isdir(self.path) else ():
            parts = name.split(".")
            if name.endswith(".new") and not os.path.exists(f"/proc/{parts[-2]}"):
                try:
                    os.unlink(os.path.join(self.path, name))
                except FileNotFoundError:
                    pass

    def _file(self, release_id: str) -> str:
        if not release_id or not all(c in "0123456789abcdef-" for c in release_id):
            raise ValueError(f"not a release id: {release_id!r}")
        return os.path.join(self.path, f"{release_id}.json")


class Recorder(Silent):
    """Writes one release ahead as it climbs. Give it to `Fanout` before anything else."""

    def __init__(self, store: Store, owner: str, options: Json, event: Json | None = None) -> None:
        """`event`: the lifecycle event that this release answers, for whoever has to finish it."""
        self._store = store
        self._owner = owner
        self._options = options
        self._event = event
        self._record: Json = {}
        self._baseline: dict[int, int] | None = None
        self.missing = ""
        """Why the record could not be written; empty when it was."""

    def started(self, report: Report) -> None:
        from hostd.release import boot_ticks_now

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
            "report": None,
        }
        self._save()

    def observed(self, report: Report, observation: Observation, holders: Iterable[Holder]) -> None:
        minors = set(self._record["minors"]) | {m for h in holders for m in h.gpus}
        self._record["minors"] = sorted(minors)
        self._record["was_held"] = self._record["was_held"] or report.was_held
        if self._baseline is None:
            self._baseline = {
                g.info.minor: g.baseline_mib for g in observation.gpus if g.baseline_mib is not None
            }
            self._record["baseline_mib"] = sorted(self._baseline.items())

    def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
        self._record["sent"] += [[rung.step.value, h.process.pid, h.process.start_time] for h in targets]
        self._record["rungs"].append(rung_dict(rung) | {"done": False})
        self._save()

    def rung_done(self, report: Report, rung: RungRecord) -> None:
        self._record["rungs"][-1] = rung_dict(rung) | {"done": True}
        self._save()

    def finished(self, report: Report) -> None:
        self._record["report"] = report_dict(report)
        self._save()
        if not self.missing:
            self._store.prune()

    def _save(self) -> None:
        try:
            self._store.write(self._record)
            self.missing = ""
        except OSError as exc:
            self.missing = str(exc)


def parse_resume(record: Json) -> Resume | None:
    """What to know of an unfinished record to go on with it; None when it does not make sense."""
    try:
        sent = [(str(step), ProcessRef(int(pid), int(start))) for step, pid, start in record["sent"]]
        last = record["rungs"][-1] if record["rungs"] else None
        at = "the first look" if last is None else f"{last['step']}, {'done' if last['done'] else 'begun'}"
        return Resume(
            release_id=str(record["release_id"]),
            vmid=int(record["vmid"]),
            termed=frozenset(ref for step, ref in sent if step == Step.TERM.value),
            killed=frozenset(ref for step, ref in sent if step == Step.KILL.value),
            minors=frozenset(int(m) for m in record["minors"]),
            baseline_mib=tuple((int(m), int(mib)) for m, mib in record["baseline_mib"]),
            was_held=bool(record["was_held"]),
            was_at=at,
            started=str(record["started"]),
            rungs=tuple(_rung(r) for r in record["rungs"]),
        )
    except (KeyError, TypeError, ValueError):
        return None


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
