"""More about a holder than a release needs, for people: since when it runs, what it has used. By psutil; without it nothing.

Never on the path of a release. Reads only what never blocks (stat, statm); not the command line (`system/scan`).
"""

from __future__ import annotations

import time
from typing import Any

Json = dict[str, Any]


def describe(pid: int, start_time: int) -> Json:
    """`{started, cpu_s, rss_mib, parent}` of a living process; empty when psutil is missing or the process is another one.

    `started` is ISO 8601 UTC, `cpu_s` seconds of CPU, `rss_mib` resident MiB, `parent` the pid and name of its parent.
    """
    try:
        import psutil
    except ImportError:
        return {}
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            created = process.create_time()
            if abs(created - _wall_time(start_time)) > 2.0:  # recycled: not the holder that was seen
                return {}
            times = process.cpu_times()
            parent = process.parent()
            return {
                "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(created)),
                "cpu_s": round(times.user + times.system, 1),
                "rss_mib": process.memory_info().rss >> 20,
                "parent": f"{parent.pid} ({parent.name()})" if parent is not None else "",
            }
    except psutil.Error:
        return {}


def _wall_time(start_time: int) -> float:
    """Clock ticks since boot as Unix time (field 22 of proc_pid_stat(5))."""
    import os

    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - start_time / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def age(started: str) -> str:
    """`3 d 4 h`, `12 min`, `5 s` since an ISO 8601 time in UTC."""
    import calendar

    seconds = max(0, int(time.time() - calendar.timegm(time.strptime(started, "%Y-%m-%dT%H:%M:%SZ"))))
    days, rest = divmod(seconds, 86_400)
    hours, rest = divmod(rest, 3600)
    minutes, seconds = divmod(rest, 60)
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes else f"{seconds} s"
