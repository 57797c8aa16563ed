"""/proc/PID as facts: who a process is, where it belongs, what it is stuck in.

Only files that answer for every process are read here: `stat`, `status`, `cgroup`, `task`, `wchan`, the link `ns/pid`.
`cmdline`, `maps`, `map_files` take the memory map's lock and can block for ever (FACTS, Kernel): `hostd.system.scan`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from hostd.errors import is_gone
from hostd.model import Process, ProcessRef, Stuck

_READ = os.O_RDONLY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_SIGKILL_BIT = 1 << (9 - 1)
_MAX_STUCK_TASKS = 64
_PF_EXITING = 0x4


class StatFields(NamedTuple):
    """The fields of /proc/PID/stat that we use (proc_pid_stat(5))."""

    pid: int
    comm: bytes
    state: str
    ppid: int
    cpu_ticks: int
    """utime + stime of all tasks, dead ones included; clock ticks."""
    threads: int
    start_time: int
    """Clock ticks since boot."""
    exiting: bool = False
    """PF_EXITING is set in its flags: the task is past exit()."""


class StatusFields(NamedTuple):
    """The fields of /proc/PID/status that we use (proc_pid_status(5))."""

    uid: int
    """Real uid."""
    tgid: int
    ns_pids: tuple[int, ...]
    """The whole `NSpid:` line, the pid in the namespace of this /proc first."""
    threads: int
    kill_pending: bool
    """SIGKILL is in SigPnd or ShdPnd: the task has been killed and has not died yet."""


def parse_stat(text: bytes) -> StatFields:
    """Parse `/proc/PID/stat`. ValueError when it is not one.

    The name stands in parentheses and may hold spaces, parentheses and line feeds: it ends at the last `)`.
    """
    opening, closing = text.index(b"("), text.rindex(b")")
    rest = text[closing + 2 :].split()
    if len(rest) < 20:
        raise ValueError("too few fields in stat")
    return StatFields(
        pid=int(text[:opening]),
        comm=text[opening + 1 : closing],
        state=rest[0].decode("ascii", "replace"),
        ppid=int(rest[1]),
        cpu_ticks=int(rest[11]) + int(rest[12]),
        threads=int(rest[17]),
        start_time=int(rest[19]),
        exiting=bool(int(rest[6]) & _PF_EXITING),
    )


def parse_tracer(text: bytes) -> int:
    """TracerPid of /proc/PID/status; 0: nobody."""
    _, _, rest = text.partition(b"\nTracerPid:")
    number = rest.partition(b"\n")[0].strip()
    return int(number) if number.isdigit() else 0


def parse_status(text: bytes) -> StatusFields:
    """Parse `/proc/PID/status`. ValueError when `Uid:` is missing.

    The kernel writes line feeds of `Name:` as `\\n` (fs/proc/array.c, proc_task_name), so lines are lines.
    """
    uid = text.index(b"\nUid:")
    ns_pids = _field(text, b"\nNSpid:").split()
    pending = int(_field(text, b"\nSigPnd:") or b"0", 16) | int(_field(text, b"\nShdPnd:") or b"0", 16)
    return StatusFields(
        uid=int(text[uid + 5 : uid + 40].split(None, 1)[0]),
        tgid=int(_field(text, b"\nTgid:") or b"0"),
        ns_pids=tuple(map(int, ns_pids)),
        threads=int(_field(text, b"\nThreads:") or b"0"),
        kill_pending=bool(pending & _SIGKILL_BIT),
    )


def _field(text: bytes, key: bytes) -> bytes:
    start = text.find(key)
    if start < 0:
        return b""
    start += len(key)
    end = text.find(b"\n", start)
    return text[start : end if end >= 0 else None].strip()


def parse_cgroup(text: bytes) -> str:
    """Path in the v2 hierarchy from `/proc/PID/cgroup`; empty when there is none.

    A hybrid host has v1 lines beside the `0::` line (cgroups(7)). The kernel appends ` (deleted)` for a removed cgroup.
    Bytes that are no UTF-8 survive as os.fsdecode makes them, so that the path can be opened.
    """
    for line in text.split(b"\n"):
        if line.startswith(b"0::"):
            path = line[3:]
            if path.endswith(b" (deleted)"):
                path = path[:-10]
            return os.fsdecode(path)
    return ""


def _read_at(dir_fd: int, name: str) -> bytes:
    """A small /proc file in one read; more only where the kernel had to split it."""
    fd = os.open(name, _READ, dir_fd=dir_fd)
    try:
        text = os.read(fd, 8192)
        if len(text) >= 4096:
            while more := os.read(fd, 65536):
                text += more
        return text
    finally:
        os.close(fd)


class Procfs:
    """Reader of one procfs. Methods return None for a process that is gone and raise OSError for anything else."""

    def __init__(self, root: str = "/proc") -> None:
        self.root = root

    def pids(self) -> list[int]:
        """Every process of this procfs, without order. OSError when the root cannot be read (that is never "gone")."""
        return [int(name) for name in os.listdir(self.root) if name.isdecimal()]

    def read_process(self, pid: int) -> Process | None:
        """Everything that we want to know about a process, from files that do not block; None when it is gone.

        All reads go through one descriptor of /proc/PID, which stays with this process if the pid is reused meanwhile.
        """
        try:
            here = os.open(f"{self.root}/{pid}", _DIRECTORY)
        except OSError as exc:
            if is_gone(exc):
                return None
            raise
        try:
            stat = parse_stat(_read_at(here, "stat"))
            status = parse_status(_read_at(here, "status"))
            cgroup = parse_cgroup(_read_at(here, "cgroup"))
            pidns = _pidns_inode(here)
        except OSError as exc:
            if is_gone(exc):
                return None
            raise
        finally:
            os.close(here)
        return Process(
            pid=pid,
            start_time=stat.start_time,
            ns_pids=status.ns_pids[1:],
            comm=stat.comm.decode("utf-8", "backslashreplace"),
            state=stat.state,
            uid=status.uid,
            ppid=stat.ppid,
            threads=stat.threads,
            cgroup=cgroup,
            pidns=pidns,
        )

    def read_ref(self, pid: int) -> ProcessRef | None:
        """Who has this pid now: one read. None when nobody has."""
        stat = self._stat(f"{pid}/stat")
        return None if stat is None else ProcessRef(pid, stat.start_time)

    def threads(self, pid: int) -> list[int]:
        """Task ids of a process, a dead leader included; empty when it is gone."""
        try:
            return [int(name) for name in os.listdir(f"{self.root}/{pid}/task")]
        except OSError as exc:
            if is_gone(exc):
                return []
            raise

    def task_state(self, pid: int, tid: int) -> str | None:
        """State letter of one task (proc_pid_stat(5)); None when it is gone."""
        stat = self._stat(f"{pid}/task/{tid}/stat")
        return None if stat is None else stat.state

    def cpu_ticks(self, pid: int) -> int | None:
        """CPU time of all tasks of a process, clock ticks; it grows while a killed one frees its memory. None: gone."""
        stat = self._stat(f"{pid}/stat")
        return None if stat is None else stat.cpu_ticks

    def is_dying(self, pid: int) -> bool:
        """True when every task of a process is past exit(): PF_EXITING (include/linux/sched.h) in its stat's flags.

        Its descriptors and mappings are gone from /proc then, while the driver may still be giving back what they held
        (seen on an H200 for as long as pinned memory takes). A process that is gone counts as dying.
        """
        for tid in self.threads(pid):
            stat = self._stat(f"{pid}/task/{tid}/stat")
            if stat is not None and not stat.exiting:
                return False
        return True

    def is_ending(self, pid: int) -> bool:
        """True when a process has SIGKILL pending or is past exit(): it will go, or cannot. Gone counts as ending."""
        text = self._read(f"{pid}/status")
        return text is None or parse_status(text).kill_pending or self.is_dying(pid)

    def tracer(self, pid: int) -> int:
        """Pid of whoever traces one of its tasks (ptrace(2)): a debugger can hold what was killed back from its end
        (PTRACE_O_TRACEEXIT). 0: nobody, or it is gone."""
        for tid in self.threads(pid)[:_MAX_STUCK_TASKS]:
            text = self._read(f"{pid}/task/{tid}/status")
            if text is not None and (tracer := parse_tracer(text)):
                return tracer
        return 0

    def read_stuck(self, pid: int, deadline_s: float = 0.5) -> list[Stuck]:
        """Why a process does not die: one entry per live task (at most 64), those in D state first; empty when gone.

        `stack` is read in a helper with a deadline, as it takes the task's exec lock (fs/proc/base.c, lock_trace); it
        is empty where it could not be read.
        """
        ref = self.read_ref(pid)
        if ref is None:
            return []
        found: list[Stuck] = []
        for tid in self.threads(pid)[:_MAX_STUCK_TASKS]:
            try:
                task = os.open(f"{self.root}/{pid}/task/{tid}", _DIRECTORY)
            except OSError as exc:
                if is_gone(exc):
                    continue
                raise
            try:
                stat = parse_stat(_read_at(task, "stat"))
                state = stat.state
                if state in "ZX":
                    continue
                # Past exit() the signal has been taken: such a task in D state hangs in the driver's release.
                pending = stat.exiting or parse_status(_read_at(task, "status")).kill_pending
                found.append(Stuck(ref, tid, state, _text_or_empty(task, "wchan"), "", pending))
            except OSError as exc:
                if not is_gone(exc):
                    raise
            finally:
                os.close(task)
        found.sort(key=lambda entry: (entry.state != "D", entry.tid))
        stacks = self._stacks(pid, [entry.tid for entry in found], deadline_s)
        return [
            Stuck(entry.ref, entry.tid, entry.state, entry.wchan, stacks.get(entry.tid, ""), entry.kill_pending)
            for entry in found
        ]

    def _stacks(self, pid: int, tids: list[int], deadline_s: float) -> dict[int, str]:
        from hostd.disposable import Outcome, call_with_deadline

        def read_all() -> bytes:
            parts = []
            for tid in tids:
                task = os.open(f"{self.root}/{pid}/task/{tid}", _DIRECTORY)
                parts.append(b"%d\n%s" % (tid, os.fsencode(_text_or_empty(task, "stack"))))
                os.close(task)
            return b"\0".join(parts)

        answer = call_with_deadline(read_all, deadline_s) if tids else None
        if answer is None or answer.outcome is not Outcome.ANSWER:
            return {}
        stacks = {}
        for part in answer.data.decode("utf-8", "backslashreplace").split("\0"):
            tid, _, stack = part.partition("\n")
            stacks[int(tid)] = stack
        return stacks

    def _stat(self, path: str) -> StatFields | None:
        text = self._read(path)
        return None if text is None else parse_stat(text)

    def _read(self, path: str) -> bytes | None:
        """A file that one read gives whole; None when the process or task is gone."""
        try:
            fd = os.open(f"{self.root}/{path}", _READ)
            try:
                return os.read(fd, 8192)
            finally:
                os.close(fd)
        except OSError as exc:
            if is_gone(exc):
                return None
            raise


def _pidns_inode(proc_pid_fd: int) -> int:
    """Inode of ns/pid, 0 when it cannot be read: a reaped zombie has none, and it takes ptrace rights."""
    try:
        return os.stat("ns/pid", dir_fd=proc_pid_fd).st_ino
    except OSError:
        return 0


def _text_or_empty(dir_fd: int, name: str) -> str:
    """`wchan` and `stack` are explanations, no evidence: what cannot be read stays empty."""
    try:
        text = _read_at(dir_fd, name).decode("utf-8", "backslashreplace").strip()
    except OSError:
        return ""
    return "" if text == "0" else text
