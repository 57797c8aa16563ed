"""What one event leaves for the next one, in /run/pve-gpu-release: small JSON files, one per container, replaced
atomically. A reboot leaves none; a full /run costs the memory, never the event.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from typing import Any, TypeVar

from hostd.clock import boot_s
from hostd.lock import RUN_DIR, ensure_run_dir
from hostd.model import Evidence, Holder, Process, ProcessRef
from hostd.statefile import read_json, write_json

Json = dict[str, Any]
MOST_BYTES = 64 << 20
"""Of one record: a snapshot grows with the holders, of which a container may have thousands, with names as it likes."""


@dataclass(slots=True)
class SeenHolder:
    """A holder as it was before the stop."""

    pid: int
    start_time: int
    comm: str
    cmdline: str = ""
    user: str = ""
    uid: int = 0
    cgroup: str = ""
    ns_pids: list[int] = field(default_factory=list)
    gpus: list[int] = field(default_factory=list)
    memory_mib: int | None = None
    evidence: list[str] = field(default_factory=list)
    inside: bool = False
    """It runs in the PID namespace of the container's init or below it: the container's wherever its cgroup is."""

    @property
    def ref(self) -> ProcessRef:
        return ProcessRef(self.pid, self.start_time)

    @classmethod
    def of(cls, holder: Holder, inside: bool = False) -> SeenHolder:
        process = holder.process
        return cls(
            process.pid,
            process.start_time,
            process.comm,
            holder.cmdline.encode("utf-8", "backslashreplace").decode()[:2000],
            holder.user,
            process.uid,
            process.cgroup,
            list(process.ns_pids),
            list(holder.gpus),
            holder.memory_mib,
            sorted(holder.evidence),
            inside,
        )

    def holder(self, vmid: int) -> Holder:
        process = Process(
            pid=self.pid,
            start_time=self.start_time,
            ns_pids=tuple(self.ns_pids),
            comm=self.comm,
            state="X",
            uid=self.uid,
            ppid=0,
            threads=1,
            cgroup=self.cgroup,
            pidns=0,
        )
        return Holder(
            process=process,
            vmid=vmid,
            evidence=frozenset(Evidence(kind) for kind in self.evidence),
            gpus=tuple(self.gpus),
            memory_mib=self.memory_mib,
            cmdline=self.cmdline,
            user=self.user,
        )


@dataclass(slots=True)
class Snapshot:
    """pre-stop: what the container held before anything was stopped. Also what the stop watchdog goes by."""

    vmid: int
    at_s: float
    """`boot_s`, of the first pre-stop of this incarnation."""
    invocation: str = ""
    """Of the container's unit; empty for an `lxc-start` by hand."""
    init: list[int] = field(default_factory=list)
    """pid and start time."""
    holders: list[SeenHolder] = field(default_factory=list)
    minors: list[int] = field(default_factory=list)
    baseline_mib: list[list[int]] = field(default_factory=list)
    """Pairs (GPU minor, ghost memory without the container)."""
    used_mib: list[list[int]] = field(default_factory=list)
    """Pairs (GPU minor, memory in use at the pre-stop)."""
    over: bool = False
    """The watchdog has seen that the container is down: nothing to watch any more."""

    @property
    def init_ref(self) -> ProcessRef | None:
        return ProcessRef(*self.init) if len(self.init) == 2 else None


@dataclass(slots=True)
class Started:
    """pre-start: the release that made way for a start, until the next ExecStartPre= consumes it."""

    vmid: int
    at_s: float
    release_id: str = ""
    event_id: str = ""
    phase: str = ""
    allow: bool = True
    consumed: bool = False
    minors: list[int] = field(default_factory=list)
    baseline_mib: list[list[int]] = field(default_factory=list)
    """Ghost memory before the container ran: the baseline of a stop that nobody announced."""
    messages: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Stopped:
    """The stop that was dealt with last."""

    vmid: int
    at_s: float
    key: str
    release_id: str = ""
    verdict: str = ""


@dataclass(slots=True)
class Pending:
    """A stop that somebody is about to deal with, once another release of the container has ended."""

    vmid: int
    at_s: float
    key: str
    pid: int = 0
    start_time: int = 0

    @property
    def by(self) -> ProcessRef:
        """Who waits."""
        return ProcessRef(self.pid, self.start_time)


@dataclass(slots=True)
class Watched:
    """A stop that the watchdog looks after, for `status`."""

    vmid: int
    since_s: float
    reports: int = 0
    message: str = ""
    next_step: str = ""
    signalled: bool = False


Record = Snapshot | Started | Stopped | Pending | Watched
T = TypeVar("T", Snapshot, Started, Stopped, Pending, Watched)
_FOLDERS: dict[type[Any], str] = {
    Snapshot: "snapshots",
    Started: "starts",
    Stopped: "stops",
    Pending: "pending",
    Watched: "watch",
}


class Records:
    """The files. Reading never raises: what cannot be read or makes no sense is not there."""

    def __init__(self, run_dir: str = RUN_DIR) -> None:
        self._run_dir = run_dir
        self.problem = ""
        """Why the last thing could not be written; empty when it was."""

    def read(self, kind: type[T], vmid: int) -> T | None:
        """The record of a container; None when there is none or it makes no sense."""
        record = parse(kind, read_json(self._path(kind, vmid), MOST_BYTES))
        return record if record is not None and record.vmid == vmid else None

    def write(self, record: Record) -> bool:
        """Replaces the record of its container. False: `problem` says why."""
        path = self._path(type(record), record.vmid)
        try:
            ensure_run_dir(self._run_dir)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            write_json(path, asdict(record))
        except OSError as exc:
            self.problem = str(exc)
            return False
        self.problem = ""
        return True

    def drop(self, kind: type[T], vmid: int) -> None:
        try:
            os.unlink(self._path(kind, vmid))
        except OSError:
            pass  # not there, or /run is read-only: then it was never written either

    def vmids(self, kind: type[T]) -> list[int]:
        """Containers with such a record."""
        try:
            names = os.listdir(os.path.join(self._run_dir, _FOLDERS[kind]))
        except OSError:
            return []
        return sorted(int(name[:-5]) for name in names if name.endswith(".json") and name[:-5].isdecimal())

    def _path(self, kind: type[Any], vmid: int) -> str:
        return os.path.join(self._run_dir, _FOLDERS[kind], f"{vmid:d}.json")


def parse(kind: type[T], values: object) -> T | None:
    """A record from its JSON; None unless everything in it has the type that its readers count on."""
    made: T | None = _made(kind, values)
    if isinstance(made, Snapshot):
        holders = [_made(SeenHolder, holder) for holder in made.holders]
        if not all(holder is not None and set(holder.evidence) <= set(Evidence) for holder in holders):
            return None
        made.holders = holders
    return made


def _made(kind: type[Any], values: object) -> Any:
    if not isinstance(values, dict):
        return None
    known = {f.name: str(f.type) for f in fields(kind)}
    given = {key: value for key, value in values.items() if key in known}
    if not all(_FITS[known[key]](value) for key, value in given.items()):
        return None
    try:
        return kind(**given)
    except TypeError:
        return None  # one that must be there is not


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def _is_ints(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_int, value))


_FITS: dict[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "int | None": lambda value: value is None or _is_int(value),
    "float": lambda value: _is_int(value) or (isinstance(value, float) and isfinite(value)),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "list[int]": _is_ints,
    "list[str]": lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
    "list[list[int]]": lambda value: isinstance(value, list) and all(_is_ints(item) and len(item) == 2 for item in value),
    "list[SeenHolder]": lambda value: isinstance(value, list),
}
"""Type of a field, as it is written above -> does a value of JSON fit it?"""


def slow_stops(run_dir: str = RUN_DIR) -> list[Json]:
    """Stops that the watchdog has something to say about: `pct stop` itself says nothing (PCT_FLOWS 7)."""
    records = Records(run_dir)
    found = (records.read(Watched, vmid) for vmid in records.vmids(Watched))
    return [
        {
            "vmid": watched.vmid,
            "since_s": round(boot_s() - watched.since_s, 1),
            "message": watched.message,
            "next_step": watched.next_step,
            "signalled": watched.signalled,
        }
        for watched in found
        if watched is not None
    ]


def refused_starts(run_dir: str = RUN_DIR) -> list[Json]:
    """Containers whose last start was refused: after a reboot from inside nobody else is told (PCT_FLOWS 7)."""
    records = Records(run_dir)
    found = (records.read(Started, vmid) for vmid in records.vmids(Started))
    return [
        {
            "vmid": started.vmid,
            "since_s": round(boot_s() - started.at_s, 1),
            "release_id": started.release_id,
            "message": "; ".join(started.messages),
        }
        for started in found
        if started is not None and not started.allow
    ]


def pairs(values: list[list[int]]) -> dict[int, int]:
    """JSON knows no dictionary with integer keys."""
    return {minor: mib for minor, mib in values}  # noqa: C416 - each must have two items
