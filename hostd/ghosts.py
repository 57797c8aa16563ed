"""Memory that nobody alive accounts for: since when, who else is attached, what the driver and the kernel log say."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

from hostd.case import driver_silence
from hostd.figures import excess_mib
from hostd.lock import RUN_DIR, ensure_run_dir
from hostd.model import GpuState, Observation
from hostd.resetplan import RECOVERY
from hostd.sources import Sources, read_driver
from hostd.statefile import read_json, write_json
from hostd.system.cgroupfs import owner_of
from hostd.system.kmsg import Xid
from hostd.words import gpu_text

MODULES = "/sys/module"
NAMED = 8
"""Processes named one by one."""


class FirstSeen:
    """When ghost memory of a GPU was first noticed, by UUID: one small file that the next release reads."""

    def __init__(self, run_dir: str = RUN_DIR) -> None:
        self._run_dir = run_dir
        self._path = os.path.join(run_dir, "ghosts.json")

    def update(self, states: Iterable[GpuState]) -> dict[str, str]:
        """UUID -> since when (ISO 8601 UTC), of those with ghost memory; the others are forgotten. Never raises."""
        known = self._read()
        before = dict(known)
        for state in states:
            if state.ghost_mib is None or not state.info.uuid:
                continue
            if excess_mib(state, None):
                known.setdefault(state.info.uuid, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
            else:
                known.pop(state.info.uuid, None)
        if known != before:
            with contextlib.suppress(OSError):
                self._write(known)
        return known

    def _read(self) -> dict[str, str]:
        found = read_json(self._path, 1 << 16)
        return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}

    def _write(self, known: dict[str, str]) -> None:
        ensure_run_dir(self._run_dir)
        write_json(self._path, known)


def haunted(observation: Observation, minors: Iterable[int]) -> list[GpuState]:
    """Those of the GPUs that have memory in use with no live client, or that do not answer for themselves."""
    if driver_silence(observation):
        return []
    wanted = set(minors)
    return [g for g in observation.gpus if g.info.minor in wanted and (excess_mib(g, None) or g.error)]


def describe(sources: Sources, states: Iterable[GpuState], since: dict[str, str], xids: Iterable[Xid]) -> list[str]:
    """Sentences for the administrator. Costs a look at every process of the host: for a release that has failed."""
    lines = []
    attached, uses = _attached(sources)
    for state in states:
        name = gpu_text(state)
        if state.ghost_mib:
            seen = since.get(state.info.uuid, "")
            lines.append(
                f"{name}: {state.ghost_mib:,} MiB in use with no live client" + (f", first seen {seen}" if seen else "")
            )
        if state.error:
            lines.append(f"{name}: {state.error}")
        here = attached.get(state.info.minor, [])
        more = f" and {len(here) - NAMED} more" if len(here) > NAMED else ""
        lines.append(f"{name}: also attached: {', '.join(here[:NAMED])}{more}" if here else f"{name}: nobody is attached")
        if state.recovery_action is not None:
            lines.append(f"{name}: the driver recommends {RECOVERY.get(state.recovery_action, 'an unknown action')}")
    lines += [f"kernel log: {xid} ({xid.advice})" for xid in xids]
    return lines + _module_lines(uses)


def _attached(sources: Sources) -> tuple[dict[int, list[str]], int]:
    """GPU minor -> who has it open, by name and owner; and how many processes have any node of the driver open."""
    driver = read_driver([])
    ours = {sources.nvml.pid, os.getpid()}
    scan = sources.scanner.scan([p for p in sources.procfs.pids() if p not in ours], frozenset(driver.by_major))
    found: dict[int, list[str]] = {}
    for pid, nodes in sorted(scan.open.items()):
        process = sources.procfs.read_process(pid)
        if process is None or not nodes:
            continue
        owner = owner_of(process.cgroup)
        whose = f"of container {owner}" if owner else "of the host"
        for minor in {n.minor for n in nodes.all if n.major in driver.gpu_majors}:
            found.setdefault(minor, []).append(f"pid {pid} ({process.comm}) {whose}")
    return found, sum(1 for nodes in scan.open.values() if nodes)


def _module_lines(processes: int, root: str = MODULES) -> list[str]:
    """The driver's use counts against what was found: a kernel client (or a descriptor in flight) shows only here."""
    lines = []
    for module in ("nvidia", "nvidia_uvm"):
        try:
            with open(f"{root}/{module}/refcnt", encoding="ascii") as file:
                count = int(file.read())
            users = sorted(os.listdir(f"{root}/{module}/holders"))
        except (OSError, ValueError):
            continue
        if count > len(users) and not processes:
            lines.append(
                f"module {module} is in use {count} times, {len(users)} by other modules "
                f"({', '.join(users) or 'none'}), and no process has a node open: a kernel client holds it"
            )
        else:
            lines.append(
                f"module {module} is in use {count} times, {len(users)} by other modules; "
                f"{processes} process{'es have' if processes != 1 else ' has'} nodes of the driver open"
            )
    return lines


__all__ = ["FirstSeen", "describe", "haunted"]
