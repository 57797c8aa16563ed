"""Which processes belong to a container: its cgroup tree and the PID namespace of its init (DESIGN 3, owner)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from hostd.model import BlindSpot, Process, ProcessRef
from hostd.sources import Sources
from hostd.system.cgroupfs import owner_of
from hostd.system.pidns import PidNamespace


@dataclass(slots=True)
class Members:
    """The processes of one container at one moment."""

    processes: dict[int, Process] = field(default_factory=dict)
    init: Process | None = None
    inits: frozenset[ProcessRef] = frozenset()
    """Every candidate for the init: ending any of them may stop the container."""
    incarnation: int | None = None
    """Inode of the container's cgroup directory: a new one after a restart (kernfs never uses one twice). None: none."""
    blind_spots: list[BlindSpot] = field(default_factory=list)
    running: bool = False
    frozen: bool = False
    missed: bool = False
    """One was gone before it could be looked at when this was read last: a child of it may have come after the list."""


AMBIGUOUS = "ambiguous-init"


def is_init(sources: Sources, process: Process) -> bool:
    """Pid 1 of a PID namespace right below ours: what ends a container when it ends.

    When its namespace cannot be read (that takes CAP_SYS_PTRACE, and a task past exit has none any more) it counts as one
    unless it is ending.
    """
    if process.ns_pids != (1,) or process.pidns == sources.own_pidns:
        return False
    return process.pidns != 0 or not sources.procfs.is_ending(process.pid)


class ContainerView:
    """Which processes belong to container `vmid`: its cgroup tree and the PID namespace of its init (DESIGN 3, owner).

    Keeps the namespace of the init it has seen, so that processes that outlive their init are still recognised.
    """

    def __init__(self, sources: Sources, vmid: int) -> None:
        self.vmid = vmid
        self._sources = sources
        self._namespace: PidNamespace | None = None

    def members(self) -> Members:
        """Every process of the container. Never raises for what cannot be read: that is a blind spot."""
        found = Members()
        self.refresh(found)
        return found

    def refresh(self, found: Members) -> None:
        """Adds what has come since. What has left stays in, but for inits: a dead one would stand beside its successor."""
        for init in found.inits:
            if self._sources.procfs.read_ref(init.pid) != init:
                found.processes.pop(init.pid, None)
                found.init = None
        found.missed = False
        self._add_cgroup_members(found)
        self.find_init(found)
        self._add_namespace_members(found)
        found.blind_spots = list(dict.fromkeys(found.blind_spots))

    def newcomers(self, known: Members) -> set[int]:
        """The processes that have come since `known` was read; they are added to it. See `missed` there, too."""
        before = set(known.processes)
        self.refresh(known)
        return known.processes.keys() - before

    def _add_cgroup_members(self, found: Members) -> None:
        try:
            cgroup = self._sources.cgroups.open(self.vmid)
            if cgroup is None:
                found.running = found.frozen = False
                return
            with cgroup:
                found.incarnation = cgroup.inode
                pids, blind = cgroup.pids()
                found.blind_spots += blind
                found.running = bool(pids)
                found.frozen = cgroup.frozen()
        except OSError as exc:
            error = exc.strerror or str(exc)
            found.blind_spots.append(BlindSpot("cgroupfs", f"/lxc/{self.vmid}", error, "cgroup-unreadable"))
            return
        # The pid of one that has left meanwhile may be anybody's by now: the cgroup is read again, of the process.
        self._read_into(found, pids, lambda p: owner_of(p.cgroup) == self.vmid)

    def owns(self, process: Process) -> bool:
        """True when this container owns the process: by cgroup, or by PID namespace unless another `/lxc/W` has it."""
        owner = owner_of(process.cgroup)
        if owner is not None:
            return owner == self.vmid
        return self.is_inside(process)

    def is_inside(self, process: Process) -> bool:
        """True when it runs in the PID namespace of the container's init or below it."""
        return self._namespace is not None and self._namespace.is_ancestor_or_same(process.pid) is True

    def close(self) -> None:
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None

    def _read_into(self, found: Members, pids: Iterable[int], accept: Callable[[Process], bool]) -> None:
        helpers = self._sources.helpers()
        for pid in pids:
            if pid <= 1 or pid in found.processes or pid in helpers:
                continue
            try:
                process = self._sources.procfs.read_process(pid)
            except OSError as exc:
                found.blind_spots.append(BlindSpot("procfs", f"process {pid}", str(exc)))
                continue
            if process is None:
                found.missed = True
            elif not process.is_zombie and accept(process):
                found.processes[pid] = process

    def find_init(self, found: Members) -> None:
        """Who of the processes known is the init; again whenever one has been added."""
        inits = [p for p in found.processes.values() if owner_of(p.cgroup) == self.vmid and is_init(self._sources, p)]
        found.inits = frozenset(p.ref for p in inits)
        found.blind_spots = [spot for spot in found.blind_spots if spot.code != AMBIGUOUS]
        if len(inits) > 1:
            found.init = None
            pids = ", ".join(str(p.pid) for p in inits)
            found.blind_spots.append(
                BlindSpot("pidns", f"init of container {self.vmid}", f"several candidates: {pids}", AMBIGUOUS)
            )
            return
        if not inits:
            return
        found.init = inits[0]
        if self._namespace is None or self._namespace.inode != found.init.pidns:
            self.close()
            try:
                self._namespace = PidNamespace.open(found.init.ref)
            except OSError as exc:
                error = exc.strerror or str(exc)
                what = f"PID namespace of pid {found.init.pid}"
                found.blind_spots.append(BlindSpot("pidns", what, error, "pidns-unreadable"))

    def _add_namespace_members(self, found: Members) -> None:
        if self._namespace is None:
            return
        try:
            pids, blind = self._namespace.members()
        except OSError as exc:
            what = f"members of pid:[{self._namespace.inode}]"
            found.blind_spots.append(BlindSpot("pidns", what, exc.strerror or str(exc), "pidns-unreadable"))
            return
        found.blind_spots += blind
        self._read_into(found, pids - found.processes.keys(), lambda p: owner_of(p.cgroup) in (None, self.vmid))
