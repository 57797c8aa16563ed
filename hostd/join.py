"""The join of one look: facts -> whose memory is whose, where a holder is, whom a dead opener left its descriptors to.

Pure, but for the names of users.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping

from hostd.facts import Facts, can_hold_memory, dead_pids, gpu_minors_of, is_seen_or_blind, listed_pids, living_opener
from hostd.model import (
    DeadClient,
    Evidence,
    GpuInfo,
    GpuState,
    Heir,
    Holder,
    Observation,
    OpenNodes,
    Process,
    sum_mib,
)
from hostd.supervisor import supervisor_of
from hostd.system.cgroupfs import owner_of


def join(vmid: int, at_s: float, facts: Facts, own_seen: set[int]) -> Observation:
    """Pure: facts of one look -> Observation. `own_seen`: pids known as the container's from earlier looks."""
    own_holders = {pid: facts.open_nodes[pid] for pid in facts.members.processes if facts.open_nodes.get(pid)}
    listed = listed_pids(facts)
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
        if is_seen_or_blind(pid, facts)
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
        init_pidns=init.pidns if init else 0,
        inits=facts.members.inits,
        incarnation=facts.members.incarnation,
        running=facts.members.running,
        frozen=facts.members.frozen,
        driver_present=facts.driver.present,
    )


def _own_heirs(own_holders: Mapping[int, OpenNodes], listed: set[int], facts: Facts) -> dict[int, frozenset[int]]:
    """GPU minor -> the container's unlisted holders that can have inherited there; those with uvm open come first."""
    heirs: dict[int, frozenset[int]] = {}
    for info in facts.gpus:
        unlisted = {
            pid
            for pid, nodes in own_holders.items()
            if pid not in listed
            and info.minor in gpu_minors_of(nodes, facts)
            and living_opener(pid, facts, listed) is None
        }
        strong = {pid for pid in unlisted if can_hold_memory(own_holders[pid], facts.driver)}
        heirs[info.minor] = frozenset(strong or unlisted)
    return heirs


def _gpu_state(info: GpuInfo, facts: Facts, own_heirs: frozenset[int], own_seen: set[int]) -> GpuState:
    gpu = next((g for g in facts.snapshot.gpus if same_gpu(g.info, info)), None)
    if gpu is None:
        return GpuState(info, None, None, None)
    dead = set(dead_pids(gpu, facts))
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
    open_gpus = gpu_minors_of(nodes, facts)
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
        open_gpus=tuple(sorted(open_gpus)),
        placed=bool(listed_on) or gpus != open_gpus or len(gpus) < 2 or not _unread(open_gpus, facts),
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
    opener = living_opener(pid, facts, listed_pids(facts))
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
        and other not in listed_pids(facts)
        and can_hold_memory(theirs, facts.driver)
        and gpu_minors_of(theirs, facts) & {minor for minor, _ in heirlooms}
    ]
    memory = sum_mib(dead.used_mib for _, dead in heirlooms) if not rivals else None
    return {minor for minor, _ in heirlooms}, memory, openers.pop() if len(openers) == 1 else None


def _unread(minors: Iterable[int], facts: Facts) -> set[int]:
    """Those GPUs whose lists of clients the driver did not give at this look."""
    return set(minors) - {gpu.info.minor for gpu in facts.snapshot.gpus if not gpu.error or gpu.mig}


def same_gpu(a: GpuInfo, b: GpuInfo) -> bool:
    """The same GPU by UUID, or by PCI address where one side has no UUID yet."""
    return (bool(a.uuid) and a.uuid == b.uuid) or (bool(a.pci_bus_id) and a.pci_bus_id == b.pci_bus_id)


# --- words -----------------------------------------------------------------------------------------------------------


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
