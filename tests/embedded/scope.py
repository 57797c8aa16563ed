"""What a node and a container have in common: a root to read and write, commands and holders to start, a cgroup."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .build import HERE, Artefacts
from .frozen import FrozenFs, attach_loop
from .process import Holder, HolderHandle, Process, describe, wait_until
from .wire import Init, NodeError, receive, report_socket

STANDIN = "/run/nvidia-standin"
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
}
BASE_NODES = {"null": 3, "zero": 5, "full": 7, "random": 8, "urandom": 9}
MS_NOSUID, MS_BIND, MS_MOVE, MS_REC = 2, 4096, 8192, 16384

type_of_stdin = int | IO[Any] | None


@dataclass(slots=True)
class Running:
    """A command inside the node: its handle and the `subprocess.Popen` of the helper that waits for it."""

    popen: subprocess.Popen[str]
    process: Process

    @property
    def pid(self) -> int:
        """Its pid in the node's PID namespace."""
        return self.process.pid

    def kill(self) -> None:
        """SIGKILL to the command itself. (After killing `popen`, this machine's init would have to reap it.)"""
        self.process.kill()


@dataclass(slots=True)
class Family:
    """Everything that was started in a node, so that closing it closes all descriptors here."""

    popens: list[subprocess.Popen[str]] = field(default_factory=list)
    holders: list[HolderHandle] = field(default_factory=list)
    processes: list[Process] = field(default_factory=list)
    controls: list[socket.socket] = field(default_factory=list)
    frozen: list[FrozenFs] = field(default_factory=list)
    guard: socket.socket | None = None

    def close(self) -> None:
        """Call when the node's processes are dead."""
        for popen in self.popens:
            popen.wait(timeout=60)
            for stream in (popen.stdin, popen.stdout, popen.stderr):
                if stream and not stream.closed:
                    stream.close()
        for holder in self.holders:
            holder.close()
        for process in self.processes:
            process.close()
        for control in self.controls:
            control.close()
        for frozen in self.frozen:
            wait_until(frozen.detached, f"loop{frozen.loop} detached")


class Scope:
    """A set of namespaces with an init, and the cgroup that its commands go to."""

    def __init__(
        self, init: Init, built: Artefacts, family: Family, cgroup_root: Path, base: str, default: str
    ) -> None:
        self.init = init
        self.init_process = describe(init.outer_pid, "init")
        self._built = built
        self._family = family
        self._cgroup_root = cgroup_root
        self._base = base
        self._default = default
        self._without = "user"
        family.processes.append(self.init_process)
        family.controls.append(init.control)

    # -- files ---------------------------------------------------------------------------------------------------

    @property
    def root(self) -> Path:
        """This scope's file tree as seen from the tests. Beware: absolute links in it lead out of it."""
        return Path(f"/proc/{self.init.outer_pid}/root")

    def path(self, inside: str) -> Path:
        return self.root / inside.lstrip("/")

    def write(self, inside: str, text: str | bytes, mode: int = 0o644) -> Path:
        """Write a file, with its directories."""
        target = self.path(inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text if isinstance(text, bytes) else text.encode())
        target.chmod(mode)
        return target

    def read(self, inside: str) -> str:
        return self.path(inside).read_text()

    def mknod(self, inside: str, major: int, minor: int, mode: int = 0o666, kind: int = stat.S_IFCHR) -> None:
        target = self.path(inside)
        target.unlink(missing_ok=True)
        os.mknod(target, kind | mode, os.makedev(major, minor))
        target.chmod(mode)

    # -- cgroups -------------------------------------------------------------------------------------------------

    def cgroup(self, below: str = "") -> Path:
        """A cgroup below this scope's own one ("/…": any of the node's), made when missing; a path on this machine."""
        base = "" if below.startswith("/") else self._base
        path = self._cgroup_root / base / below.lstrip("/")
        path.mkdir(parents=True, exist_ok=True)
        return path

    def freeze(self, frozen: bool = True) -> None:
        """Freeze (or thaw) the whole cgroup of this scope and wait until the kernel says it is done."""
        directory = self.cgroup()
        (directory / "cgroup.freeze").write_text(str(int(frozen)))
        wanted = f"frozen {int(frozen)}"
        wait_until(lambda: wanted in (directory / "cgroup.events").read_text(), f"{directory}: {wanted}")

    def thaw(self) -> None:
        self.freeze(False)

    def populated(self) -> bool:
        """A live process is in its cgroup or below."""
        try:
            return "populated 1" in (self._cgroup_root / self._base / "cgroup.events").read_text()
        except FileNotFoundError:
            return False

    # -- commands ------------------------------------------------------------------------------------------------

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = 60,
        input: str | None = None,
        cwd: str = "/",
        cgroup: str | None = None,
        uid: int | None = None,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Like subprocess.run(capture_output=True, text=True), inside. Standard input is empty (and not /dev/null)."""
        running = self.popen(
            argv, env=env, cwd=cwd, cgroup=cgroup, uid=uid, stdin=None if input is None else subprocess.PIPE
        )
        try:
            out, err = running.popen.communicate(input, timeout)
        except subprocess.TimeoutExpired as error:
            running.kill()
            out, err = running.popen.communicate()
            raise subprocess.TimeoutExpired(list(map(str, argv)), timeout, out, err) from error
        done = subprocess.CompletedProcess(list(map(str, argv)), running.popen.returncode, out, err)
        if check and done.returncode:
            raise NodeError(f"{done.args}: exit status {done.returncode}\n{out}{err}")
        return done

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "/",
        cgroup: str | None = None,
        uid: int | None = None,
        pid: int | None = None,
        exe: str | Path | None = None,
        stdin: type_of_stdin = None,
        stdout: int | IO[Any] | None = subprocess.PIPE,
        stderr: int | IO[Any] | None = subprocess.PIPE,
        pass_fds: tuple[int, ...] = (),
    ) -> Running:
        """Start a command inside, in the cgroup `cgroup` below this scope's own one ("/…": any of the node's).

        The environment is a small clean one plus `env`. `pid` asks for that pid in the innermost namespace (for tests
        of reuse). Signals sent to `.popen` are passed on; killing `.popen` kills the command; `.popen.returncode` is
        the command's.
        """
        ours, theirs = report_socket()
        with closing(ours), closing(theirs):
            popen = self._enter(
                argv, ("--report-fd", str(theirs.fileno())), env, cwd, cgroup, uid, pid, exe, stdin, stdout, stderr,
                (theirs.fileno(), *pass_fds),
            )  # fmt: skip
            theirs.close()
            word, outer_pid = receive(ours)
            if not word:
                popen.wait(timeout=60)
                raise NodeError(f"cannot start {argv}: {popen.stderr.read() if popen.stderr else popen.returncode}")
            try:
                process = describe(outer_pid, str(argv[0]))
            except NodeError:  # over already
                process = Process(outer_pid, 0, 0, 0, str(argv[0]))
        self._family.processes.append(process)
        return Running(popen, process)

    def _enter(
        self,
        argv: Sequence[str | Path],
        options: tuple[str, ...],
        env: Mapping[str, str] | None,
        cwd: str,
        cgroup: str | None,
        uid: int | None,
        pid: int | None,
        exe: str | Path | None,
        stdin: type_of_stdin,
        stdout: int | IO[Any] | None,
        stderr: int | IO[Any] | None,
        pass_fds: tuple[int, ...],
    ) -> subprocess.Popen[str]:
        procs = self.cgroup(self._default if cgroup is None else cgroup) / "cgroup.procs"
        cgroup_fd = os.open(procs, os.O_WRONLY | os.O_CLOEXEC)
        empty = os.memfd_create("empty")
        command = [str(self._built.nodetool), "enter", "--target", str(self.init.outer_pid), "--cwd", cwd]
        command += ["--without", self._without]
        command += ["--cgroup-fd", str(cgroup_fd), *options]
        for option, value in (("--uid", uid), ("--pid", pid), ("--exe", exe)):
            command += [] if value is None else [option, str(value)]
        try:
            popen = subprocess.Popen(
                [*command, "--", *map(str, argv)],
                env=ENVIRONMENT | dict(env or {}),
                cwd="/",
                stdin=empty if stdin is None else stdin,
                stdout=stdout,
                stderr=stderr,
                text=True,
                errors="replace",
                pass_fds=(cgroup_fd, *pass_fds),
            )
        finally:
            os.close(cgroup_fd)
            os.close(empty)
        self._family.popens.append(popen)
        return popen

    def nvml(self, python: str = sys.executable, pynvml_path: str | None = None, timeout: float = 60) -> dict[str, Any]:
        """What the real pynvml says inside: {"driver", "gpus": [{"minor", "compute": {pid: MiB}, "memory_v2", …}]}.

        Errors are text: {"error": "NVMLError_LibRmVersionMismatch: …", "gpus": []}.
        """
        words = [python, "-I", str(HERE / "probe.py"), *([pynvml_path] if pynvml_path else [])]
        answer = json.loads(self.run(words, timeout=timeout, check=True).stdout)
        assert isinstance(answer, dict)
        return answer

    # -- holders -------------------------------------------------------------------------------------------------

    def spawn_holder(
        self, holder: Holder | None = None, *, cgroup: str | None = None, pid: int | None = None, **options: Any
    ) -> HolderHandle:
        """Start a holder (`Holder(**options)` when none is given) and wait until its whole family is ready."""
        spec = holder or Holder(**options)
        ours, theirs = report_socket()
        log = os.memfd_create("log")  # not /dev/null: on the mapping-only node that is a driver's device
        with closing(theirs):
            env = {"HOLDER_SPEC": spec.spec(), "HOLDER_READY_FD": str(theirs.fileno())}
            popen = self._enter(
                spec.argv, (), env, "/", cgroup, None, pid, self._built.holder, None, log, log, (theirs.fileno(),)
            )
        handle = HolderHandle(popen, ours, log, self.path(STANDIN) / "alloc")
        self._family.holders.append(handle)
        for _ in range(spec.expected_reports()):
            handle.next_report()
        if spec.die:
            handle.main.wait_gone()
        if spec.stop:
            handle.main.wait_state("T")
        return handle

    # -- frozen file systems -------------------------------------------------------------------------------------

    def frozen_fs(self, inside: str = "/run/frozen") -> FrozenFs:
        """Mount a fresh ext4 there that can be frozen and thawed; thawed and unmounted with the node at the latest."""
        loop, number = attach_loop(self._built.ext4_image)
        try:
            self.mknod(f"/dev/loop{number}", 7, number, 0o600, stat.S_IFBLK)
            self.path(inside).mkdir(parents=True, exist_ok=True)
            self.init.mount(f"/dev/loop{number}", inside, "ext4")
        finally:
            os.close(loop)
        descriptor = os.open(self.path(inside), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        frozen = FrozenFs(inside, descriptor, number)
        self._family.frozen.append(frozen)
        if self._family.guard:
            frozen.hand_over(self._family.guard)
        return frozen

    # -- devices -------------------------------------------------------------------------------------------------

    def _make_dev(self, staging: str, init: Init) -> None:
        """A /dev of its own, moved into place when complete."""
        self.path(staging).mkdir(parents=True, exist_ok=True)
        init.mount("dev", staging, "tmpfs", MS_NOSUID, "mode=755")
        for name, minor in BASE_NODES.items():
            self.mknod(f"{staging}/{name}", 1, minor)
        self.mknod(f"{staging}/tty", 5, 0)
        for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
            self.path(f"{staging}/{name}").symlink_to(target)
        for name, kind, data in (("pts", "devpts", "newinstance,ptmxmode=666,mode=620"), ("shm", "tmpfs", "mode=1777")):
            self.path(f"{staging}/{name}").mkdir()
            init.mount(kind, f"{staging}/{name}", kind, MS_NOSUID, data)
        self.path(f"{staging}/ptmx").symlink_to("pts/ptmx")
