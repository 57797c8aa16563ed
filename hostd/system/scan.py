"""Which processes have a GPU device node open or mapped, told by device number, in bounded time.

Names, paths and inodes of nodes mean nothing (DESIGN 3), so every descriptor and every mapping is asked for its rdev.
Some of these reads can block for ever (FACTS, Kernel): all of them happen in disposable helpers; one that is silent for
a deadline is killed, its process becomes a blind spot, a fresh helper goes on with the next.

Jobs come in this order: descriptors of every process; mappings, of processes without descriptors first, so that a
stuck mapping costs least; command lines of holders.
"""

from __future__ import annotations

import math
import mmap
import os
import select
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hostd.disposable import Disposable
from hostd.model import BlindSpot, DeviceId, OpenNodes
from hostd.system.scanhelper import (
    BLIND,
    CMDLINE,
    END,
    FDS,
    GONE,
    JOB,
    MAPS,
    PROGRESS,
    REQUEST,
    Reader,
    parse_records,
    record_of,
    serve,
)

_JOBS_PER_LANE = 12
"""From twice as many on a second helper pays: a process costs 0.1 to 0.3 ms, a new helper 2 ms (measured)."""
_MAX_LANES = 4
_CHUNK = 250
"""Jobs given to a helper at a time in a large scan, so that a slow one does not keep the others waiting at the end."""
_KNOWN_STUCK_DEADLINE_S = 0.1
_MAX_BAD_STARTS = 3

# The codes of what is missing when a job fails, and the words for it.
_CODES = {FDS: "descriptors-unreadable", MAPS: "mappings-unreadable", CMDLINE: "detail-unreadable"}
_WORDS = {FDS: "descriptors", MAPS: "mappings", CMDLINE: "command line"}
DETAIL = "detail-unreadable"
"""Code of a blind spot that does not make a look incomplete: the process is known to be a holder already."""

Job = tuple[int, int]
"""(kind, pid)"""


@dataclass(slots=True)
class ScanResult:
    """What one scan saw. Not complete when a blind spot has another code than `detail-unreadable`."""

    open: dict[int, OpenNodes] = field(default_factory=dict)
    """Holders only."""
    cmdlines: dict[int, bytes] = field(default_factory=dict)
    """Of holders: arguments separated by NUL, at most CMDLINE_LIMIT bytes; empty for a dead leader."""
    blind_spots: list[BlindSpot] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)

    @property
    def complete(self) -> bool:
        return all(spot.code == DETAIL for spot in self.blind_spots)


class _Lane:
    """One helper with the jobs it was given and how far it is."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.busy = False
        self.bad_starts = 0
        self._helper: Disposable | None = None
        self._progress: mmap.mmap | None = None
        self._buffer = b""
        self._last = (0, 0)
        self._moved_at = 0.0

    def start(self, scan: int, majors: Sequence[int], jobs: list[Job], deadline_s: float) -> bool:
        """Give jobs of scan number `scan` to the helper, a fresh one if need be. False when it does not take them."""
        self.jobs, self.busy, self._buffer = jobs, True, b""
        helper, progress = self._ready()
        PROGRESS.pack_into(progress, 0, 0, 0)
        self._last, self._moved_at = (0, 0), time.monotonic()
        request = [REQUEST.pack(scan, len(majors), len(jobs)), struct.pack(f"={len(majors)}I", *majors)]
        request += [JOB.pack(*job) for job in jobs]
        return helper.write(b"".join(request), deadline_s)

    def _ready(self) -> tuple[Disposable, mmap.mmap]:
        if self._helper is None or self._progress is None:
            progress = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the child
            self._progress = progress
            self._helper = Disposable(lambda request, reply: serve(request, reply, progress))
        return self._helper, self._progress

    @property
    def pid(self) -> int | None:
        """Of the helper; None: there is none."""
        return self._helper.pid if self._helper is not None else None

    @property
    def fd(self) -> int:
        assert self._helper is not None
        return self._helper.read_fd

    def take(self) -> tuple[list[tuple[int, int, bytes]], bool]:
        """Records that are complete by now, and whether the helper is dead."""
        assert self._helper is not None
        data = self._helper.read(0)
        if data:
            self._buffer += data
        records, self._buffer = parse_records(self._buffer)
        return records, data == b""

    def done(self) -> int:
        """Jobs finished."""
        assert self._progress is not None
        return int(PROGRESS.unpack_from(self._progress, 0)[0])

    def silent_for(self) -> float:
        """Seconds since the last sign of life that we noticed."""
        assert self._progress is not None
        now = time.monotonic()
        state = PROGRESS.unpack_from(self._progress, 0)
        if state != self._last:
            self._last, self._moved_at = state, now
        return now - self._moved_at

    def drop(self) -> None:
        """End the helper; the next `start` makes a new one."""
        if self._helper is not None:
            self._helper.close()
            self._helper = None
        if self._progress is not None:
            self._progress.close()
            self._progress = None

    def idle(self) -> None:
        self.jobs, self.busy, self.bad_starts = [], False, 0


class Scanner:
    """Finds open GPU nodes. Its helpers start with the first scan and stay warm until `close`.

    `deadline_s`: how long a helper may show no sign of life on one process. `budget_s`: the most that one scan may
    take, whatever containers do; what it did not reach is a blind spot. Not for use from threads.
    """

    def __init__(self, deadline_s: float = 1.0, budget_s: float = 10.0) -> None:
        self.deadline_s = deadline_s
        self.budget_s = budget_s
        self._lanes: list[_Lane] = []
        self._scans = 0
        self._stuck: set[int] = set()
        """Pids that were stuck in an earlier scan: they get a shorter deadline now."""
        self._end_s = math.inf
        """CLOCK_MONOTONIC; see `within`."""

    def __enter__(self) -> Scanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the helpers without waiting for stuck ones. The scanner may be used again. Idempotent."""
        for lane in self._lanes:
            lane.drop()
        self._lanes.clear()

    @contextmanager
    def within(self, budget_s: float | None = None) -> Iterator[None]:
        """All scans inside together take no longer than that (None: than one may take): a container can make processes
        faster than they are looked at."""
        before = self._end_s
        self._end_s = min(before, time.monotonic() + min(self.budget_s, math.inf if budget_s is None else budget_s))
        try:
            yield
        finally:
            self._end_s = before

    @property
    def spent(self) -> bool:
        """What `within` allows has been used up."""
        return time.monotonic() >= self._end_s

    def scan(self, pids: Iterable[int], majors: Iterable[int]) -> ScanResult:
        """Look at these processes for character devices of these majors (`/proc/devices`, at this scan).

        Our own helpers are left out: they hold nothing, and their descriptors change while they read.
        Never raises for what a process does; OSError when no helper can be started.
        """
        helpers = {lane.pid for lane in self._lanes}
        self._scans = (self._scans + 1) & 0xFFFFFFFF
        run = _Run(self, sorted(majors), min(self._end_s, time.monotonic() + self.budget_s))
        try:
            run.all_jobs([pid for pid in dict.fromkeys(pids) if pid not in helpers])
        except OSError:
            self.close()  # lanes with work of a scan that nobody goes on with
            raise
        return run.result


def scan_here(pids: Iterable[int], majors: Iterable[int]) -> ScanResult:
    """The same reads in this process, without any deadline: for benchmarks and trusted processes only."""
    run = _Run(None, sorted(majors), 0.0)
    run.all_jobs(list(dict.fromkeys(pids)))
    return run.result


class _Run:
    """One scan."""

    def __init__(self, scanner: Scanner | None, majors: list[int], end: float) -> None:
        self.result = ScanResult()
        self._scanner = scanner
        self._majors = majors
        self._end = end
        self._by_fd: dict[int, frozenset[DeviceId]] = {}
        self._by_map: dict[int, frozenset[DeviceId]] = {}
        self._stuck_now: set[int] = set()
        self._reader = Reader(majors, lambda: None)

    def all_jobs(self, pids: list[int]) -> None:
        if not pids or not self._majors:
            return
        self._jobs([(FDS, pid) for pid in pids])
        left = [pid for pid in pids if pid not in self.result.gone]
        left.sort(key=lambda pid: pid in self._by_fd)
        self._jobs([(MAPS, pid) for pid in left] + [(CMDLINE, pid) for pid in left if pid in self._by_fd])
        self._jobs([(CMDLINE, pid) for pid in self._by_map if pid not in self._by_fd])
        none: frozenset[DeviceId] = frozenset()
        for pid in {**self._by_fd, **self._by_map}.keys() - self.result.gone:
            self.result.open[pid] = OpenNodes(self._by_fd.get(pid, none), self._by_map.get(pid, none))

    def _jobs(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        if self._scanner is None:
            for kind, pid in jobs:
                for record in parse_records(record_of(self._reader, kind, pid))[0]:
                    self._note(*record)
            return
        wanted = max(1, min(_MAX_LANES, os.cpu_count() or 1, len(jobs) // _JOBS_PER_LANE))
        lanes = self._scanner._lanes
        while len(lanes) < wanted:
            lanes.append(_Lane())
        lanes = lanes[:wanted]
        size = min(_CHUNK, -(-len(jobs) // wanted))
        chunks = [jobs[at : at + size] for at in range(0, len(jobs), size)]
        chunks.reverse()
        while True:
            for lane in lanes:
                while chunks and not lane.busy:
                    self._give(lane, chunks.pop())
            busy = [lane for lane in lanes if lane.busy]
            if not busy:
                return
            self._step(busy)

    def _give(self, lane: _Lane, jobs: list[Job]) -> None:
        """Hand jobs to a lane; a command line of a process with stuck mappings is not even tried."""
        stuck = self._stuck_now
        while True:
            for kind, pid in (job for job in jobs if job[0] == CMDLINE and job[1] in stuck):
                self._blind(kind, pid, "not read: its memory map is stuck")
            jobs = [job for job in jobs if not (job[0] == CMDLINE and job[1] in stuck)]
            if not jobs:
                lane.idle()
                return
            if self._end <= time.monotonic():
                self._out_of_budget(jobs)
                lane.drop()
                lane.idle()
                return
            assert self._scanner is not None
            if lane.start(self._scanner._scans, self._majors, jobs, self._scanner.deadline_s):
                return
            lane.drop()
            lane.bad_starts += 1
            if lane.bad_starts >= _MAX_BAD_STARTS:
                for kind, pid in jobs:
                    self._blind(kind, pid, "no helper process takes the request")
                lane.idle()
                return

    def _step(self, lanes: list[_Lane]) -> None:
        """Wait for something to happen and deal with it."""
        assert self._scanner is not None
        deadline_s = self._scanner.deadline_s
        if any(self._known_stuck(lane) for lane in lanes):
            deadline_s = min(deadline_s, _KNOWN_STUCK_DEADLINE_S)
        poll = select.poll()
        for lane in lanes:
            poll.register(lane.fd, select.POLLIN)
        wait_s = max(0.0, min(deadline_s / 4, self._end - time.monotonic()))
        ready = {fd for fd, _ in poll.poll(wait_s * 1000)}
        for lane in lanes:
            if lane.fd in ready:
                self._take(lane)
            elif self._end <= time.monotonic():
                done = lane.done()
                self._drain(lane)
                self._out_of_budget(lane.jobs[done:])
                lane.drop()
                lane.idle()
            else:
                limit = self._scanner.deadline_s
                if self._known_stuck(lane):
                    limit = min(limit, _KNOWN_STUCK_DEADLINE_S)
                if lane.silent_for() >= limit:
                    self._failed(lane, f"no answer within {limit:g} s")

    def _known_stuck(self, lane: _Lane) -> bool:
        assert self._scanner is not None
        done = lane.done()
        return done < len(lane.jobs) and lane.jobs[done][1] in self._scanner._stuck

    def _take(self, lane: _Lane) -> None:
        records, dead = lane.take()
        for kind, pid, payload in records:
            if kind == END:
                lane.idle()
                return
            self._note(kind, pid, payload)
        if dead:
            self._failed(lane, "the helper process died")

    def _drain(self, lane: _Lane) -> None:
        for kind, pid, payload in lane.take()[0]:
            if kind != END:
                self._note(kind, pid, payload)

    def _failed(self, lane: _Lane, error: str) -> None:
        """The job in progress is lost: note it, go on behind it with a fresh helper."""
        assert self._scanner is not None
        done = lane.done()  # before the drain: records come before the count
        self._drain(lane)
        jobs = lane.jobs
        if done >= len(jobs):
            lane.drop()
            lane.idle()
            return
        kind, pid = jobs[done]
        self._stuck_now.add(pid)
        self._scanner._stuck.add(pid)
        self._blind(kind, pid, error)
        lane.drop()
        self._give(lane, jobs[done + 1 :])

    def _out_of_budget(self, jobs: list[Job]) -> None:
        """One blind spot for each kind of thing that was not reached, not one per process."""
        assert self._scanner is not None
        whole = math.isinf(self._scanner._end_s)
        error = f"not reached within {self._scanner.budget_s:g} s" if whole else "not reached in the time for one look"
        groups: dict[tuple[int, str], list[int]] = {}
        for kind, pid in jobs:
            groups.setdefault((kind, self._code(kind, pid)), []).append(pid)
        for (kind, code), pids in groups.items():
            some = ", ".join(map(str, pids[:8])) + (", ..." if len(pids) > 8 else "")
            plural = "es" if len(pids) > 1 else ""
            what = f"{_WORDS[kind]} of {len(pids)} process{plural} ({some})"
            self.result.blind_spots.append(BlindSpot("procfs", what, error, code))

    def _code(self, kind: int, pid: int) -> str:
        """What else a process may have open is a detail when it is a holder by its descriptors anyway."""
        return DETAIL if pid in self._by_fd else _CODES[kind]

    def _blind(self, kind: int, pid: int, error: str) -> None:
        what = f"{_WORDS[kind]} of process {pid}"
        self.result.blind_spots.append(BlindSpot("procfs", what, error, self._code(kind, pid)))

    def _note(self, kind: int, pid: int, payload: bytes) -> None:
        if kind == GONE:
            self.result.gone.add(pid)
        elif kind == BLIND:
            self._blind(payload[0], pid, os.fsdecode(payload[1:]))
        elif kind == CMDLINE:
            self.result.cmdlines[pid] = payload
        else:
            nodes = frozenset(DeviceId(*pair) for pair in struct.iter_unpack("=II", payload))
            (self._by_fd if kind == FDS else self._by_map)[pid] = nodes
