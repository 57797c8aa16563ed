"""`pve-gpu-hostd`: the daemon. One epoll loop that forks a worker per request; idle it costs nothing.

Started by systemd (`Type=notify`, socket activation, watchdog); also by hand with `--socket PATH`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping

from hostd import __version__, audit
from hostd.config import DEFAULT_PATH, BrokenConfigError, Config, load
from hostd.lifecycle.event import STOP_PHASES, Phase
from hostd.lock import try_lock
from hostd.service.api import Api, DaemonFacts
from hostd.service.interface import INTERFACE, SOCKET_PATH
from hostd.service.server import Caller, Outcome, Server, Worker
from hostd.stopwatch import StopWatch
from hostd.store import Store, parse_resume
from hostd.system.journal import Journal

RESUME_WITHIN_S = 3600.0
"""An older release that was cut off is reported, not finished: the container's life has gone on."""
URL = "https://github.com/pve-gpu-release/pve-gpu-release"


class Notify:
    """sd_notify(3) by python3-systemd; without it or without systemd nothing is said."""

    def __init__(self) -> None:
        self._send: Callable[[str], object] = lambda text: None
        if not os.environ.get("NOTIFY_SOCKET"):
            return
        try:
            from systemd.daemon import notify

            self._send = notify
        except ImportError:
            self._send = _notify_plainly

    def __call__(self, *lines: str) -> None:
        self._send("\n".join(lines))


def _notify_plainly(text: str) -> None:
    """The documented datagram protocol, for a node whose python3-systemd is broken: without it systemd would kill us."""
    import socket

    address = os.environ["NOTIFY_SOCKET"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.sendto(text.encode(), "\0" + address[1:] if address.startswith("@") else address)


def listener() -> int | None:
    """The socket that systemd passes, by `systemd.daemon.listen_fds`; None when it passes none."""
    if os.environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    try:
        from systemd.daemon import listen_fds

        fds = [int(fd) for fd in listen_fds(unset_environment=True)]
    except ImportError:
        fds = list(range(3, 3 + int(os.environ.get("LISTEN_FDS", "0"))))
    return fds[0] if fds else None


class Daemon:
    """The daemon's life: configuration, recovery, signals, watchdog. Requests are the server's and the API's."""

    def __init__(self, config_path: str, socket_path: str, must_exist: bool) -> None:
        self._config_path = config_path
        self._must_exist = must_exist
        self._notify = Notify()
        self.config = load(config_path, must_exist=must_exist)
        self.journal = Journal(stderr=True, on_drop=audit.entries_dropped)
        self.facts = DaemonFacts()
        self.facts.config_path = config_path
        self._store = Store()
        self._busy = 0
        api = Api(lambda: self.config, self.facts)
        api.on_pre_stop = lambda vmid: self.stops.arm(vmid)
        passed = listener()
        import socket

        where = socket.socket(fileno=passed) if passed is not None else socket_path
        self.server = Server(
            where, api.methods(), version=__version__, url=URL, on_finished=self._on_finished, log=self._log
        )
        self.facts.counts = lambda: (
            self.server.connections,
            len(self.server.workers),
            self.server.queued,
        )
        self.stops = StopWatch(self.server.call_at, self._look_after_stop, self._stop_delays)
        self._signal_pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def _stop_delays(self, vmid: int) -> tuple[float, float]:
        hook = self.config.for_container(vmid).hook
        return hook.watchdog_delay_s, hook.watchdog_interval_s

    def _look_after_stop(self, vmid: int) -> None:
        parameters = {"vmid": vmid, "phase": Phase.WATCHDOG.value, "source": "daemon"}
        self.server.submit(f"{INTERFACE}.Event", parameters, Caller(os.getpid(), 0, 0))

    # --- life ---

    def run(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit status."""
        signal.set_wakeup_fd(self._signal_pipe[1], warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.server.watch(self._signal_pipe[0], self._on_signal)
        self._arm_watchdog()
        notes = [] if self.facts.first_pid_namespace else ["this is not the machine's first PID namespace"]
        self.journal.send(audit.daemon_started(__version__, notes))
        self._recover()
        self.stops.resume()
        self._notify("READY=1", self._status_line())
        self.server.run()
        self.journal.send(audit.daemon_stopped("asked to"))
        self.journal.close(deadline_s=1.0)
        return 0

    def _on_signal(self, _events: int) -> None:
        numbers = set(os.read(self._signal_pipe[0], 512))
        if signal.SIGHUP in numbers:
            self._reload()
        if numbers & {signal.SIGTERM, signal.SIGINT}:
            self._notify("STOPPING=1", "STATUS=stopping")
            self.server.stop()

    def _reload(self) -> None:
        """SIGHUP: the file as it is now, or the last good one when it is broken."""
        now_usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self._notify("RELOADING=1", f"MONOTONIC_USEC={now_usec}")
        try:
            self.config = load(self._config_path, must_exist=self._must_exist)
            self.facts.config_error = ""
            self.journal.send(audit.config_loaded(self._config_path))
        except BrokenConfigError as exc:
            self.facts.config_error = exc.problems[0]
            self.journal.send(
                audit.config_failed(self._config_path, exc.problems, instead="the last good configuration")
            )
        self._notify("READY=1", self._status_line())

    def _status_line(self) -> str:
        busy = len(self.server.workers)
        what = f"{busy} request{'s' if busy != 1 else ''} at work" if busy else "idle"
        wrong = f"; configuration broken, last good one in force: {self.facts.config_error}" if self.facts.config_error else ""
        return f"STATUS={what}{wrong}"

    def _arm_watchdog(self) -> None:
        """WATCHDOG=1 at half of what systemd asks for (sd_watchdog_enabled(3)); no other timer exists while idle."""
        usec = os.environ.get("WATCHDOG_USEC", "")
        if not usec.isdigit() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
            return
        period_s = int(usec) / 2e6

        def beat() -> None:
            self._notify("WATCHDOG=1")
            self.server.call_at(time.monotonic() + period_s, beat)

        beat()

    def _on_finished(self, worker: Worker, outcome: Outcome) -> None:
        self._notify(self._status_line())
        if outcome.status < 0 and not worker.cancelled:
            text = f"worker of {worker.method} ended by signal {-outcome.status}"
            self.journal.send(audit.internal_error("worker", text))
        self.journal.reap()

    def _log(self, text: str) -> None:
        self.journal.send(audit.internal_error("daemon", text))

    # --- recovery ---

    def _recover(self) -> None:
        """Finishes what a killed daemon or hook left open, reports what a killed command line left open."""
        for record in self._store.all():
            if record.get("report") is not None:
                continue
            resume = parse_resume(record)
            if resume is None:
                self._store.remove(str(record["release_id"]))
                continue
            lock = try_lock(resume.vmid)
            if lock is None:
                continue  # somebody is at it
            lock.close()
            self._recover_one(record, resume.vmid, resume.was_at)

    def _recover_one(self, record: Mapping[str, object], vmid: int, was_at: str) -> None:
        release_id = str(record["release_id"])
        context = audit.Context(vmid=vmid, release_id=release_id, trigger=str(record.get("trigger", "")))
        age_s = _age_s(record)
        event = _stop_event(record)
        lost = record.get("owner") == "cli" or (event is None and record.get("event") is not None)
        if lost or age_s > RESUME_WITHIN_S:
            why = "whoever asked for it was killed" if lost else f"it is {age_s:.0f} s old"
            self.journal.send(audit.abandoned(context, was_at, why))
            closed = dict(record) | {"report": {"verdict": None, "reason": "interrupted", "message": why}}
            try:
                self._store.write(closed)
            except OSError as exc:
                self.journal.send(audit.record_missing(context, str(exc)))
            return
        if event is not None:
            self.server.submit(f"{INTERFACE}.Event", event, Caller(os.getpid(), 0, 0))
            return
        options = record.get("options")
        parameters = {
            "vmid": vmid,
            "release_id": release_id,
            "on_disconnect": "continue",
            "options": options if isinstance(options, dict) else {},
        }
        self.server.submit(f"{INTERFACE}.Release", parameters, Caller(os.getpid(), 0, 0))


def _stop_event(record: Mapping[str, object]) -> dict[str, object] | None:
    """The event that an unfinished record answers, if it can still be answered: the end of a container can, a start
    has gone on without us long ago."""
    event = record.get("event")
    if not isinstance(event, dict) or event.get("phase") not in STOP_PHASES:
        return None
    return {key: event.get(key) for key in ("vmid", "phase", "source", "context")}


def _age_s(record: Mapping[str, object]) -> float:
    from hostd.release import boot_ticks_now

    at = record.get("at_ticks")
    ticks = boot_ticks_now() - at if isinstance(at, int) else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def preload() -> None:
    """Imports what workers need, so that each one starts with it: pynvml too, which opens no device by itself."""
    import hostd.release
    import hostd.system.nvml_child  # noqa: F401

    try:
        import pynvml  # noqa: F401
    except Exception:  # noqa: BLE001 - broken or missing: workers say so, with a code (`nvml-missing`)
        return


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pve-gpu-hostd", description="The daemon of pve-gpu-release.")
    parser.add_argument("--config", metavar="FILE", help=f"instead of {DEFAULT_PATH}")
    parser.add_argument("--socket", metavar="PATH", default=SOCKET_PATH, help="where to listen without systemd")
    parser.add_argument("--version", action="version", version=f"pve-gpu-hostd {__version__}")
    args = parser.parse_args(argv)
    if os.geteuid() != 0:
        print("pve-gpu-hostd: cannot run as anybody but root", file=sys.stderr)
        return 9
    from hostd.lock import ensure_run_dir

    ensure_run_dir()
    preload()
    try:
        daemon = Daemon(args.config or DEFAULT_PATH, args.socket, args.config is not None)
    except BrokenConfigError as exc:
        print(f"pve-gpu-hostd: {exc.message}", file=sys.stderr)
        print("  next: pve-gpu-release check-config", file=sys.stderr)
        return 2
    import gc

    gc.collect()
    gc.freeze()
    return daemon.run()


def entry() -> None:
    """Console script."""
    sys.exit(main(sys.argv[1:]))


__all__ = ["Config", "Daemon", "entry", "main"]

if __name__ == "__main__":
    entry()
