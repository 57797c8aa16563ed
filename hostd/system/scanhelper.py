"""The helper of a scan: reads that can block, in a process that may be killed, and the records it answers with.

A request is a header, majors and jobs; the answer is a record for each thing found and one at the end. How far it is stands
in shared memory, so that silence can be told from work.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable, Iterable

from hostd.errors import is_gone
from hostd.system.descriptors import Descriptors
from hostd.system.mappings import Mappings, other_tids

CMDLINE_LIMIT = 16_384
"""Bytes of a command line that are read; the kernel allows megabytes."""

# Job kinds.
FDS, MAPS, CMDLINE = b"fmc"

# Records of the helper: kind of job or of event, pid, length of what follows.
GONE, BLIND, END = b"gbe"
_RECORD = struct.Struct("=BII")
REQUEST = struct.Struct("=III")
JOB = struct.Struct("=BI")
PROGRESS = struct.Struct("=II")


class Reader:
    """Does the jobs of one scan. `beat` is called while a long job goes on."""

    def __init__(self, majors: Iterable[int], beat: Callable[[], None]) -> None:
        self._descriptors = Descriptors(majors, beat)
        self._mappings = Mappings(majors, beat)
        self.problem: OSError | None = None
        """What kept the last job from asking everything, beside what it found."""

    def read(self, kind: int, pid: int) -> bytes:
        """The payload of one job, empty when there is nothing to tell. Raises OSError, one that `is_gone` when the process
        left while it was looked at."""
        self.problem = None
        if kind == CMDLINE:
            return self._cmdline(pid)
        if kind == FDS:
            nodes = self._descriptors.read(pid)
            self.problem = self._descriptors.problem
        else:
            nodes = self._mappings.read(pid)
        return b"".join(struct.pack("=II", *node) for node in sorted(nodes))

    def _cmdline(self, pid: int) -> bytes:
        """Of the leader, or of a live task when it is dead; empty for a kernel thread."""
        return self._cmdline_of(pid) or next(filter(None, map(self._cmdline_of, other_tids(pid))), b"")

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


def serve(request_fd: int, reply_fd: int, progress: mmap.mmap) -> None:
    """The helper: requests in, records out; (jobs done, heartbeats) in shared memory, so that silence can be told."""
    state = [0, 0]  # done, beats
    known, reader = 0, None

    def beat() -> None:
        state[1] = (state[1] + 1) & 0xFFFFFFFF
        PROGRESS.pack_into(progress, 0, *state)

    while header := _read_exactly(request_fd, REQUEST.size):
        number, n_majors, n_jobs = REQUEST.unpack(header)
        majors = struct.unpack(f"={n_majors}I", _read_exactly(request_fd, 4 * n_majors))
        jobs = list(JOB.iter_unpack(_read_exactly(request_fd, JOB.size * n_jobs)))
        if reader is None or number != known:
            known, reader = number, Reader(majors, beat)  # what it has learnt holds for one scan only
        state[0] = 0
        for kind, pid in jobs:
            record = record_of(reader, kind, pid)
            if record:
                _write(reply_fd, record)
            state[0] += 1
            PROGRESS.pack_into(progress, 0, *state)
        _write(reply_fd, _RECORD.pack(END, 0, 0))


def record_of(reader: Reader, kind: int, pid: int) -> bytes:
    try:
        payload = reader.read(kind, pid)
    except OSError as exc:
        if is_gone(exc):
            return _RECORD.pack(GONE, pid, 0)
        return _blind_record(kind, pid, exc)
    record = _RECORD.pack(kind, pid, len(payload)) + payload if payload else b""
    return record + _blind_record(kind, pid, reader.problem) if reader.problem else record


def _blind_record(kind: int, pid: int, exc: OSError) -> bytes:
    text = struct.pack("=B", kind) + os.fsencode(exc.strerror or str(exc))
    return _RECORD.pack(BLIND, pid, len(text)) + text


def parse_records(data: bytes) -> tuple[list[tuple[int, int, bytes]], bytes]:
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
