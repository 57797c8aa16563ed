"""Tasks: a worker process, its UPID and its log under /var/log/pve/tasks.

On the command line the caller waits, and the output goes to the terminal and to the log. With PVE_STANDIN_RPCENV=priv
(pvedaemon) or ha (pve-ha-lrm) it goes to the log alone, as in the daemons.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from pvenode.conf import node_name
from pvenode.run import PveError, write_all

TASKS = Path("/var/log/pve/tasks")


def in_daemon() -> bool:
    return os.environ.get("PVE_STANDIN_RPCENV", "cli") in ("priv", "ha")


def upid(kind: str, vmid: int) -> tuple[str, Path]:
    """The task's name, and the path of its log."""
    started = int(time.time())
    start_ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    name = f"UPID:{node_name()}:{os.getpid():08X}:{start_ticks:08X}:{started:08X}:{kind}:{vmid}:root@pam:"
    return name, TASKS / f"{started:08X}"[-1] / name


def copy_output(pipe: int, log: int, terminal: bool) -> bytes:
    """Until everyone closed the pipe; returns the last bytes, to know whether a line was left open."""
    tail = b""
    while data := os.read(pipe, 65536):
        if terminal:
            write_all(1, data)
        write_all(log, data)
        tail = data[-1:]
    return tail


def worker(body: Callable[[], None], output: int) -> int:
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    try:
        body()
        status = 0
    except PveError as error:
        sys.stdout.flush()
        os.write(2, b"")
        Worker.error = str(error)
        status = 255
    sys.stdout.flush()
    sys.stderr.flush()
    return status


class Worker:
    error = ""


def start_worker(body: Callable[[], None], output: int, verdict: int) -> int:
    """Fork; the child leads its own process group, so that what a hook left in it ends with the task."""
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)
        return pid
    status = 255
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)  # only a running command is interrupted (run.py)
        status = worker(body, output)
        os.write(verdict, Worker.error.encode(errors="surrogateescape"))
    finally:
        os._exit(status)


def finish(log: int, tail: bytes, error: str) -> None:
    """The closing line. A daemon adds no newline before it: output left open is glued to it (PCT_FLOWS 3)."""
    if tail not in (b"", b"\n") and not in_daemon():
        write_all(log, b"\n")
    write_all(log, b"TASK OK\n" if not error else f"TASK ERROR: {error}\n".encode(errors="surrogateescape"))


def run_task(kind: str, vmid: int, body: Callable[[], None]) -> int:
    """Run `body` as a task and wait for it. Returns the exit status of pct: 0, or 255 with the error printed."""
    if not in_daemon():
        os.environ["PATH"] = "/sbin:/bin:/usr/sbin:/usr/bin"
    name, path = upid(kind, vmid)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o640)
    sys.stdout.flush()
    output_read, output_write = os.pipe()
    verdict_read, verdict_write = os.pipe()
    pid = start_worker(body, output_write, verdict_write)
    os.close(output_write)
    os.close(verdict_write)

    def forward(signum: int, _frame: FrameType | None) -> None:
        os.kill(pid, signum)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, forward)
    tail = copy_output(output_read, log, not in_daemon())
    error = os.read(verdict_read, 65536).decode(errors="surrogateescape")
    _, wait_status = os.waitpid(pid, 0)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if wait_status and not error:
        error = "unexpected status"
    finish(log, tail, error)
    with open(TASKS / "index", "a") as index:
        index.write(f"{name} {int(time.time()):08X} {error or 'OK'}\n")
    if error and not in_daemon():
        print(error, file=sys.stderr)
    return 255 if error else 0
