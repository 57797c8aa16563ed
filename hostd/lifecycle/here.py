"""A lifecycle event dealt with in the hook's own process: no daemon, the same code, the same lock."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

from hostd import audit
from hostd.cancel import Cancel
from hostd.config import DEFAULT_PATH, BrokenConfigError, Config, HookSettings, load
from hostd.engine import raise_descriptor_limit
from hostd.errors import PgrError
from hostd.lifecycle.event import Event, Phase, parse_context
from hostd.lifecycle.handling import Around
from hostd.lifecycle.phases import Lifecycle, guarded
from hostd.nodes import make_nodes
from hostd.sources import open_sources
from hostd.system.journal import Journal

Json = dict[str, Any]
LEAST_S = 5.0
"""Given to the work here, however much of the budget a silent daemon has used."""
JOURNAL_S = 1.0
PRE_STOP_S = 5.0
"""The longest that pre-stop waits for the driver."""


def deal_with(vmid: int, phase: str, source: str, context: dict[str, str], why: str, spent_s: float) -> Json:
    """The reply as the daemon's Event method gives it. `why`: why not the daemon; `spent_s`: on finding that out."""
    event = Event(vmid, Phase(phase), source, parse_context(context))
    journal = Journal(on_drop=audit.entries_dropped)
    cancel = Cancel()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    raise_descriptor_limit()  # the caller's is unfiltered (PCT_FLOWS 3)
    try:
        config = read_config(event, journal)
        hook = config.for_container(vmid).hook
        config = with_budgets(config, vmid, lambda budget_s: max(LEAST_S, budget_s - spent_s))
        deadline_s = nvml_deadline_s(event.phase, hook, config)
        read_s = config.for_container(vmid).limits.read_deadline_s
        try:
            sources = open_sources(nvml_deadline_s=deadline_s, read_deadline_s=read_s)
        except PgrError as exc:
            return {"allow": True, "message": exc.message, "next_step": exc.next_step}
        around = Around(
            owner="hook",
            journal=journal,
            cancel=cancel,
            make_nodes=make_nodes,
            caller_uid=os.getuid(),
            caller_pid=os.getppid(),
        )
        try:
            outcome = guarded(Lifecycle(sources, event, config, around), journal)
        finally:
            sources.close()
        if outcome.silent:
            return {"allow": True, "message": ""}
        note = [f"pve-gpu-hostd was not used ({why})"] if outcome.messages and "no daemon" not in why else []
        return {
            "allow": outcome.allow,
            "message": "\n".join([*outcome.messages, *note]),
            "next_step": outcome.next_step,
            "report": outcome.report,
        }
    finally:
        journal.close(JOURNAL_S)
        cancel.close()


def read_config(event: Event, journal: Journal) -> Config:
    """The configuration; a broken one is replaced by the built-in defaults, because a typo must not keep a container
    from starting (DESIGN 8). Said in the journal."""
    try:
        config = load(DEFAULT_PATH, must_exist=False)
        problems = config.notices
    except BrokenConfigError as exc:
        config, problems = Config(), exc.problems
    if problems:
        context = audit.Context(vmid=event.vmid, phase=event.phase.value, trigger=event.trigger)
        journal.send(audit.config_failed(DEFAULT_PATH, problems, instead="the built-in defaults", ctx=context))
    return config


def with_budgets(config: Config, vmid: int, shorten: Any) -> Config:
    """The same configuration with the container's hook budgets changed."""
    own = config.for_container(vmid)
    hook = replace(
        own.hook, budget_s=shorten(own.hook.budget_s), pre_start_budget_s=shorten(own.hook.pre_start_budget_s)
    )
    return replace(config, containers={**config.containers, vmid: replace(own, hook=hook)})


def nvml_deadline_s(phase: Phase, hook: HookSettings, config: Config) -> float:
    """A silent driver may not use up the budget of a phase: there is work that needs no driver."""
    if phase is Phase.PRE_STOP:
        return min(config.nvml.deadline_s, PRE_STOP_S)
    budget_s = hook.pre_start_budget_s if phase in (Phase.PRE_START, Phase.EXEC_START_PRE) else hook.budget_s
    return min(config.nvml.deadline_s, max(1.0, budget_s / 3))


__all__ = ["deal_with", "nvml_deadline_s", "read_config", "time"]
