"""One release, rebuilt from the fields of its journal entries alone, and told as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from hostd import audit
from hostd.terminal import escape, shorten


class Entry(Protocol):
    """What this module asks of a journal entry (`hostd.system.journalread.Record`)."""

    @property
    def fields(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def realtime_us(self) -> int: ...
    def get(self, name: str, default: str = "") -> str: ...
    def all(self, name: str) -> tuple[str, ...]: ...


@dataclass(slots=True)
class HolderStory:
    pid: int
    start_time: int
    comm: str = ""
    vmid: int | None = None
    """Only for somebody else's process: its container, None = the host's."""
    ns_pids: list[int] = field(default_factory=list)
    cmdline: str = ""
    user: str = ""
    unit: str = ""
    cgroup: str = ""
    memory_mib: int | None = None
    gpus: list[int] = field(default_factory=list)
    evidence: list[str] = field(default_factory=list)
    inherited_from: int | None = None
    found_ms: int = 0
    fate: str = ""
    stuck: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class RungStory:
    step: str
    begun_ms: int
    targets: list[int]
    done: bool = False
    """False: the intent is in the journal and no outcome is."""
    sent: int | None = None
    gone: int | None = None
    waited_ms: int | None = None
    outcome: str = ""
    note: str = ""


@dataclass(slots=True)
class GpuStory:
    minor: int | None
    uuid: str
    name: str = ""
    pci_bus_id: str = ""
    used_mib_before: int | None = None
    used_mib_after: int | None = None
    reserved_mib: int | None = None
    ghost_mib: int | None = None
    other_pids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Event:
    at_ms: int
    event: str
    message: str


@dataclass(slots=True)
class Story:
    release_id: str
    vmid: int | None = None
    trigger: str = ""
    phase: str = ""
    caller_uid: int | None = None
    caller_pid: int | None = None
    dry_run: bool = False
    started_us: int = 0
    """Realtime of the first entry, microseconds since the epoch."""
    duration_ms: int | None = None
    verdict: str = ""
    reason: str = ""
    message: str = ""
    next_step: str = ""
    details: list[str] = field(default_factory=list)
    exit_status: int | None = None
    was_held: bool | None = None
    holders: list[HolderStory] = field(default_factory=list)
    others: list[HolderStory] = field(default_factory=list)
    rungs: list[RungStory] = field(default_factory=list)
    gpus: list[GpuStory] = field(default_factory=list)
    blind_spots: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    gaps: list[str] = field(default_factory=list)
    """What the journal does not tell."""


# --- rebuild -------------------------------------------------------------------------------------------------------


def rebuild(entries: Iterable[Entry]) -> Story | None:
    """The story of one release from its entries, in journal order; None when there are none."""
    builder: _Builder | None = None
    for entry in entries:
        if builder is None:
            builder = _Builder(entry)
        builder.add(entry)
    return builder.finish() if builder is not None else None


class _Builder:
    def __init__(self, first: Entry) -> None:
        self.story = Story(first.get("PVE_GPU_RELEASE_ID"), started_us=first.realtime_us)
        self._kinds: set[str] = set()
        self._base_ms = _integer(first, "AT_MS") or 0

    def add(self, entry: Entry) -> None:
        kind = audit.BY_MESSAGE_ID.get(entry.get("MESSAGE_ID"))
        name = kind.name if kind is not None else entry.get("PVE_GPU_RELEASE_EVENT")
        self._kinds.add(name)
        story = self.story
        story.vmid = story.vmid if story.vmid is not None else _integer(entry, "PVE_VMID")
        story.trigger = story.trigger or entry.get("TRIGGER")
        story.phase = story.phase or entry.get("PVE_PHASE")
        story.caller_uid = story.caller_uid if story.caller_uid is not None else _integer(entry, "CALLER_UID")
        story.caller_pid = story.caller_pid if story.caller_pid is not None else _integer(entry, "CALLER_PID")
        story.dry_run = story.dry_run or entry.get("DRY_RUN") == "1"
        at_ms = self._at_ms(entry)
        story.events.append(Event(at_ms, name, entry.get("MESSAGE")))
        match name:
            case audit.HOLDER_FOUND.name:
                self._holder(entry, at_ms, story.holders)
            case audit.FOREIGN_SEEN.name:
                self._holder(entry, at_ms, story.others)
            case audit.RUNG_BEGUN.name:
                story.rungs.append(RungStory(entry.get("RUNG"), at_ms, _integers(entry, "HOLDER_PID")))
            case audit.RUNG_DONE.name:
                self._rung_done(entry, at_ms)
            case audit.HOLDER_FATE.name:
                self._fate(entry, at_ms)
            case audit.GPU_VERIFIED.name:
                story.gpus.append(_gpu(entry))
            case audit.BLIND_SPOT.name:
                story.blind_spots += entry.all("BLIND_SPOT")
            case audit.FINISHED.name | audit.REFUSED.name | audit.ABANDONED.name:
                self._finished(entry)
            case audit.ENTRIES_DROPPED.name:
                story.gaps.append(entry.get("MESSAGE"))

    def finish(self) -> Story:
        story = self.story
        if not self._kinds & {audit.STARTED.name, audit.REFUSED.name, audit.RESUMED.name}:
            story.gaps.append("its beginning is not in the journal (rotated away?)")
        for rung in story.rungs:
            if not rung.done:
                story.gaps.append(f"the outcome of {rung.step} at +{rung.begun_ms / 1000:.3f} s was not written")
        if not self._kinds & {audit.FINISHED.name, audit.REFUSED.name, audit.ABANDONED.name}:
            story.gaps.append("its end is not in the journal: still running, cut off, or not written")
        return story

    def _at_ms(self, entry: Entry) -> int:
        """By our own monotonic clock where the entry has it: the journal's wall clock may jump."""
        own = _integer(entry, "AT_MS")
        if own is not None:
            return max(0, own - self._base_ms)
        return max(0, (entry.realtime_us - self.story.started_us) // 1000)

    def _holder(self, entry: Entry, at_ms: int, into: list[HolderStory]) -> HolderStory:
        holder = HolderStory(
            _integer(entry, "HOLDER_PID") or 0,
            _integer(entry, "HOLDER_START") or 0,
            entry.get("HOLDER_COMM"),
            _integer(entry, "HOLDER_VMID"),
            _integers(entry, "HOLDER_NSPID"),
            entry.get("HOLDER_CMDLINE"),
            entry.get("HOLDER_USER"),
            entry.get("HOLDER_UNIT"),
            entry.get("HOLDER_CGROUP"),
            _integer(entry, "HOLDER_MIB"),
            _integers(entry, "GPU_MINOR"),
            list(entry.all("EVIDENCE")),
            _integer(entry, "INHERITED_FROM"),
            at_ms,
        )
        into.append(holder)
        return holder

    def _fate(self, entry: Entry, at_ms: int) -> None:
        ref = (_integer(entry, "HOLDER_PID") or 0, _integer(entry, "HOLDER_START") or 0)
        holder = next((h for h in self.story.holders if (h.pid, h.start_time) == ref), None)
        if holder is None:
            holder = self._holder(entry, at_ms, self.story.holders)
        holder.fate = entry.get("OUTCOME")
        for name in ("TID", "STATE", "WCHAN", "STACK", "KILL_PENDING", "SINCE"):
            if value := entry.get(f"STUCK_{name}"):
                holder.stuck[name.lower()] = value

    def _rung_done(self, entry: Entry, at_ms: int) -> None:
        step = entry.get("RUNG")
        rung = next((r for r in reversed(self.story.rungs) if r.step == step and not r.done), None)
        if rung is None:
            rung = RungStory(step, at_ms, _integers(entry, "HOLDER_PID"))
            self.story.rungs.append(rung)
        rung.done = True
        rung.sent, rung.gone = _integer(entry, "SENT"), _integer(entry, "GONE")
        rung.waited_ms = _integer(entry, "WAITED_MS")
        rung.outcome, rung.note = entry.get("OUTCOME"), entry.get("NOTE")

    def _finished(self, entry: Entry) -> None:
        story = self.story
        story.verdict, story.reason = entry.get("VERDICT"), entry.get("REASON")
        story.message, story.next_step = entry.get("MESSAGE"), entry.get("NEXT_STEP")
        story.details += entry.all("DETAIL")
        story.exit_status = _integer(entry, "EXIT_STATUS")
        duration = _integer(entry, "DURATION_USEC")
        story.duration_ms = duration // 1000 if duration is not None else None
        story.was_held = {"1": True, "0": False}.get(entry.get("WAS_HELD"))


def _gpu(entry: Entry) -> GpuStory:
    return GpuStory(
        _integer(entry, "GPU_MINOR"),
        entry.get("GPU_UUID"),
        entry.get("GPU_NAME"),
        entry.get("GPU_PCI"),
        _integer(entry, "VRAM_BEFORE"),
        _integer(entry, "VRAM_AFTER"),
        _integer(entry, "VRAM_RESERVED"),
        _integer(entry, "VRAM_GHOST"),
        _integers(entry, "OTHER_PID"),
    )


def _integer(entry: Entry, name: str) -> int | None:
    return _as_integer(entry.get(name))


def _integers(entry: Entry, name: str) -> list[int]:
    return [number for number in map(_as_integer, entry.all(name)) if number is not None]


def _as_integer(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None


# --- tell ----------------------------------------------------------------------------------------------------------

MAX_COMMAND = 200


def tell(story: Story, started: str) -> str:
    """Plain text, safe for a terminal; `started` = the first entry's time as people read it."""
    lines = [f"Release {story.release_id} of {_container(story)}", *_asked(story, started), *_verdict(story)]
    if story.holders or story.others:
        lines += ["", "Who held what, and how we know"]
        lines += [line for holder in story.holders for line in _holder(holder)]
        lines += [line for holder in story.others for line in _other(holder)]
    lines += ["", "What was done"]
    lines += _timeline(story)
    if story.gpus:
        lines += ["", "The driver's word on each GPU"]
        lines += [_proof(gpu) for gpu in story.gpus]
    if story.blind_spots:
        lines += ["", "What could not be read", *(f"  {spot}" for spot in story.blind_spots)]
    if story.gaps:
        lines += ["", "What the journal does not tell", *(f"  {gap}" for gap in story.gaps)]
    return "\n".join(escape(line) for line in lines)


def _container(story: Story) -> str:
    return f"container {story.vmid}" if story.vmid is not None else "an unknown container"


def _asked(story: Story, started: str) -> list[str]:
    who = f"asked for by {story.trigger or 'somebody unknown'}"
    if story.phase:
        who += f" in phase {story.phase}"
    if story.caller_uid is not None:
        who += f", uid {story.caller_uid}"
    if story.caller_pid is not None:
        who += f", pid {story.caller_pid}"
    took = f", took {_seconds(story.duration_ms)}" if story.duration_ms is not None else ""
    dry = "; a dry run: nothing was signalled" if story.dry_run else ""
    return [f"  {who}; began {started}{took}{dry}"]


def _verdict(story: Story) -> list[str]:
    if not story.reason:
        return ["  verdict: none in the journal"]
    status = f", exit status {story.exit_status}" if story.exit_status is not None else ""
    lines = [f"  verdict: {story.verdict or 'none'} ({story.reason}{status})", f"  {story.message}"]
    lines += [f"  {detail}" for detail in story.details]
    if story.next_step:
        lines.append(f"  next step: {story.next_step}")
    return lines


def _holder(holder: HolderStory) -> list[str]:
    inside = f", inside the container {' > '.join(map(str, holder.ns_pids))}" if holder.ns_pids else ""
    lines = [f"  pid {holder.pid} ({holder.comm}){inside}" + (f", user {holder.user}" if holder.user else "")]
    lines.append(f"    held {_gpus(holder.gpus)}{_mib(holder.memory_mib)}; seen by {_evidence(holder.evidence)}")
    if holder.inherited_from is not None:
        lines.append(f"    inherited from pid {holder.inherited_from}, which is gone and which the driver still names")
    if holder.unit:
        lines.append(f"    run by {holder.unit}")
    if holder.cmdline:
        lines.append(f"    command: {shorten(escape(holder.cmdline), MAX_COMMAND)}")
    if holder.fate:
        lines.append(f"    in the end: {holder.fate}")
    if holder.stuck:
        lines.append("    stuck: " + ", ".join(f"{name} {value}" for name, value in holder.stuck.items()))
    return lines


def _other(holder: HolderStory) -> list[str]:
    owner = f"container {holder.vmid}" if holder.vmid is not None else "the host"
    return [f"  pid {holder.pid} ({holder.comm}) of {owner} is on {_gpus(holder.gpus)} too; left alone"]


_EVIDENCE = {"fd": "an open descriptor", "map": "a mapping", "nvml": "the driver's list"}


def _evidence(kinds: Sequence[str]) -> str:
    return " and ".join(_EVIDENCE.get(kind, kind) for kind in kinds) or "nothing recorded"


def _gpus(minors: Sequence[int]) -> str:
    return ", ".join(f"nvidia{minor}" for minor in minors) or "control nodes only"


def _mib(mib: int | None) -> str:
    return "" if mib is None else f" with {mib} MiB"


_TOLD_ABOVE = frozenset((audit.BLIND_SPOT.name, audit.GPU_VERIFIED.name, audit.FOREIGN_SEEN.name))


def _timeline(story: Story) -> list[str]:
    prefix = f"container {story.vmid}: "
    width = len(f"{max((event.at_ms for event in story.events), default=0) / 1000:.3f}")
    return [
        f"  +{event.at_ms / 1000:>{width}.3f} s  {event.message.removeprefix(prefix)}"
        for event in story.events
        if event.event not in _TOLD_ABOVE
    ]


def _proof(gpu: GpuStory) -> str:
    name = f"nvidia{gpu.minor}" if gpu.minor is not None else "GPU"
    what = ", ".join(part for part in (gpu.name, gpu.uuid, gpu.pci_bus_id) if part)
    if gpu.used_mib_after is None:
        return f"  {name} ({what}): the driver gave no figures"
    before = "unknown" if gpu.used_mib_before is None else f"{gpu.used_mib_before} MiB"
    text = f"  {name} ({what}): {before} used before, {gpu.used_mib_after} MiB after"
    if gpu.ghost_mib is not None:
        text += f", {gpu.ghost_mib} MiB of it with no live client"
    if gpu.other_pids:
        text += f"; also on it: {', '.join(map(str, gpu.other_pids))}"
    return text


def _seconds(milliseconds: int) -> str:
    return f"{milliseconds / 1000:.3f} s"
