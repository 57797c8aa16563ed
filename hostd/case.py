"""What a verdict may depend on, as values: a selection, a hand-over, the case, the judgement; and how those are put."""

from __future__ import annotations

from dataclasses import dataclass, field

from hostd.model import DeviceId, Holder, Observation, Process, ProcessRef, Stuck, Verdict
from hostd.verdicts import REASONS, say

DETAIL_ONLY = "detail-unreadable"
"""Code of a blind spot that takes nothing away from the look (a command line, the mappings of a known holder)."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What `--gpu` and `--pid` leave of a container. None = everything."""

    minors: frozenset[int] | None = None
    pids: frozenset[ProcessRef] | None = None
    nodes: frozenset[DeviceId] = frozenset()
    """For a hand-over: also whoever merely has one of these open, wherever its memory is."""

    def takes(self, holder: Holder) -> bool:
        if self.pids is not None and holder.ref not in self.pids:
            return False
        if self.minors is None or self.nodes & holder.nodes:
            return True
        return holder.placed and bool(self.minors & set(holder.gpus))

    def cannot_tell(self, holder: Holder) -> bool:
        """It has a selected GPU open among others, and the driver did not say which of them it uses: not a target."""
        if self.minors is None or self.nodes or holder.placed:
            return False
        return bool(self.minors & set(holder.gpus)) and (self.pids is None or holder.ref in self.pids)


@dataclass(frozen=True, slots=True)
class Handover:
    """Between two looks at the driver a client of somebody else grew by what one of ours, gone between them, had."""

    minor: int
    pid: int
    mib: int


@dataclass(frozen=True, slots=True)
class Case:
    """Everything a verdict may depend on."""

    before: Observation
    """The look before the first rung."""
    after: Observation
    """The last look."""
    minors: frozenset[int]
    """The GPUs that are verified: every one that a selected holder had."""
    own_minors: frozenset[int] = frozenset()
    """GPUs of the container's configuration: looked at for ghost memory even when it holds nothing."""
    selection: Selection = Selection()
    acted: bool = False
    dry_run: bool = False
    verify_memory: bool = True
    stuck: tuple[Stuck, ...] = ()
    undead: tuple[Holder, ...] = ()
    """Those of them that show no descriptor any more: they hang in exit(), in the driver's release of it."""
    respawned: frozenset[ProcessRef] = frozenset()
    known: frozenset[ProcessRef] = frozenset()
    """Holders that a rung has dealt with."""
    openers: frozenset[int] = frozenset()
    """Pids of the holders that were dealt with, and of the dead openers that they had inherited from."""
    handovers: tuple[Handover, ...] = ()
    """Charges of others that grew when one of ours went."""
    new_run_ticks: int | None = None
    """Start of the container's new init, when it was started again during this release."""
    time_is_up: bool = False
    had: int = 0
    """Selected holders at the first look."""
    resumed: frozenset[ProcessRef] = frozenset()
    """What an earlier attempt of this release, which was cut off, had signalled."""
    baseline_mib: dict[int, int] = field(default_factory=dict)
    """GPU minor -> baseline of that earlier attempt; it wins over `before`."""
    falling: bool = False
    """Memory was still falling when the time was up."""
    waited_s: float = 0.0
    restless: bool = False
    """Holders came back after the last round, though the last look may not have met one."""
    returned: tuple[Holder, ...] = ()
    """Every holder that started after the first signal."""
    restarters: tuple[Process, ...] = ()
    """The container's processes that were seen to start a holder more than once."""
    xid: str = ""
    xid_advice: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    verdict: Verdict | None
    reason: str
    message: str
    next_step: str

    @property
    def exit_status(self) -> int:
        return REASONS[self.reason].exit_status


def judgement(case: Case, reason: str, **facts: object) -> Judgement:
    message, next_step = say(reason, vmid=case.after.vmid, **facts)
    return Judgement(REASONS[reason].verdict, reason, message, next_step)


def of_new_run(holder: Holder, new_run_ticks: int | None) -> bool:
    """True when it cannot be of the run that the release began with: nothing of the new one is older than its init."""
    return new_run_ticks is not None and holder.process.start_time >= new_run_ticks


_DRIVER_CODES = ("nvml-missing", "driver-mismatch", "driver-not-loaded", "driver-silent")


def driver_silence(observation: Observation) -> tuple[str, str] | None:
    """(reason, detail) when the driver as a whole gave no answer at this look."""
    for spot in observation.blind_spots:
        if spot.source == "nvml" and spot.code != DETAIL_ONLY:
            code = spot.code if spot.code in _DRIVER_CODES else "driver-silent"
            return ("driver-silent" if code == "driver-not-loaded" else code), f"{spot.what}: {spot.error}"
    return None
