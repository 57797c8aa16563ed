"""Jobs that are started again when they die, and what can stop them: scripts that run inside a container."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.embedded.node import Container, wait_until
from tests.embedded.scope import Running

PYTHON = "/usr/bin/python3" if os.path.exists("/usr/bin/python3") else sys.executable
"""One that the users of an unprivileged container may run, too."""
UNIT = "system.slice/vllm.service"
DOCKER_ID = "a1b2" * 16
JOB = """
import os, signal, time
fds = [os.open(p, os.O_RDWR | os.O_NOCTTY) for p in ("/dev/nvidia0", "/dev/nvidiactl")]
print("up", flush=True)
time.sleep(600)
"""
"""Holds GPU 0 by descriptor."""
SUPERVISOR = """
import os, subprocess, sys, time
pause_s = float(sys.argv[1])
while True:
    subprocess.call([sys.executable, "-I", "-c", sys.argv[2]])
    time.sleep(pause_s)
"""
"""`Restart=always`, `RestartSec=` its first argument."""
BOMB = """
import os, signal, time
os.setpgid(0, 0)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
def burn():
    while True:
        fd = os.open("/dev/nvidia0", os.O_RDWR | os.O_NOCTTY)
        time.sleep(0.002)
        if os.fork():
            break
        os.close(fd)
    time.sleep(0.05)
    os._exit(0)
for _ in range(2):
    if os.fork() == 0:
        burn()
while True:
    time.sleep(600)
"""
"""Two chains of holders that live 52 ms each and have a successor after 2 ms: sooner than a look can act on them."""


@dataclass(slots=True)
class Job:
    """A supervisor and how often its job has come up."""

    running: Running

    def wait_up(self, timeout_s: float = 20) -> None:
        """Until the job has (again) come up."""
        out = self.running.popen.stdout
        assert out is not None
        assert select.select([out], [], [], timeout_s)[0], "the job did not come up"
        assert out.readline() == "up\n"

    @property
    def pid(self) -> int:
        return self.running.pid

    def alive(self) -> bool:
        return self.running.process.alive()


def start(container: Container, argv: Sequence[str], cgroup: str | None = None) -> Job:
    job = Job(container.popen(argv, cgroup=cgroup))
    job.wait_up()
    return job


def supervised(container: Container, cgroup: str | None = UNIT, pause_s: float = 0.1) -> Job:
    """A job under a supervisor that is in the same cgroup."""
    return start(container, [PYTHON, "-I", "-c", SUPERVISOR, str(pause_s), JOB], cgroup)


def shell_loop(container: Container, cgroup: str | None = None) -> Job:
    """`while true; do job; done` in a shell."""
    script = f"while :; do {PYTHON} -I -c '{JOB}'; done"
    return start(container, ["/bin/sh", "-c", script], cgroup)


def bomb(container: Container, cgroup: str | None = UNIT) -> Job:
    return start(container, [PYTHON, "-I", "-c", BOMB], cgroup)


def holders(container: Container) -> list[int]:
    """The container's processes that have the stand-in GPU 0 open, by this machine's /proc."""
    found = []
    for process in container.members():
        try:
            numbers = [os.stat(entry).st_rdev for entry in (process.proc / "fd").iterdir()]
        except OSError:
            continue
        if os.makedev(4, 50) in numbers:
            found.append(process.pid)
    return found


def empty(container: Container, cgroup: str) -> bool:
    return "populated 0" in (container.cgroup(cgroup) / "cgroup.events").read_text()


def wait_empty(container: Container, cgroup: str) -> None:
    wait_until(lambda: empty(container, cgroup), f"{cgroup} empty")


SYSTEMD = """
import os, signal, socket, struct, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.makedirs("/run/systemd", exist_ok=True)
server = socket.socket(socket.AF_UNIX)
server.bind("/run/systemd/private")
server.listen()
os.write(int(sys.argv[1]), b"up\\n")
cgroup = sys.argv[2]

def text(data, at):
    (length,) = struct.unpack_from("<I", data, at)
    return data[at + 4 : at + 4 + length].decode(), (at + 4 + length + 1 + 3) & ~3

def serve(peer):
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    data = b""
    while not data.endswith(b"BEGIN\\r\\n") and b"BEGIN\\r\\n" not in data:
        data += peer.recv(4096)
    head, _, data = data.partition(b"BEGIN\\r\\n")
    if head != b"\\0AUTH EXTERNAL 30\\r\\n" or uid != 0:
        peer.sendall(b"REJECTED EXTERNAL\\r\\n")
        return
    peer.sendall(b"OK 0123456789abcdef0123456789abcdef\\r\\n")
    while len(data) < 16:
        data += peer.recv(4096)
    body, serial, fields = struct.unpack_from("<III", data, 4)
    start = 16 + fields + (-fields % 8)
    while len(data) < start + body:
        data += peer.recv(4096)
    assert b"StopUnit" in data[:start] and b"/org/freedesktop/systemd1" in data[:start]
    unit, at = text(data, start)
    mode, _ = text(data, start + (at - start))
    assert mode == "replace", mode
    directory = f"/sys/fs/cgroup{cgroup}/{unit}"
    reply = b"\\5\\1u\\0" + struct.pack("<I", serial)
    kind, body = 2, b""
    if not os.path.isdir(directory):
        name = b"org.freedesktop.systemd1.NoSuchUnit"
        reply += b"\\4\\1s\\0" + struct.pack("<I", len(name)) + name + b"\\0"
        kind, words = 3, b"Unit not loaded."
        body = struct.pack("<I", len(words)) + words + b"\\0"
        reply += b"\\0" * (-len(reply) % 8) + b"\\10\\1g\\0\\1s\\0"
    message = struct.pack("<cBBBIII", b"l", kind, 1, 1, len(body), 7, len(reply)) + reply
    peer.sendall(message + b"\\0" * (-len(message) % 8) + body)
    if kind == 2:
        for pid in open(directory + "/cgroup.procs").read().split():
            os.kill(int(pid), signal.SIGTERM)

while True:
    peer, _ = server.accept()
    serve(peer)
"""
"""What we need of systemd as pid 1: its private socket, and `StopUnit`, which sends SIGTERM to the whole cgroup."""

DOCKERD = """
import os, re, signal, socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind("/run/docker.sock")
server.listen()
print("up", flush=True)
while True:
    peer, _ = server.accept()
    data = b""
    while not data.endswith(b"\\r\\n\\r\\n"):
        data += peer.recv(4096)
    match = re.match(rb"POST /containers/([0-9a-f]+)/stop\\?t=\\d+ HTTP/1.1\\r\\n", data)
    directory = f"/sys/fs/cgroup{sys.argv[1]}/docker/{match[1].decode()}" if match else ""
    if not os.path.isdir(directory):
        peer.sendall(b"HTTP/1.1 404 Not Found\\r\\n\\r\\n")
        continue
    for pid in open(directory + "/cgroup.procs").read().split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    peer.sendall(b"HTTP/1.1 204 No Content\\r\\n\\r\\n")
"""
"""What we need of dockerd: `POST /containers/ID/stop`."""


def become_systemd(container: Container) -> None:
    """Turns the container's init into a stand-in for systemd. Nothing can be mounted in it afterwards."""
    directory = container.path("/run/systemd")
    directory.mkdir()
    root = int((container.init_process.proc / "uid_map").read_text().split()[1])
    os.chown(directory, root, root)
    ready, theirs = os.pipe()
    cgroup = f"/lxc/{container.vmid}/ns/system.slice"
    try:
        argv = [PYTHON, "-I", "-c", SYSTEMD, "3", cgroup]
        container.init.ask("exec", PYTHON, "0", *argv, fd=theirs)
        os.close(theirs)
        theirs = -1
        assert select.select([ready], [], [], 20)[0] and os.read(ready, 3) == b"up\n"
    finally:
        os.close(ready)
        if theirs >= 0:
            os.close(theirs)


def dockerd(container: Container) -> Job:
    argv = [PYTHON, "-I", "-c", DOCKERD, f"/lxc/{container.vmid}/ns"]
    return start(container, argv, "system.slice/docker.service")
