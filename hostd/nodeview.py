"""Who holds what on the whole node: every process, every owner. For `ps` and `status`; it acts on nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hostd.case import DETAIL_ONLY
from hostd.engine import find_subject
from hostd.facts import Facts
from hostd.join import join
from hostd.membership import ContainerView, Members
from hostd.model import BlindSpot, DriverNumbers, GpuState, Holder, NvmlSnapshot, Process
from hostd.observe import Observer
from hostd.sources import Sources, known_gpus, read_driver
from hostd.system.cgroupfs import owner_of
from hostd.system.pve import Pve
from hostd.system.scan import ScanResult
from hostd.wire import process_dict, ps_dict

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class NodeView:
    """One look at the node. `holders` have their owner in `vmid` (None: the host's)."""

    holders: tuple[Holder, ...]
    gpus: tuple[GpuState, ...]
    blind_spots: tuple[BlindSpot, ...]
    driver_present: bool
    driver_version: str = ""


class Owners:
    """Container of any process: by cgroup, else by descent from the PID namespace of a container's init."""

    def __init__(self, sources: Sources, blind: list[BlindSpot]) -> None:
        self._sources = sources
        self._blind = blind
        self._views: list[ContainerView] | None = None

    def of(self, process: Process) -> int | None:
        owner = owner_of(process.cgroup)
        if owner is not None or not process.ns_pids:
            return owner
        return next((view.vmid for view in self._inits() if view.owns(process)), None)

    def close(self) -> None:
        for view in self._views or ():
            view.close()

    def _inits(self) -> list[ContainerView]:
        """A view of every container, its PID namespace known; asked for only when a process is in no container's cgroup."""
        if self._views is None:
            vmids, blind = self._sources.cgroups.containers()
            self._blind += blind
            self._views = [ContainerView(self._sources, vmid) for vmid in vmids]
            for view in self._views:
                self._blind += view.members().blind_spots
        return self._views


def look_at_containers(sources: Sources, vmids: Iterable[int]) -> NodeView:
    """The holders of some containers and every GPU; cost and blind spots are theirs alone, not the host's."""
    holders: list[Holder] = []
    blind: list[BlindSpot] = []
    gpus: tuple[GpuState, ...] = ()
    driver_present = False
    for vmid in vmids:
        observer = Observer(sources, vmid)
        try:
            seen = observer.look()
        finally:
            observer.close()
        holders += seen.holders
        blind += [spot for spot in seen.blind_spots if spot not in blind]
        gpus = seen.gpus
        driver_present = seen.driver_present
    return NodeView(tuple(holders), gpus, tuple(blind), driver_present)


def look_at_node(sources: Sources) -> NodeView:
    """Every holder on the node, and every GPU with its figures.

    Costs a walk over /proc: grows with the host, unlike `Observer.look`.
    """
    blind: list[BlindSpot] = []
    driver = read_driver(blind)
    if driver.present:
        sources.nvml.send_snapshot_request()
    scan = _scan_everybody(sources, driver, blind)
    snapshot = sources.nvml.receive_snapshot() if driver.present else NvmlSnapshot(())
    members = Members()
    listed = {c.pid for g in snapshot.gpus for c in g.clients}
    for pid in {*scan.open, *listed}:
        try:
            process = sources.procfs.read_process(pid)
        except OSError as exc:
            blind.append(BlindSpot("procfs", f"process {pid}", exc.strerror or str(exc), "process-unreadable"))
            continue
        if process is not None and not process.is_zombie:
            members.processes[pid] = process
    owners = Owners(sources, blind)
    try:
        vmids = {pid: owners.of(process) for pid, process in members.processes.items()}
    finally:
        owners.close()
    facts = Facts(
        driver,
        snapshot,
        known_gpus(tuple(g.info for g in snapshot.gpus), blind),
        dict(scan.open),
        dict(scan.cmdlines),
        members,
        {},
        blind_spots=[*blind, *scan.blind_spots, *snapshot.blind_spots],
    )
    joined = join(0, time.monotonic(), facts, set())
    holders = tuple(replace(h, vmid=vmids.get(h.process.pid)) for h in joined.holders)
    return NodeView(holders, joined.gpus, tuple(facts.blind_spots), driver.present, snapshot.driver_version)


def _scan_everybody(sources: Sources, driver: DriverNumbers, blind: list[BlindSpot]) -> ScanResult:
    """Who has what open on the whole node; what fails altogether is a blind spot."""
    if not driver.present:
        return ScanResult()
    try:
        pids = set(sources.procfs.pids()) - sources.helpers()
        return sources.scanner.scan(pids, frozenset(driver.by_major))
    except OSError as exc:
        blind.append(BlindSpot("procfs", sources.procfs.root, exc.strerror or str(exc), "descriptors-unreadable"))
        return ScanResult()


def observe(sources: Sources, vmids: tuple[int, ...]) -> Json:
    """`ps --json`. Raises NoSuchContainerError for a container that does not exist."""
    for vmid in vmids:
        find_subject(sources, vmid, Pve())
    view = look_at_containers(sources, vmids) if vmids else look_at_node(sources)
    return ps_dict(view.holders, view.gpus, [s for s in view.blind_spots if s.code != DETAIL_ONLY])


def find_pid(sources: Sources, vmid: int, pid: int) -> list[Json]:
    """The container's processes that have this number at some PID-namespace level, the shallowest level first."""
    find_subject(sources, vmid, Pve())
    view = ContainerView(sources, vmid)
    try:
        matches = [p for p in view.members().processes.values() if pid in p.ns_pids]
    finally:
        view.close()
    return [process_dict(p) for p in sorted(matches, key=lambda p: (p.ns_pids.index(pid), p.pid))]
