"""Work given to the daemon. Cheap to import; `DaemonUnavailable` tells the caller to do it itself."""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found, unused-ignore]  # `signal` brings `enum` with it

from hostd.cli import interrupt
from hostd.service.client import Connection, DaemonAbsent, DaemonLost, DaemonUnavailable, connect
from hostd.shapes import ANSWERS, REPORT, fits

TYPE_CHECKING = False
if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from typing import Any

    Json = dict[str, Any]

SILENT_S = 30.0
"""A worker tells about once a second what it waits for, and is silent for one driver call at most: after so long the
daemon itself stands still."""
SILENCE_SAID_AFTER_S = 5.0


def wanted(args: argparse.Namespace) -> bool:
    """False with --no-daemon, and with --config: the daemon has its own."""
    return not args.no_daemon and args.config is None


def release(
    vmid: int,
    options: Json,
    release_id: str,
    emit: Callable[[Json], None],
    note: Callable[[str], None] = lambda text: None,
) -> Json:
    """One release by the daemon; its progress goes to `emit`, its silence is said by `note`. Ctrl-C asks the daemon to
    stop, and the report still comes; a second one, or the loss of the daemon then, does not wait for it. Raises PgrError
    for a typed error, DaemonAbsent before and DaemonLost after it was asked."""
    steps: list[str] = []

    def follow(progress: Json) -> None:
        rung = progress.get("rung")
        if progress.get("event") == "rung_begun" and isinstance(rung, dict):
            steps.append(str(rung.get("step")))
        emit(progress)

    with connect() as daemon:

        def cancel(*_: object) -> None:
            if interrupt.came:
                raise _interrupted(vmid, steps)
            interrupt.came = True
            daemon.cancel()

        interrupt.hold(signal.SIGINT, signal.SIGTERM)
        previous = {n: signal.signal(n, cancel) for n in (signal.SIGINT, signal.SIGTERM)}
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            parameters: Json = {"vmid": vmid, "options": options, "on_disconnect": "cancel", "release_id": release_id}
            return _stream(daemon, "Release", parameters, follow, note)
        except DaemonLost:
            if interrupt.came:  # asked to stop, and it is not known whether the daemon did: not to be gone on with
                raise _interrupted(vmid, steps) from None
            raise
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def verify(parameters: Json, emit: Callable[[Json], None]) -> Json:
    """One judgement by the daemon, as `release`."""
    with connect() as daemon:
        return _stream(daemon, "Verify", parameters, emit)


def _interrupted(vmid: int, steps: list[str]) -> Exception:
    begun = f"it had begun with {', '.join(steps)}" if steps else "it had told of no signal yet"
    return interrupt.error(vmid, f"not waited for the daemon's answer; {begun}")


def _stream(
    daemon: Connection,
    method: str,
    parameters: Json,
    emit: Callable[[Json], None],
    note: Callable[[str], None] = lambda text: None,
) -> Json:
    def patience() -> float:
        if not daemon.is_silent(SILENCE_SAID_AFTER_S):
            return SILENT_S
        left_s = SILENT_S - SILENCE_SAID_AFTER_S
        note(f"the daemon is silent; waiting {left_s:.0f} s more")
        return left_s

    for reply in daemon.call_more(method, parameters, timeout=patience):
        progress = reply.get("progress")
        if isinstance(progress, dict):
            _show(progress, emit)
        report = reply.get("report")
        if isinstance(report, dict):
            if not fits(report, REPORT) or report["vmid"] != parameters["vmid"]:
                raise DaemonLost("the daemon's report is not one that this version understands")
            return report
    raise DaemonLost("the daemon ended its answer without a report")


def _show(progress: Json, emit: Callable[[Json], None]) -> None:
    """Progress is for people: what another version tells and this one cannot show ends no release."""
    try:
        emit(progress)
    except (LookupError, TypeError, ValueError, AttributeError):
        pass


def ask(method: str, parameters: Json) -> Json:
    """One call without progress (Observe, Map, Status). Raises as `release`."""
    with connect() as daemon:
        answer = daemon.call(method, parameters, timeout=60.0)
    if not fits(answer, ANSWERS[method]):
        raise DaemonLost("the daemon's answer is not one that this version understands")
    return answer


__all__ = ["DaemonAbsent", "DaemonLost", "DaemonUnavailable", "ask", "release", "verify", "wanted"]
