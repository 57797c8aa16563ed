"""Work given to the daemon. Cheap to import; `DaemonUnavailable` tells the caller to do it itself."""

from __future__ import annotations

import signal

from hostd.cli import interrupt
from hostd.service.client import Connection, DaemonAbsent, DaemonLost, DaemonUnavailable, connect

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    Json = dict[str, Any]

SILENT_S = 300.0
"""A worker tells about once a second what it waits for, and is silent for one driver call at most: after so long the
daemon itself stands still."""


def wanted(args: argparse.Namespace) -> bool:
    """False with --no-daemon, and with --config: the daemon has its own."""
    return not args.no_daemon and args.config is None


def release(
    vmid: int,
    options: Json,
    release_id: str,
    emit: Callable[[Json], None],
) -> Json:
    """One release by the daemon; its progress goes to `emit`. Ctrl-C asks the daemon to stop, the report
    still comes. Raises PgrError for a typed error, DaemonAbsent before and DaemonLost after it was asked."""
    with connect() as daemon:

        def cancel(*_: object) -> None:
            interrupt.came = True
            daemon.cancel()

        previous = {n: signal.signal(n, cancel) for n in (signal.SIGINT, signal.SIGTERM)}
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            parameters: Json = {"vmid": vmid, "options": options, "on_disconnect": "cancel", "release_id": release_id}
            return _stream(daemon, "Release", parameters, emit)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def verify(parameters: Json, emit: Callable[[Json], None]) -> Json:
    """One judgement by the daemon, as `release`."""
    with connect() as daemon:
        return _stream(daemon, "Verify", parameters, emit)


def _stream(daemon: Connection, method: str, parameters: Json, emit: Callable[[Json], None]) -> Json:
    for reply in daemon.call_more(method, parameters, timeout=SILENT_S):
        progress = reply.get("progress")
        if isinstance(progress, dict):
            emit(progress)
        report = reply.get("report")
        if isinstance(report, dict):
            return report
    raise DaemonLost("the daemon ended its answer without a report")


def ask(method: str, parameters: Json) -> Json:
    """One call without progress (Observe, Map, Status). Raises as `release`."""
    with connect() as daemon:
        return daemon.call(method, parameters, timeout=60.0)


__all__ = ["DaemonAbsent", "DaemonLost", "DaemonUnavailable", "ask", "release", "verify", "wanted"]
