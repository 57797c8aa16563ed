"""What an answer of the daemon, or a record on disk, must have before its readers rely on it: another version of this
product may have written it. A reader of JSON indexes only what stands here."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Shape = Any
    """A type or several, a number (that one), `[shape]` for a list of it, a dict of keys; a key with "?" behind it may be
    absent or null."""

_NUMBER = (int, float)
_TEXT = (str, type(None))
_COUNT = (int, type(None))

_PROCESS = {"pid": int, "ns_pids": [int], "start_time": int, "comm": str, "cgroup": str}
_HOLDER = {
    **_PROCESS,
    **dict.fromkeys(("cmdline", "user", "unit", "state"), str),
    **{"evidence": [str], "gpus": [int], "memory_mib": _COUNT, "inherited_from?": int},
}
_SEEN_HOLDER = {**_HOLDER, "vmid": _COUNT}
_GPU = {"index": _COUNT, "minor": int, "uuid": str, "pci_bus_id": str, "name": str, "ghost_mib": _COUNT}
_SEEN_GPU = {**_GPU, "used_mib": _COUNT, "reserved_mib": _COUNT, "total_mib?": int, "error": str}
_SPOT = {"source": str, "what": str, "error": str}
_RUNG = {"step": str, "at_ms": int, "targets": [int], "sent": int, "gone": int, "waited_ms": _NUMBER, "note?": str}
_STUCK = {"tid": int, "wchan": str, "stack": str}

REPORT: Shape = {
    **{"schema": 1, "release_id": str, "vmid": int, "trigger": str, "verdict": _TEXT, "reason": str, "message": str},
    **{"was_held": bool, "dry_run": bool, "started": str, "duration_ms": _NUMBER, "next_step": str},
    "holders": [{**_HOLDER, "fate": str, "stuck?": _STUCK}],
    "gpus": [{**_GPU, "used_mib_before": _COUNT, "used_mib_after": _COUNT, "other_holders": [_SEEN_HOLDER]}],
    "rungs": [_RUNG],
    "blind_spots": [_SPOT],
    "details?": [str],
}
_OBSERVED = {"schema": 1, "holders": [_SEEN_HOLDER], "gpus": [_SEEN_GPU], "blind_spots": [_SPOT]}
_SUMMARY = {
    **dict.fromkeys(("release_id", "trigger", "reason", "started"), str),
    **{"vmid": _COUNT, "verdict": _TEXT, "duration_ms": _NUMBER},
}
ANSWERS: dict[str, Shape] = {
    "Observe": _OBSERVED,
    "Map": {"vmid": int, "ns_pid": int, "matches": [{"pid": int, "ns_pids": [int], "comm": str}]},
    "Status": {
        **_OBSERVED,
        "first_pid_namespace?": bool,
        "daemon": {
            **{"version": str, "pid": int, "since": str, "workers": int, "config_error": str},
            "first_pid_namespace": bool,
        },
        "driver": {"present": bool, "version": str, "nvml": str, "detail": str},
        "releases": [_SUMMARY],
        "stops?": [{"vmid": int, "message": str, "next_step": str}],
        "refused?": [{"vmid": int, "since_s": _NUMBER, "message": str, "release_id": str}],
    },
}
"""By method of `io.pve.GpuRelease`."""


def fits(value: object, shape: Shape) -> bool:
    """True when everything that the shape names is there and of its type; what else is there does not matter."""
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        for key, inner in shape.items():
            if key[-1] != "?":
                if key not in value or not fits(value[key], inner):
                    return False
            elif value.get(key[:-1]) is not None and not fits(value[key[:-1]], inner):
                return False
        return True
    if isinstance(shape, list):
        return isinstance(value, list) and all(fits(item, shape[0]) for item in value)
    if isinstance(shape, int):
        return isinstance(value, int) and value == shape
    return isinstance(value, shape)
