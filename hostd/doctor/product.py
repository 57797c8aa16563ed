"""Checks of our own state: daemon, configuration, records of releases, /run/pve-gpu-release."""

from __future__ import annotations

import os
import stat
from typing import Any

from hostd.clock import boot_s
from hostd.doctor.facts import Facts, Settings
from hostd.doctor.finding import Results, Skipped
from hostd.doctor.kinds import found
from hostd.doctor.kinds.hooks import FROM_FILE, RELOADED
from hostd.doctor.kinds.product import MAKE_RUN_DIR
from hostd.doctor.mends import remount
from hostd.doctor.shell import Shell, remark, word
from hostd.lifecycle.records import Records, Started, Watched
from hostd.lock import RUN_DIR
from hostd.store import Store
from hostd.system.procfs import Procfs

SOCKET_UNIT = "pve-gpu-hostd.socket"
SERVICE_UNIT = "pve-gpu-hostd.service"
ENABLE = f"systemctl unmask {SOCKET_UNIT}; systemctl enable --now {SOCKET_UNIT}"
DAEMON_DEADLINE_S = 3.0


def daemon(facts: Facts) -> Results:
    from hostd.service.client import DaemonUnavailable, connect
    from hostd.service.interface import SOCKET_PATH

    unit = facts.unit_files.find(SOCKET_UNIT)
    if unit is None or unit.masked or not facts.unit_files.enabled(SOCKET_UNIT):
        state = "not installed" if unit is None else "masked" if unit.masked else "not enabled"
        mend = Shell(ENABLE if unit else f"{RELOADED} && {ENABLE}{FROM_FILE}")
        yield found("socket-not-enabled", unit.path if unit else f"no {SOCKET_UNIT}", state=state, mend=mend)
    service = facts.unit_files.find(SERVICE_UNIT)
    if service is not None and service.masked:
        yield found("daemon-masked", f"{service.path} is empty or a link to /dev/null")
    if unit is None or (service is not None and service.masked):
        return  # what mends that starts the socket, too
    if os.path.lexists(RUN_DIR) and (os.path.islink(RUN_DIR) or not os.path.isdir(RUN_DIR)):
        yield Skipped(f"{RUN_DIR} is no directory")
        return
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
    named = facts.config_path
    for problem in settings.problems:
        yield found("config-broken", facts.config_path, problem=problem, file=named)
    for notice in settings.config.notices:
        yield found("config-ignored", facts.config_path, problem=notice, file=named)


def records(_facts: Facts) -> Results:
    """Releases that were cut off, starts that the gate refused, stops that hang."""
    written = Store().all()
    for record in written:
        if record["report"] is None and not (is_at_work(record) or is_answered(record, written)):
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
            why = Shell(f"pve-gpu-release explain {word(start.release_id)}" if start.release_id else f"pve-gpu-release log {vmid}")
            yield found("start-refused", evidence, vmid=vmid, reason=reason, why=why)
    for vmid in kept.vmids(Watched):
        stop = kept.read(Watched, vmid)
        if stop is not None and stop.reports:
            advice = remark(stop.next_step or "what is left of it")
            yield found("stop-hangs", stop.message, vmid=vmid, since=_ago(stop.since_s), advice=advice)


def is_answered(record: dict[str, Any], written: list[dict[str, Any]]) -> bool:
    """A dry run owes nothing; else a whole release of the container has been made since."""
    return record.get("dry_run") is True or any(
        later["report"] is not None
        and later["vmid"] == record["vmid"]
        and later["at_ticks"] > record["at_ticks"]
        and later.get("dry_run") is not True
        and not later["options"].get("gpu")
        and not later["options"].get("pid")
        for later in written
    )


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
        yield found("run-dir", evidence, why="it is no directory", mend=Shell(f"rm {RUN_DIR} && {MAKE_RUN_DIR}"))
    elif info.st_uid != 0 or stat.S_IMODE(info.st_mode) & 0o077:
        why = f"mode {stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid}; expected 0700 and root"
        mend = Shell(f"chown root:root {RUN_DIR} && chmod 700 {RUN_DIR}")
        yield found("run-dir", evidence, why=why, mend=mend)
    if stat.S_ISDIR(info.st_mode):
        yield from _room(os.statvfs(RUN_DIR))


def _room(room: os.statvfs_result) -> Results:
    evidence = f"{room.f_bavail} of {room.f_blocks} blocks and {room.f_favail} of {room.f_files} inodes are free"
    if room.f_flag & os.ST_RDONLY:
        mend = remount(RUN_DIR, "rw")
        yield found("run-dir-full", f"{evidence}; read-only", why="it is mounted read-only", mend=mend)
    elif room.f_blocks and not room.f_bavail:
        yield found("run-dir-full", evidence, why="its file system is full", mend=remount(RUN_DIR, "size=50%"))
    elif room.f_files and not room.f_favail:
        mend = remount(RUN_DIR, "nr_inodes=1m")
        yield found("run-dir-full", evidence, why="its file system has no inode left", mend=mend)
