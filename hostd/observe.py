"""Joins the sources into one look at one container: who holds which GPU, how we know, and where we were blind.

Order of a look: the driver first (its lists name foreign pids that are worth a scan), then the processes. So one look that
finds the memory back *and* no holder has scanned the processes after the memory check (DESIGN 4, "a last scan").
"""

from __future__ import annotations

import functools
import os
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
from hostd.system import devices, mounts
from hostd.system.cgroupfs import Cgroupfs, find_mount, owner_of
from hostd.system.nvml import Nvml
from hostd.system.pidns import PidNamespace, own_inode
from hostd.system.procfs import Procfs
from hostd.system.scan import DETAIL, Scanner, ScanResult


@dataclass(slots=True)
class Sources:
    """The outside world, as one value. `close()` ends every helper process."""

    procfs: Procfs
    cgroups: Cgroupfs
    scanner: Scanner
    nvml: Nvml
    own_pidns: int

    def helpers(self) -> set[int]:
        """Ourselves and our NVML child, which has GPU nodes open itself: never a holder, in whatever cgroup we run."""
        return {pid for pid in (os.getpid(), self.nvml.pid) if pid is not None}

    def close(self) -> None:
        self.nvml.close()
        self.scanner.close()


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


AMBIGUOUS = "ambiguous-init"


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
        self._add_cgroup_members(found)
        self._find_init(found)
        self._add_namespace_members(found)
        found.blind_spots = list(dict.fromkeys(found.blind_spots))

    def newcomers(self, known: Members) -> set[int]:
        """The processes that have come since `known` was read; they are added to it."""
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
                found.incarnation = os.fstat(cgroup.fd).st_ino
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
            if process is not None and not process.is_zombie and accept(process):
                found.processes[pid] = process

    def _find_init(self, found: Members) -> None:
        inits = [
            p
            for p in found.processes.values()
            if p.ns_pids == (1,) and p.pidns not in (0, self._sources.own_pidns) and owner_of(p.cgroup) == self.vmid
        ]
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


@dataclass(slots=True)
class Facts:
    """What one look has read, before the join."""

    driver: DriverNumbers
    snapshot: NvmlSnapshot
    gpus: tuple[GpuInfo, ...]
    open_nodes: dict[int, OpenNodes]
    cmdlines: dict[int, bytes]
    members: Members
    foreign: dict[int, Process]
    """Live processes that are not the container's: listed ones, and heirs of dead openers."""
    dying: frozenset[int] = frozenset()
    """Listed pids without descriptor or mapping that are past exit()."""
    unseen: frozenset[int] = frozenset()
    """Listed foreign pids of which descriptors or mappings could not be read."""
    placed: Mapping[ProcessRef, tuple[int, ...]] = field(default_factory=dict)
    """Where the driver's lists placed a holder at an earlier look."""
    heirs: dict[int, frozenset[int]] = field(default_factory=dict)
    """GPU minor -> foreign unlisted pids that can have inherited a dead opener's memory there."""
    passed: frozenset[int] = frozenset()
    """Those of them that have a descriptor which was opened inside the container."""
    host_minors: frozenset[int] | None = None
    """Minors of the host's GPU nodes, read when somebody has one open that nobody knows."""
    blind_spots: list[BlindSpot] = field(default_factory=list)


MOST_LISTINGS = 16
"""How often one look may read the list of a container's processes again."""
MOST_ANCESTORS = 16
SWEEP_S = 1.0
"""How long the result of a sweep over the host is good for."""


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
        self._placed: dict[ProcessRef, tuple[int, ...]] = {}
        """Where the driver's lists placed a holder when they were read last (DESIGN 4, "Which GPU?")."""
        self._swept: Sweep | None = None
        self._mounts: dict[int, frozenset[int]] = {}
        """Mount namespace of a process of the container -> its mounts: what was opened through one was opened here."""

    def close(self) -> None:
        self.view.close()

    def look(self, *, nvml: bool = True, nvml_deadline_s: float | None = None) -> Observation:
        """One complete look; with `nvml=False` without the driver. `nvml_deadline_s`: instead of the configured one."""
        at_s = time.monotonic()
        blind: list[BlindSpot] = []
        driver = read_driver(blind)
        if nvml and driver.present:
            self.sources.nvml.send_snapshot_request(deadline_s=nvml_deadline_s)
        members = self.view.members()
        snapshot = self._snapshot(nvml, driver)
        foreign = self._live_foreign(snapshot, members, blind)
        self._named = tuple(g.info for g in snapshot.gpus) or self._named
        gpus = known_gpus(self._named, blind)
        scan = self._scan(members, frozenset(driver.by_major))
        facts = Facts(driver, snapshot, gpus, dict(scan.open), dict(scan.cmdlines), members, foreign)
        facts.blind_spots = [*blind, *members.blind_spots, *scan.blind_spots]
        if nvml and driver.present:
            facts.blind_spots += [*snapshot.blind_spots, *_implausible(snapshot)]
        self._scan_foreign(facts)
        facts.dying = self._dying(facts)
        self._note_mounts(pid for pid in members.processes if facts.open_nodes.get(pid))
        self._find_foreign_heirs(facts)
        facts.placed = self._placed
        observation = join(self.vmid, at_s, facts, self._own_seen)
        self._own_seen.update(h.process.pid for h in observation.holders)
        for gpu in observation.gpus:
            if not facts.heirs.get(gpu.info.minor):  # then the dead opener cannot have been anybody else's
                self._own_seen.update(c.pid for c in gpu.dead_clients if c.heir is Heir.OWN)
        if snapshot.gpus:
            listed = _listed_pids(facts)
            self._placed |= {h.ref: h.gpus for h in observation.holders if h.process.pid in listed or h.inherited_from}
        return replace(observation, nvml_asked=nvml)

    def _scan(self, members: Members, majors: frozenset[int]) -> ScanResult:
        """Who has what open. A look is no snapshot: a holder may end before its descriptors are read, with a successor
        that was not in the list yet. Where nobody was found, those that have come since are looked at too, until none
        comes any more."""
        scan = self._scan_pids(members.processes, majors)
        for _ in range(MOST_LISTINGS):
            if any(scan.open.get(pid) for pid in members.processes):
                break
            fresh = self.view.newcomers(members)
            if not fresh:
                break
            more = self._scan_pids(fresh, majors)
            scan.open.update(more.open)
            scan.cmdlines.update(more.cmdlines)
            scan.blind_spots.extend(more.blind_spots)
        return scan

    def _scan_pids(self, pids: Iterable[int], majors: frozenset[int]) -> ScanResult:
        """As the scanner's; that no helper can be started is a blind spot, too."""
        try:
            return self.sources.scanner.scan(pids, majors)
        except OSError as exc:
            what = "descriptors of the processes"
            error = f"cannot start a helper: {exc.strerror or exc}"
            return ScanResult(blind_spots=[BlindSpot("procfs", what, error, "descriptors-unreadable")])

    def _scan_foreign(self, facts: Facts) -> None:
        """What listed processes of others have open. Where that cannot be read they count as what the list says they
        are, and it takes nothing away from a look at this container."""
        majors = frozenset(facts.driver.by_major)
        scan = self._scan_pids(facts.foreign, majors)
        facts.open_nodes |= scan.open
        facts.cmdlines |= scan.cmdlines
        facts.blind_spots += [replace(spot, code=DETAIL) for spot in scan.blind_spots]
        if any(spot.code != DETAIL for spot in scan.blind_spots):
            for pid in facts.foreign.keys() - scan.open.keys():
                if not self._scan_pids([pid], majors).complete:
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
        """The living processes among the listed pids that are not the container's."""
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
        return found

    def _dying(self, facts: Facts) -> frozenset[int]:
        known = facts.members.processes.keys() | facts.foreign.keys()
        unseen = [pid for pid in _listed_pids(facts) & known if not facts.open_nodes.get(pid)]
        found = set()
        for pid in unseen:
            try:
                if self.sources.procfs.is_dying(pid):
                    found.add(pid)
            except OSError as exc:
                facts.blind_spots.append(BlindSpot("procfs", f"tasks of process {pid}", exc.strerror or str(exc), DETAIL))
        return frozenset(found)

    def _note_mounts(self, pids: Iterable[int]) -> None:
        for pid in pids:
            namespace = mounts.mount_namespace(pid)
            if namespace is not None and namespace not in self._mounts:
                self._mounts[namespace] = mounts.read_mount_ids(pid)

    def _find_foreign_heirs(self, facts: Facts) -> None:
        """Foreign processes that may keep a dead opener's memory: a sweep over the host, only when there is one."""
        dead = {g.info.minor: frozenset(_dead_pids(g, facts)) for g in facts.snapshot.gpus}
        everyone = frozenset[int]().union(*dead.values())
        if not everyone:
            return
        sweep = self._sweep(everyone, facts)
        listed = _listed_pids(facts)
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
                parent = self.sources.procfs.read_process(child.ppid)
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
                if self.sources.procfs.read_ref(known.pid) != known.ref:
                    self._swept.forget(known.pid)
            return self._swept
        sweep = Sweep(dead, time.monotonic())
        try:
            pids = set(self.sources.procfs.pids()) - facts.members.processes.keys() - self.sources.helpers()
        except OSError as exc:
            facts.blind_spots.append(BlindSpot("procfs", self.sources.procfs.root, exc.strerror or str(exc), DETAIL))
            return sweep
        majors = frozenset(facts.driver.by_major)
        scan = self._scan_pids(pids, majors)
        facts.blind_spots += [replace(spot, code=DETAIL) for spot in scan.blind_spots]
        for pid, nodes in scan.open.items():
            try:
                process = self.sources.procfs.read_process(pid)
            except OSError:
                continue  # a figure less in the report, nobody who could be a target
            if process is not None and not self.view.owns(process):
                sweep.processes[pid] = process
                sweep.open_nodes[pid] = nodes
        if facts.members.init is not None:
            self._note_mounts([facts.members.init.pid])
        ours = frozenset[int]().union(*self._mounts.values())
        through = mounts.opened_through(sweep.processes, majors, self.sources.scanner.deadline_s)
        sweep.passed = frozenset(pid for pid, theirs in through.items() if theirs & ours)
        self._swept = sweep
        return sweep


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


def _implausible(snapshot: NvmlSnapshot) -> list[BlindSpot]:
    """Numbers in the driver's lists that no process can have: left out, and said so."""
    return [
        BlindSpot("nvml", f"clients of GPU {gpu.info.index}", f"lists pids that cannot be: {_words(gpu)}", DETAIL)
        for gpu in snapshot.gpus
        if gpu.implausible_pids
    ]


def _words(gpu: NvmlGpu) -> str:
    return ", ".join(map(str, gpu.implausible_pids[:8]))


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
        blind.append(BlindSpot("devices", "/proc/driver/nvidia/gpus", str(exc), DETAIL))
        from_proc = ()
    return devices.merge_gpus(from_proc, named)


def gpu_minors_of(nodes: OpenNodes, facts: Facts) -> frozenset[int]:
    """Which of the open nodes are GPUs; control nodes (nvidiactl, uvm, caps) are not. A GPU that nobody knows any more is
    one as long as the host has its node (DESIGN 4, "Which nodes are GPUs")."""
    known = {n.minor for n in nodes.all if devices.is_gpu(n, facts.driver, facts.gpus)}
    unknown = {n.minor for n in nodes.all if n.major in facts.driver.gpu_majors} - known
    if unknown:
        if facts.host_minors is None:
            facts.host_minors = devices.read_host_minors(facts.driver)
        known |= unknown & facts.host_minors
    return frozenset(known)


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
    return pid in facts.dying or pid in facts.unseen or bool(facts.open_nodes.get(pid))


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
        inits=facts.members.inits,
        incarnation=facts.members.incarnation,
        running=facts.members.running,
        frozen=facts.members.frozen,
        driver_present=facts.driver.present,
    )


def _living_opener(pid: int, facts: Facts, listed: set[int]) -> int | None:
    """The listed client, alive, whose child, grandchild, ... this process of the container is: it inherited from that."""
    child = facts.members.processes.get(pid)
    for _ in range(MOST_ANCESTORS):
        parent = facts.members.processes.get(child.ppid) if child is not None else None
        if child is None or parent is None or parent.start_time > child.start_time:
            return None
        if parent.pid in listed:
            return parent.pid
        child = parent
    return None


def _own_heirs(own_holders: Mapping[int, OpenNodes], listed: set[int], facts: Facts) -> dict[int, frozenset[int]]:
    """GPU minor -> the container's unlisted holders that can have inherited there; those with uvm open come first."""
    heirs: dict[int, frozenset[int]] = {}
    for info in facts.gpus:
        unlisted = {
            pid
            for pid, nodes in own_holders.items()
            if pid not in listed
            and info.minor in gpu_minors_of(nodes, facts)
            and _living_opener(pid, facts, listed) is None
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
        if pid not in own_seen and foreign_heirs - facts.passed:
            return Heir.FOREIGN
        return Heir.PASSED if foreign_heirs & facts.passed else Heir.NOBODY

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
    if not facts.snapshot.gpus:
        gpus = set(facts.placed.get(process.ref, gpus))
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
        is_init=process.ref in facts.members.inits,
        open_gpus=tuple(sorted(gpu_minors_of(nodes, facts))),
        passed_on=process.pid in facts.passed,
        dying=process.pid in facts.dying,
    )


def _placement(
    pid: int,
    nodes: OpenNodes,
    listed_on: Mapping[int, int | None],
    facts: Facts,
    states: tuple[GpuState, ...],
) -> tuple[set[int], int | None, int | None]:
    """(GPU minors, MiB, dead opener) of a holder (DESIGN 4, "Which GPU?"): where the driver lists it; else where it lists
    the living process whose child it is (a data worker); else where a dead opener left memory that it can have inherited;
    else every GPU node that it has open."""
    if listed_on:
        figures = list(listed_on.values())
        return set(listed_on), (None if None in figures else sum(f for f in figures if f is not None)), None
    open_gpus = gpu_minors_of(nodes, facts)
    opener = _living_opener(pid, facts, _listed_pids(facts))
    if opener is not None:
        theirs = {s.info.minor for s in states if opener in s.client_mib}
        return (theirs & open_gpus) or set(open_gpus), None, None
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
