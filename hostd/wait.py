"""Waiting until a GPU, or what a container holds, is free: for `ExecStartPre=`, scripts, and before `pct start`.

Nothing is signalled. A GPU is free when no stale holder is on it (a process that is past exit() and has not given its
memory back, or memory with no live client) and, where that is asked for, it has so much free memory. A container is
free when no process of it holds a GPU and nothing of it is stale.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hostd.cancel import Cancel
from hostd.case import Case, Judgement, Selection
from hostd.climb import LAST_LOOK_S, Subject
from hostd.judge import judge
from hostd.model import GpuInfo, Holder, NvmlGpu, NvmlSnapshot, ProcessRef, Verdict
from hostd.observe import Observer
from hostd.selection import resolve_gpu
from hostd.sources import Sources
from hostd.system import devices
from hostd.verdicts import REASONS, say
from hostd.wire import SCHEMA, clean
from hostd.words import holders_text

Json = dict[str, Any]
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 1.0
"""Between two looks; an exit of somebody who is waited for wakes at once."""
TOLERANCE_MIB = 16


@dataclass(slots=True)
class Look:
    """What one look found. Free exactly when `reason` has exit status 0."""

    reason: str
    facts: dict[str, object]
    waits_for: list[ProcessRef] = field(default_factory=list)
    """Whose end may change the answer."""
    gpus: list[Json] = field(default_factory=list)
    judgement: Judgement | None = None

    @property
    def free(self) -> bool:
        return REASONS[self.reason].verdict is Verdict.RELEASED

    def words(self) -> tuple[str, str]:
        if self.judgement is not None:
            return self.judgement.message, self.judgement.next_step
        return say(self.reason, **self.facts)


class ContainerTarget:
    """Everything that one container holds, and the GPUs of its configuration."""

    def __init__(self, sources: Sources, subject: Subject, free_mib: int | None) -> None:
        self.vmid = subject.vmid
        self._observer = Observer(sources, subject.vmid, subject.blind_spots)
        self._own_minors = subject.own_minors
        self._minors: set[int] = set()
        self._free_mib = free_mib

    def look(self, limit_s: float | None = None) -> Look:
        """`limit_s`: on the driver's answer, and on reading what processes have open; None: as configured."""
        seen = self._observer.look(nvml_deadline_s=limit_s, budget_s=limit_s)
        self._minors |= {m for h in seen.holders for m in h.gpus}
        minors = frozenset(self._minors)
        case = Case(seen, seen, minors, self._own_minors, Selection(), dry_run=True)
        verdict = judge(case)
        waits = [h.ref for h in seen.holders]
        found = Look(verdict.reason, {}, waits, judgement=verdict)
        if found.free and self._free_mib is not None:
            for state in seen.gpus:
                free = None if state.total_mib is None or state.used_mib is None else state.total_mib - state.used_mib
                free = None if free is None else free - (state.reserved_mib or 0)
                if state.info.minor in minors | self._own_minors and (free is None or free < self._free_mib):
                    return _short(state.info, free, self._free_mib, seen.foreign)
        return found

    def close(self) -> None:
        self._observer.close()


def _short(info: GpuInfo, free: int | None, wanted: int, holders: Iterable[Holder]) -> Look:
    there = [h for h in holders if info.minor in h.gpus]
    name = f"GPU {info.index}" if info.index is not None else f"GPU {info.pci_bus_id}"
    facts: dict[str, object] = {
        "gpus": name,
        "free": _mib(free),
        "wanted": _mib(wanted),
        "holders": holders_text(there) or "nobody known",
    }
    return Look("gpu-in-use", facts, [h.ref for h in there])


class GpuTarget:
    """One GPU, whoever uses it."""

    def __init__(self, sources: Sources, selector: str, free_mib: int | None) -> None:
        self._sources = sources
        self._selector = selector
        self._free_mib = free_mib
        self._info: GpuInfo | None = None

    def look(self, limit_s: float | None = None) -> Look:
        """`limit_s`: on the driver's answer; None: as configured."""
        snapshot = self._sources.nvml.snapshot(deadline_s=limit_s)
        if snapshot.blind_spots:
            spot = snapshot.blind_spots[0]
            return Look("cannot-look", {"detail": f"the driver does not answer: {spot.error}"})
        gpu = self._find(snapshot)
        if gpu is None or gpu.error or gpu.used_mib is None or gpu.total_mib is None:
            why = gpu.error if gpu is not None and gpu.error else "the driver gives no figures for it"
            return Look("cannot-look", {"detail": f"GPU {self._selector}: {why}"})
        return self._judge(gpu, gpu.used_mib, gpu.total_mib)

    def _find(self, snapshot: NvmlSnapshot) -> NvmlGpu | None:
        if self._info is None:
            known = devices.merge_gpus((), tuple(g.info for g in snapshot.gpus))
            self._info = resolve_gpu(self._selector, known, driver_silent=False)
        wanted = self._info
        return next((g for g in snapshot.gpus if g.info.uuid == wanted.uuid), None)

    def _judge(self, gpu: NvmlGpu, used: int, total: int) -> Look:
        live_mib, live, dying, dead = 0, [], [], []
        for client in gpu.clients:
            process = self._sources.procfs.read_process(client.pid)
            if process is None or process.is_zombie:
                dead += [client.pid] if client.used_mib else []
                continue
            if self._sources.procfs.is_dying(client.pid):
                dying.append(process)
                continue
            live.append(process)
            live_mib += client.used_mib or 0
        ghost = used - live_mib
        free = total - used - (gpu.reserved_mib or 0)
        name = f"GPU {gpu.info.index}" if gpu.info.index is not None else f"GPU {gpu.info.pci_bus_id}"
        facts: dict[str, object] = {"gpus": name, "free": _mib(free), "wanted": _mib(self._free_mib)}
        facts["holders"] = ", ".join(f"pid {p.pid} ({p.comm})" for p in live[:4]) or "nobody"
        one = _gpu_json(gpu, free, ghost)
        if dying or ghost > TOLERANCE_MIB + TOLERANCE_MIB * len(live):
            names = [f"pid {p.pid} ({p.comm}), which is ending" for p in dying]
            names += [f"dead pid {pid}, or who has its descriptors" for pid in dead]
            who = ", ".join(names[:4]) or "no live process"
            facts |= {"ghost": _mib(ghost), "holders": who}
            return Look("gpu-stale", facts, [p.ref for p in dying], [one])
        if self._free_mib is not None and free < self._free_mib:
            return Look("gpu-in-use", facts, [p.ref for p in live], [one])
        return Look("gpu-free", facts, [], [one])

    def close(self) -> None:
        return


def _gpu_json(gpu: NvmlGpu, free: int, ghost: int) -> Json:
    info = gpu.info
    return {
        "index": info.index,
        "minor": info.minor,
        "uuid": info.uuid,
        "pci_bus_id": info.pci_bus_id,
        "name": info.name,
        "used_mib": gpu.used_mib,
        "free_mib": free,
        "ghost_mib": max(0, ghost),
    }


def _mib(value: int | None) -> str:
    return "an unknown amount" if value is None else f"{value:,} MiB"


def wait(
    target: ContainerTarget | GpuTarget,
    timeout_s: float,
    cancel: Cancel,
    tell: Callable[[str, float], None],
    nvml_deadline_s: float,
) -> tuple[Look, float]:
    """Looks until it is free or the time is up; (the last look, seconds). `tell(what, seconds)`: about once a second.

    No look waits longer for the driver than `nvml_deadline_s`, nor much longer than the time that is left.
    """
    begun_s = time.monotonic()
    end_s = begun_s + timeout_s
    pause_s, told_s, before = FIRST_PAUSE_S, -1.0, ""
    while True:
        cancel.check()
        left_s = max(LAST_LOOK_S, end_s - time.monotonic())
        found = target.look(left_s if left_s < nvml_deadline_s else None)
        now_s = time.monotonic()
        if found.free or now_s >= end_s:
            return found, now_s - begun_s
        what = found.words()[0]
        if told_s < 0 or now_s - told_s >= 1.0:
            tell(what, now_s - begun_s)
            told_s = now_s
        if what != before:  # something moves: look closely again
            before, pause_s = what, FIRST_PAUSE_S
        _sleep(found.waits_for, min(pause_s, max(0.0, end_s - now_s)), cancel)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)


def _sleep(refs: Iterable[ProcessRef], pause_s: float, cancel: Cancel) -> None:
    """Until one of them ends, the time is up or we are asked to stop."""
    fds = []
    try:
        for ref in list(refs)[:256]:
            try:
                fds.append(os.pidfd_open(ref.pid))
            except OSError:
                return  # gone already: look again
        select.select([*fds, cancel.fileno()], [], [], pause_s)
    finally:
        for fd in fds:
            os.close(fd)


def result(found: Look, waited_s: float, vmid: int | None, selector: str | None) -> Json:
    """`wait --json`."""
    message, step = found.words()
    verdict = REASONS[found.reason].verdict
    return {
        "schema": SCHEMA,
        "vmid": vmid,
        "gpu": selector,
        "verdict": verdict.value if verdict else None,
        "reason": found.reason,
        "message": clean(message),
        "waited_ms": round(waited_s * 1000),
        "gpus": found.gpus,
        "next_step": clean(step),
    }


__all__ = ["ContainerTarget", "GpuTarget", "result", "wait"]
