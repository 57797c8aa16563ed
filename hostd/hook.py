"""What the hookscript and the drop-in run: one lifecycle event, by the daemon or, without it, here.

    python3 -I -S -c '...; hostd.hook.entry()' VMID PHASE [SOURCE]

Quick to import: every start and stop of every container pays for it, GPU or not. The exit status is 0 whatever
happens, but for a start that is refused on purpose: 77. Everything printed ends with a newline, and no child keeps
stdout or stderr: Proxmox waits for them without limit (PCT_FLOWS 2).
"""

from __future__ import annotations

import os
import sys
import time

from hostd import inherited
from hostd.service.client import DaemonLost, connect
from hostd.service.interface import SOCKET_PATH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

REFUSED = 77
PHASES = ("pre-start", "post-start", "pre-stop", "post-stop", "exec-start-pre", "exec-stop-post")
CONNECT_S = 3.0
ACCEPT_S = 5.0
"""Until a worker of the daemon has taken the event."""
SLACK_S = 5.0
"""Beyond the budget, before a daemon that is silent at a start is given up. At a stop nothing waits for the answer."""


def main(argv: list[str], environment: Mapping[str, str], socket: str = SOCKET_PATH) -> int:
    """One event; the exit status."""
    if len(argv) < 2 or not argv[0].isascii() or not argv[0].isdigit() or argv[1] not in PHASES:
        say(f"cannot tell what {' '.join(argv)!r} means: expected VMID PHASE", error=True)
        return 0
    vmid, phase = int(argv[0]), argv[1]
    source = argv[2] if len(argv) > 2 else "drop-in" if phase.startswith("exec-") else "hookscript"
    context = {key: value[:64] for key in _KEYS if (value := environment.get(key, ""))}
    context["EVENT_ID"] = os.urandom(8).hex()
    begun_s = time.monotonic()
    try:
        reply = by_daemon(vmid, phase, source, context, socket)
    except Exception as exc:  # noqa: BLE001 - absent, lost, of another version, broken: the work is done here
        reply = in_process(vmid, phase, source, context, str(exc), time.monotonic() - begun_s)
    return tell(vmid, phase, reply)


_KEYS = ("INVOCATION_ID", "SERVICE_RESULT", "EXIT_CODE", "EXIT_STATUS", "LXC_PID", "LXC_TARGET")


def by_daemon(vmid: int, phase: str, source: str, context: dict[str, str], socket: str) -> dict[str, object]:
    """The daemon's reply. Raises DaemonUnavailable when it has none in time."""
    parameters: dict[str, object] = {
        "vmid": vmid,
        "phase": phase,
        "source": source,
        "context": context,
        "on_disconnect": "continue",
    }
    begun_s = time.monotonic()
    limit_s, budget_s = ACCEPT_S, 0.0
    doing = ""

    def left_s() -> float:
        return begun_s + limit_s - time.monotonic()

    with connect(socket, CONNECT_S) as connection:
        try:
            for reply in connection.call_more("Event", parameters, left_s):
                progress = reply.get("progress")
                if not isinstance(progress, dict):
                    if not isinstance(reply.get("allow"), bool):
                        raise DaemonLost("the daemon's answer is not one that this version understands")
                    return reply
                if progress.get("event") == "accepted":
                    given = progress.get("since_s")
                    budget_s = float(given) if isinstance(given, (int, float)) else 20.0
                    limit_s = budget_s if phase in _STOPPED else budget_s + SLACK_S
                if progress.get("event") == "waiting":
                    doing = str(progress.get("what") or "")
        except DaemonLost:
            if not budget_s or phase not in _STOPPED or left_s() > 0.05:
                raise  # lost, not slow: the work is done here
    text = f"still at work after {time.monotonic() - begun_s:.0f} s ({doing or 'no word yet'}); pve-gpu-hostd goes on"
    return {"allow": True, "message": text}


_STOPPED = ("post-stop", "exec-stop-post")


def in_process(
    vmid: int, phase: str, source: str, context: dict[str, str], why: str, spent_s: float
) -> dict[str, object]:
    """The same work here. Whatever goes wrong, the container goes."""
    try:
        sys.dont_write_bytecode = True
        import site

        site.main()  # the shell starts us with -S; psutil, pynvml and yaml live in dist-packages
        from hostd.lifecycle.here import deal_with

        return deal_with(vmid, phase, source, context, why, spent_s)
    except Exception as exc:  # noqa: BLE001 - a fault of ours must never keep a container from starting or stopping
        return {"allow": True, "message": f"internal error, nothing was checked: {type(exc).__name__}: {exc}"}


def tell(vmid: int, phase: str, reply: dict[str, object]) -> int:
    """Says what there is to say and returns the exit status."""
    message, next_step = str(reply.get("message") or ""), str(reply.get("next_step") or "")
    refused = reply.get("allow") is False and phase in ("pre-start", "exec-start-pre")
    for line in message.split("\n"):
        if line:
            say(line if line.startswith(f"container {vmid} ") else f"container {vmid}: {line}", error=refused)
    if next_step and message:
        say(f"  next: {next_step}", error=refused)
    return REFUSED if refused else 0


def say(text: str, *, error: bool = False) -> None:
    """One line for the task log. A closed pipe or a full disk is no reason to fail."""
    clean = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text)
    prefix = "" if clean.startswith("  ") else "pve-gpu-release: "
    try:
        os.write(2 if error else 1, f"{prefix}{clean}\n".encode("utf-8", "backslashreplace"))
    except OSError:
        pass


def entry() -> None:
    """Never raises, never prints a traceback into a task log."""
    status = 0
    try:
        inherited.set_right()
        status = main(sys.argv[1:], os.environ)
    except BaseException as exc:  # noqa: BLE001 - see main
        say(f"internal error, nothing was checked: {type(exc).__name__}: {exc}", error=True)
    os._exit(status)
