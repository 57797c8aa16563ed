"""Joins the sources into one look at one container: who holds which GPU, how we know, and where we were blind.

Order of a look: the driver first (its lists name foreign pids that are worth a scan), then the processes. So one look that
finds the memory back *and* no holder has scanned the processes after the memory check (DESIGN 4, "a last scan").
"""

from __future__ import annotations

import time
from dataclasses import replace

from hostd.facts import Facts, dead_pids, listed_pids
from hostd.heirs import HeirSearch
from hostd.join import join
from hostd.membership import ContainerView, Members
from hostd.model import (
    BlindSpot,
    DriverNumbers,
    GpuInfo,
    Heir,
    NvmlGpu,
    NvmlSnapshot,
    Observation,
    Process,
    ProcessRef,
)
from hostd.sources import Sources, known_gpus, read_driver
from hostd.system.scan import DETAIL, ScanResult

MOST_LISTINGS = 50
"""How often one look may read the list of a container's processes again."""

MORE_LOOKS = 20
"""How often the container is searched again for who keeps the memory of a dead opener."""

RESTLESS = "processes-restless"


class Observer:
    """Looks at one container, again and again during one release."""

    def __init__(self, sources: Sources, vmid: int, blind_spots: tuple[BlindSpot, ...] = ()) -> None:
        """`blind_spots`: what could not be read of the container beside its processes; part of every look."""
        self.sources = sources
        self.vmid = vmid
        self._blind_spots = blind_spots
        self.view = ContainerView(sources, vmid)
        self._named: tuple[GpuInfo, ...] = ()
        """GPUs as the driver's library named them last."""
        self._own_seen: set[int] = set()
        """Pids that were the container's holders at an earlier look: their charges are ours when they are dead."""
        self._placed: dict[ProcessRef, tuple[int, ...]] = {}
        """Where the driver's lists placed a holder when they were read last (DESIGN 4, "Which GPU?")."""
        self._heirs = HeirSearch(sources, self.view)

    def close(self) -> None:
        self.view.close()

    def look(
        self, *, nvml: bool = True, nvml_deadline_s: float | None = None, budget_s: float | None = None
    ) -> Observation:
        """One complete look; with `nvml=False` without the driver. `nvml_deadline_s`: instead of the configured one.
        `budget_s`: for reading what processes have open; what is not reached then is a blind spot."""
        at_s = time.monotonic()
        blind: list[BlindSpot] = []
        driver = read_driver(blind)
        if nvml and driver.present:
            self.sources.nvml.send_snapshot_request(deadline_s=nvml_deadline_s)
        members = self.view.members()
        snapshot = self._snapshot(nvml, driver)
        with self.sources.scanner.within(budget_s):  # from here on: the driver may have taken its own time
            facts = self._facts(driver, snapshot, members, blind, nvml and driver.present)
        observation = join(self.vmid, at_s, facts, self._own_seen)
        self._own_seen.update(h.process.pid for h in observation.holders)
        for gpu in observation.gpus:
            if not facts.heirs.get(gpu.info.minor):  # then the dead opener cannot have been anybody else's
                self._own_seen.update(c.pid for c in gpu.dead_clients if c.heir is Heir.OWN)
        if snapshot.gpus:
            listed = listed_pids(facts)
            self._placed |= {h.ref: h.gpus for h in observation.holders if h.process.pid in listed or h.inherited_from}
        return replace(observation, nvml_asked=nvml)

    def _facts(
        self, driver: DriverNumbers, snapshot: NvmlSnapshot, members: Members, blind: list[BlindSpot], asked: bool
    ) -> Facts:
        """What the processes have open, and who may keep the memory of dead openers. `asked`: the driver was."""
        foreign = self._live_foreign(snapshot, members, blind)
        self._named = tuple(g.info for g in snapshot.gpus) or self._named
        gpus = known_gpus(self._named, blind)
        scan = self._scan(members, frozenset(driver.by_major))
        facts = Facts(driver, snapshot, gpus, dict(scan.open), dict(scan.cmdlines), members, foreign)
        facts.blind_spots = [*self._blind_spots, *blind, *members.blind_spots, *scan.blind_spots]
        if asked:
            facts.blind_spots += [*snapshot.blind_spots, *_implausible(snapshot)]
        self._scan_foreign(facts)
        facts.dying = self._dying(facts)
        self._heirs.note_mounts(pid for pid in members.processes if facts.open_nodes.get(pid))
        self._heirs.find(facts)
        if _without_heir(facts):
            self._look_again(facts)
        facts.placed = self._placed
        return facts

    def _scan(self, members: Members, majors: frozenset[int]) -> ScanResult:
        """Who has what open. A look is no snapshot: a holder may end before its descriptors are read, with a successor
        that was not in the list yet. Where nobody was found, those that have come since are looked at too, until none
        comes any more."""
        scan = self.sources.scan(members.processes, majors)
        for _ in range(MOST_LISTINGS):
            if any(scan.open.get(pid) for pid in members.processes):
                return scan
            fresh = self.view.newcomers(members)
            if not fresh and not members.missed:
                return scan
            if self.sources.scanner.spent:
                break
            more = self.sources.scan(fresh, majors)
            scan.open.update(more.open)
            scan.cmdlines.update(more.cmdlines)
            scan.blind_spots.extend(more.blind_spots)
        what = f"processes of container {self.vmid}"
        error = "new ones come faster than they can be looked at"
        scan.blind_spots.append(BlindSpot("cgroupfs", what, error, RESTLESS))
        return scan

    def _look_again(self, facts: Facts) -> None:
        """The driver charges memory to a dead pid, so somebody keeps it: who moves too fast for one look is met in the
        next ones."""
        for _ in range(MORE_LOOKS):
            scan = self._scan(facts.members, frozenset(facts.driver.by_major))
            facts.open_nodes |= scan.open
            facts.cmdlines |= scan.cmdlines
            facts.blind_spots += [spot for spot in scan.blind_spots if spot not in facts.blind_spots]
            if any(scan.open.get(pid) for pid in facts.members.processes) or self.sources.scanner.spent:
                return

    def _scan_foreign(self, facts: Facts) -> None:
        """What listed processes of others have open. Where that cannot be read they count as what the list says they
        are, and it takes nothing away from a look at this container."""
        majors = frozenset(facts.driver.by_major)
        scan = self.sources.scan(facts.foreign, majors)
        facts.open_nodes |= scan.open
        facts.cmdlines |= scan.cmdlines
        facts.blind_spots += [replace(spot, code=DETAIL) for spot in scan.blind_spots]
        if any(spot.code != DETAIL for spot in scan.blind_spots):
            for pid in facts.foreign.keys() - scan.open.keys():
                if not self.sources.scan([pid], majors).complete:
                    facts.unseen |= {pid}

    def find(self, number: int, host: bool) -> list[Process]:
        """The container's processes with this pid in its own PID namespace, or with this host pid."""
        members = self.view.members()
        if host:
            return [p for p in members.processes.values() if p.pid == number]
        found = [p for p in members.processes.values() if p.ns_pids[:1] == (number,)]
        if members.init is None:
            return found
        return [p for p in found if self.view.is_inside(p)]

    def recheck(self, pid: int) -> ProcessRef | None:
        """The identity of a pid if the container still owns it now; what is re-read between pidfd_open and a signal."""
        process = self.sources.procfs.read_process(pid)
        return process.ref if process is not None and self.view.owns(process) else None

    def _snapshot(self, nvml: bool, driver: DriverNumbers) -> NvmlSnapshot:
        if not (nvml and driver.present):
            return NvmlSnapshot(())
        return self.sources.nvml.receive_snapshot()

    def _live_foreign(self, snapshot: NvmlSnapshot, members: Members, blind: list[BlindSpot]) -> dict[int, Process]:
        """The living processes among the listed pids that are not the container's; its own that were missed are added."""
        found: dict[int, Process] = {}
        listed = {c.pid for gpu in snapshot.gpus for c in gpu.clients}
        for pid in listed - members.processes.keys() - self.sources.helpers():
            try:
                process = self.sources.procfs.read_process(pid)
            except OSError as exc:
                blind.append(BlindSpot("procfs", f"process {pid}", str(exc)))
                continue
            if process is None or process.is_zombie:
                continue
            if self.view.owns(process):
                members.processes[pid] = process
            else:
                found[pid] = process
        self.view.find_init(members)
        return found

    def _dying(self, facts: Facts) -> frozenset[int]:
        known = facts.members.processes.keys() | facts.foreign.keys()
        unseen = [pid for pid in listed_pids(facts) & known if not facts.open_nodes.get(pid)]
        found = set()
        for pid in unseen:
            try:
                if self.sources.procfs.is_dying(pid):
                    found.add(pid)
            except OSError as exc:
                facts.blind_spots.append(
                    BlindSpot("procfs", f"tasks of process {pid}", exc.strerror or str(exc), DETAIL)
                )
        return frozenset(found)


def _without_heir(facts: Facts) -> bool:
    """True when a dead client has memory, and no process is seen that can have inherited it."""
    if any(facts.open_nodes.get(pid) for pid in facts.members.processes):
        return False
    charged = {c.pid for gpu in facts.snapshot.gpus for c in gpu.clients if c.used_mib}
    return any(
        charged & set(dead_pids(gpu, facts)) and not facts.heirs.get(gpu.info.minor) for gpu in facts.snapshot.gpus
    )


def _implausible(snapshot: NvmlSnapshot) -> list[BlindSpot]:
    """Numbers in the driver's lists that no process can have: left out, and said so."""
    return [
        BlindSpot("nvml", f"clients of GPU {gpu.info.index}", f"lists pids that cannot be: {_words(gpu)}", DETAIL)
        for gpu in snapshot.gpus
        if gpu.implausible_pids
    ]


def _words(gpu: NvmlGpu) -> str:
    return ", ".join(map(str, gpu.implausible_pids[:8]))
