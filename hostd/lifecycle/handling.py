"""One event while it is dealt with: what is known of the container, what is remembered, and what is said about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hostd import audit
from hostd.cancel import Cancel
from hostd.config import Config, ContainerSettings
from hostd.engine import configured_minors
from hostd.errors import BusyError, UnreadableError
from hostd.events import Listener, Silent
from hostd.lifecycle.clearing import Cleared, Taken, clear, container_runs
from hostd.lifecycle.event import START_PHASES, Event, Phase
from hostd.lifecycle.records import Record, Records, Snapshot, Started, Watched
from hostd.lock import RUN_DIR, ReleaseLock, acquire
from hostd.nodes import MadeNodes
from hostd.observe import Observer
from hostd.sources import Sources
from hostd.system.journal import Journal
from hostd.system.pve import ContainerConfig, Pve

Json = dict[str, Any]

_ASKS_THE_DRIVER = frozenset({Phase.PRE_START, Phase.PRE_STOP, Phase.POST_STOP})
"""The phases that come first; a drop-in's mostly finds everything done."""


@dataclass(slots=True)
class Outcome:
    """What the caller is told. `silent`: the container is none of our business."""

    allow: bool = True
    messages: list[str] = field(default_factory=list)
    next_step: str = ""
    report: Json | None = None
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Around:
    """Where an event is dealt with."""

    owner: str = "hook"
    """`daemon` or `hook`."""
    journal: Journal | None = None
    pve: Pve = field(default_factory=Pve)
    run_dir: str = RUN_DIR
    cancel: Cancel = field(default_factory=Cancel)
    listener: Listener = field(default_factory=Silent)
    watched: bool = False
    """The daemon watches this stop."""
    make_nodes: Callable[[Iterable[str]], MadeNodes] = lambda paths: MadeNodes()
    caller_uid: int | None = None
    caller_pid: int | None = None


@dataclass(slots=True)
class Known:
    """What is known of the container before anything is done."""

    config: ContainerConfig | None
    unreadable: str = ""
    minors: frozenset[int] = frozenset()

    @property
    def wants_gpu(self) -> bool:
        return self.config is not None and self.config.wants_gpu


class Handling:
    """What the phases share."""

    def __init__(self, sources: Sources, event: Event, config: Config, around: Around) -> None:
        self.sources = sources
        self.event = event
        self.around = around
        self.settings: ContainerSettings = config.for_container(event.vmid)
        self.records = Records(around.run_dir)
        self.outcome = Outcome()
        self.begun_s = time.monotonic()
        self.release_id = ""
        """Of the release that this event led to."""

    def elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s

    def begin(self) -> None:
        """The driver works while we look at configuration and processes, where an earlier event was about a GPU."""
        if self.event.phase in _ASKS_THE_DRIVER and self.is_known():
            self.sources.nvml.start()

    # --- which container ---

    def is_known(self) -> bool:
        """An earlier event was about a GPU. Cheap, and a hint only."""
        vmid = self.event.vmid
        return self.records.read(Started, vmid) is not None or self.records.read(Snapshot, vmid) is not None

    def known(self) -> Known:
        """Reads the container's configuration."""
        try:
            config = self.around.pve.read_container(self.event.vmid)
        except UnreadableError as exc:
            return Known(None, exc.message)
        return Known(config, "", configured_minors(config.gpu_paths) if config else frozenset())

    def concerns_us(self, known: Known, taken: Taken) -> bool:
        """False for a container without GPU in its configuration, without holder and without snapshot."""
        if known.wants_gpu and self.event.phase in _ASKS_THE_DRIVER:
            self.sources.nvml.start()
        if known.wants_gpu or self.records.read(Snapshot, self.event.vmid) is not None:
            return True
        if self.event.phase not in START_PHASES and self.records.read(Started, self.event.vmid) is not None:
            return True
        return self._holds(taken)

    def _holds(self, taken: Taken) -> bool:
        """A process in the container's cgroup holds a GPU."""
        if taken.payload is None or not taken.payload.populated():
            return False
        observer = Observer(self.sources, self.event.vmid)
        try:
            return bool(observer.look(nvml=False, budget_s=self.look_s()).holders)
        finally:
            observer.close()

    def look_s(self) -> float:
        """For one look at what processes have open: a container that makes them faster decides nothing here."""
        hook = self.settings.hook
        return max(1.0, min(hook.budget_s, hook.pre_start_budget_s) / 4)

    # --- leftovers in its cgroups ---

    def clear(self, taken: Taken, *, with_monitor: bool) -> list[Cleared]:
        """Ends what is left in the container's cgroups, if it does not run, and without a release."""
        limits = self.settings.limits
        deadline_s = time.monotonic() + min(self.settings.hook.budget_s, 2 * limits.kill_grace_s)
        return [
            clear(
                self.sources,
                cgroup,
                settle_s=0.25,
                grace_s=limits.kill_grace_s,
                deadline_s=deadline_s,
                may_kill=lambda: container_runs(self.sources, self.event.vmid) is None,
                check=self.around.cancel.check,
            )
            for cgroup in (taken.payload, taken.monitor if with_monitor else None)
            if cgroup is not None
        ]

    def clear_again(self, taken: Taken) -> None:
        """A known stop announced once more: something may have come into the cgroup since. No second record."""
        if taken.payload is None or not taken.payload.populated():
            return
        self.on_cleared(self.clear(taken, with_monitor=False))

    def on_cleared(self, cleared: Cleared | list[Cleared]) -> None:
        """Says what was left behind and what became of it."""
        for one in cleared if isinstance(cleared, list) else [cleared]:
            if not one.processes:
                continue
            names = ", ".join(f"{pid} ({comm})" for pid, comm in one.names)
            if one.spared:
                self.say(f"{names} in {one.cgroup} left alone: the container runs")
                continue
            self.send(audit.cleared(self.context(), one.cgroup, one.names, empty=one.empty))
            self.say(f"left behind in {one.cgroup}: {names}; {'cleared' if one.empty else 'NOT cleared'}")
            for stuck in one.stuck:
                self.say(
                    f"pid {stuck.ref.pid} cannot die: SIGKILL is pending, state {stuck.state}, waiting in "
                    f"{stuck.wchan or 'an unknown place'}; what it waits for has to end, or the node to be rebooted"
                )

    # --- what is said and remembered ---

    def lock(self, timeout_s: float) -> ReleaseLock | None:
        """None when somebody else has it for longer than that, or when there is no lock to be had."""
        try:
            return acquire(
                self.event.vmid,
                wait=True,
                timeout_s=timeout_s,
                run_dir=self.around.run_dir,
                check=self.around.cancel.check,
            )
        except BusyError:
            return None
        except OSError as exc:
            self.send(audit.internal_error("lock", str(exc), self.context()))
            return None

    def context(self) -> audit.Context:
        return audit.Context(
            vmid=self.event.vmid,
            release_id=self.release_id,
            trigger=self.event.trigger,
            phase=self.event.phase.value,
            caller_uid=self.around.caller_uid,
            caller_pid=self.around.caller_pid,
        )

    def send(self, entry: audit.Entry) -> None:
        if self.around.journal is not None:
            self.around.journal.send(entry)

    def say(self, text: str) -> None:
        """Into the task log."""
        prefix = f"container {self.event.vmid}: "
        self.outcome.messages.append(text.removeprefix(prefix))

    def write(self, record: Record) -> None:
        if not self.records.write(record):
            self.send(audit.record_missing(self.context(), self.records.problem))

    def note_driver(self) -> None:
        """Says that a driver call hangs; in the daemon its own watch does."""
        if self.around.owner == "daemon" or self.outcome.silent:
            return
        if wedged := self.sources.nvml.wedged():
            self.send(audit.nvml_wedged(wedged.pid, wedged.call, wedged.age_s, self.context()))

    def drop_stop(self) -> None:
        self.records.drop(Snapshot, self.event.vmid)
        self.records.drop(Watched, self.event.vmid)

    def done(self, outcome: str, detail: str = "") -> None:
        """The entry that closes the event."""
        context = self.context()
        detail = detail.removeprefix(f"container {self.event.vmid}: ")
        more = [f"{k}={v}" for k, v in self.event.context.items() if k in ("SERVICE_RESULT", "EXIT_STATUS")]
        text = "; ".join(
            part for part in (detail, " ".join(more) if self.event.phase is Phase.EXEC_STOP_POST else "") if part
        )
        self.send(audit.phase_done(context, outcome, self.elapsed_s(), detail=text))
