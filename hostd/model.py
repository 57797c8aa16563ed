"""The words of the product as types: facts seen, decisions made, reports given. No I/O, standard library only.

Units are in the names (`_mib`, `_s`, `_ms`); `start_time` is the kernel's, in clock ticks since boot (field 22 of
/proc/PID/stat, proc_pid_stat(5)). A pid is always one of the PID namespace we run in unless it is called `ns_pid`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class Verdict(StrEnum):
    """The three answers; `unknown` means that we could not look everywhere."""

    RELEASED = "released"
    HELD = "held"
    UNKNOWN = "unknown"


class Evidence(StrEnum):
    """How we know that a process holds a GPU."""

    FD = "fd"
    MAP = "map"
    NVML = "nvml"


class Fate(StrEnum):
    """What became of a holder by the end of a release."""

    EXITED = "exited"
    SURVIVED = "survived"
    UNKILLABLE = "unkillable"
    RESPAWNED = "respawned"
    SPARED = "spared"


class Step(StrEnum):
    """The rungs of the ladder, in climbing order."""

    STOP_UNIT = "stop-unit"
    TERM = "term"
    KILL = "kill"
    CGROUP_KILL = "cgroup-kill"
    RESET = "reset"


class DeviceId(NamedTuple):
    """A character device number (`st_rdev` split)."""

    major: int
    minor: int


class ProcessRef(NamedTuple):
    """The identity of a process: a pid alone is none, it may be reused (pidfd_open(2))."""

    pid: int
    start_time: int


@dataclass(frozen=True, slots=True)
class BlindSpot:
    """Something that could not be read for another reason than that it is gone."""

    source: str
    """`procfs`, `cgroupfs`, `nvml`, `pve`, `devices`, `pidns`, ..."""
    what: str
    """The object, for people: a path, a pid, a call."""
    error: str
    code: str = ""
    """Stable kebab-case code where the decision depends on the kind (`nvml-missing`, `driver-silent`, ...)."""


@dataclass(frozen=True, slots=True)
class Process:
    """What the kernel says about one process, all of it from files that never block (FACTS, Kernel)."""

    pid: int
    start_time: int
    ns_pids: tuple[int, ...]
    """Pids in the namespaces below ours, outermost first, without our own (`NSpid:`)."""
    comm: str
    state: str
    """One letter of proc_pid_stat(5): R S D T t Z X I."""
    uid: int
    ppid: int
    threads: int
    cgroup: str
    """Path in the v2 hierarchy, `/lxc/129/ns/...`."""
    pidns: int
    """Inode of its PID namespace; 0 when unreadable (a zombie has none)."""

    @property
    def ref(self) -> ProcessRef:
        return ProcessRef(self.pid, self.start_time)

    @property
    def is_zombie(self) -> bool:
        """True for a dead process with no live thread: it holds nothing (FACTS, Kernel)."""
        return self.state in "ZX" and self.threads <= 1


@dataclass(frozen=True, slots=True)
class OpenNodes:
    """The GPU device nodes that the live tasks of one process have open or mapped."""

    by_fd: frozenset[DeviceId] = frozenset()
    by_map: frozenset[DeviceId] = frozenset()

    @property
    def all(self) -> frozenset[DeviceId]:
        return self.by_fd | self.by_map

    def __bool__(self) -> bool:
        return bool(self.by_fd or self.by_map)


# --- GPUs and the driver -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DriverNumbers:
    """Character majors of NVIDIA drivers, from /proc/devices at this scan."""

    by_major: dict[int, frozenset[str]]
    """major -> names (195 is both `nvidia` and `nvidiactl` on recent drivers)."""

    def __contains__(self, rdev_major: int) -> bool:
        return rdev_major in self.by_major

    @property
    def gpu_majors(self) -> frozenset[int]:
        """Majors on which GPU minors live: `nvidia`, `nvidia-frontend` on old drivers."""
        return frozenset(m for m, names in self.by_major.items() if names & {"nvidia", "nvidia-frontend"})

    @property
    def present(self) -> bool:
        """True when an NVIDIA driver is loaded."""
        return bool(self.by_major)


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """One GPU as the kernel side knows it: from /proc/driver/nvidia/gpus/*/information or from NVML."""

    minor: int
    uuid: str
    pci_bus_id: str
    """Canonical lower-case `0000:3b:00.0`."""
    name: str
    index: int | None = None
    """NVML index; None when NVML is silent."""


@dataclass(frozen=True, slots=True)
class NvmlClient:
    """A pid in one of the driver's lists. A hint, never a target (DESIGN 4)."""

    pid: int
    used_mib: int | None
    """None when the driver does not say (MIG, vGPU)."""
    kinds: frozenset[str]
    """Of `compute`, `graphics`, `mps`."""


@dataclass(frozen=True, slots=True)
class NvmlGpu:
    """One GPU as NVML describes it at one moment. Figures are None where the driver does not give them."""

    info: GpuInfo
    total_mib: int | None
    used_mib: int | None
    """Of the v2 call: without the driver's reserve."""
    reserved_mib: int | None
    bar1_used_mib: int | None
    clients: tuple[NvmlClient, ...]
    implausible_pids: tuple[int, ...] = ()
    recovery_action: int | None = None
    """Field value 230: 0 none, 1 reset, 2 reboot, 3 drain P2P, 4 drain and reset (FACTS)."""
    persistence_mode: bool | None = None
    mig: bool | None = None
    nvlink_peers: tuple[str, ...] = ()
    """PCI bus ids of GPUs linked with this one."""
    error: str = ""
    """Not empty when this GPU could not be asked (lost, reset required); figures are None then."""
    error_code: str = ""
    """`gpu-lost`, `figures-unavailable`, ..."""


@dataclass(frozen=True, slots=True)
class NvmlSnapshot:
    """Every GPU by NVML in one look, or why there is none."""

    gpus: tuple[NvmlGpu, ...]
    driver_version: str = ""
    blind_spots: tuple[BlindSpot, ...] = ()

    @property
    def complete(self) -> bool:
        return not self.blind_spots and not any(g.error for g in self.gpus)

    def by_uuid(self, uuid: str) -> NvmlGpu | None:
        return next((g for g in self.gpus if g.info.uuid == uuid), None)


# --- Joined observation --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Supervisor:
    """Who would start the job again: derived from the holder's cgroup below the container's."""

    kind: str
    """`systemd`, `systemd-user`, `docker`, `podman`, `containerd`, `session`, or `` when there is none."""
    name: str
    """Unit or nested container id, `vllm.service`."""
    cgroup: str
    """Its cgroup, `/lxc/129/ns/system.slice/vllm.service`."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A process that holds a GPU, with the evidence and to whom it belongs."""

    process: Process
    vmid: int | None
    """Owning container; None = the host's."""
    evidence: frozenset[Evidence]
    gpus: tuple[int, ...]
    """Minors of the GPUs whose memory it holds or may hold (DESIGN 4, "Which GPU?")."""
    nodes: frozenset[DeviceId] = frozenset()
    memory_mib: int | None = None
    inherited_from: int | None = None
    """Pid of the dead opener that the driver still lists for it."""
    cmdline: str = ""
    user: str = ""
    supervisor: Supervisor | None = None
    is_init: bool = False
    """It is the container's init, or one of several candidates: ending it may stop the container."""
    open_gpus: tuple[int, ...] = ()
    """Minors of the GPUs that it has open or mapped, whichever of them it uses."""
    placed: bool = True
    """False: `gpus` is everything it has open because the driver's lists, which could say more, were not to be had."""
    passed_on: bool = False
    """Not the container's, but a descriptor that it has was opened inside it."""
    dying: bool = False
    """Past exit(), but the driver still lists it: nothing to signal, something to wait for."""

    @property
    def ref(self) -> ProcessRef:
        return self.process.ref

    @property
    def targetable(self) -> bool:
        """Only `fd` or `map` evidence makes a target; the driver's list alone never does."""
        return bool(self.evidence & {Evidence.FD, Evidence.MAP})


class Heir(StrEnum):
    """Who keeps the memory that the driver charges to a dead pid."""

    OWN = "own"
    """A live holder of the container observed inherited the opener's descriptors."""
    PASSED = "passed"
    """Somebody else's process has a descriptor that was opened inside this container."""
    FOREIGN = "foreign"
    """Only somebody else's process can have inherited them, and it was not opened here."""
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class DeadClient:
    """A pid in the driver's list that no live holder has: a dead opener, or a recycled number."""

    pid: int
    used_mib: int | None
    heir: Heir


@dataclass(frozen=True, slots=True)
class GpuState:
    """One GPU in one observation: figures, clients joined to live processes, ghost memory."""

    info: GpuInfo
    used_mib: int | None
    reserved_mib: int | None
    bar1_used_mib: int | None
    client_mib: dict[int, int | None] = field(default_factory=dict)
    """Listed pid -> MiB, for every listed client, each pid once."""
    own_clients: tuple[int, ...] = ()
    """Listed pids that live and belong to the container observed."""
    foreign_clients: tuple[int, ...] = ()
    dead_clients: tuple[DeadClient, ...] = ()
    error: str = ""
    error_code: str = ""
    recovery_action: int | None = None
    total_mib: int | None = None

    @property
    def live_mib(self) -> int | None:
        """Sum over listed clients that live; None when one of the figures is missing."""
        return sum_mib(self.client_mib.get(pid) for pid in self.own_clients + self.foreign_clients)

    def dead_mib(self, *heirs: Heir) -> int | None:
        return sum_mib(c.used_mib for c in self.dead_clients if c.heir in heirs)

    @property
    def ghost_mib(self) -> int | None:
        """Memory in use that nobody alive accounts for: no listed client that lives, and no living heir of a dead one.

        None when a figure is missing (never 0 then).
        """
        return _minus(self.used_mib, self.live_mib, self.dead_mib(Heir.OWN, Heir.PASSED, Heir.FOREIGN))

    @property
    def baseline_mib(self) -> int | None:
        """Memory in use before a release that no listed client accounts for, dead ones included: what a dead opener has
        left may be the container's whether or not its heir was found, and is no baseline (DESIGN 3, ghost memory).

        None when a figure is missing. Never more than `ghost_mib`.
        """
        return _minus(self.used_mib, self.live_mib, self.dead_mib(*Heir))

    @property
    def available_mib(self) -> int | None:
        """What is free, with what living clients of others hold counted as free (DESIGN 7: they never make a GPU dirty).

        None when a figure is missing.
        """
        others = sum_mib(self.client_mib.get(pid) for pid in self.foreign_clients)
        if self.total_mib is None or self.used_mib is None or others is None:
            return None
        return self.total_mib - (self.reserved_mib or 0) - self.used_mib + others

    @property
    def live_clients(self) -> int:
        return len(self.own_clients) + len(self.foreign_clients)

    @property
    def tolerance_mib(self) -> int:
        """16 MiB plus 16 MiB per live client: a context costs about 8 MiB that no list shows."""
        return 16 + 16 * self.live_clients


def sum_mib(values: Iterable[int | None]) -> int | None:
    """None as soon as one figure is missing: never a smaller sum."""
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _minus(used: int | None, *parts: int | None) -> int | None:
    if used is None or None in parts:
        return None
    return max(0, used - sum(part for part in parts if part is not None))


@dataclass(frozen=True, slots=True)
class Observation:
    """One complete look at one container. `judge` needs nothing else."""

    vmid: int
    at_s: float
    """CLOCK_MONOTONIC."""
    holders: tuple[Holder, ...]
    """Of this container only, `nvml`-only ones included."""
    foreign: tuple[Holder, ...] = ()
    """Other live processes in the driver's lists of the GPUs seen."""
    gpus: tuple[GpuState, ...] = ()
    blind_spots: tuple[BlindSpot, ...] = ()
    processes: int = 0
    """Live processes of the container that were looked at."""
    init: ProcessRef | None = None
    init_pidns: int = 0
    """Inode of the init's PID namespace; 0 without an init."""
    inits: frozenset[ProcessRef] = frozenset()
    """Every candidate for the init."""
    incarnation: int | None = None
    """Inode of the container's cgroup directory; None when there is none."""
    running: bool = False
    """The container's cgroup is populated."""
    frozen: bool = False
    driver_present: bool = True
    nvml_asked: bool = True

    def gpu(self, minor: int) -> GpuState | None:
        return next((g for g in self.gpus if g.info.minor == minor), None)


@dataclass(frozen=True, slots=True)
class Stuck:
    """Why a task does not die: state, kernel function it waits in, kernel stack."""

    ref: ProcessRef
    tid: int
    state: str
    wchan: str
    stack: str
    kill_pending: bool
    since: str = ""


# --- What was done -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RungRecord:
    """One rung as it happened; signals accepted, processes gone and time waited are three separate facts."""

    step: Step
    at_ms: int
    targets: list[int] = field(default_factory=list)
    sent: int = 0
    gone: int = 0
    waited_ms: int = 0
    note: str = ""


@dataclass(slots=True)
class HolderReport:
    holder: Holder
    fate: Fate
    stuck: Stuck | None = None


@dataclass(slots=True)
class GpuReport:
    info: GpuInfo
    used_mib_before: int | None = None
    used_mib_after: int | None = None
    reserved_mib: int | None = None
    ghost_mib: int | None = None
    bar1_used_mib_after: int | None = None
    other_holders: list[Holder] = field(default_factory=list)
    recovery_action: int | None = None
    """As in `NvmlGpu`."""


@dataclass(slots=True)
class Report:
    """Everything one release decided, saw and did. `hostd/wire.py` turns it into JSON schema 1 of DESIGN 5."""

    release_id: str
    vmid: int
    trigger: str
    verdict: Verdict | None = None
    reason: str = ""
    message: str = ""
    next_step: str = ""
    was_held: bool = False
    dry_run: bool = False
    started: str = ""
    """ISO 8601 UTC."""
    duration_ms: int = 0
    holders: list[HolderReport] = field(default_factory=list)
    gpus: list[GpuReport] = field(default_factory=list)
    rungs: list[RungRecord] = field(default_factory=list)
    blind_spots: list[BlindSpot] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """What else an administrator wants to know of a failure: sentences, for people."""
