"""Releases that were cut off: each open record is finished or reported, once (DESIGN 6).

The container's lock decides who is at it. A command line that lost its daemon goes on by itself, with the same id under
the same lock: whoever comes second finds the report.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from hostd import audit
from hostd.clock import boot_ticks_now
from hostd.engine import reset_records
from hostd.ladder import Limits
from hostd.lifecycle.event import STOP_PHASES
from hostd.lock import RUN_DIR, read_owner, try_lock
from hostd.model import Report
from hostd.service.interface import INTERFACE
from hostd.service.processes import when_ended
from hostd.service.server import Caller, Server
from hostd.store import Store, was_at
from hostd.system.journal import Entry
from hostd.wire import report_dict

Json = dict[str, Any]
RESTART_S = 60.0
"""From the death of a daemon until the next one looks at what it left, beside the time limit that the release had itself:
an older one is reported, not finished. The container's life has gone on, and who holds a GPU by now was never meant."""
CALLERS_TURN_S = 10.0
"""A caller whose worker died is told to do the work itself; one that has not begun by then will not."""
RETRY_S = 5.0
"""When nobody knows who has the lock (a full /run): until the record is closed."""
RESETS_AGAIN_S = 5.0
"""The first pause before a reset that was cut off is looked at again."""
MOST_ATTEMPTS = 2
"""By this daemon, of one release: what kills its worker every time would kill the next one too."""


class Recovery:
    """`run()` when the daemon begins; `worker_died()` while it lives."""

    def __init__(self, server: Server, say: Callable[[Entry], None], store: Store | None = None) -> None:
        self._server = server
        self._say = say
        self._store = store or Store()
        self._attempts: dict[str, int] = {}

    def run(self) -> None:
        self._recover_resets(RESETS_AGAIN_S, ())
        self._store.sweep()
        for record in self._store.open_ones():
            self._deal_with(record)

    def _recover_resets(self, pause_s: float, before: tuple[str, ...]) -> None:
        """Undoes resets that were cut off; looks again, ever more rarely, while one is left that cannot be undone yet
        (an nvidia-smi is still at work, a service does not start)."""
        if not reset_records(RUN_DIR):
            return
        from hostd.reset import recover

        said = tuple(recover())
        for text in said:
            if text not in before:
                self._say(audit.reset_recovered(text))
        if reset_records(RUN_DIR):
            again = min(600.0, pause_s * 2)
            self._server.call_at(time.monotonic() + pause_s, lambda: self._recover_resets(again, said))

    def worker_died(self, pid: int, *, orphaned: bool) -> None:
        """A worker ended without an answer. Its caller, if it has one, is asked to go on and gets the first turn."""
        if orphaned:
            self._take_over(pid)
        else:
            self._server.call_at(time.monotonic() + CALLERS_TURN_S, lambda: self._take_over(pid))

    def _take_over(self, pid: int) -> None:
        for record in self._store.open_ones():
            if record["pid"] == pid:
                self._deal_with(record)

    def _again(self, release_id: str) -> None:
        record = self._store.read(release_id)
        if record is not None and record["report"] is None:
            self._deal_with(record)

    def _deal_with(self, record: Json) -> None:
        release_id, vmid = record["release_id"], record["vmid"]
        try:
            lock = try_lock(vmid)
        except OSError:
            lock = None  # whoever does the work will say so
        if lock is None:
            # Somebody is at it, perhaps with this very release: look again when that one has ended.
            if not when_ended(self._server, read_owner(vmid), lambda: self._again(release_id)):
                self._server.call_at(time.monotonic() + RETRY_S, lambda: self._again(release_id))
            return
        lock.close()
        attempts = self._attempts[release_id] = self._attempts.get(release_id, 0) + 1
        why = _why_not(record, attempts)
        if not why:
            try:
                self._submit(record)
                return
            except Exception as exc:  # noqa: BLE001 - options of another version, hostile ones: reported, not finished
                why = f"it cannot be gone on with: {exc}"
        self._close(record, why)

    def _submit(self, record: Json) -> None:
        us = Caller(os.getpid(), 0, 0)
        event = _stop_event(record)
        if event is not None:
            self._server.submit(f"{INTERFACE}.Event", event, us)
            return
        parameters = {
            "vmid": record["vmid"],
            "release_id": record["release_id"],
            "on_disconnect": "continue",
            "options": record["options"],
        }
        self._server.submit(f"{INTERFACE}.Release", parameters, us)

    def _close(self, record: Json, why: str) -> None:
        context = audit.Context(vmid=record["vmid"], release_id=record["release_id"], trigger=record["trigger"])
        self._say(audit.abandoned(context, was_at(record), why))
        report = Report(record["release_id"], record["vmid"], record["trigger"])
        report.started, report.reason, report.was_held = record["started"], "interrupted", bool(record["was_held"])
        report.message = f"cut off at {was_at(record)} and not finished: {why}"
        report.next_step = f"pve-gpu-release verify {record['vmid']} shows what is left"
        try:
            self._store.write(record | {"report": report_dict(report)})
        except OSError as exc:
            self._store.remove(record["release_id"])  # said once; a full /run must not make us say it again
            self._say(audit.record_missing(context, str(exc)))


def _why_not(record: Json, attempts: int) -> str:
    """Why an unfinished release is only reported; empty when it is to be finished."""
    age_s = (boot_ticks_now() - record["at_ticks"]) / os.sysconf("SC_CLK_TCK")
    if record["owner"] == "cli" or (record["event"] is not None and _stop_event(record) is None):
        return "whoever asked for it was killed"
    if age_s > _limit_s(record) + RESTART_S:
        return f"it is {age_s:.0f} s old"
    if attempts > MOST_ATTEMPTS:
        return f"{attempts - 1} workers died of it"
    return ""


def _limit_s(record: Json) -> float:
    """The time limit that was asked for; at least the built-in one, for the configured one may have been longer."""
    options = record["options"]
    given = options.get("timeout_s") if isinstance(options, dict) else None
    return max(Limits().timeout_s, float(given) if isinstance(given, (int, float)) else 0.0)


def _stop_event(record: Mapping[str, object]) -> Json | None:
    """The event that an unfinished record answers, if it can still be answered: the end of a container can, a start
    has gone on without us long ago."""
    event = record.get("event")
    if not isinstance(event, dict) or event.get("phase") not in STOP_PHASES:
        return None
    return {key: event.get(key) for key in ("vmid", "phase", "source", "context")}
