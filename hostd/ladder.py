"""The escalation ladder as data. One loop (`hostd/release.py`) climbs it, for CLI, daemon and hook alike."""

from __future__ import annotations

from dataclasses import dataclass, field

from hostd.model import ProcessRef, RungRecord, Step


@dataclass(frozen=True, slots=True)
class Rung:
    """One step and how long it may bring nothing before the next one is tried."""

    step: Step
    grace_s: float
    """Seconds *without progress* (a holder gone, memory falling, CPU time of a dying task growing)."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Every limit of a release, in seconds where not named otherwise. Defaults are the product's defaults."""

    grace_s: float = 10.0
    """After SIGTERM (`--grace`)."""
    kill_grace_s: float = 5.0
    """After SIGKILL: without progress this long, a task with SIGKILL pending in D state is unkillable."""
    drain_grace_s: float = 10.0
    """Memory that has not fallen for this long after the last holder left will not fall."""
    timeout_s: float = 150.0
    """On the whole release (`--timeout`)."""
    nvml_deadline_s: float = 10.0
    """On one call of the driver's library; without persistence mode opening a GPU takes seconds (FACTS)."""
    read_deadline_s: float = 1.0
    """On reading one process's mappings or command line in a helper."""
    settle_s: float = 1.0
    """How long to look again for a job that something alive would start again."""
    respawn_rounds: int = 3
    """How often holders that came back are killed again before we say `respawned`."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller asked for. The same object for CLI, daemon and hook."""

    limits: Limits = field(default_factory=Limits)
    now: bool = False
    dry_run: bool = False
    stop: bool = False
    stop_units: bool = False
    reset: bool = False
    """Asked for: a refusal is then the end (7)."""
    auto_reset: bool = False
    """Configured (`ladder.reset: auto`): a refusal changes nothing."""
    reset_services: tuple[str, ...] = ("nvidia-persistenced.service", "nvidia-dcgm.service")
    """Services of the host that a reset may stop and start again (`reset.services`)."""
    verify_memory: bool = True
    gpu: str | None = None
    open_nodes: bool = False
    """With `gpu`: also holders that merely have its node open (a hand-over to a VM)."""
    pid: str | None = None
    """`17` in the container's PID namespace, `host:4711`, or several with commas between."""
    trigger: str = "cli"
    wait: bool = True


@dataclass(frozen=True, slots=True)
class Resume:
    """What a release that was cut off had done, so that its successor repeats nothing."""

    release_id: str
    vmid: int
    termed: frozenset[ProcessRef] = frozenset()
    killed: frozenset[ProcessRef] = frozenset()
    minors: frozenset[int] = frozenset()
    baseline_mib: tuple[tuple[int, int], ...] = ()
    """(GPU minor, baseline) before the first rung of the first attempt."""
    was_held: bool = False
    was_at: str = "the first look"
    begun_ticks: int | None = None
    """When the first attempt began, in clock ticks since boot: an init that is younger is of another run."""
    started: str = ""
    rungs: tuple[RungRecord, ...] = ()


def rungs_for(options: Options) -> tuple[Rung, ...]:
    """The rungs of a running container, in order (the stop side has its own, in `lifecycle`)."""
    limits = options.limits
    ladder: list[Rung] = []
    if options.stop_units:
        ladder.append(Rung(Step.STOP_UNIT, limits.grace_s))
    if not options.now:
        ladder.append(Rung(Step.TERM, limits.grace_s))
    ladder.append(Rung(Step.KILL, limits.kill_grace_s))
    return tuple(ladder)
