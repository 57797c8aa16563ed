"""`pve-gpu-hostd`: the daemon. One epoll loop that forks a worker per request; idle it costs nothing.

Started by systemd (`Type=notify`, socket activation, watchdog); also by hand with `--socket PATH`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time

from hostd import __version__, audit, inherited
from hostd.config import DEFAULT_PATH, BrokenConfigError, Config, load
from hostd.lifecycle.event import Phase
from hostd.model import DriverNumbers
from hostd.service.api import Api, DaemonFacts, EventRequest, LookRequest, ReleaseRequest
from hostd.service.driverwatch import DriverWatch
from hostd.service.interface import INTERFACE, SOCKET_PATH
from hostd.service.logbook import Logbook
from hostd.service.notify import Notify, passed_listener, watchdog_period_s
from hostd.service.recovery import Recovery
from hostd.service.server import Caller, Outcome, Server, Worker
from hostd.stopwatch import StopWatch
from hostd.system.devices import read_driver_numbers

AGAIN = 75
"""Exit status (EX_TEMPFAIL) that asks systemd for a new start: RestartForceExitStatus= of the unit."""
URL = "https://github.com/pve-gpu-release/pve-gpu-release"


class Daemon:
    """The daemon's life: configuration, signals, watchdog, status line. Requests are the server's and the API's."""

    def __init__(self, config_path: str, socket_path: str, must_exist: bool) -> None:
        """Raises BrokenConfigError, and OSError when it cannot listen."""
        self._config_path = config_path
        self._must_exist = must_exist
        self.config = load(config_path, must_exist=must_exist)
        self._notify = Notify()
        self._signal_pipe = _catch_signals()
        self._log = Logbook()
        self.facts = DaemonFacts()
        self.facts.config_path = config_path
        api = Api(lambda: self.config, self.facts)
        api.on_pre_stop = lambda vmid: self.stops.arm(vmid)
        self._numbers = _device_numbers()
        passed = passed_listener()
        self._socket_passed = passed is not None
        self.server = Server(
            socket.socket(fileno=passed) if passed is not None else socket_path,
            api.methods(),
            version=__version__,
            url=URL,
            on_started=lambda worker: self._say_status(),
            on_finished=self._on_finished,
            log=lambda text: self._log.say(audit.internal_error("daemon", text)),
            is_stale=self._is_stale,
        )
        self.driver = DriverWatch(self.server, self._log.say, lambda: self.config.nvml.deadline_s)
        self.recovery = Recovery(self.server, self._log.say)
        self.stops = StopWatch(self.server.call_at, self._look_after_stop, self._stop_delays)
        self.facts.counts = self._counts

    def run(self) -> int:
        """Serves until SIGTERM or SIGINT; returns the exit status."""
        self.server.watch(self._signal_pipe[0], self._on_signal)
        self._beat()
        notes = [] if self.facts.first_pid_namespace else ["this is not the machine's first PID namespace"]
        self._log.say(audit.daemon_started(__version__, notes))
        self._note_notices()
        self._log.attach(self.server)
        self.recovery.run()
        self.stops.resume()
        self.driver.look()
        self._notify("READY=1", f"STATUS={self._status()}")
        self.server.run()
        stale = self._is_stale()
        self._log.say(audit.daemon_stopped("the driver has other device numbers than at its start" if stale else "asked to"))
        self._log.close()
        return AGAIN if stale else 0

    # --- signals ---

    def _on_signal(self, _events: int) -> None:
        numbers = set(os.read(self._signal_pipe[0], 4096))
        if signal.SIGHUP in numbers:
            self._reload()
        if numbers & {signal.SIGTERM, signal.SIGINT}:
            self._notify("STOPPING=1", "STATUS=stopping")
            self.server.stop()

    def _reload(self) -> None:
        """SIGHUP: the file as it is now, or the last good one when it is broken."""
        self._notify.reloading()
        try:
            self.config = load(self._config_path, must_exist=self._must_exist)
            self.facts.config_error = ""
            self._log.say(audit.config_loaded(self._config_path))
            self._note_notices()
        except BrokenConfigError as exc:
            self.facts.config_error = exc.problems[0]
            self._log.say(audit.config_failed(self._config_path, exc.problems, instead="the last good configuration"))
        self._notify("READY=1")
        self._say_status()

    def _note_notices(self) -> None:
        """A file that says something and could not be read for want of a package: what it says is not in force."""
        if self.config.notices:
            self.facts.config_error = self.config.notices[0]
            self._log.say(audit.config_failed(self._config_path, self.config.notices, instead="the built-in defaults"))

    def _beat(self) -> None:
        """The watchdog's timer is the only one while the daemon is idle."""
        period_s = watchdog_period_s()
        if period_s is None:
            return
        self._notify("WATCHDOG=1")
        self.server.call_at(time.monotonic() + period_s, self._beat)

    # --- requests ---

    def _is_stale(self) -> bool:
        """systemd resolves DeviceAllow=char-nvidia… when it starts us (systemd.resource-control(5)): a driver that was
        loaded since, or again, has device nodes that our children cannot open. By hand there is no such filter."""
        return self._socket_passed and _device_numbers() != self._numbers

    def _on_finished(self, worker: Worker, outcome: Outcome) -> None:
        self._say_status()
        self.driver.look()
        if outcome.message is not None or (worker.cancelled and worker.orphaned):
            return
        how = f"by signal {-outcome.status}" if outcome.status < 0 else f"with status {outcome.status}"
        text = f"worker {worker.pid} of {_what(worker)} ended {how} without an answer"
        self._log.say(audit.internal_error("worker", text))
        if not self.server.stopping:
            self.recovery.worker_died(worker.pid, orphaned=worker.orphaned)

    def _stop_delays(self, vmid: int) -> tuple[float, float]:
        hook = self.config.for_container(vmid).hook
        return hook.watchdog_delay_s, hook.watchdog_interval_s

    def _look_after_stop(self, vmid: int) -> None:
        parameters = {"vmid": vmid, "phase": Phase.WATCHDOG.value, "source": "daemon"}
        self.server.submit(f"{INTERFACE}.Event", parameters, Caller(os.getpid(), 0, 0))

    # --- what it says of itself ---

    def _counts(self) -> dict[str, int]:
        return {
            "connections": self.server.connections,
            "workers": len(self.server.workers),
            "queued": self.server.queued,
            "refused": self.server.refused,
            "driver_hangs": self.driver.times,
        }

    def _say_status(self) -> None:
        self._notify.status(self._status())

    def _status(self) -> str:
        """One line for `systemctl status`."""
        busy = sorted({_what(worker) for worker in self.server.workers})
        what = f"at work: {', '.join(busy[:5])}{' ...' if len(busy) > 5 else ''}" if busy else "idle"
        if self.facts.config_error:
            good = "" if self.config.notices else ", the last good one is in force"
            what += f"; configuration broken{good}: {self.facts.config_error}"
        return what


def _device_numbers() -> DriverNumbers | None:
    try:
        return read_driver_numbers()
    except OSError:
        return None


def _catch_signals() -> tuple[int, int]:
    """A pipe that gets the numbers of SIGTERM, SIGINT and SIGHUP; before there is a socket that others can see."""
    pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(pipe[1], warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    return pipe


def _what(worker: Worker) -> str:
    """`Release 129`."""
    name = worker.method.rpartition(".")[2]
    match worker.request:
        case ReleaseRequest(vmid=vmid):
            return f"{name} {vmid}"
        case EventRequest(event=event):
            return f"{event.phase.value} {event.vmid}"
        case LookRequest(vmids=(vmid,)):
            return f"{name} {vmid}"
    return name


def preload() -> None:
    """Imports what workers need, so that each one starts with it: pynvml too, which opens no device by itself."""
    import hostd.lifecycle.here
    import hostd.release
    import hostd.system.nvml_child
    import hostd.xid  # noqa: F401

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

    try:
        ensure_run_dir()
        preload()
        daemon = Daemon(args.config or DEFAULT_PATH, args.socket, args.config is not None)
    except BrokenConfigError as exc:
        print(f"pve-gpu-hostd: {exc.message}", file=sys.stderr)
        print("  next: pve-gpu-release check-config", file=sys.stderr)
        return 2
    except OSError as exc:
        print(f"pve-gpu-hostd: cannot listen: {exc}", file=sys.stderr)
        return 1
    import gc

    gc.collect()
    gc.freeze()
    return daemon.run()


def entry() -> None:
    """Console script."""
    inherited.set_right()
    sys.exit(main(sys.argv[1:]))


__all__ = ["Config", "Daemon", "entry", "main"]

if __name__ == "__main__":
    entry()
