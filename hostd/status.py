"""What `status` shows: daemon, driver, GPUs, holders per container, the last releases. Reads only."""

from __future__ import annotations

import os
import time
from typing import Any

from hostd.case import DETAIL_ONLY
from hostd.lifecycle.records import refused_starts, slow_stops
from hostd.lock import RUN_DIR
from hostd.nodeview import NodeView, look_at_node
from hostd.sources import open_sources
from hostd.store import Store, was_at
from hostd.system.nvml import Wedged, read_wedged
from hostd.system.pidns import first_namespace
from hostd.wire import SCHEMA, ps_dict

Json = dict[str, Any]
SHOWN = 10
"""Releases that `status` shows."""


def node_status(daemon: Json | None, *, nvml_deadline_s: float, run_dir: str = RUN_DIR) -> Json:
    """The whole status; `daemon` is None when it is not the daemon's own look. A wedged driver is not asked again."""
    wedged = read_wedged(older_than_s=nvml_deadline_s)
    sources = open_sources(nvml_deadline_s=nvml_deadline_s, read_deadline_s=1.0)
    try:
        if wedged is None:
            sources.nvml.start()
        view = look_at_node(sources)
    finally:
        sources.close()
    spots = [s for s in view.blind_spots if s.code != DETAIL_ONLY]
    result = ps_dict(view.holders, view.gpus, spots)
    detail = f"{wedged.call} in pid {wedged.pid} for {wedged.age_s:.0f} s" if wedged else ""
    return result | {
        "schema": SCHEMA,
        "daemon": daemon,
        "first_pid_namespace": first_namespace(),
        "driver": {
            "present": view.driver_present,
            "version": view.driver_version,
            "nvml": "wedged" if wedged else nvml_word(view),
            "detail": detail or next((f"{s.what}: {s.error}" for s in spots if s.source == "nvml"), ""),
            "wedged": wedged_dict(wedged) if wedged else None,
        },
        "releases": release_summaries(Store(run_dir)),
        "stops": slow_stops(run_dir),
        "refused": refused_starts(run_dir),
    }


def wedged_dict(wedged: Wedged) -> Json:
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - wedged.age_s))
    return {"pid": wedged.pid, "since": since, "call": wedged.call, "age_s": round(wedged.age_s, 1)}


def nvml_word(view: NodeView) -> str:
    """`ok`, `none` (no driver), `missing`, `mismatch` or `silent`."""
    if not view.driver_present:
        return "none"
    codes = {s.code for s in view.blind_spots if s.source == "nvml"}
    for code, word in (("nvml-missing", "missing"), ("driver-mismatch", "mismatch")):
        if code in codes:
            return word
    return "silent" if codes else "ok"


def release_summaries(store: Store, limit: int = SHOWN) -> list[Json]:
    """The last releases, newest first; one in flight has verdict null and reason `in-flight`, or `interrupted` when
    whoever was at it is gone."""
    found = []
    for record in reversed(store.all()):
        report = record.get("report")
        if not isinstance(report, dict):
            report = _without_report(record)
        found.append(
            {
                "release_id": record["release_id"],
                "vmid": record.get("vmid"),
                "trigger": record.get("trigger", ""),
                "verdict": report.get("verdict"),
                "reason": report.get("reason", ""),
                "message": report.get("message", ""),
                "started": record.get("started", ""),
                "duration_ms": report.get("duration_ms", 0),
            }
        )
        if len(found) == limit:
            break
    return found


def _without_report(record: Json) -> Json:
    """What stands in for the report of a release that is in flight, or that nobody is at any more."""
    if os.path.exists(f"/proc/{record['pid']}"):
        reason, message = "in-flight", f"at {was_at(record)}, in pid {record['pid']}"
    else:
        reason, message = "interrupted", f"cut off at {was_at(record)}; nobody has gone on with it"
    return {"verdict": None, "reason": reason, "message": message, "duration_ms": 0}


__all__ = ["node_status", "release_summaries"]
