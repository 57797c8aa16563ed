"""The outside world as one value, and what every look reads of the driver: unreadable is a blind spot, no failure."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from hostd.errors import UnreadableError
from hostd.model import BlindSpot, DriverNumbers, GpuInfo
from hostd.system import devices
from hostd.system.cgroupfs import Cgroupfs, find_mount
from hostd.system.nvml import Nvml
from hostd.system.pidns import own_inode
from hostd.system.procfs import Procfs
from hostd.system.scan import DETAIL, Scanner, ScanResult


@dataclass(slots=True)
class Sources:
    """The outside world, as one value. `close()` ends every helper process."""

    procfs: Procfs
    cgroups: Cgroupfs
    scanner: Scanner
    nvml: Nvml
    own_pidns: int

    def helpers(self) -> set[int]:
        """Ourselves and our NVML child, which has GPU nodes open itself: never a holder, in whatever cgroup we run."""
        return {pid for pid in (os.getpid(), self.nvml.pid) if pid is not None}

    def scan(self, pids: Iterable[int], majors: frozenset[int]) -> ScanResult:
        """As the scanner's; that no helper can be started is a blind spot, too."""
        try:
            return self.scanner.scan(pids, majors)
        except OSError as exc:
            what = "descriptors of the processes"
            error = f"cannot start a helper: {exc.strerror or exc}"
            return ScanResult(blind_spots=[BlindSpot("procfs", what, error, "descriptors-unreadable")])

    def close(self) -> None:
        self.nvml.close()
        self.scanner.close()


def open_sources(*, nvml_deadline_s: float, read_deadline_s: float, nvml: Nvml | None = None) -> Sources:
    """The real sources of this machine; `nvml` may have been started before. Raises UnreadableError when there is no
    cgroup v2 mount, no /proc, or one of another PID namespace: its numbers are other processes for every system call."""
    try:
        own = own_inode()
        if os.readlink("/proc/self") != str(os.getpid()):
            raise UnreadableError(
                "cannot look: /proc is of another PID namespace than this process, its numbers mean other processes here",
                next_step="run it without unshare --pid, or with --mount-proc",
            )
    except OSError as exc:
        raise UnreadableError(f"cannot read our own PID namespace: {exc}") from exc
    cgroups = Cgroupfs(find_mount())
    return Sources(Procfs(), cgroups, Scanner(deadline_s=read_deadline_s), nvml or Nvml(nvml_deadline_s), own)


def read_driver(blind: list[BlindSpot]) -> DriverNumbers:
    """Majors of the NVIDIA drivers now; unreadable is a blind spot and reads as none."""
    try:
        return devices.read_driver_numbers()
    except OSError as exc:
        blind.append(BlindSpot("devices", "/proc/devices", str(exc)))
        return DriverNumbers({})


def known_gpus(named: tuple[GpuInfo, ...], blind: list[BlindSpot]) -> tuple[GpuInfo, ...]:
    """GPUs known to the kernel side or the driver's library (`named`, by this look or an earlier one), joined."""
    try:
        from_proc = devices.read_proc_gpus(known=named)
    except OSError as exc:  # TimeoutError too: these files go through the driver and can hang with it
        blind.append(BlindSpot("devices", "/proc/driver/nvidia/gpus", str(exc), DETAIL))
        from_proc = ()
    return devices.merge_gpus(from_proc, named)
