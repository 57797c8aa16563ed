"""The stop watchdog: `pct stop` of a container with a stuck task hangs for ever without a word (PCT_FLOWS 7.7). After
`hook.watchdog_delay` somebody looks, says who is in the way and what would help, and ends what may be ended by then.

The daemon keeps one timer per stop that was announced (`StopWatch`); the look itself is a worker's (`look_after`).
Nothing ticks while no container is being stopped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hostd import audit
from hostd.clock import boot_s, utc_at
from hostd.lifecycle.clearing import Taken, container_runs, members
from hostd.lifecycle.records import Records, Snapshot, Watched
from hostd.membership import is_init
from hostd.model import Fate, Holder, HolderReport, Process, Stuck
from hostd.observe import Observer
from hostd.sources import Sources
from hostd.system.pidfd import Pinned
from hostd.triage import stuck_tasks

Json = dict[str, Any]
CONFIG_LOCK = "/run/lock/lxc/pve-config-{}.lock"
WAY_OUT = (
    "what the task waits for has to end (see wchan): a frozen or dead file system thawed or forced off, a driver call "
    "to return; if it waits in the NVIDIA driver only a GPU reset or a reboot of the node clears it"
)


class StopWatch:
    """The daemon's timers. `call_at(when, run)` and `look(vmid)` are the server's; `delays(vmid)` the configuration."""

    def __init__(
        self,
        call_at: Callable[[float, Callable[[], None]], Any],
        look: Callable[[int], None],
        delays: Callable[[int], tuple[float, float]],
        records: Records | None = None,
    ) -> None:
        self._call_at = call_at
        self._look = look
        self._delays = delays
        self._records = records or Records()
        self._timers: dict[int, Any] = {}

    def arm(self, vmid: int, age_s: float = 0.0) -> None:
        """A stop of this container was announced `age_s` ago."""
        self.disarm(vmid)
        delay_s = max(0.0, self._delays(vmid)[0] - age_s)
        self._timers[vmid] = self._call_at(time.monotonic() + delay_s, lambda: self._fire(vmid))

    def disarm(self, vmid: int) -> None:
        timer = self._timers.pop(vmid, None)
        if timer is not None:
            timer.cancel()

    def resume(self) -> None:
        """After a restart of the daemon: stops that were announced to its predecessor."""
        for vmid in self._records.vmids(Snapshot):
            snapshot = self._records.read(Snapshot, vmid)
            if snapshot is not None and not snapshot.over:
                self.arm(vmid, max(0.0, boot_s() - snapshot.at_s))

    @property
    def armed(self) -> tuple[int, ...]:
        return tuple(self._timers)

    def _fire(self, vmid: int) -> None:
        self._timers.pop(vmid, None)
        snapshot = self._records.read(Snapshot, vmid)
        if snapshot is None or snapshot.over:
            return
        self._timers[vmid] = self._call_at(time.monotonic() + self._delays(vmid)[1], lambda: self._fire(vmid))
        self._look(vmid)


@dataclass(frozen=True, slots=True)
class Finding:
    """What the watchdog makes of a stop that takes long. Pure."""

    over: bool
    """Nothing to watch any more."""
    may_signal: bool
    message: str
    next_step: str = ""


def judge_stop(
    *,
    init_alive: bool,
    init_ending: bool,
    others: int,
    stopping: bool,
    stuck: list[Stuck],
    since_s: float,
) -> Finding:
    """`stopping`: Proxmox's lock of the container is held, so that somebody still works at the stop.

    Signals only once the container's init is dead or dying: before that `pct stop` and `pct shutdown --timeout 600`
    look alike (DESIGN 7).
    """
    if init_alive and not init_ending:
        if not stopping:
            return Finding(True, False, "the stop was given up; the container goes on running")
        return Finding(
            False,
            False,
            f"the stop takes {since_s:.0f} s so far: the container's init lives and has no SIGKILL pending, so it is "
            "given its time; nothing is signalled",
            "pct stop ends it at once, a shutdown at its --timeout",
        )
    if not others:
        return Finding(True, False, "the container has stopped")
    if stuck:
        who = ", ".join(
            f"pid {s.ref.pid} (state {s.state}, waiting in {s.wchan or 'an unknown place'})" for s in stuck[:4]
        )
        return Finding(False, True, f"the stop hangs since {since_s:.0f} s on what cannot die: {who}", WAY_OUT)
    return Finding(
        False, True, f"the container's init is gone, {others} of its processes are still there after {since_s:.0f} s"
    )


def look_after(
    sources: Sources,
    vmid: int,
    taken: Taken,
    records: Records,
    send: Callable[[audit.Entry], None],
    context: audit.Context,
) -> Json:
    """One look at a stop that takes long. Returns what `status` shows; `over` true ends the watch."""
    snapshot = records.read(Snapshot, vmid)
    if snapshot is None or snapshot.over:
        return {"over": True, "message": "the container has stopped"}
    processes, blind = members(sources.procfs, taken.payload) if taken.payload is not None else ([], [])
    init = next((p for p in processes if p.ref == snapshot.init_ref), None) or _any_init(sources, processes)
    if init is None and blind and (running := container_runs(sources, vmid)) is not None:
        if running.init is None:
            return {"over": False, "message": f"container {vmid} {running.words}", "next_step": ""}
        init = sources.procfs.read_process(running.init.pid)
    ending = init is not None and sources.procfs.is_ending(init.pid)
    others = [p for p in processes if init is None or p.ref != init.ref]
    since = utc_at(snapshot.at_s)
    stuck = stuck_tasks(sources.procfs, [p.ref for p in processes], since) if init is None or ending else []
    finding = judge_stop(
        init_alive=init is not None,
        init_ending=ending,
        others=len(others) or len(stuck),
        stopping=lock_is_held(CONFIG_LOCK.format(vmid)),
        stuck=stuck,
        since_s=boot_s() - snapshot.at_s,
    )
    before = records.read(Watched, vmid)
    signalled = signal_holders(sources, vmid, taken) if finding.may_signal else []
    message = finding.message + (f"; SIGKILL sent to {', '.join(map(str, signalled))}" if signalled else "")
    if finding.over:
        records.drop(Watched, vmid)
        if init is not None:
            records.drop(Snapshot, vmid)
        else:  # the event that deals with the stop may come much later, after a long unmount
            snapshot.over = True
            records.write(snapshot)
    else:
        watched = Watched(vmid, snapshot.at_s, (before.reports if before else 0) + 1, message, finding.next_step)
        watched.signalled = bool(signalled) or (before is not None and before.signalled)
        records.write(watched)
    reports = _reports(vmid, processes, stuck)
    send(audit.watchdog_report(context, message, reports, next_step=finding.next_step))
    return {"over": finding.over, "message": message, "next_step": finding.next_step}


def _any_init(sources: Sources, processes: list[Process]) -> Process | None:
    for process in processes:
        if is_init(sources, process):
            return process
    return None


def signal_holders(sources: Sources, vmid: int, taken: Taken) -> list[int]:
    """SIGKILL, pinned, to the GPU holders that have none pending; the pids that took it.

    Only of the run that was judged: the look may take long, and the container may be started again meanwhile.
    """
    observer = Observer(sources, vmid)
    sent = []
    try:
        seen = observer.look(nvml=False)
        if taken.payload is None or seen.incarnation != taken.payload.inode:
            return []
        for holder in seen.holders:
            pid = holder.process.pid
            if not holder.targetable or sources.procfs.is_ending(pid) or container_runs(sources, vmid) is not None:
                continue
            try:
                pin = Pinned.pin(holder.ref, observer.recheck)
            except OSError:
                continue  # in doubt; the next look is soon
            if pin is not None:
                with pin:
                    if pin.send(9):
                        sent.append(pid)
    finally:
        observer.close()
    return sent


def _reports(vmid: int, processes: list[Process], stuck: list[Stuck]) -> list[HolderReport]:
    by_ref = {s.ref: s for s in stuck}
    return [
        HolderReport(Holder(p, vmid, frozenset(), ()), Fate.UNKILLABLE, by_ref[p.ref])
        for p in processes
        if p.ref in by_ref
    ]


def lock_is_held(path: str, table: str = "/proc/locks") -> bool:
    """Somebody has a lock on this file: read from /proc/locks, never tried (DESIGN 7: hooks take no lock of Proxmox's).

    True when it cannot be said: the stop is then watched on.
    """
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    wanted = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        with open(table, encoding="ascii", errors="replace") as file:
            return any(wanted in line.split() and "->" not in line for line in file)
    except OSError:
        return True
