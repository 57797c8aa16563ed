"""What one look has read, before the join, and what can be asked of it alone. Pure but for one late look at /dev."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hostd.membership import Members
from hostd.model import BlindSpot, DriverNumbers, GpuInfo, NvmlGpu, NvmlSnapshot, OpenNodes, Process, ProcessRef
from hostd.system import devices

MOST_ANCESTORS = 16
"""How far up a process is followed to the client that it inherited from."""


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


def listed_pids(facts: Facts) -> set[int]:
    return {c.pid for g in facts.snapshot.gpus for c in g.clients}


def dead_pids(gpu: NvmlGpu, facts: Facts) -> list[int]:
    """Listed pids that no live holder has. A live process with that number but without any descriptor or mapping is a
    recycled pid when it is foreign; the container's own is kept as `nvml`-only evidence (DESIGN 4)."""
    return [
        c.pid
        for c in gpu.clients
        if c.pid not in facts.members.processes and not (c.pid in facts.foreign and is_seen_or_blind(c.pid, facts))
    ]


def is_seen_or_blind(pid: int, facts: Facts) -> bool:
    return pid in facts.dying or pid in facts.unseen or bool(facts.open_nodes.get(pid))


def living_opener(pid: int, facts: Facts, listed: set[int]) -> int | None:
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
