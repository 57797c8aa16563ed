"""Runs inside an embedded node: releases by the product's own code, with every signal written down.

One JSON object per line in, one out. Executed by `referee.Referee` (see the tests); argv: the root of the checkout.

{"vmid": 129, "options": {...}, "real": false, "hook": {...}} ->
{"sent": [[pid, start_time, signal], ...], "units": [cgroup, ...], "report": {...}}

Without "real" no signal leaves: what would have been sent is recorded, with the pid that the *kernel* says the pidfd
stands for. "hook" is pulled when a rung has been written down and before its targets are pinned, or, with "late": true,
when all are pinned and before the first signal leaves:
{"kind": "move", "pid": P, "cgroup": C}: process P is moved into cgroup C.
{"kind": "recycle", "pid": P, "cgroup": C, "open": [...]}: P is killed and its number given to a new process in C.
{"kind": "kill", "pid": P}: P is killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Json = dict[str, Any]


def main(root: str) -> None:
    sys.path.insert(0, root)
    from hostd.cancel import Cancel
    from hostd.engine import find_subject
    from hostd.events import Silent
    from hostd.ladder import Limits, Options
    from hostd.model import Holder, Report, RungRecord
    from hostd.release import Release
    from hostd.rungs import Effects
    from hostd.sources import Sources, open_sources
    from hostd.stopunit import Stopped, UnitStopper
    from hostd.system.pidfd import Pinned
    from hostd.system.pve import Pve
    from hostd.wire import report_dict

    class Recorder(Effects):
        def __init__(self, real: bool, late: Json | None) -> None:
            self.real = real
            self.late = late
            self.sent: list[list[int]] = []
            self.units: list[str] = []

        def send(self, pin: Pinned, number: int) -> bool:
            if self.late is not None and pin.ref.pid != self.late["pid"]:
                pull(self.late)
                self.late = None
            self.sent.append([pid_of(pin.fd), pin.ref.start_time, number])
            return super().send(pin, number) if self.real else not pin.gone()

        def ask_units(self, units: UnitStopper, holders: list[Holder], grace_s: float) -> Stopped:
            return Stopped()

        def kill_units(self, units: UnitStopper, holders: list[Holder]) -> Stopped:
            self.units += [h.supervisor.cgroup for h in holders if h.supervisor]
            return super().kill_units(units, holders) if self.real else Stopped()

    class Hook(Silent):
        def __init__(self, what: Json | None) -> None:
            self.what = what

        def rung_begun(self, report: Report, rung: RungRecord, targets: Iterable[Holder]) -> None:
            if self.what is not None:
                pull(self.what)
                self.what = None

    def release(sources: Sources, order: Json) -> Json:
        limits = Limits(**order.get("limits", {}))
        options = Options(limits=limits, **order.get("options", {}))
        subject = find_subject(sources, order["vmid"], Pve())
        hook = order.get("hook")
        late = hook if hook and hook.get("late") else None
        effects, cancel = Recorder(order["real"], late), Cancel()
        early = Hook(None if late else hook)
        try:
            report = Release(sources, subject, options, early, effects=effects, cancel=cancel).run()
        finally:
            cancel.close()
        return {"sent": effects.sent, "units": effects.units, "report": report_dict(report)}

    os.makedirs("/run/pve-gpu-release", exist_ok=True)
    sources = open_sources(nvml_deadline_s=10.0, read_deadline_s=1.0)
    sources.nvml.start()
    try:
        for line in sys.stdin:
            print(json.dumps(release(sources, json.loads(line))), flush=True)
    finally:
        sources.close()
        for pid in recycled:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


recycled: list[int] = []
"""Children of ours that have another process's former pid."""


def pid_of(pidfd: int) -> int:
    """Which process a pidfd stands for, by the kernel (pidfd_open(2): fdinfo); 0 or less when it is gone."""
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line[4:])
    raise AssertionError("no pidfd")


def pull(hook: Json) -> None:
    pid = hook["pid"]
    if hook["kind"] == "move":
        Path(f"/sys/fs/cgroup{hook['cgroup']}/cgroup.procs").write_text(str(pid))
        return
    pidfd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
    end = time.monotonic() + 20
    while os.path.exists(f"/proc/{pid}"):  # until its parent has collected it: only then the number is free
        if time.monotonic() > end:
            raise TimeoutError(f"pid {pid} is not collected")
        time.sleep(0.001)
    if hook["kind"] == "recycle":
        recycled.append(fork_as(pid, hook["cgroup"], hook["open"]))


def fork_as(pid: int, cgroup: str, devices: list[str]) -> int:
    """A child with that pid, in that cgroup, with those nodes open; ready when this returns."""
    ready, tell = os.pipe()
    for _ in range(200):  # others of the node may fork between the two
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
        child = os.fork()
        if child == 0:
            try:
                os.close(ready)
                Path(f"/sys/fs/cgroup{cgroup}/cgroup.procs").write_text("0")
                for device in devices:
                    os.open(device, os.O_RDWR | os.O_NOCTTY)
                os.write(tell, b"+")
                while True:
                    signal.pause()
            finally:
                os._exit(1)
        if child == pid:
            break
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    else:
        raise RuntimeError(f"cannot get pid {pid}")
    os.close(tell)
    if os.read(ready, 1) != b"+":
        raise RuntimeError("the recycled process is not ready")
    os.close(ready)
    return child


if __name__ == "__main__":
    main(sys.argv[1])
