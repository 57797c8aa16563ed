"""Handles on processes of the node, and the description of a holder."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

from .wire import DEADLINE_S, NodeError, receive


def wait_until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Look again every millisecond until it holds; NodeError at the deadline. For what the kernel has no event for."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise NodeError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.001)


THAW = re.compile("rwsem|munmap")
"""Where a thread sleeps that waits for a frozen file system, or behind one that does (wchan)."""


@dataclass(slots=True)
class Process:
    """One process inside the node.

    `pid` is its number in the node's PID namespace (what the product calls "host pid"), `ns_pid` the innermost one,
    `outer_pid` the one on this machine, `start_time` in clock ticks since boot.
    """

    outer_pid: int
    pid: int
    ns_pid: int
    start_time: int
    role: str = "process"
    tid: int = 0
    pidfd: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        try:
            self.pidfd = os.pidfd_open(self.outer_pid)
        except ProcessLookupError:
            self.pidfd = -1

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    @property
    def proc(self) -> Path:
        """Its directory in this machine's /proc."""
        return Path(f"/proc/{self.outer_pid}")

    def alive(self) -> bool:
        """Has a live thread (a dead leader with live threads is alive, a zombie is not)."""
        return self.pidfd >= 0 and not _readable(self.pidfd, 0)

    def wait_gone(self, timeout_s: float = DEADLINE_S) -> None:
        if self.pidfd >= 0 and not _readable(self.pidfd, timeout_s):
            raise NodeError(f"{self.role} {self.pid} still lives after {timeout_s:g} s (state {self.state()})")

    def state(self, tid: int | None = None) -> str:
        """R, S, D, T, Z…, of its leader or of the thread with that outer tid; "" when gone."""
        return _state(self.proc / (f"task/{tid}/stat" if tid else "stat"))

    def states(self) -> str:
        """The states of all threads, in one string."""
        try:
            return "".join(_state(task / "stat") for task in (self.proc / "task").iterdir())
        except OSError:
            return ""

    def times_asleep(self) -> int:
        """How often it has gone to sleep of itself: more than before a signal when that has been handled."""
        lines = (self.proc / "status").read_text(errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("voluntary_ctxt_switches:")).split()[1])

    def wait_state(self, state: str, timeout_s: float = DEADLINE_S) -> None:
        """Until one of its threads is in that state."""
        wait_until(lambda: state in self.states(), f"{self.role} {self.pid} in state {state}", timeout_s)

    def wait_stuck(self, threads: int = 1, timeout_s: float = DEADLINE_S) -> None:
        """Until so many of its threads wait for a frozen file system in D state (and not for a disk). With `fault=` it is
        two: one in the page fault, and one that queues to change the memory map, behind which every reader waits."""
        what = f"{self.role} {self.pid} with {threads} threads stuck on a frozen file system"
        wait_until(lambda: self._stuck_threads() >= threads, what, timeout_s)

    def _stuck_threads(self) -> int:
        try:
            tasks = list((self.proc / "task").iterdir())
            return sum(_state(t / "stat") == "D" and bool(THAW.search((t / "wchan").read_text())) for t in tasks)
        except OSError:
            return 0

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.pidfd >= 0:
            try:
                signal.pidfd_send_signal(self.pidfd, number)
            except ProcessLookupError:
                return

    def nested_pids(self) -> list[int]:
        """Its pid at every level from the node's namespace inwards; [] when it is gone."""
        try:
            status = (self.proc / "status").read_text(errors="replace")
        except OSError:
            return []
        return next([int(n) for n in line.split()[2:]] for line in status.splitlines() if line.startswith("NSpid:"))

    def cgroup(self) -> str:
        """Its v2 cgroup as the embedded node sees it ("/lxc/129/ns/…"); "" when it is gone."""
        return re.sub(r"^.*?/pve-gpu-node-[^/]*(?=/)", "", self.outer_cgroup())

    def outer_cgroup(self) -> str:
        """The same as this machine sees it."""
        try:
            lines = (self.proc / "cgroup").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return next(line[3:] for line in lines if line.startswith("0::"))


def _readable(descriptor: int, timeout_s: float) -> bool:
    """With poll(2): descriptors of a crowd have numbers beyond select's 1,024."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(timeout_s * 1000))


def _state(path: Path) -> str:
    try:
        return path.read_bytes().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return ""


def describe(outer_pid: int, role: str = "process") -> Process:
    """The handle of a live process of the node, by its pid on this machine. Raises NodeError when it is gone."""
    try:
        status = Path(f"/proc/{outer_pid}/status").read_text(errors="replace")
        start_time = int(Path(f"/proc/{outer_pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError as error:
        raise NodeError(f"cannot describe process {outer_pid}: {error}") from error
    pids = next(line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:"))
    pid = int(pids[1] if len(pids) > 1 else pids[0])
    return Process(outer_pid, pid, int(pids[-1]), start_time, role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """How a holder behaves. Devices are paths inside its container; text may hold any bytes but NUL."""

    argv: tuple[str, ...] = ("python3", "train.py")
    open: tuple[str, ...] = ()
    map: tuple[str, ...] = ()
    """Mapped MAP_PRIVATE, the descriptor is closed: only for the mapping-only node's GPU."""
    alloc: tuple[str, ...] = ()
    """"MINOR:MIB:KINDS", kinds out of compute, graphics, mps, joined by commas."""
    import_: tuple[str, ...] = ()
    """CUDA IPC: allocations (`HolderHandle.allocations()`) that are charged to us once their holder is gone."""
    comm: str | None = None
    mode: str = "plain"
    """plain · dead-leader (leader exits, a thread lives) · private-table (descriptors in a thread's own table only)."""
    children: int = 0
    grandchildren: int = 0
    """Forked without exec after everything was opened; `grandchildren` per child."""
    child_comm: str | None = None
    grandchild_comm: str | None = None
    child_setsid: bool = False
    child_ignore_term: bool = False
    crowd: int = 0
    """So many children that inherit everything and report nothing (a busy host: open=("/dev/null",) * 30)."""
    zombies: int = 0
    threads: int = 0
    die: bool = False
    """SIGKILLs itself when all is ready: with children a dead opener."""
    stop: bool = False
    """SIGSTOPs itself when all is ready."""
    inflight: bool = False
    """All descriptors exist only as a message in a socket that nobody reads."""
    ignore_term: bool = False
    ignore_hup: bool = False
    term_ms: int | None = None
    """Exits this long after SIGTERM."""
    setsid: bool = False
    daemon: bool = False
    """Double fork with setsid: reparented to the namespace's init."""
    respawn: int | None = None
    """A supervisor without devices restarts it so many times (-1: for ever); `handle.next_report()` tells each."""
    supervisor_comm: str | None = None
    listen: str | None = None
    """Receive another holder's descriptors on this unix socket and keep them; reports "listening", then "received"."""
    connect: str | None = None
    """Send a copy of all descriptors to that socket."""
    fault: str | None = None
    """On trigger() a thread write-faults a mapping of this file (on a frozen file system: blocks cmdline and maps)."""
    touch: str | None = None
    """On trigger() create this file (on a frozen file system: D state)."""
    fork_on_trigger: bool = False
    exit_on_trigger: bool = False
    uid: int | None = None

    def spec(self) -> str:
        return "\n".join(f"{key} {value}" for key, value in self._lines())

    def _lines(self) -> Iterator[tuple[str, str]]:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "argv" or value == item.default:
                continue
            for one in value if isinstance(value, tuple) else (value,):
                yield item.name.rstrip("_"), _encode("1" if one is True else str(one))

    def expected_reports(self) -> int:
        if self.listen:
            return 1
        return 1 + self.children * (1 + self.grandchildren) + (self.respawn is not None)


def _encode(text: str) -> str:
    return "".join(chr(b) if 32 < b < 127 and b != 37 else f"%{b:02x}" for b in os.fsencode(text))


class HolderHandle:
    """A running holder and its family. `main` is the process that opened the devices (or the supervisor's child)."""

    def __init__(self, popen: subprocess.Popen[str], reports: socket.socket, log: int, alloc_directory: Path) -> None:
        self.popen = popen
        self._log = log
        self.processes: list[Process] = []
        self._reports = reports
        self._alloc_directory = alloc_directory

    def next_report(self, timeout_s: float = DEADLINE_S) -> Process:
        """Wait for the next process of this family to be ready (also one that a supervisor restarted)."""
        try:
            text, outer_pid = receive(self._reports, timeout_s)
        except TimeoutError as error:
            raise NodeError(f"holder: no report within {timeout_s:g} s{self._last_words()}") from error
        if not text or text.startswith("error="):
            raise NodeError(
                f"holder: {text.removeprefix('error=') or 'it died before it was ready'}{self._last_words()}"
            )
        report = dict(word.split("=", 1) for word in text.split())
        pid, ns_pid = int(report["node_pid"]), int(report["pid"])
        process = Process(outer_pid, pid, ns_pid, int(report["start"]), report["role"], int(report["tid"]))
        self.processes.append(process)
        return process

    def _last_words(self) -> str:
        return f" (exit status {self.popen.poll()}): {os.pread(self._log, 4096, 0).decode(errors='replace')}"

    def by_role(self, role: str) -> list[Process]:
        """holder, child, grandchild, supervisor, listening, received."""
        return [process for process in self.processes if process.role == role]

    @property
    def main(self) -> Process:
        return next(
            (p for p in reversed(self.processes) if p.role in ("holder", "received", "listening")), self.processes[0]
        )

    @property
    def pid(self) -> int:
        return self.main.pid

    @property
    def pids(self) -> list[int]:
        """Node pids of all processes that reported, dead ones included."""
        return [process.pid for process in self.processes]

    def allocations(self) -> list[str]:
        """Names of this family's allocation records."""
        starts = {f"{process.pid}-{process.start_time}-" for process in self.processes}
        names = sorted(entry.name for entry in self._alloc_directory.iterdir() if "." not in entry.name)
        return [name for name in names if any(name.startswith(start) for start in starts)]

    def alive(self) -> list[Process]:
        return [process for process in self.processes if process.alive()]

    def trigger(self) -> None:
        self.main.kill(signal.SIGUSR1)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Signal every live process of the family, supervisors first."""
        for process in sorted(self.alive(), key=lambda p: p.role != "supervisor"):
            process.kill(number)

    def wait_gone(self, timeout_s: float = DEADLINE_S) -> None:
        for process in self.processes:
            process.wait_gone(timeout_s)

    def close(self) -> None:
        self._reports.close()
        for process in self.processes:
            process.close()
        os.close(self._log)
