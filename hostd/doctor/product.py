"""Checks of our own state: daemon, configuration, records of releases, /run/pve-gpu-release."""

from __future__ import annotations

import os
import stat
from typing import Any

from hostd.clock import boot_s
from hostd.doctor.facts import Facts, Settings
from hostd.doctor.finding import Results
from hostd.doctor.kinds import found
from hostd.lifecycle.records import Records, Started, Watched
from hostd.lock import RUN_DIR
from hostd.store import Store
from hostd.system.procfs import Procfs

SOCKET_UNIT = "pve-gpu-hostd.socket"
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


def records(_facts: Facts) -> Results:
    """Releases that were cut off, starts that the gate refused, stops that hang."""
    for record in Store().all():
        if record.get("report") is None and not is_at_work(record):
            rungs = record.get("rungs") or [{}]
            step = rungs[-1].get("step", "the first look")
            evidence = f"record {record['release_id']}, started {record.get('started', '?')}, no report"
            yield found("release-cut-off", evidence, vmid=vmid_of(record), step=step, pid=record.get("pid"))
    kept = Records()
    for vmid in kept.vmids(Started):
        start = kept.read(Started, vmid)
        if start is not None and not start.allow:
            said = " / ".join(start.messages) or "no message"
            reason = start.messages[-1] if start.messages else "a GPU was dirty"
            evidence = f"at {start.phase}, {_ago(start.at_s)}: {said}"
            yield found("start-refused", evidence, vmid=vmid, reason=reason, release_id=start.release_id or "ID")
    for vmid in kept.vmids(Watched):
        stop = kept.read(Watched, vmid)
        if stop is not None and stop.reports:
            mend = stop.next_step or f"pve-gpu-release {vmid}; pve-gpu-release status"
            yield found("stop-hangs", stop.message, vmid=vmid, since=_ago(stop.since_s), mend=mend)


def vmid_of(record: dict[str, Any]) -> int | None:
    vmid = record.get("vmid")
    return vmid if isinstance(vmid, int) else None


def _ago(at_s: float) -> str:
    return f"{max(0.0, boot_s() - at_s):.0f} s ago"


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
