"""What one release knows while it climbs: the looks so far, who was dealt with, who may be signalled now."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from hostd.cancel import Cancel
from hostd.case import Handover, Selection, driver_silence, of_new_run
from hostd.clock import boot_ticks_now
from hostd.events import Listener
from hostd.figures import handovers
from hostd.ladder import Options, Resume
from hostd.lineage import Lineage
from hostd.model import BlindSpot, Holder, Observation, ProcessRef, Report, Stuck
from hostd.observe import Observer
from hostd.sources import Sources

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostd.system.kmsg import Xid
    from hostd.xid import XidWatch

LAST_LOOK_S = 2.0
"""Driver and processes get at least this, each, also when the time is up: the verdict rests on the last look."""


@dataclass(slots=True)
class Subject:
    """Which container, and what its configuration says about GPUs (paths as it names them)."""

    vmid: int
    own_minors: frozenset[int] = frozenset()
    blind_spots: tuple[BlindSpot, ...] = ()
    """What could not be read of it: part of every look."""
    exists: Callable[[], bool] = lambda: True


class Climb:
    """Looks, and remembers between looks. The parts of a release share one; `begin` with the first look, then `look`."""

    first: Observation
    """Before the first rung."""
    latest: Observation | None = None
    """What an interruption can report; None before `begin`."""

    def __init__(
        self,
        sources: Sources,
        subject: Subject,
        options: Options,
        listener: Listener,
        cancel: Cancel,
        report: Report,
        resume: Resume | None,
    ) -> None:
        self.sources = sources
        self.subject = subject
        self.options = options
        self.listener = listener
        self.cancel = cancel
        self.report = report
        self.resume = resume
        self.observer = Observer(sources, subject.vmid, subject.blind_spots)
        self.lineage = Lineage(sources, self.observer.view)
        self.selection = Selection()
        self.begun_s = time.monotonic()
        self.deadline_s = self.begun_s + options.limits.timeout_s
        self.begun_ticks = boot_ticks_now()
        if resume is not None and resume.begun_ticks is not None:
            self.begun_ticks = resume.begun_ticks
        self.baseline_mib = dict(resume.baseline_mib) if resume else {}
        """GPU minor -> baseline that wins over the first look's."""
        self.minors: set[int] = set()
        """The GPUs that are verified."""
        self.dealt: dict[ProcessRef, Holder] = {}
        self.asked: set[ProcessRef] = set()
        """Holders whose supervisor has begun to stop them."""
        self.killed: set[ProcessRef] = set()
        self.returned: dict[ProcessRef, Holder] = {}
        """Holders that started after our first signal."""
        self.stuck: list[Stuck] = []
        """Of the targets that SIGKILL did not end while nothing moved."""
        self.silent = False
        """The driver did not answer when it was asked last: it is asked again at the end, not after each rung."""
        self.handovers: list[Handover] = []
        self.first_signal_ticks: int | None = None
        self.new_run_ticks: int | None = None
        """Start of an init that the container did not have when the release began: what is of its run is left alone."""
        self.falling = False
        """Memory was, when we stopped waiting for it."""
        self.restless = False
        """Holders still came back after the last round, whatever the last look happens to show."""
        self.xids: XidWatch | None = None
        self.xid: Xid | None = None
        """The driver reported this in the middle: no further signal."""
        self._answered: Observation | None = None
        """The last look at which the driver answered."""

    def close(self) -> None:
        self.observer.close()
        if self.xids is not None:
            self.xids.close()

    # --- looking ---

    def look_first(self) -> Observation:
        """A driver that hangs may take a part of the time only: what comes after needs some, too."""
        limits = self.options.limits
        part_s = max(0.5, limits.timeout_s / 4)
        return self.observer.look(
            nvml_deadline_s=min(limits.nvml_deadline_s, part_s), budget_s=max(LAST_LOOK_S, part_s)
        )

    def begin(self, first: Observation) -> None:
        self.first = self.latest = first
        self.silent = driver_silence(first) is not None
        self._answered = None if self.silent else first
        self._note_new_run(first)  # one that goes on where another was cut off may come too late

    def look(self, *, nvml: bool) -> Observation:
        """The next look, and what it says about the container's run, about holders that came back and about others."""
        budget_s = max(LAST_LOOK_S, self.deadline_s - time.monotonic())
        observation = self.observer.look(nvml=nvml, nvml_deadline_s=self.driver_limit_s(), budget_s=budget_s)
        self.latest = observation
        self._note_new_run(observation)
        self._note_handovers(observation)
        holders = self.selected(observation)
        self.minors |= self.minors_of(h for h in holders if not of_new_run(h, self.new_run_ticks))
        fresh = [h for h in self.targets(observation) if h.ref not in self.dealt]
        self.lineage.note(fresh)
        since = self.first_signal_ticks
        self.returned |= {h.ref: h for h in fresh if since is not None and h.process.start_time >= since}
        if fresh or nvml:
            self.listener.observed(self.report, observation, holders)
        return observation

    def _note_new_run(self, observation: Observation) -> None:
        """The container was started again: an init that is younger than this release, or a cgroup that is another one
        (DESIGN 4, "Killing by cgroup never hits a new incarnation"; no signal does)."""
        old = self.first.inits if self.resume is None else frozenset[ProcessRef]()
        # A first look may meet it, too: it takes as long as the driver does. One of the tick that we began in is older.
        young = [
            init.start_time
            for init in observation.inits
            if init.start_time > self.begun_ticks or (init not in old and init.start_time == self.begun_ticks)
        ]
        if not young and observation.incarnation not in (None, self.first.incarnation):
            young = [self.begun_ticks]  # its cgroup was made anew, its init was not met
        if young:
            self.new_run_ticks = min([*young, *([self.new_run_ticks] if self.new_run_ticks is not None else [])])

    def _note_handovers(self, observation: Observation) -> None:
        before = self._answered
        if observation.nvml_asked:
            self.silent = driver_silence(observation) is not None
        if not observation.nvml_asked or self.silent:
            return
        self._answered = observation
        if before is None:
            return
        for gpu in observation.gpus:
            was = before.gpu(gpu.info.minor)
            if was is not None and gpu.info.minor in self.minors:
                gone = [ref.pid for ref in self.dealt if ref.pid in was.own_clients]
                self.handovers += handovers(was, gpu, gone)

    def recheck(self, pid: int) -> ProcessRef | None:
        """The identity of a pid, last thing before a signal, if the container still owns it now and it is not of a run
        that began since the last look: such a process was met by its pid in the driver's list, or in a list of the
        container's processes that was read again, before its init was."""
        ref = self.observer.recheck(pid)
        if ref is None or ref.start_time < self.begun_ticks or self._is_same_run(pid):
            return ref
        return None

    def _is_same_run(self, pid: int) -> bool:
        """The cgroup is the one of the last look and its init lives, or the process is in the namespace of that init."""
        seen = self.latest
        if seen is None:
            return True
        try:
            cgroup = self.sources.cgroups.open(self.subject.vmid)
            if cgroup is not None:
                with cgroup:
                    if seen.incarnation not in (None, cgroup.inode):
                        return False
            if seen.init is None or self.sources.procfs.read_ref(seen.init.pid) == seen.init:
                return True
            process = self.sources.procfs.read_process(pid)
            return process is not None and self.observer.view.is_inside(process)
        except OSError:
            return False

    def driver_limit_s(self) -> float:
        """How long one answer of the driver may take now: a part of the time as long as KILL may still be needed, then
        what is left of it, and never less than the last look needs."""
        left_s = self.deadline_s - time.monotonic()
        limit_s = max(LAST_LOOK_S, left_s) if self.killed else max(0.5, left_s / 4)
        return min(self.options.limits.nvml_deadline_s, limit_s)

    # --- choosing ---

    def selected(self, observation: Observation) -> list[Holder]:
        return [h for h in observation.holders if self.selection.takes(h)]

    def targets(self, observation: Observation) -> list[Holder]:
        """Who may be signalled: not what belongs to a new run, never the init unless that is allowed."""
        return [
            h
            for h in self.selected(observation)
            if h.targetable and not of_new_run(h, self.new_run_ticks) and (self.options.stop or not h.is_init)
        ]

    def dying(self, observation: Observation) -> list[Holder]:
        return [h for h in self.selected(observation) if h.dying]

    def minors_of(self, holders: Iterable[Holder]) -> set[int]:
        """The GPUs that are verified for holders: every one that they had open (DESIGN 4, Verify).

        With `--gpu` those whose memory they held: a CUDA process opens every node that it can see (FACTS).
        """
        if self.selection.minors is not None:
            return {m for h in holders for m in h.gpus}
        return {m for h in holders for m in (*h.gpus, *h.open_gpus)}

    def own_minors(self) -> frozenset[int]:
        """The GPUs of the configuration, as far as they are selected."""
        wanted = self.selection.minors
        return self.subject.own_minors if wanted is None else self.subject.own_minors & wanted

    def uuids(self) -> list[str]:
        """Of the GPUs that are verified."""
        return [g.info.uuid for g in self.first.gpus if g.info.minor in self.minors]

    def lives(self, ref: ProcessRef) -> bool:
        """The process exists, whatever it holds: who has let go of the GPU and goes on has not exited."""
        process = self.sources.procfs.read_process(ref.pid)
        return process is not None and process.ref == ref and not process.is_zombie

    # --- time, and the driver's own word against going on ---

    def time_is_up(self) -> bool:
        return time.monotonic() >= self.deadline_s

    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s

    def now_ms(self) -> int:
        """Since the release began."""
        return round(self.elapsed_s() * 1000)

    def is_told_to_stop(self, observation: Observation) -> bool:
        """True when the driver has reported an error that more signals would only make worse (CASES, Xid 119)."""
        if self.xid is None and self.xids is not None:
            gpus = [g.info.pci_bus_id for g in observation.gpus or self.first.gpus if g.info.minor in self.minors]
            self.xid = self.xids.fatal(gpus)
        return self.xid is not None
