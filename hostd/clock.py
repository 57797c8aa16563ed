"""Now, in the units that processes and records are compared in."""

from __future__ import annotations

import os
import time

_CLK_TCK = os.sysconf("SC_CLK_TCK")


def boot_ticks_now() -> int:
    """Clock ticks since boot, the unit of a process's start time (proc_pid_stat(5), field 22)."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * _CLK_TCK)


def boot_s() -> float:
    """Seconds since boot, suspend included: comparable between processes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def utc_now() -> str:
    """ISO 8601 with milliseconds."""
    return _utc(time.time())


def utc_at(at_s: float) -> str:
    """The same of a moment in seconds since boot."""
    return _utc(time.time() - (boot_s() - at_s))


def _utc(moment: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(moment)) + f".{int(moment % 1 * 1000):03d}Z"
