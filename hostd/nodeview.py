"""Who holds what on the whole node: every process, every owner. For `ps` and `status`; it acts on nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from hostd.engine import find_subject
from hostd.judge import DETAIL_ONLY
from hostd.model import BlindSpot, GpuState, Holder, NvmlSnapshot, Process
from hostd.observe import ContainerView, Facts, Members, Observer, Sources, join, known_gpus, read_driver
from hostd.system.cgroupfs import owner_of
from hostd.system.pidns import PidNamespace
from hostd.system.pve import Pve
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
        self._namespaces: list[tuple[int, PidNamespace]] | None = None

    def of(self, process: Process) -> int | None:
        owner = owner_of(process.cgroup)
        if owner is not None or not process.ns_pids:
            return owner
        for vmid, namespace in self._inits():
            if namespace.is_ancestor_or_same(process.pid):
                return vmid
        return None

    def close(self) -> None:
        for _, namespace in self._namespaces or ():
            namespace.close()

    def _inits(self) -> list[tuple[int, PidNamespace]]:
        if self._namespaces is None:
            self._namespaces = []
            vmids, blind = self._sources.cgroups.containers()
            self._blind += blind
            for vmid in vmids:
                self._add_init(vmid)
        return self._namespaces

    def _add_init(self, vmid: int) -> None:
        cgroup = self._sources.cgroups.open(vmid)
        if cgroup is None or self._namespaces is None:
            return
        try:
            pids, _ = cgroup.pids()
        finally:
            cgroup.close()
        for pid in pids:
            process = self._sources.procfs.read_process(pid) if pid > 1 else None
            if process and process.ns_pids == (1,) and process.pidns not in (0, self._sources.own_pidns):
                namespace = PidNamespace.open(process.ref)
                if namespace is not None:
                    self._namespaces.append((vmid, namespace))


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
    pids = [pid for pid in sources.procfs.pids() if pid != sources.nvml.pid]
    scan = sources.scanner.scan(pids, frozenset(driver.by_major)) if driver.present else None
    snapshot = sources.nvml.receive_snapshot() if driver.present else NvmlSnapshot(())
    members = Members()
    listed = {c.pid for g in snapshot.gpus for c in g.clients}
    for pid in {*(scan.open if scan else ()), *listed}:
        process = sources.procfs.read_process(pid)
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
        dict(scan.open) if scan else {},
        dict(scan.cmdlines) if scan else {},
        members,
        {},
        blind_spots=[*blind, *(scan.blind_spots if scan else ()), *snapshot.blind_spots],
    )
    joined = join(0, time.monotonic(), facts, set())
    holders = tuple(replace(h, vmid=vmids.get(h.process.pid)) for h in joined.holders)
    return NodeView(holders, joined.gpus, tuple(facts.blind_spots), driver.present, snapshot.driver_version)


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
