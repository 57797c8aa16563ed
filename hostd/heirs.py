"""Who else may keep the memory of a dead opener: a sweep over the host for foreign processes that can have inherited it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hostd.facts import MOST_ANCESTORS, Facts, can_hold_memory, dead_pids, gpu_minors_of, listed_pids
from hostd.membership import ContainerView
from hostd.model import BlindSpot, OpenNodes, Process
from hostd.sources import Sources
from hostd.system import mounts
from hostd.system.scan import DETAIL

SWEEP_S = 1.0
"""How long the result of a sweep over the host is good for."""


@dataclass(slots=True)
class Sweep:
    """One walk over the host for whoever may keep the memory of dead openers."""

    dead: frozenset[int]
    at_s: float
    open_nodes: dict[int, OpenNodes] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    """Not the container's."""
    passed: frozenset[int] = frozenset()
    """Those with a descriptor that was opened inside the container."""

    def forget(self, pid: int) -> None:
        del self.processes[pid], self.open_nodes[pid]
        self.passed -= {pid}


class HeirSearch:
    """The foreign heirs of one container's dead openers, look after look."""

    def __init__(self, sources: Sources, view: ContainerView) -> None:
        self._sources = sources
        self._view = view
        self._swept: Sweep | None = None
        self._mounts: dict[int, frozenset[int]] = {}
        """Mount namespace of a process of the container -> its mounts: what was opened through one was opened here."""

    def note_mounts(self, pids: Iterable[int]) -> None:
        """Remembers the mounts of these processes of the container: they may have ended when they are asked for."""
        for pid in pids:
            namespace = mounts.mount_namespace(pid)
            if namespace is not None and namespace not in self._mounts:
                self._mounts[namespace] = mounts.read_mount_ids(pid)

    def find(self, facts: Facts) -> None:
        """Adds to the facts the foreign processes that may keep a dead opener's memory; sweeps only when there is one."""
        dead = {g.info.minor: frozenset(dead_pids(g, facts)) for g in facts.snapshot.gpus}
        everyone = frozenset[int]().union(*dead.values())
        if not everyone:
            return
        sweep = self._sweep(everyone, facts)
        listed = listed_pids(facts)
        for minor in (minor for minor, pids in dead.items() if pids):
            facts.heirs[minor] = frozenset(
                pid
                for pid, nodes in sweep.open_nodes.items()
                if pid not in listed
                and minor in gpu_minors_of(nodes, facts)
                and can_hold_memory(nodes, facts.driver)
                and (pid in sweep.passed or not self._has_living_opener(sweep.processes[pid], listed))
            )
        found = frozenset[int]().union(*facts.heirs.values())
        facts.passed = found & sweep.passed
        for pid in found:
            facts.foreign[pid] = sweep.processes[pid]
            facts.open_nodes[pid] = sweep.open_nodes[pid]

    def _has_living_opener(self, process: Process, listed: set[int]) -> bool:
        """True for the children of a client that lives: their descriptors are its, not a dead one's."""
        child = process
        for _ in range(MOST_ANCESTORS):
            if child.ppid in listed or child.ppid <= 1:
                return child.ppid in listed
            try:
                parent = self._sources.procfs.read_process(child.ppid)
            except OSError:
                return False
            if parent is None or parent.start_time > child.start_time:
                return False
            child = parent
        return False

    def _sweep(self, dead: frozenset[int], facts: Facts) -> Sweep:
        """Every process of others that has a node open. Kept for a moment: while memory drains, look follows look."""
        if self._swept is not None and self._swept.dead == dead and time.monotonic() - self._swept.at_s < SWEEP_S:
            for known in tuple(self._swept.processes.values()):
                if self._sources.procfs.read_ref(known.pid) != known.ref:
                    self._swept.forget(known.pid)
            return self._swept
        sweep = Sweep(dead, time.monotonic())
        try:
            pids = set(self._sources.procfs.pids()) - facts.members.processes.keys() - self._sources.helpers()
        except OSError as exc:
            facts.blind_spots.append(BlindSpot("procfs", self._sources.procfs.root, exc.strerror or str(exc), DETAIL))
            return sweep
        majors = frozenset(facts.driver.by_major)
        scan = self._sources.scan(pids, majors)
        facts.blind_spots += [replace(spot, code=DETAIL) for spot in scan.blind_spots]
        for pid, nodes in scan.open.items():
            try:
                process = self._sources.procfs.read_process(pid)
            except OSError:
                continue  # a figure less in the report, nobody who could be a target
            if process is not None and not self._view.owns(process):
                sweep.processes[pid] = process
                sweep.open_nodes[pid] = nodes
        if facts.members.init is not None:
            self.note_mounts([facts.members.init.pid])
        ours = frozenset[int]().union(*self._mounts.values())
        through = mounts.opened_through(sweep.processes, majors, self._sources.scanner.deadline_s)
        sweep.passed = frozenset(pid for pid, theirs in through.items() if theirs & ours)
        self._swept = sweep
        return sweep
