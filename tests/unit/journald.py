"""A real systemd-journald of one's own: in a private mount and PID namespace, with its own /run and /var/log.

    with PrivateJournald() as node:
        node.python("from hostd.system.journal import Journal; ...")
        node.entries("PVE_VMID=129")

Run as a script this is the keeper: pid 1 of the namespace, told on stdin what to do, answers each line with `ok`.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DAEMON = next(
    (p for p in ("/usr/lib/systemd/systemd-journald", "/lib/systemd/systemd-journald") if os.path.exists(p)), ""
)
SOCKET = "/run/systemd/journal/socket"
DEADLINE_S = 60.0
AVAILABLE = os.geteuid() == 0 and bool(DAEMON) and bool(shutil.which("unshare")) and bool(shutil.which("journalctl"))


class PrivateJournald:
    """`start`, `stop`, `deaf` (a bound socket that nobody reads), `hear` (read and forget what came)."""

    def __init__(self, first: str = "start") -> None:
        self._keeper = subprocess.Popen(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation", "private",
             sys.executable, "-I", __file__],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        self._await_ok()
        children = Path(f"/proc/{self._keeper.pid}/task/{self._keeper.pid}/children").read_text().split()
        self.pid = int(children[0])
        if first:
            self.tell(first)

    def __enter__(self) -> PrivateJournald:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.close()
        self._keeper.wait(DEADLINE_S)
        self._keeper.stdout.close()

    def tell(self, command: str) -> None:
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(command + "\n")
        self._await_ok()

    def _await_ok(self) -> None:
        assert self._keeper.stdout is not None
        ready, _, _ = select.select([self._keeper.stdout], [], [], DEADLINE_S)
        assert ready, "the keeper did not answer"
        assert self._keeper.stdout.readline() == "ok\n"

    def command(self, *words: str) -> list[str]:
        """`nsenter -m` goes to `/`, so the product is named by PYTHONPATH."""
        return ["nsenter", "-t", str(self.pid), "-m", "-p", "--", "env", f"PYTHONPATH={ROOT}", *words]

    def run(self, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
        settings: dict[str, object] = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(self.command(*words), **settings)  # type: ignore[call-overload,no-any-return]

    def python(self, code: str, *arguments: str, **options: object) -> str:
        """stdout of a Python program with the product importable; a failing one fails the test."""
        done = self.run(sys.executable, "-c", code, *arguments, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def entries(self, *matches: str) -> list[dict[str, object]]:
        self.run("journalctl", "--sync")
        found = self.run("journalctl", "-q", "-a", "-o", "json", *matches).stdout
        return [json.loads(line) for line in found.splitlines()]

    def wait_for_entry(self, *matches: str) -> None:
        until = time.monotonic() + DEADLINE_S
        while not self.entries(*matches):
            assert time.monotonic() < until, f"no entry with {matches}"

    def processes(self) -> list[int]:
        """Pids inside the namespace but the keeper and journald itself."""
        listed = [line.split() for line in self.run("ps", "-e", "-o", "pid=,stat=,comm=").stdout.splitlines()]
        ours = {"systemd-journal", "ps"}
        return [int(pid) for pid, state, comm, *_ in listed if pid != "1" and state[0] != "Z" and comm not in ours]

    def wait_for_nobody(self, deadline_s: float = 10) -> None:
        until = time.monotonic() + deadline_s
        while left := self.processes():
            assert time.monotonic() < until, f"still there: {left}"
            select.select([], [], [], 0.02)


def _keep() -> None:
    for path in ("/run", "/var/log"):
        subprocess.run(["mount", "-t", "tmpfs", "tmpfs", path], check=True)
    for path in ("/run/systemd/journal", "/run/log/journal"):
        os.makedirs(path)
    _take_machine_id()
    journald: subprocess.Popen[bytes] | None = None
    deaf: socket.socket | None = None
    print("ok", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "start":
                journald = subprocess.Popen([DAEMON], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                _await_listener()
            case "stop":
                assert journald is not None
                journald.terminate()
                journald.wait()
            case "deaf":
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(SOCKET)
                deaf = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                deaf.bind(SOCKET)
            case "hear":
                assert deaf is not None
                deaf.close()
                os.unlink(SOCKET)
        print("ok", flush=True)


def _take_machine_id() -> None:
    """One of our own: journald does not start without, and an image's is empty or missing until its first boot."""
    given = Path("/run/machine-id")
    given.write_text(f"{os.urandom(16).hex()}\n")
    if os.path.exists("/etc/machine-id"):
        subprocess.run(["mount", "--bind", given, "/etc/machine-id"], check=True)
        return
    for path in ("/run/etc/upper", "/run/etc/work"):
        os.makedirs(path)
    layers = "lowerdir=/etc,upperdir=/run/etc/upper,workdir=/run/etc/work"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, "/etc"], check=True)
    shutil.copyfile(given, "/etc/machine-id")


def _await_listener() -> None:
    until = time.monotonic() + DEADLINE_S
    while True:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(SOCKET)
                return
            except OSError:
                assert time.monotonic() < until, "journald did not start"
        select.select([], [], [], 0.01)


if __name__ == "__main__":
    _keep()
