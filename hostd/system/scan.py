"""Which processes have a GPU device node open or mapped, told by device number, in bounded time.

Names, paths and inodes of nodes mean nothing (DESIGN 3), so every descriptor and every mapping is asked for its rdev.
Some of these reads can block for ever (FACTS, Kernel): all of them happen in disposable helpers; one that is silent for
a deadline is killed, its process becomes a blind spot, a fresh helper goes on with the next.

Jobs come in this order: descriptors of every process; mappings, of processes without descriptors first, so that a
stuck mapping costs least; command lines of holders.
"""

from __future__ import annotations

import errno
import itertools
import mmap
import os
import select
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from hostd import syscalls
from hostd.disposable import Disposable
from hostd.errors import is_gone
from hostd.model import BlindSpot, DeviceId, OpenNodes

CMDLINE_LIMIT = 16_384
"""Bytes of a command line that are read; the kernel allows megabytes."""
_BEAT_EVERY = 256
_JOBS_PER_LANE = 12
"""From twice as many on a second helper pays: a process costs 0.1 to 0.3 ms, a new helper 2 ms (measured)."""
_MAX_LANES = 4
_CHUNK = 250
"""Jobs given to a helper at a time in a large scan, so that a slow one does not keep the others waiting at the end."""
_UNSTABLE_TRIES = 4
_UNSTABLE_S = 0.25
"""How long a table is read again while descriptors leave it between the list and the question. A server with 1,000
descriptors and 1,000 connections a second is through after a few reads; who moves one descriptor all the time is not."""
_MOST_LISTINGS = 16
"""How often the tasks of one process may be listed again in one look."""
_REPS = 8
_KNOWN_STUCK_DEADLINE_S = 0.1
_MAX_BAD_STARTS = 3

# Job kinds, the codes of what is missing when one fails, and the words for it.
_FDS, _MAPS, _CMDLINE = b"fmc"
_CODES = {_FDS: "descriptors-unreadable", _MAPS: "mappings-unreadable", _CMDLINE: "detail-unreadable"}
_WORDS = {_FDS: "descriptors", _MAPS: "mappings", _CMDLINE: "command line"}
DETAIL = "detail-unreadable"
"""Code of a blind spot that does not make a look incomplete: the process is known to be a holder already."""

# Records of the helper: kind of job or of event, pid, length of what follows.
_GONE, _BLIND, _END = b"gbe"
_RECORD = struct.Struct("=BII")
_REQUEST = struct.Struct("=III")
_JOB = struct.Struct("=BI")
_PROGRESS = struct.Struct("=II")

# File systems whose inode numbers name one file per device number (statfs(2)): ext2/3/4, xfs, f2fs, squashfs, erofs.
# Not btrfs, bcachefs (one number per subvolume), overlayfs and FUSE (numbers of their own making).
_ONE_INODE_ONE_FILE = frozenset({0xEF53, 0x58465342, 0xF2F52010, 0x73717368, 0xE0F5E1E2})

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


# --- the reads, in the helper or (for benchmarks) here -------------------------------------------------------------


class _Gone(Exception):  # noqa: N818 - an event, not a fault
    """The process left while it was looked at."""


class _Reader:
    """Reads the jobs of one request. `beat` is called while a long job goes on."""

    def __init__(self, majors: Iterable[int], beat: Callable[[], None]) -> None:
        self._majors = frozenset(majors)
        self._beat = beat
        self._statx = syscalls.FastStatx()
        self._plain: set[bytes] = set()
        """Mappings' `dev inode path` known to be no GPU node, where that text names one file."""
        self._devices: dict[bytes, bool] = {}
        """Device number as `maps` writes it -> do its inode numbers name one file?"""
        self.problem: OSError | None = None
        """What kept the last job from asking everything, beside what it found."""

    def read(self, kind: int, pid: int) -> bytes:
        """The payload of one job, empty when there is nothing to tell. Raises _Gone, OSError."""
        self.problem = None
        if kind == _CMDLINE:
            return self._cmdline(pid)
        nodes = self._fds(pid) if kind == _FDS else self._maps(pid)
        return b"".join(struct.pack("=II", *node) for node in sorted(nodes))

    # --- descriptors ---

    def _fds(self, pid: int) -> set[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        try:
            # One directory per task below `task`, so a single thread shows as 3 links (fs/proc/base.c).
            alone = os.stat(b"/proc/%d/task" % pid).st_nlink == 3
            self.problem = self._fd_table(pid, found)
        except OSError as exc:
            raise (_Gone if is_gone(exc) else exc) from exc
        if not alone:
            self.problem = self._other_tables(pid, found) or self.problem
        return found

    def _other_tables(self, pid: int, found: set[tuple[int, int]]) -> OSError | None:
        """Tables of the other tasks where they do not share one already seen (a dead leader has none at all).

        A thread may hand its table to one that it starts and end; so the list is read again until it shows no task
        that was not looked at. One that ends while the list is read cuts it short: then it has fewer than there are.
        """
        path = b"/proc/%d/task" % pid
        problem: OSError | None = None
        looked_at, tables = {pid}, [pid]
        for _ in range(_MOST_LISTINGS):
            try:
                tids = {int(name) for name in os.listdir(path)}
                whole = len(tids) >= os.stat(path).st_nlink - 2
            except OSError as exc:
                return problem if is_gone(exc) else exc
            fresh = tids - looked_at
            problem = self._tables_of(fresh, tables, found) or problem
            if found or (whole and not fresh):
                return problem
            looked_at |= fresh
        return problem or OSError(errno.EAGAIN, "tasks come faster than they can be looked at")

    def _tables_of(self, tids: Iterable[int], tables: list[int], found: set[tuple[int, int]]) -> OSError | None:
        problem: OSError | None = None
        for number, tid in enumerate(sorted(tids)):
            if number % 64 == 63:
                self._beat()
            if self._shares_table(tid, tables):
                continue
            try:
                problem = self._fd_table(tid, found) or problem
            except OSError as exc:
                if not is_gone(exc):
                    problem = exc
                continue
            if len(tables) < _REPS:
                tables.append(tid)
        return problem

    @staticmethod
    def _shares_table(tid: int, seen: list[int]) -> bool:
        for other in seen:
            try:
                if syscalls.kcmp_files(tid, other):
                    return True
            except OSError:
                continue  # cannot be told: walk it
        return False

    def _fd_table(self, tid: int, found: set[tuple[int, int]]) -> OSError | None:
        """Add the GPU nodes open in one task's table; what kept us from asking one of its descriptors.

        No descriptor is left out by its link text: a statx costs as much as the readlink that could spare it.
        A descriptor that left between the list and the question may have got another number, so where nothing was
        found the table is read again.
        """
        path = b"/proc/%d/fd" % tid
        here = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            until = time.monotonic() + _UNSTABLE_S
            for tried in itertools.count(1):
                names = os.listdir(path)
                if not names:
                    return None
                problem, left = self._ask(tid, here, names, found)
                if found or not left:
                    return problem
                if tried >= _UNSTABLE_TRIES and time.monotonic() > until:
                    break
                self._beat()
            return OSError(errno.EAGAIN, "descriptors change faster than they can be read")
        finally:
            os.close(here)

    def _ask(self, tid: int, here: int, names: list[bytes], found: set[tuple[int, int]]) -> tuple[OSError | None, bool]:
        """(what kept us from asking one of them, did one leave meanwhile?)"""
        statx, where, words = self._statx.call, self._statx.where, self._statx.words
        majors, flags = self._majors, syscalls.STATX_FLAGS
        problem: OSError | None = None
        left = False
        beat = _BEAT_EVERY
        for name in names:
            try:
                if statx(here, name, flags, 1, where):
                    mode, major, minor = syscalls.statx_rdev(name, here)
                else:
                    mode, major, minor = words[7], words[32], words[33]
                if major in majors and mode & 0o170000 == 0o020000 and not _is_path_only(tid, name):
                    found.add((major, minor))
            except OSError as exc:
                left = left or is_gone(exc)
                problem = problem if is_gone(exc) else exc
            beat -= 1
            if not beat:
                beat = _BEAT_EVERY
                self._beat()
        return problem, left

    # --- mappings ---

    def _maps(self, pid: int) -> set[tuple[int, int]]:
        """GPU nodes that the process maps.

        `maps` names the device of the file system, never the rdev (FACTS), so each mapped file is asked through
        `map_files`; `maps` serves to ask each file only once where its inode number names it.
        """
        found: set[tuple[int, int]] = set()
        if self._map_of(pid, found):
            return found
        # The leader is dead (or a kernel thread): any live task shows the same map, under /proc/TID only (FACTS).
        any(self._map_of(tid, found) for tid in self._other_tids(pid))
        return found

    @staticmethod
    def _other_tids(pid: int) -> list[int]:
        """Tasks of a process without its leader. Raises _Gone, OSError."""
        try:
            return [tid for name in os.listdir(b"/proc/%d/task" % pid) if (tid := int(name)) != pid]
        except OSError as exc:
            raise (_Gone if is_gone(exc) else exc) from exc

    def _map_of(self, tid: int, found: set[tuple[int, int]]) -> bool:
        """Add what one task maps; False when it has no memory map (dead, kernel thread) or is gone."""
        for _ in range(_UNSTABLE_TRIES):
            try:
                fd = os.open(b"/proc/%d/maps" % tid, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    text = self._all(fd)
                finally:
                    os.close(fd)
            except OSError as exc:
                if is_gone(exc):
                    return False
                raise
            if not text:
                return False
            if self._ask_mappings(tid, text, found):
                return True
        raise OSError(errno.EAGAIN, "mappings change faster than they can be read")

    def _all(self, fd: int) -> bytes:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
            if len(parts) % 64 == 0:
                self._beat()
        return b"".join(parts)

    def _ask_mappings(self, tid: int, text: bytes, found: set[tuple[int, int]]) -> bool:
        """False when a mapping left between the two reads: then it may be split or moved, so look again."""
        plain, beat = self._plain, _BEAT_EVERY
        # address perms offset dev inode path; the kernel escapes line feeds in paths (proc_pid_maps(5)).
        for line in text.split(b"\n"):
            beat -= 1
            if not beat:
                beat = _BEAT_EVERY
                self._beat()
            parts = line.split(b" ", 3)
            if len(parts) < 4 or parts[3] in plain:
                continue
            identity = parts[3]
            if identity.startswith(b"00:00 "):
                continue  # anonymous memory, [stack], [vdso]
            start, _, end = parts[0].partition(b"-")
            # map_files has no leading zeros and refuses them (fs/proc/base.c, dname_to_vma_addr).
            path = b"/proc/%d/map_files/%s-%s" % (tid, start.lstrip(b"0") or b"0", end.lstrip(b"0"))
            try:
                mode, major, minor = syscalls.statx_rdev(path)
            except OSError as exc:
                if is_gone(exc):
                    return not os.path.exists(b"/proc/%d/maps" % tid)  # the whole task is gone
                raise
            if major in self._majors and mode & 0o170000 == 0o020000:
                found.add((major, minor))
            elif self._names_one_file(identity, path):
                plain.add(identity)
        return True

    def _names_one_file(self, identity: bytes, path: bytes) -> bool:
        device = identity.split(b" ", 1)[0]
        known = self._devices.get(device)
        if known is None:
            if device.startswith(b"00:"):
                # No block device: ask nobody (statfs of a FUSE or NFS file waits for its server).
                known = device in _zfs_devices()
                if known is False and len(self._devices) > 4096:
                    return False
            else:
                try:
                    known = syscalls.fs_type(path) in _ONE_INODE_ONE_FILE
                except OSError:
                    return False
            self._devices[device] = known
        return known

    # --- command lines ---

    def _cmdline(self, pid: int) -> bytes:
        """Of the leader, or of a live task when it is dead; empty for a kernel thread."""
        return self._cmdline_of(pid) or next(filter(None, map(self._cmdline_of, self._other_tids(pid))), b"")

    @staticmethod
    def _cmdline_of(tid: int) -> bytes:
        try:
            fd = os.open(b"/proc/%d/cmdline" % tid, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return os.read(fd, CMDLINE_LIMIT)
            finally:
                os.close(fd)
        except OSError as exc:
            if is_gone(exc):
                return b""
            raise


def _is_path_only(tid: int, name: bytes) -> bool:
    """True for a descriptor opened with O_PATH: it names the node, the driver knows nothing of it (open(2)).

    The mode of the link cannot tell: access mode 3, for ioctl only, shows none either. Raises OSError.
    """
    fd = os.open(b"/proc/%d/fdinfo/%s" % (tid, name), os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    flags = next((line.split()[1] for line in text.splitlines() if line.startswith(b"flags:")), None)
    if flags is None:
        raise OSError(errno.EIO, "fdinfo without flags")
    return bool(int(flags, 8) & os.O_PATH)


def _zfs_devices() -> frozenset[bytes]:
    """Device numbers of mounted ZFS data sets, as `maps` writes them. Object numbers name one file per data set.

    Proxmox mounts a container's data set on the host, so that our own mount table has it.
    """
    found = set()
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            for line in file:
                left, _, right = line.partition(b" - ")
                if right.startswith(b"zfs "):
                    major, _, minor = left.split(b" ", 3)[2].partition(b":")
                    found.add(b"%02x:%02x" % (int(major), int(minor)))
    except (OSError, ValueError):
        pass  # then each mapping is asked
    return frozenset(found)


def _serve(request_fd: int, reply_fd: int, progress: mmap.mmap) -> None:
    """The helper: requests in, records out; (jobs done, heartbeats) in shared memory, so that silence can be told."""
    state = [0, 0]  # done, beats
    known, reader = 0, None

    def beat() -> None:
        state[1] = (state[1] + 1) & 0xFFFFFFFF
        _PROGRESS.pack_into(progress, 0, *state)

    while header := _read_exactly(request_fd, _REQUEST.size):
        number, n_majors, n_jobs = _REQUEST.unpack(header)
        majors = struct.unpack(f"={n_majors}I", _read_exactly(request_fd, 4 * n_majors))
        jobs = list(_JOB.iter_unpack(_read_exactly(request_fd, _JOB.size * n_jobs)))
        if reader is None or number != known:
            known, reader = number, _Reader(majors, beat)  # what it has learnt holds for one scan only
        state[0] = 0
        for kind, pid in jobs:
            record = _record(reader, kind, pid)
            if record:
                _write(reply_fd, record)
            state[0] += 1
            _PROGRESS.pack_into(progress, 0, *state)
        _write(reply_fd, _RECORD.pack(_END, 0, 0))


def _record(reader: _Reader, kind: int, pid: int) -> bytes:
    try:
        payload = reader.read(kind, pid)
    except _Gone:
        return _RECORD.pack(_GONE, pid, 0)
    except OSError as exc:
        return _blind_record(kind, pid, exc)
    record = _RECORD.pack(kind, pid, len(payload)) + payload if payload else b""
    return record + _blind_record(kind, pid, reader.problem) if reader.problem else record


def _blind_record(kind: int, pid: int, exc: OSError) -> bytes:
    text = struct.pack("=B", kind) + os.fsencode(exc.strerror or str(exc))
    return _RECORD.pack(_BLIND, pid, len(text)) + text


def _records(data: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
    """The complete records in `data`, as (kind, pid, payload), and what is left of it."""
    records, at = [], 0
    while len(data) - at >= _RECORD.size:
        kind, pid, length = _RECORD.unpack_from(data, at)
        start = at + _RECORD.size
        if len(data) - start < length:
            break
        at = start + length
        records.append((kind, pid, data[start:at]))
    return records, data[at:]


def _read_exactly(fd: int, size: int) -> bytes:
    parts = []
    while size:
        part = os.read(fd, size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# --- the scanner ---------------------------------------------------------------------------------------------------


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
        _PROGRESS.pack_into(progress, 0, 0, 0)
        self._last, self._moved_at = (0, 0), time.monotonic()
        request = [_REQUEST.pack(scan, len(majors), len(jobs)), struct.pack(f"={len(majors)}I", *majors)]
        request += [_JOB.pack(*job) for job in jobs]
        return helper.write(b"".join(request), deadline_s)

    def _ready(self) -> tuple[Disposable, mmap.mmap]:
        if self._helper is None or self._progress is None:
            progress = mmap.mmap(-1, mmap.PAGESIZE)  # shared with the child
            self._progress = progress
            self._helper = Disposable(lambda request, reply: _serve(request, reply, progress))
        return self._helper, self._progress

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
        records, self._buffer = _records(self._buffer)
        return records, data == b""

    def done(self) -> int:
        """Jobs finished."""
        assert self._progress is not None
        return int(_PROGRESS.unpack_from(self._progress, 0)[0])

    def silent_for(self) -> float:
        """Seconds since the last sign of life that we noticed."""
        assert self._progress is not None
        now = time.monotonic()
        state = _PROGRESS.unpack_from(self._progress, 0)
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

    def __enter__(self) -> Scanner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the helpers without waiting for stuck ones. The scanner may be used again. Idempotent."""
        for lane in self._lanes:
            lane.drop()
        self._lanes.clear()

    def scan(self, pids: Iterable[int], majors: Iterable[int]) -> ScanResult:
        """Look at these processes for character devices of these majors (`/proc/devices`, at this scan).

        Never raises for what a process does; OSError when no helper can be started.
        """
        self._scans = (self._scans + 1) & 0xFFFFFFFF
        run = _Run(self, sorted(majors), time.monotonic() + self.budget_s)
        run.all_jobs(list(dict.fromkeys(pids)))
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
        self._reader = _Reader(majors, lambda: None)

    def all_jobs(self, pids: list[int]) -> None:
        if not pids or not self._majors:
            return
        self._jobs([(_FDS, pid) for pid in pids])
        left = [pid for pid in pids if pid not in self.result.gone]
        left.sort(key=lambda pid: pid in self._by_fd)
        self._jobs([(_MAPS, pid) for pid in left] + [(_CMDLINE, pid) for pid in left if pid in self._by_fd])
        self._jobs([(_CMDLINE, pid) for pid in self._by_map if pid not in self._by_fd])
        none: frozenset[DeviceId] = frozenset()
        for pid in {**self._by_fd, **self._by_map}.keys() - self.result.gone:
            self.result.open[pid] = OpenNodes(self._by_fd.get(pid, none), self._by_map.get(pid, none))

    def _jobs(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        if self._scanner is None:
            for kind, pid in jobs:
                for record in _records(_record(self._reader, kind, pid))[0]:
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
            for kind, pid in (job for job in jobs if job[0] == _CMDLINE and job[1] in stuck):
                self._blind(kind, pid, "not read: its memory map is stuck")
            jobs = [job for job in jobs if not (job[0] == _CMDLINE and job[1] in stuck)]
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
            if kind == _END:
                lane.idle()
                return
            self._note(kind, pid, payload)
        if dead:
            self._failed(lane, "the helper process died")

    def _drain(self, lane: _Lane) -> None:
        for kind, pid, payload in lane.take()[0]:
            if kind != _END:
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
        error = f"not reached within {self._scanner.budget_s:g} s"
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
        if kind == _GONE:
            self.result.gone.add(pid)
        elif kind == _BLIND:
            self._blind(payload[0], pid, os.fsdecode(payload[1:]))
        elif kind == _CMDLINE:
            self.result.cmdlines[pid] = payload
        else:
            nodes = frozenset(DeviceId(*pair) for pair in struct.iter_unpack("=II", payload))
            (self._by_fd if kind == _FDS else self._by_map)[pid] = nodes
