"""Joins the sources into one look at one container: who holds which GPU, how we know, and where we were blind.

Order of a look: the driver first (its lists name foreign pids that are worth a scan), then the processes. So one look that
finds the memory back *and* no holder has scanned the processes after the memory check (DESIGN 4, "a last scan").
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from hostd.errors import UnreadableError
from hostd.model import (
    BlindSpot,
    DeadClient,
    DeviceId,
    DriverNumbers,
    Evidence,
    GpuInfo,
    GpuState,
    Heir,
    Holder,
    NvmlGpu,
    NvmlSnapshot,
    Observation,
    OpenNodes,
    Process,
    ProcessRef,
    Supervisor,
)
from hostd.supervisor import supervisor_of
from hostd.system import devices
from hostd.system.cgroupfs import Cgroupfs, find_mount, owner_of
from hostd.system.nvml import Nvml
from hostd.system.pidns import PidNamespace, own_inode
from hostd.system.procfs import Procfs
from hostd.system.scan import Scanner, ScanResult


@dataclass(slots=True)
class Sources:
    """The outside world, as one value. `close()` ends every helper process."""

    procfs: Procfs
    cgroups: Cgroupfs
    scanner: Scanner
    nvml: Nvml
    own_pidns: int

    def close(self) -> None:
        self.nvml.close()
        self.scanner.close()


@dataclass(slots=True)
class Members:
    """The processes of one container at one moment."""

    processes: dict[int, Process] = field(default_factory=dict)
    init: Process | None = None
    blind_spots: list[BlindSpot] = field(default_factory=list)
    running: bool = False
    frozen: bool = False


class ContainerView:
    """Which processes belong to container `vmid`: its cgroup tree and the PID namespace of its init (DESIGN 3, owner).

    Keeps the namespace of the init it has seen, so that processes that outlive their init are still recognised.
    """

    def __init__(self, sources: Sources, vmid: int) -> None:
        self.vmid = vmid
        self._sources = sources
        self._namespace: PidNamespace | None = None

    def members(self) -> Members:
        """Every process of the container. Raises UnreadableError when the cgroup tree cannot be opened at all."""
        found = Members()
        cgroup = self._sources.cgroups.open(self.vmid)
        if cgroup is None:
            self._add_namespace_members(found)
            return found
        try:
            pids, blind = cgroup.pids()
            found.blind_spots += blind
            found.running = bool(pids)
            found.frozen = cgroup.frozen()
        finally:
            cgroup.close()
        self._read_into(found, pids)
        self._find_init(found)
        self._add_namespace_members(found)
        return found

    def newcomers(self, known: Members) -> set[int]:
        """The processes that have come since `known` was read; they are added to it."""
        before = set(known.processes)
        cgroup = self._sources.cgroups.open(self.vmid)
        if cgroup is not None:
            try:
                self._read_into(known, cgroup.pids()[0])
            finally:
                cgroup.close()
        self._add_namespace_members(known)
        return known.processes.keys() - before

    def owns(self, process: Process) -> bool:
        """True when this container owns the process: by cgroup, or by PID namespace unless another `/lxc/W` has it."""
        owner = owner_of(process.cgroup)
        if owner is not None:
            return owner == self.vmid
        return self._namespace is not None and self._namespace.is_ancestor_or_same(process.pid) is True

    def close(self) -> None:
        if self._namespace is not None:
            self._namespace.close()
            self._namespace = None

    def _read_into(self, found: Members, pids: Iterable[int], accept: Callable[[Process], bool] | None = None) -> None:
        for pid in pids:
            if pid <= 1 or pid in found.processes:
                continue
            try:
                process = self._sources.procfs.read_process(pid)
            except OSError as exc:
                found.blind_spots.append(BlindSpot("procfs", f"process {pid}", str(exc)))
                continue
            if process is not None and not process.is_zombie and (accept is None or accept(process)):
                found.processes[pid] = process

    def _find_init(self, found: Members) -> None:
        inits = [
            p for p in found.processes.values() if p.ns_pids == (1,) and p.pidns not in (0, self._sources.own_pidns)
        ]
        if len(inits) > 1:
            pids = ", ".join(str(p.pid) for p in inits)
            found.blind_spots.append(
                BlindSpot("pidns", f"init of container {self.vmid}", f"several candidates: {pids}", "ambiguous-init")
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
                found.blind_spots.append(BlindSpot("pidns", f"PID namespace of pid {found.init.pid}", str(exc)))

    def _add_namespace_members(self, found: Members) -> None:
        if self._namespace is None:
            return
        pids, blind = self._namespace.members()
        found.blind_spots += blind
        self._read_into(found, pids - found.processes.keys(), lambda p: owner_of(p.cgroup) in (None, self.vmid))


@dataclass(slots=True)
class Facts:
    """What one look has read, before the join."""

    driver: DriverNumbers
    snapshot: NvmlSnapshot
    gpus: tuple[GpuInfo, ...]
    open_nodes: dict[int, OpenNodes]
    cmdlines: Mapping[int, bytes]
    members: Members
    foreign: dict[int, Process]
    """Live processes that are not the container's: listed ones, and heirs of dead openers."""
    dying: frozenset[int] = frozenset()
    """Listed pids without descriptor or mapping that are past exit()."""
    heirs: dict[int, frozenset[int]] = field(default_factory=dict)
    """GPU minor -> foreign unlisted pids that can have inherited a dead opener's memory there."""
    blind_spots: list[BlindSpot] = field(default_factory=list)


MOST_LISTINGS = 16
"""How often one look may read the list of a container's processes again."""


class Observer:
    """Looks at one container, again and again during one release."""

    def __init__(self, sources: Sources, vmid: int) -> None:
        self.sources = sources
        self.vmid = vmid
        self.view = ContainerView(sources, vmid)
        self._named: tuple[GpuInfo, ...] = ()
        """GPUs as the driver's library named them last."""
        self._own_seen: set[int] = set()
        """Pids that were the container's holders at an earlier look: their charges are ours when they are dead."""

    def close(self) -> None:
        self.view.close()

    def look(self, *, nvml: bool = True) -> Observation:
        """One complete look; with `nvml=False` without the driver (between rungs, where only processes matter)."""
        at_s = time.monotonic()
        blind: list[BlindSpot] = []
        driver = read_driver(blind)
        if nvml and driver.present:
            self.sources.nvml.send_snapshot_request()
        members = self.view.members()
        snapshot = self._snapshot(nvml, driver)
        foreign = self._live_foreign(snapshot, members, blind)
        self._named = tuple(g.info for g in snapshot.gpus) or self._named
        gpus = known_gpus(self._named, blind)
        scan = self._scan(members, foreign, frozenset(driver.by_major))
        facts = Facts(driver, snapshot, gpus, scan.open, scan.cmdlines, members, foreign)
        facts.blind_spots = [*blind, *members.blind_spots, *scan.blind_spots]
        if nvml and driver.present:
            facts.blind_spots += snapshot.blind_spots
        facts.dying = self._dying(facts)
        facts.heirs = self._foreign_heirs(facts)
        observation = join(self.vmid, at_s, facts, self._own_seen)
        self._own_seen.update(h.process.pid for h in observation.holders)
        return replace(observation, nvml_asked=nvml)

    def _scan(self, members: Members, foreign: Iterable[int], majors: frozenset[int]) -> ScanResult:
        """Who has what open. A look is no snapshot: a holder may end before its descriptors are read, with a successor
        that was not in the list yet. Where nobody was found, those that have come since are looked at too, until none
        comes any more."""
        scan = self.sources.scanner.scan([*members.processes, *foreign], majors)
        for _ in range(MOST_LISTINGS):
            if any(scan.open.get(pid) for pid in members.processes):
                break
            fresh = self.view.newcomers(members)
            if not fresh:
                break
            more = self.sources.scanner.scan(fresh, majors)
            scan.open.update(more.open)
            scan.cmdlines.update(more.cmdlines)
            scan.blind_spots.extend(more.blind_spots)
        return scan

    def find(self, number: int, host: bool) -> Process | None:
        """The container's process with this pid in its own PID namespace, or with this host pid."""
        for process in self.view.members().processes.values():
            if process.pid == number if host else process.ns_pids[:1] == (number,):
                return process
        return None

    def recheck(self, pid: int) -> ProcessRef | None:
        """The identity of a pid if the container still owns it now; what is re-read between pidfd_open and a signal."""
        process = self.sources.procfs.read_process(pid)
        return process.ref if process is not None and self.view.owns(process) else None

    def _snapshot(self, nvml: bool, driver: DriverNumbers) -> NvmlSnapshot:
        if not (nvml and driver.present):
            return NvmlSnapshot(())
        return self.sources.nvml.receive_snapshot()

    def _live_foreign(self, snapshot: NvmlSnapshot, members: Members, blind: list[BlindSpot]) -> dict[int, Process]:
        """The living processes among the listed pids that are not the container's."""
        found: dict[int, Process] = {}
        for pid in {c.pid for gpu in snapshot.gpus for c in gpu.clients} - members.processes.keys():
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
        return found

    def _dying(self, facts: Facts) -> frozenset[int]:
        known = facts.members.processes.keys() | facts.foreign.keys()
        unseen = [pid for pid in _listed_pids(facts) & known if not facts.open_nodes.get(pid)]
        return frozenset(pid for pid in unseen if self.sources.procfs.is_dying(pid))

    def _foreign_heirs(self, facts: Facts) -> dict[int, frozenset[int]]:
        """Foreign processes that may keep a dead opener's memory: a sweep over the host, only when there is one."""
        minors = {g.info.minor for g in facts.snapshot.gpus if _dead_pids(g, facts)}
        if not minors:
            return {}
        others = [pid for pid in self.sources.procfs.pids() if pid not in facts.members.processes]
        scan = self.sources.scanner.scan(others, frozenset(facts.driver.by_major))
        for spot in scan.blind_spots:
            facts.blind_spots.append(replace(spot, code="detail-unreadable"))
        listed = _listed_pids(facts)
        heirs = {
            minor: frozenset(
                pid
                for pid, nodes in scan.open.items()
                if pid not in listed and minor in gpu_minors_of(nodes, facts) and can_hold_memory(nodes, facts.driver)
            )
            for minor in minors
        }
        for pid in frozenset().union(*heirs.values()):
            process = self.sources.procfs.read_process(pid)
            if process is not None:
                facts.foreign[pid] = process
                facts.open_nodes[pid] = scan.open[pid]
        return heirs


def read_driver(blind: list[BlindSpot]) -> DriverNumbers:
    """Majors of the NVIDIA drivers now; unreadable is a blind spot and reads as none."""
    try:
        return devices.read_driver_numbers()
    except OSError as exc:
        blind.append(BlindSpot("devices", "/proc/devices", str(exc)))
        return DriverNumbers({})


def known_gpus(named: tuple[GpuInfo, ...], blind: list[BlindSpot]) -> tuple[GpuInfo, ...]:
    """GPUs known to the kernel side or the driver's library (`named`, by this look or an earlier one), joined."""
    try:
        from_proc = devices.read_proc_gpus(known=named)
    except OSError as exc:  # TimeoutError too: these files go through the driver and can hang with it
        blind.append(BlindSpot("devices", "/proc/driver/nvidia/gpus", str(exc), "detail-unreadable"))
        from_proc = ()
    return devices.merge_gpus(from_proc, named)


def gpu_minors_of(nodes: OpenNodes, facts: Facts) -> frozenset[int]:
    """Which of the open nodes are GPUs; control nodes (nvidiactl, uvm, caps) are not."""
    return frozenset(n.minor for n in nodes.all if devices.is_gpu(n, facts.driver, facts.gpus))


def can_hold_memory(nodes: OpenNodes, driver: DriverNumbers) -> bool:
    """True when a process has what CUDA memory needs beside the GPU's node: nvidia-uvm (FACTS, descriptors of CUDA)."""
    uvm = {major for major, names in driver.by_major.items() if "nvidia-uvm" in names}
    return not uvm or any(n.major in uvm for n in nodes.all)


def _listed_pids(facts: Facts) -> set[int]:
    return {c.pid for g in facts.snapshot.gpus for c in g.clients}


def _dead_pids(gpu: NvmlGpu, facts: Facts) -> list[int]:
    """Listed pids that no live holder has. A live process with that number but without any descriptor or mapping is a
    recycled pid when it is foreign; the container's own is kept as `nvml`-only evidence (DESIGN 4)."""
    return [
        c.pid
        for c in gpu.clients
        if c.pid not in facts.members.processes and not (c.pid in facts.foreign and _seen_or_blind(c.pid, facts))
    ]


def _seen_or_blind(pid: int, facts: Facts) -> bool:
    return (
        pid in facts.dying
        or bool(facts.open_nodes.get(pid))
        or any(spot.what.startswith(f"pid {pid} ") or spot.what == f"pid {pid}" for spot in facts.blind_spots)
    )


def join(vmid: int, at_s: float, facts: Facts, own_seen: set[int]) -> Observation:
    """Pure: facts of one look -> Observation. `own_seen`: pids known as the container's from earlier looks."""
    own_holders = {pid: facts.open_nodes[pid] for pid in facts.members.processes if facts.open_nodes.get(pid)}
    listed = _listed_pids(facts)
    own_heirs = _own_heirs(own_holders, listed, facts)
    states = tuple(_gpu_state(info, facts, own_heirs.get(info.minor, frozenset()), own_seen) for info in facts.gpus)
    holders = tuple(
        _holder(vmid, facts.members.processes[pid], own_holders.get(pid, OpenNodes()), facts, states)
        for pid in facts.members.processes
        if pid in own_holders or pid in listed
    )
    foreign = tuple(
        _holder(owner_of(p.cgroup), p, facts.open_nodes.get(pid, OpenNodes()), facts, states)
        for pid, p in facts.foreign.items()
        if _seen_or_blind(pid, facts)
    )
    init = facts.members.init
    return Observation(
        vmid=vmid,
        at_s=at_s,
        holders=holders,
        foreign=foreign,
        gpus=states,
        blind_spots=tuple(facts.blind_spots),
        processes=len(facts.members.processes),
        init=init.ref if init else None,
        running=facts.members.running,
        frozen=facts.members.frozen,
        driver_present=facts.driver.present,
    )


def _own_heirs(own_holders: Mapping[int, OpenNodes], listed: set[int], facts: Facts) -> dict[int, frozenset[int]]:
    """GPU minor -> the container's unlisted holders that can have inherited there; those with uvm open come first."""
    heirs: dict[int, frozenset[int]] = {}
    for info in facts.gpus:
        unlisted = {
            pid for pid, nodes in own_holders.items() if pid not in listed and info.minor in gpu_minors_of(nodes, facts)
        }
        strong = {pid for pid in unlisted if can_hold_memory(own_holders[pid], facts.driver)}
        heirs[info.minor] = frozenset(strong or unlisted)
    return heirs


def _gpu_state(info: GpuInfo, facts: Facts, own_heirs: frozenset[int], own_seen: set[int]) -> GpuState:
    gpu = next((g for g in facts.snapshot.gpus if same_gpu(g.info, info)), None)
    if gpu is None:
        return GpuState(info, None, None, None)
    dead = set(_dead_pids(gpu, facts))
    foreign_heirs = facts.heirs.get(info.minor, frozenset())

    def heir_of(pid: int) -> Heir:
        if own_heirs:
            return Heir.OWN
        return Heir.FOREIGN if foreign_heirs and pid not in own_seen else Heir.NOBODY

    return GpuState(
        info=info,
        used_mib=gpu.used_mib,
        total_mib=gpu.total_mib,
        reserved_mib=gpu.reserved_mib,
        bar1_used_mib=gpu.bar1_used_mib,
        client_mib={c.pid: c.used_mib for c in gpu.clients},
        own_clients=tuple(c.pid for c in gpu.clients if c.pid in facts.members.processes),
        foreign_clients=tuple(c.pid for c in gpu.clients if c.pid in facts.foreign and c.pid not in dead),
        dead_clients=tuple(DeadClient(c.pid, c.used_mib, heir_of(c.pid)) for c in gpu.clients if c.pid in dead),
        error=gpu.error,
        error_code=gpu.error_code,
        recovery_action=gpu.recovery_action,
    )


def same_gpu(a: GpuInfo, b: GpuInfo) -> bool:
    """The same GPU by UUID, or by PCI address where one side has no UUID yet."""
    return (bool(a.uuid) and a.uuid == b.uuid) or (bool(a.pci_bus_id) and a.pci_bus_id == b.pci_bus_id)


def _holder(vmid: int | None, process: Process, nodes: OpenNodes, facts: Facts, states: tuple[GpuState, ...]) -> Holder:
    listed_on = {s.info.minor: s.client_mib[process.pid] for s in states if process.pid in s.client_mib}
    evidence = {
        kind
        for kind, seen in (
            (Evidence.FD, nodes.by_fd),
            (Evidence.MAP, nodes.by_map),
            (Evidence.NVML, listed_on),
        )
        if seen
    }
    gpus, memory, opener = _placement(process.pid, nodes, listed_on, facts, states)
    init = facts.members.init
    return Holder(
        process=process,
        vmid=vmid,
        evidence=frozenset(evidence),
        gpus=tuple(sorted(gpus)),
        nodes=nodes.all,
        memory_mib=memory,
        inherited_from=opener,
        cmdline=printable_cmdline(facts.cmdlines.get(process.pid, b"")),
        user=user_name(process.uid),
        supervisor=supervisor_of(process.cgroup, vmid),
        is_init=init is not None and init.ref == process.ref,
        dying=process.pid in facts.dying,
    )


def _placement(
    pid: int,
    nodes: OpenNodes,
    listed_on: Mapping[int, int | None],
    facts: Facts,
    states: tuple[GpuState, ...],
) -> tuple[set[int], int | None, int | None]:
    """(GPU minors, MiB, dead opener) of a holder (DESIGN 4, "Which GPU?"): where the driver lists it; else where a dead
    opener left memory that it can have inherited; else every GPU node that it has open."""
    if listed_on:
        figures = list(listed_on.values())
        return set(listed_on), (None if None in figures else sum(f for f in figures if f is not None)), None
    open_gpus = gpu_minors_of(nodes, facts)
    heirlooms = [
        (s.info.minor, dead)
        for s in states
        if s.info.minor in open_gpus and can_hold_memory(nodes, facts.driver)
        for dead in s.dead_clients
        if dead.heir is not Heir.NOBODY
    ]
    if not heirlooms:
        return set(open_gpus), None, None
    openers = {dead.pid for _, dead in heirlooms}
    rivals = [
        other
        for other, theirs in facts.open_nodes.items()
        if other != pid
        and other not in _listed_pids(facts)
        and can_hold_memory(theirs, facts.driver)
        and gpu_minors_of(theirs, facts) & {minor for minor, _ in heirlooms}
    ]
    memory = _sum(dead.used_mib for _, dead in heirlooms) if not rivals else None
    return {minor for minor, _ in heirlooms}, memory, openers.pop() if len(openers) == 1 else None


def _sum(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def printable_cmdline(raw: bytes) -> str:
    """argv joined by spaces, undecodable bytes kept as surrogates; escaping is the surface's duty (`terminal.escape`)."""
    return raw.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "surrogateescape")


@functools.cache
def _local_users() -> dict[int, str]:
    """uid -> name of this host's /etc/passwd, read once. Not getpwuid(3): NSS may ask a network that hangs."""
    names: dict[int, str] = {}
    try:
        with open("/etc/passwd", encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.split(":")
                if len(fields) > 2 and fields[2].isdigit():
                    names.setdefault(int(fields[2]), fields[0])
    except OSError:
        return {}
    return names


def user_name(uid: int) -> str:
    """The host's name of a uid, or its number (the uids of an unprivileged container have no name here)."""
    return _local_users().get(uid, str(uid))


def open_sources(*, nvml_deadline_s: float, read_deadline_s: float, nvml: Nvml | None = None) -> Sources:
    """The real sources of this machine; `nvml` may have been started before. Raises UnreadableError when there is no
    cgroup v2 mount or no /proc."""
    try:
        own = own_inode()
    except OSError as exc:
        raise UnreadableError(f"cannot read our own PID namespace: {exc}") from exc
    cgroups = Cgroupfs(find_mount())
    return Sources(Procfs(), cgroups, Scanner(deadline_s=read_deadline_s), nvml or Nvml(nvml_deadline_s), own)


__all__ = [
    "ContainerView",
    "DeviceId",
    "Facts",
    "Members",
    "Observer",
    "Sources",
    "Supervisor",
    "join",
    "open_sources",
]
