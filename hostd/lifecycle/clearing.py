"""Leftovers in a container's cgroups after it stopped: waited for, killed through a directory descriptor that was taken
when the event happened, named.

Proxmox's own LXC hook fails on them and prints only "Script exited with status 16" (PCT_FLOWS 4); LXC never clears
them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hostd.clock import utc_now
from hostd.errors import is_gone
from hostd.membership import is_init
from hostd.model import BlindSpot, Process, ProcessRef, Stuck
from hostd.sources import Sources
from hostd.system.cgroupfs import HIDDEN, MONITOR, PAYLOAD, ContainerCgroup, owner_of
from hostd.system.pidfd import Pinned
from hostd.system.procfs import Procfs
from hostd.triage import stuck_tasks

SETTLE_S = 0.25
"""What is not dying this long after the container's end stays on its own: a killed monitor's payload takes 70 ms."""
SLICE_S = 0.05


@dataclass(slots=True)
class Taken:
    """The cgroups of a container at the moment of an event, by descriptor. None: there was none."""

    payload: ContainerCgroup | None
    monitor: ContainerCgroup | None

    @classmethod
    def now(cls, sources: Sources, vmid: int) -> Taken:
        return cls(sources.cgroups.open(vmid, PAYLOAD), sources.cgroups.open(vmid, MONITOR))

    def close(self) -> None:
        for cgroup in (self.payload, self.monitor):
            if cgroup is not None:
                cgroup.close()


@dataclass(slots=True)
class Cleared:
    """What was done about one cgroup."""

    cgroup: str
    processes: list[Process] = field(default_factory=list)
    """Those that did not go by themselves."""
    killed: bool = False
    spared: bool = False
    """Left alone: the container runs (again)."""
    empty: bool = True
    stuck: list[Stuck] = field(default_factory=list)
    blind_spots: list[BlindSpot] = field(default_factory=list)
    waited_s: float = 0.0

    @property
    def names(self) -> list[tuple[int, str]]:
        return [(p.pid, p.comm) for p in self.processes]


@dataclass(frozen=True, slots=True)
class Running:
    """A container that runs, or may: nothing is killed when in doubt."""

    init: ProcessRef | None
    """None: whether it runs cannot be told."""
    doubt: str = ""

    @property
    def words(self) -> str:
        return f"runs (init {self.init.pid})" if self.init is not None else f"may run ({self.doubt})"


def container_runs(sources: Sources, vmid: int) -> Running | None:
    """A container that has a live monitor, and an init that is alive and not dying. None: it does not run.

    More than one candidate counts as running, and so does a tree in which somebody cannot be seen. Where a part of the tree
    could not be walked, every process of the node says itself whether it is in there. Raises OSError.
    """
    monitor = sources.cgroups.open(vmid, MONITOR)
    if monitor is None:
        return None
    with monitor:
        if not monitor.populated():
            return None
    payload = sources.cgroups.open(vmid, PAYLOAD)
    if payload is None:
        return None
    with payload:
        listed, blind = payload.pids()
    for pid in sorted(listed | set(sources.procfs.pids() if blind else ())):
        process = sources.procfs.read_process(pid) if pid > 1 else None
        if process is None or process.is_zombie or not is_init(sources, process):
            continue
        if (pid in listed or owner_of(process.cgroup) == vmid) and not sources.procfs.is_ending(pid):
            return Running(process.ref)
    hidden = next((spot for spot in blind if spot.code == HIDDEN), None)
    return Running(None, f"{hidden.what}: {hidden.error}") if hidden is not None else None


def clear(
    sources: Sources,
    cgroup: ContainerCgroup,
    *,
    settle_s: float,
    grace_s: float,
    deadline_s: float,
    may_kill: Callable[[], bool],
    look: Callable[[], None] = lambda: None,
    before_kill: Callable[[list[Process]], None] = lambda processes: None,
    check: Callable[[], None] = lambda: None,
) -> Cleared:
    """Waits for what is dying, kills what is not, waits for that. `deadline_s`: CLOCK_MONOTONIC.

    `settle_s`: how long to give processes that are not dying yet. `grace_s`: seconds in which nothing moves after which
    the rest is called stuck. `look` may take its time; `may_kill` is asked after it, and then comes the kill: `before_kill`
    only writes down what is about to be done.
    """
    done = Cleared(cgroup.path)
    begun_s = time.monotonic()
    try:
        if cgroup.wait_empty(0):
            return done
        dying = _Dying(sources.procfs, cgroup, grace_s, deadline_s, check)
        if dying.wait(until_s=begun_s + settle_s):
            return done
        done.processes, done.blind_spots = members(sources.procfs, cgroup)
        if not done.processes and cgroup.wait_empty(0):
            return done
        look()
        if not may_kill():
            done.spared, done.empty = True, False
            return done
        before_kill(done.processes)
        done.killed, since = True, utc_now()
        _kill(cgroup, sources.procfs)
        done.empty = dying.wait()
        if not done.empty:
            rest, _ = members(sources.procfs, cgroup)
            done.stuck = stuck_tasks(sources.procfs, [p.ref for p in rest], since)
            done.processes += [p for p in rest if p.ref not in {q.ref for q in done.processes}]
        return done
    except OSError as exc:
        if not is_gone(exc):
            done.blind_spots.append(BlindSpot("cgroupfs", cgroup.path, exc.strerror or str(exc)))
            done.empty = False
        return done
    finally:
        done.waited_s = time.monotonic() - begun_s


class _Dying:
    """Waits for a cgroup to become empty as long as something moves: a process gone, CPU time of a dying one."""

    def __init__(
        self, procfs: Procfs, cgroup: ContainerCgroup, grace_s: float, deadline_s: float, check: Callable[[], None]
    ) -> None:
        self._procfs = procfs
        self._cgroup = cgroup
        self._grace_s = grace_s
        self._deadline_s = deadline_s
        self._check = check

    def wait(self, until_s: float | None = None) -> bool:
        """True when it is empty. With `until_s` the wait ends there unless everything left is dying."""
        moved_s = time.monotonic()
        seen: dict[int, int] = {}
        while True:
            self._check()
            now = time.monotonic()
            left_s = min(moved_s + self._grace_s, self._deadline_s) - now
            if self._cgroup.wait_empty(min(SLICE_S, max(0.0, left_s))):
                return True
            if left_s <= 0:
                return False
            pids, _ = self._cgroup.pids()
            if until_s is not None and now >= until_s and not all(self._procfs.is_ending(pid) for pid in pids):
                return False
            ticks = {pid: self._procfs.cpu_ticks(pid) or 0 for pid in pids}
            if seen.keys() - ticks.keys() or any(ticks[pid] > seen.get(pid, ticks[pid]) for pid in ticks):
                moved_s = time.monotonic()
            seen = ticks


def members(procfs: Procfs, cgroup: ContainerCgroup) -> tuple[list[Process], list[BlindSpot]]:
    """The live processes of a cgroup and below, by pid."""
    pids, blind = cgroup.pids()
    found = (procfs.read_process(pid) for pid in sorted(pids) if pid > 1)
    return [process for process in found if process is not None and not process.is_zombie], blind


def _kill(cgroup: ContainerCgroup, procfs: Procfs) -> None:
    """cgroup.kill; where the kernel refuses it (threaded cgroups, before Linux 5.14) each process by its pidfd."""
    try:
        cgroup.kill()
        return
    except OSError as exc:
        if is_gone(exc) and not cgroup.exists():
            return

    def member(pid: int) -> ProcessRef | None:
        """Who has the pid, if it is in this very cgroup now: read between pidfd_open and the signal."""
        process = procfs.read_process(pid)
        if process is None or not f"{process.cgroup}/".startswith(f"{cgroup.path}/") or not cgroup.exists():
            return None
        return process.ref

    for process in members(procfs, cgroup)[0]:
        pin = Pinned.pin(process.ref, member)
        if pin is not None:
            with pin:
                pin.send(signal.SIGKILL)
