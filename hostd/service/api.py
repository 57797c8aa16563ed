"""What the daemon's methods do: parsed in the daemon, performed in a forked worker with the same code as the CLI's."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hostd import __version__
from hostd.audit import entries_dropped
from hostd.config import Config, ContainerSettings, ResetPolicy
from hostd.engine import Surroundings, perform, require_root
from hostd.errors import InterruptedRelease
from hostd.ladder import Options
from hostd.lifecycle.event import CONTEXT_KEYS, START_PHASES, Event, Phase, parse_context
from hostd.nodeview import find_pid, observe
from hostd.selection import is_gpu_selector, is_pid_selector
from hostd.service.interface import INTERFACE
from hostd.service.jobs import stopping_error
from hostd.service.varlink import Params, invalid_parameter
from hostd.service.worker import Context, Emit, Forked
from hostd.sources import open_sources
from hostd.status import node_status
from hostd.stream import EventListener
from hostd.system.journal import Journal

Json = dict[str, Any]
HIGHEST_VMID = 999_999_999
COUNTS = ("connections", "workers", "queued", "refused", "driver_hangs")
FLUSH_S = 1.0
"""For the last entries of a worker that is told to stop: systemd ends everything soon after the daemon itself."""


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    vmid: int
    options: Options
    release_id: str


@dataclass(frozen=True, slots=True)
class LookRequest:
    vmids: tuple[int, ...]
    pid: int = 0
    daemon: Json | None = None
    nvml_deadline_s: float = 10.0


@dataclass(frozen=True, slots=True)
class EventRequest:
    event: Event
    config: Config


class Api:
    """Builds the method table. `config()` is the configuration in force, `facts()` what Status says of the daemon."""

    def __init__(self, config: Callable[[], Config], facts: Callable[[], Json]) -> None:
        self._config = config
        self._facts = facts
        self.on_pre_stop: Callable[[int], None] = lambda vmid: None
        """Arms the stop watchdog."""

    def methods(self) -> dict[str, Forked]:
        return {
            f"{INTERFACE}.Release": Forked(self.parse_release, run_release, graceful=True, streams=True),
            f"{INTERFACE}.Verify": Forked(self.parse_verify, run_release, streams=True, lane="look"),
            f"{INTERFACE}.Observe": Forked(self.parse_observe, run_observe, lane="look"),
            f"{INTERFACE}.Map": Forked(self.parse_map, run_map, lane="look"),
            f"{INTERFACE}.Status": Forked(self.parse_status, run_status, lane="look"),
            f"{INTERFACE}.Event": Forked(
                self.parse_event, run_event, graceful=True, streams=True, on_disconnect="continue"
            ),
        }

    def parse_release(self, params: Params) -> ReleaseRequest:
        vmid = params.integer("vmid", 1, HIGHEST_VMID)
        release_id = params.text_or("release_id", "", 36)
        if release_id and not all(c in "0123456789abcdef-" for c in release_id):
            raise invalid_parameter("release_id", "expected a UUID in lower case")
        settings = self._config().for_container(vmid)
        options = release_options(params.section("options"), settings, self._config().reset.services)
        params.no_others()
        return ReleaseRequest(vmid, options, release_id or str(uuid.uuid4()))

    def parse_verify(self, params: Params) -> ReleaseRequest:
        vmid = params.integer("vmid", 1, HIGHEST_VMID)
        options = Options(
            limits=self._config().for_container(vmid).limits,
            gpu=selector(params, "gpu", is_gpu_selector),
            pid=selector(params, "pid", is_pid_selector),
            verify_memory=params.flag_or("verify_memory", True),
            dry_run=True,
            trigger="verify",
        )
        params.no_others()
        return ReleaseRequest(vmid, options, "")

    def parse_observe(self, params: Params) -> LookRequest:
        vmids = params.integers_or("vmids", (), 1, HIGHEST_VMID)
        params.no_others()
        return LookRequest(vmids, nvml_deadline_s=self._config().nvml.deadline_s)

    def parse_map(self, params: Params) -> LookRequest:
        request = LookRequest((params.integer("vmid", 1, HIGHEST_VMID),), params.integer("pid", 1, 1 << 22))
        params.no_others()
        return request

    def parse_event(self, params: Params) -> EventRequest:
        vmid = params.integer("vmid", 1, HIGHEST_VMID)
        phase = params.choice("phase", tuple(Phase))
        source = params.text_or("source", "hookscript", 32)
        given = params.section("context")
        context = parse_context({key: given.text_or(key, "") for key in CONTEXT_KEYS})
        params.no_others()
        event = Event(vmid, Phase(phase), source, context)
        if event.phase is Phase.PRE_STOP:
            self.on_pre_stop(vmid)
        return EventRequest(event, self._config())

    def parse_status(self, params: Params) -> LookRequest:
        params.no_others()
        return LookRequest((), daemon=self._facts(), nvml_deadline_s=self._config().nvml.deadline_s)


def selector(given: Params, key: str, could_be: Callable[[str], bool]) -> str | None:
    """What selects a GPU or a process; nonsense is refused before anything is looked at, as on the command line."""
    text = given.text_or(key, None)
    if text is not None and not could_be(text):
        raise invalid_parameter(given.path(key), "selects nothing that could exist")
    return text


def release_options(given: Params, settings: ContainerSettings, services: tuple[str, ...]) -> Options:
    """ReleaseOptions over what is configured for the container."""
    limits = settings.limits
    timeout_s = given.number_or("timeout_s", limits.timeout_s, 0, 86_400)
    if timeout_s <= 0:
        raise invalid_parameter(given.path("timeout_s"), "expected more than 0: a limit of nothing is no release either")
    options = Options(
        limits=replace(
            limits,
            grace_s=given.number_or("grace_s", limits.grace_s, 0, 86_400),
            timeout_s=timeout_s,
        ),
        now=given.flag_or("now", False),
        dry_run=given.flag_or("dry_run", False),
        stop=given.flag_or("stop", False),
        stop_units=given.flag_or("stop_units", settings.stop_units),
        reset=given.flag_or("reset", False),
        auto_reset=settings.reset is ResetPolicy.AUTO,
        reset_services=services,
        verify_memory=given.flag_or("verify_memory", True),
        wait=given.flag_or("wait", True),
        gpu=selector(given, "gpu", is_gpu_selector),
        pid=selector(given, "pid", is_pid_selector),
        trigger=given.text_or("trigger", "api", 64),
    )
    given.no_others()
    return options


def run_release(request: ReleaseRequest, emit: Emit, context: Context) -> Mapping[str, object]:
    """Release and Verify: progress while it runs, then the report."""
    require_root()
    limits = request.options.limits
    sources = open_sources(nvml_deadline_s=limits.nvml_deadline_s, read_deadline_s=limits.read_deadline_s)
    journal = Journal(stderr=True, on_drop=entries_dropped)
    vmid = request.vmid

    def waits(pid: int, since_s: float) -> None:
        what = "another release of this container" + (f" (pid {pid})" if pid else "")
        emit({"progress": {"event": "waiting", "vmid": vmid, "what": what, "since_s": round(since_s, 1)}})

    around = Surroundings(
        owner="daemon",
        listener=EventListener(lambda event: emit({"progress": event})),
        journal=journal,
        caller_uid=context.caller.uid,
        caller_pid=context.caller.pid,
        on_wait=waits,
    )
    try:
        report = perform(sources, vmid, request.options, around, context.cancel, release_id=request.release_id)
        if report["reason"] == "interrupted" and context.cancel.handed_over:
            raise stopping_error()  # the caller goes on with it, or the next daemon
        return {"report": report}
    finally:
        sources.close()
        journal.close(FLUSH_S if context.cancel.requested else 0.0)


def run_event(request: EventRequest, emit: Emit, context: Context) -> Mapping[str, object]:
    """A lifecycle event: first "accepted" with the budget of the phase, progress, then what the hook is to say."""
    from hostd.lifecycle.handling import Around
    from hostd.lifecycle.here import nvml_deadline_s
    from hostd.lifecycle.phases import Lifecycle, guarded
    from hostd.nodes import make_nodes_by_unit

    require_root()
    event, settings = request.event, request.config.for_container(request.event.vmid)
    hook = settings.hook
    budget_s = hook.pre_start_budget_s if event.phase in START_PHASES else hook.budget_s
    emit({"progress": {"event": "accepted", "vmid": event.vmid, "since_s": budget_s}})
    deadline_s = nvml_deadline_s(event.phase, hook, request.config)
    sources = open_sources(nvml_deadline_s=deadline_s, read_deadline_s=settings.limits.read_deadline_s)
    journal = Journal(stderr=True, on_drop=entries_dropped)
    around = Around(
        owner="daemon",
        journal=journal,
        cancel=context.cancel,
        listener=EventListener(lambda progress: emit({"progress": progress})),
        watched=True,
        make_nodes=make_nodes_by_unit,
        caller_uid=context.caller.uid,
        caller_pid=context.caller.pid,
    )
    try:
        outcome = guarded(Lifecycle(sources, event, request.config, around), journal)
    except InterruptedRelease as exc:
        if context.cancel.handed_over:
            raise stopping_error() from exc  # the hook goes on with it, or the next daemon
        raise
    finally:
        sources.close()
        journal.close(FLUSH_S if context.cancel.requested else 0.0)
    return {
        "allow": outcome.allow,
        "message": "\n".join(outcome.messages),
        "next_step": outcome.next_step,
        "report": outcome.report if event.phase is not Phase.WATCHDOG else None,
    }


def run_observe(request: LookRequest, _emit: Emit, _context: Context) -> Mapping[str, object]:
    sources = open_sources(nvml_deadline_s=request.nvml_deadline_s, read_deadline_s=1.0)
    try:
        sources.nvml.start()
        return observe(sources, request.vmids)
    finally:
        sources.close()


def run_map(request: LookRequest, _emit: Emit, _context: Context) -> Mapping[str, object]:
    sources = open_sources(nvml_deadline_s=1.0, read_deadline_s=1.0)
    try:
        vmid = request.vmids[0]
        return {"vmid": vmid, "ns_pid": request.pid, "matches": find_pid(sources, vmid, request.pid)}
    finally:
        sources.close()


def run_status(request: LookRequest, _emit: Emit, _context: Context) -> Mapping[str, object]:
    return node_status(request.daemon, nvml_deadline_s=request.nvml_deadline_s)


class DaemonFacts:
    """What Status says of the daemon itself."""

    def __init__(self) -> None:
        from hostd.system.pidns import first_namespace

        now = time.time()
        self.since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        self.first_pid_namespace = first_namespace()
        self.config_path = ""
        self.config_error = ""
        self.counts: Callable[[], dict[str, int]] = lambda: dict.fromkeys(COUNTS, 0)

    def __call__(self) -> Json:
        return {
            "version": __version__,
            "pid": os.getpid(),
            "since": self.since,
            "first_pid_namespace": self.first_pid_namespace,
            "config": self.config_path,
            "config_error": self.config_error,
            **self.counts(),
        }


__all__ = ["Api", "DaemonFacts"]
