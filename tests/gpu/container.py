"""Containers without LXC: the cgroup `/lxc/129/ns`, a PID namespace one level below ours, a mount namespace with
/proc and /dev of its own. To the product they are containers: their cgroup exists.

Only cgroups that we made (they carry a mark) are ever killed or removed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from .channel import Channel, ChannelClosedError, Message, close_quietly, wait_readable
from .cuda import environment

HERE = Path(__file__).resolve().parent
MARK = "trusted.pve-gpu-release-test"
START_S = 30.0
READY_S = 90.0
"""A holder with 16 GiB of pinned memory on a machine whose memory is still growing takes its time."""
GONE_S = 90.0
HOLDER = (sys.executable, "-I", "-S", str(HERE / "holder.py"))


# --- /proc --------------------------------------------------------------------------------------------------------


def read_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third (state) on; proc_pid_stat(5)."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)[1].split()


def state_of(pid: int) -> str:
    """One letter; empty when the process is gone."""
    try:
        return read_stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def start_time_of(pid: int) -> int:
    """Clock ticks since boot."""
    return int(read_stat(pid)[19])


def status_line(pid: int, key: str) -> str:
    """One line of /proc/PID/status without its key; empty when the process is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
            if line.startswith(key + ":"):
                return line.split(":", 1)[1].strip()
    except (FileNotFoundError, ProcessLookupError):
        pass
    return ""


def ns_pids_of(pid: int) -> list[int]:
    """Pids in the namespaces below ours, outermost first."""
    return [int(word) for word in status_line(pid, "NSpid").split()][1:]


def wait_for_state(pid: int, letters: str, timeout_s: float = 20.0) -> None:
    """Wait until /proc/PID/stat shows one of these states. Raises TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while (now := state_of(pid)) not in letters:
        if time.monotonic() > deadline:
            raise TimeoutError(f"pid {pid} is in state {now!r}, not in {letters!r}")
        time.sleep(0.002)


# --- devices ------------------------------------------------------------------------------------------------------


def nvidia_majors() -> set[int]:
    """Character majors of NVIDIA drivers, from /proc/devices."""
    majors = set()
    text = Path("/proc/devices").read_text()
    for line in text.split("Block devices", 1)[0].splitlines():
        words = line.split()
        if len(words) == 2 and words[0].isdigit() and words[1].startswith("nvidia"):
            majors.add(int(words[0]))
    return majors


@dataclass(frozen=True)
class Node:
    """A device node of the host that a container gets too."""

    name: str
    """Path below /dev."""
    major: int
    minor: int
    mode: int
    source: str


def host_nodes() -> list[Node]:
    """Every NVIDIA character device below the host's /dev."""
    majors = nvidia_majors()
    found = []
    for path in sorted([*Path("/dev").glob("nvidia*"), *Path("/dev").glob("nvidia*/*")]):
        facts = path.lstat()
        if stat.S_ISCHR(facts.st_mode) and os.major(facts.st_rdev) in majors:
            number = facts.st_rdev
            mode = stat.S_IMODE(facts.st_mode)
            found.append(Node(str(path.relative_to("/dev")), os.major(number), os.minor(number), mode, str(path)))
    return found


def gpu_descriptors(pid: int, majors: set[int]) -> int:
    """How many descriptors on NVIDIA nodes the tasks of this process have, each task's table counted once per task."""
    count = 0
    for path in Path(f"/proc/{pid}/task").glob("*/fd/*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            count += stat.S_ISCHR(facts.st_mode) and os.major(facts.st_rdev) in majors
    return count


# --- cgroups ------------------------------------------------------------------------------------------------------


def find_cgroup2() -> Path:
    """The v2 mount, unified or hybrid. Raises LookupError."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, right = line.split(" - ", 1)
        if right.split()[0] == "cgroup2" and left.split()[3] == "/":
            return Path(left.split()[4])
    raise LookupError("no cgroup2 mount in /proc/self/mountinfo")


class Cgroup:
    """A cgroup that the suite made, for one container."""

    def __init__(self, vmid: int) -> None:
        root = find_cgroup2()
        self.parent = root / "lxc"
        self.path = self.parent / str(vmid)
        self.made_parent = not self.parent.exists()
        if self.path.exists():
            if not self.is_ours():
                raise RuntimeError(f"{self.path} exists and is not ours: is container {vmid} a real one on this node?")
            self.destroy()
            self.made_parent = False
        self.parent.mkdir(exist_ok=True)
        self.path.mkdir()
        os.setxattr(self.path, MARK, b"1")

    def is_ours(self) -> bool:
        try:
            return os.getxattr(self.path, MARK) == b"1"
        except OSError:
            return False

    def make(self, name: str) -> Path:
        """A cgroup below the container's; `name` may have several parts."""
        path = self.path / name
        path.mkdir(parents=True, exist_ok=True)
        return path

    def directories(self) -> list[Path]:
        """This cgroup and everything below, deepest first."""
        found = [Path(top) for top, _names, _files in os.walk(self.path)]
        return sorted(found, key=lambda path: len(path.parts), reverse=True)

    def pids(self, name: str = "") -> list[int]:
        """Live processes in this cgroup (or in one below it) and its descendants, zombies included."""
        found: list[int] = []
        for top, _names, _files in os.walk(self.path / name):
            with contextlib.suppress(OSError):
                found += [int(word) for word in (Path(top) / "cgroup.procs").read_text().split()]
        return sorted(found)

    def populated(self, name: str = "") -> bool:
        """What cgroup.events says; False when the cgroup is gone."""
        try:
            return "populated 1" in (self.path / name / "cgroup.events").read_text()
        except (FileNotFoundError, OSError):
            return False

    def kill(self, timeout_s: float = GONE_S) -> None:
        """SIGKILL for everything in it, and wait until it is empty. Raises TimeoutError naming what stays."""
        if not self.path.exists():
            return
        if not self.is_ours():
            raise RuntimeError(f"{self.path} is not ours any more")
        (self.path / "cgroup.kill").write_text("1")
        deadline = time.monotonic() + timeout_s
        with (self.path / "cgroup.events").open() as events:
            poller = select.poll()
            poller.register(events, select.POLLPRI)
            while True:
                events.seek(0)
                if "populated 1" not in events.read():
                    return
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.path} is not empty {timeout_s:g} s after cgroup.kill: {self.describe()}")
                poller.poll(200)

    def destroy(self) -> None:
        """Kill, then remove the directories."""
        self.kill()
        deadline = time.monotonic() + 5
        while self.path.exists():
            try:
                for path in self.directories():
                    path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
        if self.made_parent:
            with contextlib.suppress(OSError):
                self.parent.rmdir()

    def describe(self) -> str:
        """Every process with what matters about it, for a failure report."""
        majors = nvidia_majors()
        lines = []
        for top, names, _files in os.walk(self.path):
            names.sort()
            events = (Path(top) / "cgroup.events").read_text().replace("\n", " ") if os.path.exists(top) else ""
            lines.append(f"{top}: {events}")
            for pid in [int(word) for word in (Path(top) / "cgroup.procs").read_text().split()]:
                cmdline = ""
                with contextlib.suppress(OSError):
                    cmdline = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                words = (
                    f"  pid {pid} state {state_of(pid)} NSpid [{status_line(pid, 'NSpid')}]",
                    f"comm {status_line(pid, 'Name')!r} gpu-fds {gpu_descriptors(pid, majors) if pid else '?'}",
                    cmdline[-160:],
                )
                lines.append(" ".join(words))
        return "\n".join(lines)


# --- processes ----------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """A process of ours, pinned by a pidfd. `pid` is the host's number."""

    pid: int
    label: str
    log: Path
    channel: Channel
    child: subprocess.Popen[bytes] | None = None
    pidfd: int = field(init=False)
    start_time: int = field(init=False)
    ns_pids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.pidfd = os.pidfd_open(self.pid)
        self.start_time = start_time_of(self.pid)
        self.ns_pids = ns_pids_of(self.pid)

    @property
    def ns_pid(self) -> int:
        """The number in its own, innermost PID namespace."""
        return self.ns_pids[-1] if self.ns_pids else self.pid

    def is_alive(self) -> bool:
        return not wait_readable(self.pidfd, 0)

    def send_signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def wait_gone(self, timeout_s: float) -> None:
        """Wait for its end. Raises TimeoutError."""
        if not wait_readable(self.pidfd, timeout_s):
            raise TimeoutError(f"{self} lives {timeout_s:g} s later, state {state_of(self.pid)}")

    def kill(self, timeout_s: float = GONE_S) -> None:
        """SIGKILL and wait for its end."""
        with contextlib.suppress(ProcessLookupError):
            self.send_signal(signal.SIGKILL)
        self.wait_gone(timeout_s)

    def check(self, timeout_s: float = 60.0) -> dict[str, object]:
        """Let the holder read its GPU memory back."""
        self.channel.send({"cmd": "check"})
        return self.channel.expect("check", timeout_s).facts

    def assert_untouched(self) -> None:
        """It lives, is the same process, and no signal reached it."""
        assert self.is_alive(), f"{self} is dead; it was foreign to the release"
        assert start_time_of(self.pid) == self.start_time
        assert state_of(self.pid) not in "TtZX", f"{self} is in state {state_of(self.pid)}"
        seen = self.channel.drain()
        self.channel.kept = [message for message in seen if message.event != "signal"]
        signals = [message.facts.get("signo") for message in seen if message.event == "signal"]
        assert not signals, f"{self} got signals {signals}; it was foreign to the release"

    def close(self) -> None:
        """Forget it; a child of ours is killed and reaped."""
        if self.child is not None:
            self.child.kill()
            self.child.wait(GONE_S)
        close_quietly(self.pidfd)
        self.channel.close()

    def __str__(self) -> str:
        return f"{self.label} (pid {self.pid}, in its namespace {self.ns_pid})"


class StartFailedError(Exception):
    """A process did not get ready; the text has its log."""


def _first_message(channel: Channel, event: str, label: str, log: Path) -> Message:
    try:
        return channel.expect(event, READY_S)
    except (RuntimeError, TimeoutError, ChannelClosedError) as exc:
        said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        raise StartFailedError(f"{label}: {type(exc).__name__} {exc}\n--- {log}\n{said}") from None


def start_on_host(options: Sequence[str], *, label: str, directory: Path, event: str = "ready") -> Process:
    """A holder in the host's namespaces, a child of ours."""
    log = directory / f"{label}.log"
    channel, theirs = Channel.pair()
    with log.open("ab") as out, theirs:
        child = subprocess.Popen(
            [*HOLDER, "--status-fd", str(theirs.fileno()), *options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=[theirs.fileno()],
            env=environment(),
            start_new_session=True,
        )
    try:
        message = _first_message(channel, event, label, log)
        return Process(message.pid, label, log, channel, child)
    except BaseException:
        child.kill()
        child.wait()
        channel.close()
        raise


class Container:
    """One running 'container'. Use as a context manager: leaving it kills and removes everything of it."""

    def __init__(
        self,
        vmid: int,
        directory: Path,
        *,
        how: str = "bind",
        nodes: Sequence[Node] | None = None,
        init_opens: Sequence[str] = (),
    ) -> None:
        self.vmid = vmid
        self.directory = directory
        self.how = how
        self.processes: list[Process] = []
        self.log = directory / f"init-{vmid}.log"
        self.init_pid = 0
        self.init_pidfd = -1
        self.launcher: subprocess.Popen[bytes] | None = None
        self.cgroup = Cgroup(vmid)
        self.control, theirs = Channel.pair()
        try:
            self.scratch = Path(tempfile.mkdtemp(prefix=f"dev-{vmid}-", dir=directory))
            with theirs:
                self._launch(theirs.fileno(), host_nodes() if nodes is None else nodes, init_opens)
            message = _first_message(self.control, "up", f"init of {vmid}", self.log)
            self.init_pid = message.pid
            self.init_pidfd = os.pidfd_open(self.init_pid)
        except BaseException:
            self.destroy()
            raise

    def _launch(self, control_fd: int, nodes: Sequence[Node], init_opens: Sequence[str]) -> None:
        config = {
            "control_fd": control_fd,
            "cgroup": str(self.cgroup.make("ns")),
            "scratch": str(self.scratch),
            "how": self.how,
            "nodes": [vars(node) for node in nodes],
            "init_opens": list(init_opens),
        }
        with self.log.open("ab") as out:
            self.launcher = subprocess.Popen(
                [sys.executable, "-I", "-S", str(HERE / "container_init.py"), json.dumps(config)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                pass_fds=[control_fd],
                start_new_session=True,
            )

    def __enter__(self) -> Container:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.destroy()

    def is_running(self) -> bool:
        return not wait_readable(self.init_pidfd, 0)

    def _request(
        self,
        argv: Sequence[str],
        log: Path,
        env: dict[str, str],
        cgroup: str,
        nested: str = "",
        *,
        report: bool = False,
    ) -> tuple[int, Channel]:
        """(pid in the container, our end of the status socket)"""
        channel, theirs = Channel.pair()
        path = self.cgroup.make(cgroup)
        request = {
            "argv": list(argv),
            "env": environment() | env,
            "cgroup": str(path),
            "nested": nested,
            "report": report,
        }
        with log.open("ab") as out, theirs:
            self.control.send(request, [theirs.fileno(), out.fileno()])
        return int(self.control.expect("spawned", START_S).facts["ns_pid"]), channel

    def spawn(
        self,
        *options: str,
        label: str = "holder",
        event: str = "ready",
        cgroup: str = "ns",
        nested: str = "",
        namespaces: bool = True,
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start holder.py with these options and wait for its `event`.

        `nested` is "", "init" (docker-like with an init of its own) or "direct" (the holder is the nested pid 1).
        Without `namespaces` it lives in the host's namespaces and only in the container's cgroup.
        """
        log = self.directory / f"{label}-{self.vmid}-{len(self.processes)}.log"
        if not namespaces:
            path = self.cgroup.make(cgroup)
            process = start_on_host(["--cgroup", str(path), *options], label=log.stem, directory=self.directory)
        else:
            argv = [*HOLDER, "--status-fd", "3", *options]
            _ns_pid, channel = self._request(argv, log, env or {}, cgroup, nested)
            try:
                message = _first_message(channel, event, f"{label} in {self.vmid}", log)
                process = Process(message.pid, f"{label} of {self.vmid}", log, channel)
            except BaseException:
                channel.close()
                raise
        self.processes.append(process)
        return process

    def spawn_all(self, many: Sequence[Sequence[str]], *, label: str = "holder") -> list[Process]:
        """Start several holders at the same time and wait until every one is ready."""
        begun: list[tuple[Channel, Path]] = []
        for options in many:
            log = self.directory / f"{label}-{self.vmid}-{len(self.processes) + len(begun)}.log"
            argv = [*HOLDER, "--status-fd", "3", *options]
            begun.append((self._request(argv, log, {}, "ns")[1], log))
        started = []
        for channel, log in begun:
            message = _first_message(channel, "ready", f"{label} in {self.vmid}", log)
            started.append(Process(message.pid, f"{label} of {self.vmid}", log, channel))
        self.processes += started
        return started

    def adopt(self, message: Message, parent: Process, label: str) -> Process:
        """A forked child of a holder, known by its message."""
        process = Process(message.pid, f"{label} of {self.vmid}", parent.log, parent.channel)
        self.processes.append(process)
        return process

    def run(
        self, argv: Sequence[str], *, env: dict[str, str] | None = None, timeout_s: float = 60.0
    ) -> tuple[int, str]:
        """Run a program in the container like `pct exec` -> (exit status, output). Raises TimeoutError."""
        log = self.directory / f"run-{self.vmid}-{time.monotonic_ns()}.log"
        ns_pid, channel = self._request(argv, log, env or {}, "ns/.lxc", report=True)
        try:
            ended = self.control.expect("exit", timeout_s, ns_pid=ns_pid)
            return int(ended.facts["status"]), log.read_text(errors="replace")
        finally:
            channel.close()

    def destroy(self) -> None:
        """Kill and remove; safe to call twice and when the container is dead already."""
        try:
            self.cgroup.destroy()
        finally:
            for process in self.processes:
                process.close()
            self.processes.clear()
            self.control.close()
            if self.launcher is not None:
                self.launcher.kill()
                self.launcher.wait(GONE_S)
            if self.init_pidfd >= 0:
                close_quietly(self.init_pidfd)
                self.init_pidfd = -1

    def describe(self) -> str:
        with contextlib.suppress(OSError):
            return self.cgroup.describe()
        return f"{self.cgroup.path}: gone"


def tails(directory: Path, limit: int = 1500) -> Iterator[str]:
    """The end of every log in a directory that has something to say."""
    for path in sorted(directory.glob("*.log")):
        text = path.read_text(errors="replace").strip()
        if text:
            yield f"--- {path.name}\n{text[-limit:]}"
