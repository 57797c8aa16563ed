"""Checks of our own state: daemon, configuration, records of releases, /run/pve-gpu-release."""

from __future__ import annotations

import os
import stat
from typing import Any

from hostd.config import OnDirty
from hostd.doctor.facts import Facts, Settings
from hostd.doctor.finding import Results
from hostd.doctor.kinds import found
from hostd.lock import RUN_DIR
from hostd.store import Store
from hostd.system.procfs import Procfs

SOCKET_UNIT = "pve-gpu-hostd.socket"
START_TRIGGERS = ("pre-start", "exec-start-pre", "start")
"""How a gate's record says where it comes from."""
DAEMON_DEADLINE_S = 3.0


def daemon(facts: Facts) -> Results:
    from hostd.service.client import DaemonUnavailable, connect
    from hostd.service.interface import SOCKET_PATH

    unit = facts.unit_files.find(SOCKET_UNIT)
    if unit is None or unit.masked or not facts.unit_files.enabled(SOCKET_UNIT):
        state = "not installed" if unit is None else "masked" if unit.masked else "not enabled"
        yield found("socket-not-enabled", unit.path if unit else f"no {SOCKET_UNIT}", state=state)
    active = facts.get("units").get(SOCKET_UNIT, {}).get("ActiveState", "") if facts.booted else ""
    if not os.path.exists(SOCKET_PATH) or active not in ("", "active"):
        state = f"the socket unit is {active}" if active else "no socket"
        there = "there" if os.path.exists(SOCKET_PATH) else "not there"
        yield found("socket-not-active", f"{SOCKET_PATH} is {there}", state=state)
        return
    try:
        connect(SOCKET_PATH, DAEMON_DEADLINE_S).close()
    except DaemonUnavailable as exc:
        yield found("daemon-silent", f"{SOCKET_PATH}: {exc}")


def configuration(facts: Facts) -> Results:
    settings: Settings = facts.get("settings")
    for problem in settings.problems:
        yield found("config-broken", facts.config_path, problem=problem)
    for notice in settings.config.notices:
        yield found("config-ignored", facts.config_path, problem=notice)


def records(facts: Facts) -> Results:
    """Releases that were cut off, and starts that the gate refused."""
    settings: Settings = facts.get("settings")
    last_start: dict[int, dict[str, Any]] = {}
    for record in Store().all():
        vmid = record.get("vmid")
        report = record.get("report")
        if not isinstance(vmid, int):
            continue
        if report is None and not is_at_work(record):
            rungs = record.get("rungs") or [{}]
            step = rungs[-1].get("step", "the first look")
            evidence = f"record {record['release_id']}, started {record.get('started', '?')}, no report"
            yield found("release-cut-off", evidence, vmid=vmid, step=step, pid=record.get("pid"))
        elif isinstance(report, dict) and any(word in str(record.get("trigger")) for word in START_TRIGGERS):
            last_start[vmid] = record
    for vmid, record in last_start.items():
        report = record["report"]
        if settings.config.for_container(vmid).hook.on_dirty is OnDirty.BLOCK and report.get("verdict") == "held":
            evidence = f"record {record['release_id']}, {record.get('started', '?')}: {report.get('message', '')}"
            reason = report.get("reason", "")
            yield found("start-refused", evidence, vmid=vmid, reason=reason, release_id=record["release_id"])


def is_at_work(record: dict[str, Any]) -> bool:
    """The process that wrote the record lives: its pid is taken by a process that started before the record."""
    pid, at_ticks = record.get("pid"), record.get("at_ticks")
    if not isinstance(pid, int) or not isinstance(at_ticks, (int, float)):
        return False
    ref = Procfs().read_ref(pid)
    return ref is not None and ref.start_time <= at_ticks


def run_dir(_facts: Facts) -> Results:
    try:
        info = os.lstat(RUN_DIR)
    except FileNotFoundError:
        yield found("run-dir-missing", f"{RUN_DIR}: no such file")
        return
    evidence = f"{RUN_DIR}: {stat.filemode(info.st_mode)}, uid {info.st_uid}, gid {info.st_gid}"
    if not stat.S_ISDIR(info.st_mode):
        mend = f"rm {RUN_DIR} && systemd-tmpfiles --create"
        yield found("run-dir", evidence, why="it is no directory", mend=mend)
    elif info.st_uid != 0 or stat.S_IMODE(info.st_mode) & 0o077:
        why = f"mode {stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid}; expected 0700 and root"
        yield found("run-dir", evidence, why=why, mend=f"chown root:root {RUN_DIR} && chmod 700 {RUN_DIR}")
