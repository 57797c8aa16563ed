"""Pid 1 of a test container: `python3 -I -S container_init.py CONFIG_JSON`. Standard library only.

The launcher (this program in the host's namespaces) makes a PID namespace and waits, as lxc-start would. Its child is
the container's init: it moves into the container's cgroup, gets a mount namespace with its own /proc and /dev, then
starts processes as the test asks over a socket and reaps what dies. It ends when the test's end of the socket is
closed; the kernel then ends everything in the namespace (pid_namespaces(7)).

Requests carry two descriptors, the status socket and the log:
    {"argv", "env", "cgroup", "report": bool, "nested": "" | "init" | "direct"}
`init`: a second PID namespace with an init of its own above the program; `direct`: the program is its pid 1.
Messages:
    {"event": "up"}, {"event": "spawned", "ns_pid"}, {"event": "exit", "ns_pid", "status"}, {"event": "error", "what"}
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import stat
import sys
import traceback
from typing import Any, NoReturn

CLONE_NEWNS = 0x00020000
CLONE_NEWPID = 0x20000000
MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 4096, 8192, 16384, 1 << 18
PLAIN_NODES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
STATUS_FD = 3

LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """os.unshare came with Python 3.12; the suite runs from 3.11."""
    check(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    def raw(text: str | None) -> bytes | None:
        return None if text is None else text.encode()

    result = LIBC.mount(raw(source), raw(target), raw(kind), ctypes.c_ulong(flags), raw(data))
    check(result, f"mount {source} on {target}")


def join_cgroup(path: str) -> None:
    """Writing 0 moves the writer, whatever its pid is called here (cgroups(7))."""
    with open(os.path.join(path, "cgroup.procs"), "w", encoding="ascii") as file:
        file.write("0")


def own_proc() -> None:
    """A mount namespace with the /proc of our PID namespace."""
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def own_dev(config: dict[str, Any]) -> None:
    """A tmpfs as /dev with the usual nodes and the GPU's, made by mknod or bound from the host's."""
    os.umask(0)
    scratch = config["scratch"]
    mount("tmpfs", scratch, "tmpfs", MS_NOSUID, "mode=755,size=512m")
    for name, (major, minor) in PLAIN_NODES.items():
        os.mknod(f"{scratch}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    os.mkdir(f"{scratch}/shm", 0o1777)
    os.mkdir(f"{scratch}/pts", 0o755)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(target, f"{scratch}/{name}")
    for node in config["nodes"]:
        target = f"{scratch}/{node['name']}"
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if config["how"] == "mknod":
            os.mknod(target, stat.S_IFCHR | node["mode"], os.makedev(node["major"], node["minor"]))
        else:
            with open(target, "w", encoding="ascii"):
                pass
            mount(node["source"], target, None, MS_BIND)
    mount(scratch, "/dev", None, MS_MOVE)
    os.umask(0o022)


def reap_until_empty() -> NoReturn:
    """The life of a nested init: reap, and end when nobody is left."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            os._exit(0)


def stay_for(child: int) -> NoReturn:
    """The life of a nested namespace's starter (a containerd-shim): end when its child ends."""
    _pid, status = os.waitpid(child, 0)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def become(request: dict[str, Any], status_fd: int, log_fd: int) -> NoReturn:
    """In a fresh child of init: go where the request says and turn into the program."""
    try:
        os.dup2(log_fd, 1)
        os.dup2(log_fd, 2)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        join_cgroup(request["cgroup"])
        nested = request["nested"]
        if nested:
            unshare(CLONE_NEWPID)
            child = os.fork()
            if child:
                os.close(status_fd)
                stay_for(child)
            own_proc()
        if nested == "init" and os.fork():
            os.close(status_fd)
            reap_until_empty()
        os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
        os.dup2(status_fd, STATUS_FD)
        os.closerange(STATUS_FD + 1, 1024)
        os.execve(request["argv"][0], request["argv"], request["env"])
    except BaseException:  # noqa: BLE001 - this process must never run on as a copy of init
        with contextlib.suppress(OSError):
            os.write(2, traceback.format_exc().encode())
        os._exit(127)


class Init:
    """The container's init: one socket, one loop."""

    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.reported: set[int] = set()
        """Children whose end the test waits for. Nobody would read about the others, and a queue of 10 is soon full."""

    def send(self, event: str, **facts: object) -> None:
        try:
            self.control.send(json.dumps({"event": event, **facts}).encode())
        except OSError:
            os._exit(0)

    def spawn(self) -> None:
        raw, fds, _flags, _address = socket.recv_fds(self.control, 1 << 20, 2)
        if not raw:
            os._exit(0)
        request = json.loads(raw)
        status_fd, log_fd = fds
        child = os.fork()
        if child == 0:
            become(request, status_fd, log_fd)
        os.close(status_fd)
        os.close(log_fd)
        if request["report"]:
            self.reported.add(child)
        self.send("spawned", ns_pid=child)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self.reported:
                self.reported.discard(pid)
                self.send("exit", ns_pid=pid, status=os.waitstatus_to_exitcode(status))

    def serve(self) -> NoReturn:
        woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _signo, _frame: None)
        poller = select.poll()
        poller.register(self.control, select.POLLIN)
        poller.register(woken, select.POLLIN)
        self.send("up")
        while True:
            for fd, _events in poller.poll():
                if fd == woken:
                    os.read(woken, 4096)
                    self.reap()
                else:
                    self.spawn()


def main(config: dict[str, Any]) -> int:
    control = socket.socket(fileno=config["control_fd"])
    unshare(CLONE_NEWPID)
    child = os.fork()
    if child:
        control.close()
        _pid, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status) & 0xFF
    init = Init(control)
    try:
        join_cgroup(config["cgroup"])
        own_proc()
        own_dev(config)
        for path in config["init_opens"]:
            os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        if config["init_opens"]:
            init.send("opened")
        init.serve()
    except BaseException:  # noqa: BLE001 - the test shows it
        init.send("error", what=traceback.format_exc())
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
