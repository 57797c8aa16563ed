"""The daemon and systemd: readiness, status line, watchdog, passed sockets (sd_notify(3), sd_listen_fds(3))."""

from __future__ import annotations

import os
import time
from collections.abc import Callable


class Notify:
    """sd_notify(3) by python3-systemd; without it or without systemd nothing is said."""

    def __init__(self) -> None:
        self._send: Callable[[str], object] = lambda text: None
        self._status = ""
        if not os.environ.get("NOTIFY_SOCKET"):
            return
        try:
            from systemd.daemon import notify

            self._send = notify
        except Exception:  # noqa: BLE001 - missing or broken, in whatever way
            self._send = _notify_plainly

    def __call__(self, *lines: str) -> None:
        try:
            self._send("\n".join(lines))
        except OSError:
            pass  # systemd is re-executing itself or gone; it will ask again by its watchdog

    def status(self, text: str) -> None:
        """What `systemctl status` shows; said only when it has changed."""
        if text != self._status:
            self._status = text
            self(f"STATUS={text}")

    def reloading(self) -> None:
        self("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")


def _notify_plainly(text: str) -> None:
    """The documented datagram protocol, for a node whose python3-systemd is broken: without it systemd would kill us."""
    import socket

    address = os.environ["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)


def watchdog_period_s() -> float | None:
    """How often to say WATCHDOG=1: half of what systemd asks for (sd_watchdog_enabled(3)); None when it asks for none."""
    usec = os.environ.get("WATCHDOG_USEC", "")
    if not usec.isdecimal() or int(usec) == 0 or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return None
    return int(usec) / 2e6


def passed_listener() -> int | None:
    """The socket that systemd passes, by `systemd.daemon.listen_fds`; None when it passes none."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    try:
        from systemd.daemon import listen_fds

        fds = [int(fd) for fd in listen_fds(unset_environment=True)]
    except Exception:  # noqa: BLE001 - missing or broken, in whatever way
        count = os.environ.pop("LISTEN_FDS", "0")
        for name in ("LISTEN_PID", "LISTEN_FDNAMES"):
            os.environ.pop(name, None)
        fds = list(range(3, 3 + int(count))) if count.isdecimal() else []
    return fds[0] if fds else None
