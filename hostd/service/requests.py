"""The requests of `io.pve.GpuRelease` as types: parameters in, dataclasses out, and the way back for the caller."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hostd.ladder import Limits, Options
from hostd.service.varlink import Params

VMID_MIN, VMID_MAX = 1, 999_999_999
"""Proxmox's own upper bound; below 100 it has none of its own, plain LXC may."""
PID_MAX = 2**22
"""PID_MAX_LIMIT of the kernel."""

DISCONNECT = ("cancel", "continue")


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    vmid: int
    options: Options


@dataclass(frozen=True, slots=True)
class ObserveRequest:
    vmids: tuple[int, ...] | None
    """None: all containers and the host."""


@dataclass(frozen=True, slots=True)
class VerifyRequest:
    vmid: int
    options: Options


@dataclass(frozen=True, slots=True)
class MapRequest:
    vmid: int
    pid: int


@dataclass(frozen=True, slots=True)
class EventRequest:
    vmid: int
    phase: str
    source: str
    context: dict[str, str]


PHASES = ("pre-start", "post-start", "pre-stop", "post-stop", "exec-start-pre", "exec-stop-post")
SOURCES = ("hookscript", "drop-in")


def _vmid(params: Params) -> int:
    return params.integer("vmid", VMID_MIN, VMID_MAX)


def parse_release(params: Params, defaults: Options | None = None) -> ReleaseRequest:
    """`defaults`: what holds where the caller says nothing (the configuration of that container)."""
    base = defaults or Options(trigger="api")
    vmid = _vmid(params)
    params.choice_or("on_disconnect", "cancel", DISCONNECT)  # the server's business
    given = params.section("options")
    options = replace(
        base,
        limits=_limits(given, base.limits),
        now=given.flag_or("now", base.now),
        dry_run=given.flag_or("dry_run", base.dry_run),
        stop=given.flag_or("stop", base.stop),
        stop_units=given.flag_or("stop_units", base.stop_units),
        reset=given.flag_or("reset", base.reset),
        verify_memory=given.flag_or("verify_memory", base.verify_memory),
        wait=given.flag_or("wait", base.wait),
        gpu=given.text_or("gpu", base.gpu, 128),
        pid=given.text_or("pid", base.pid, 32),
        trigger=given.text_or("trigger", base.trigger, 64),
    )
    given.no_others()
    params.no_others()
    return ReleaseRequest(vmid, options)


def _limits(given: Params, base: Limits) -> Limits:
    return replace(
        base,
        grace_s=given.number_or("grace_s", base.grace_s, 0, 86400),
        timeout_s=given.number_or("timeout_s", base.timeout_s, 0, 86400),
    )


def release_parameters(vmid: int, options: Options, on_disconnect: str = "cancel") -> dict[str, object]:
    """What `parse_release` turns into the same request again."""
    return {
        "vmid": vmid,
        "on_disconnect": on_disconnect,
        "options": {
            "now": options.now,
            "dry_run": options.dry_run,
            "stop": options.stop,
            "stop_units": options.stop_units,
            "reset": options.reset,
            "verify_memory": options.verify_memory,
            "wait": options.wait,
            "gpu": options.gpu,
            "pid": options.pid,
            "grace_s": options.limits.grace_s,
            "timeout_s": options.limits.timeout_s,
            "trigger": options.trigger,
        },
    }


def parse_observe(params: Params) -> ObserveRequest:
    vmids = params.integers_or("vmids", None, VMID_MIN, VMID_MAX)
    params.no_others()
    return ObserveRequest(vmids or None)


def parse_verify(params: Params) -> VerifyRequest:
    base = Options(trigger="api", dry_run=True)
    request = VerifyRequest(
        _vmid(params),
        replace(
            base,
            gpu=params.text_or("gpu", None, 128),
            pid=params.text_or("pid", None, 32),
            verify_memory=params.flag_or("verify_memory", True),
        ),
    )
    params.no_others()
    return request


def parse_map(params: Params) -> MapRequest:
    request = MapRequest(_vmid(params), params.integer("pid", 1, PID_MAX))
    params.no_others()
    return request


def parse_nothing(params: Params) -> None:
    params.no_others()


def parse_event(params: Params) -> EventRequest:
    params.choice_or("on_disconnect", "continue", DISCONNECT)
    request = EventRequest(
        _vmid(params),
        params.choice("phase", PHASES),
        params.choice("source", SOURCES),
        params.texts("context"),
    )
    params.no_others()
    return request
