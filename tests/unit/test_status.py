"""`pve-gpu-release status`: what it says, and what it makes of records."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hostd.cli.status import lines
from hostd.status import release_summaries, wedged_dict
from hostd.store import Store
from hostd.system.nvml import Wedged
from tests.unit.test_store import ID, number, record, report_of

HOSTILE = "x\x1b[2J\nreleased"
GPU: dict[str, Any] = {
    "index": 0, "minor": 50, "uuid": "GPU-1", "pci_bus_id": "0000:18:00.0", "name": "NVIDIA H200", "total_mib": 1000,
    "used_mib": 700, "reserved_mib": 615, "ghost_mib": 300, "bar1_used_mib": 1, "dead_clients": [], "error": "",
}  # fmt: skip
HOLDER: dict[str, Any] = {
    "vmid": 129, "pid": 7, "ns_pids": [2], "start_time": 1, "comm": HOSTILE, "cmdline": HOSTILE, "user": "root",
    "cgroup": "/lxc/129/ns", "unit": HOSTILE, "state": "S", "evidence": ["fd"], "gpus": [50], "memory_mib": 400,
    "inherited_from": None,
}  # fmt: skip
DAEMON: dict[str, Any] = {
    "version": "1", "pid": 5, "since": "2026-01-01T00:00:00Z", "first_pid_namespace": True, "config": "", "config_error": "",
    "connections": 1, "workers": 0, "queued": 0, "refused": 0, "driver_hangs": 0,
}  # fmt: skip


def status(**changes: Any) -> dict[str, Any]:
    driver = {"present": True, "version": "580", "nvml": "ok", "detail": "", "wedged": None}
    empty: dict[str, Any] = {"gpus": [], "holders": [], "releases": [], "blind_spots": []}
    return {"schema": 1, "daemon": DAEMON, "driver": driver, **empty} | changes


def said(**changes: Any) -> str:
    return "\n".join(lines(status(**changes), colour=False))


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"daemon": None}, "not running: releases are done by the command line itself"),
        ({"daemon": DAEMON | {"workers": 2}}, "2 requests at work"),
        ({"daemon": DAEMON | {"config_error": "line 3: ladder.grace"}}, "the last good one is in force: line 3"),
        ({"daemon": DAEMON | {"first_pid_namespace": False}}, "not the machine's first PID namespace"),
        ({"daemon": None, "first_pid_namespace": False}, "not the machine's first PID namespace"),
        ({"driver": status()["driver"] | {"present": False}}, "no NVIDIA driver is loaded"),
        ({"driver": status()["driver"] | {"nvml": "wedged", "detail": "nvmlInit in pid 9 for 70 s"}}, "NVML wedged: nvmlInit"),
        ({"gpus": [GPU]}, "700 MiB of 1,000 MiB in use"),
        ({"gpus": [GPU], "holders": [HOLDER]}, "container 129: 1 holder, 400 MiB"),
        ({"holders": [HOLDER | {"vmid": None}]}, "host: 1 holder"),
        ({"blind_spots": [{"source": "proc", "what": "pid 9", "error": "denied"}]}, "could not read pid 9: denied"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_people_read(changes: dict[str, Any], text: str) -> None:
    assert text in said(**changes)


def test_no_name_reaches_the_terminal_unescaped() -> None:
    releases = [{"release_id": ID, "vmid": 129, "trigger": HOSTILE, "verdict": None, "reason": "in-flight",
                 "message": HOSTILE, "started": "2026-01-01T00:00:00.000Z", "duration_ms": 1}]  # fmt: skip
    spots = [{"source": HOSTILE, "what": HOSTILE, "error": HOSTILE}]
    driver = status()["driver"] | {"version": HOSTILE, "detail": HOSTILE}
    text = lines(
        status(
            driver=driver, gpus=[GPU | {"name": HOSTILE, "error": HOSTILE}], holders=[HOLDER], releases=releases,
            blind_spots=spots, daemon=DAEMON | {"config_error": HOSTILE},
        ),
        colour=False,
    )  # fmt: skip
    assert all(line.isprintable() for line in text), text


def test_the_last_releases_newest_first(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    for n in range(15):
        store.write(record(number(n), started=f"2026-01-01T00:00:{n:02}.000Z", report=report_of(number(n))))
    assert [r["release_id"] for r in release_summaries(store)] == [number(n) for n in range(14, 4, -1)]


def test_one_that_is_at_work_and_one_that_nobody_is_at(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.write(record(number(1), pid=os.getpid(), started="2026-01-02"))
    store.write(record(number(2), pid=(1 << 22), started="2026-01-01"))
    flying, lost = release_summaries(store)
    assert (flying["verdict"], flying["reason"]) == (None, "in-flight") and "term, begun" in flying["message"]
    assert (lost["verdict"], lost["reason"]) == (None, "interrupted") and "nobody" in lost["message"]


def test_a_stuck_call_is_dated_by_its_age_whatever_the_clock_said() -> None:
    told = wedged_dict(Wedged(7, since=0.0, call="nvmlInit", age_s=3.26))
    assert told["pid"] == 7 and told["call"] == "nvmlInit" and told["age_s"] == 3.3
    assert not told["since"].startswith("1970")
