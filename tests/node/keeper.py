#!/usr/bin/env python3
"""The process behind one virtual node: it owns the mounts, the cgroup, the loop devices and systemd-nspawn.

Started by node.py as `keeper.py TREE DIRECTORY LAYER` with a pipe as standard input; LAYER is a directory of files that
are put over the tree's. A line "boot" on the pipe boots the node again, whatever state it is in. When the pipe closes,
because the node is done with or because the test was killed, everything is taken down. All mounts are in the keeper's
own mount namespace and the node's files are on a tmpfs there, so that even a killed keeper leaves no more than an empty
directory, a cgroup and a frozen loop file system; `sweep` of the next start removes these.

Writes one JSON object per line: {"ready": {"leader": PID, "payload": CGROUP}} or {"error": TEXT}.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

CLONE_NEWNS = 0x00020000
PR_SET_PDEATHSIG = 1
FITHAW = 0xC0045878
BOOT_TIMEOUT = 60
DATA = Path(__file__).resolve().parent / "data/root"


class KeeperError(Exception):
    pass


def cgroup2_root() -> Path:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        fields, _, rest = line.partition(" - ")
        if rest.split()[0] == "cgroup2":
            return Path(fields.split()[4])
    raise KeeperError("cannot boot a node: no cgroup2 mount on this machine")


def private_mounts() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise KeeperError(f"cannot unshare mounts: {os.strerror(ctypes.get_errno())}")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    nspawn = Path("/run/systemd/nspawn")  # its locks and propagation directories are nobody else's business
    nspawn.mkdir(parents=True, exist_ok=True)
    mount("-t", "tmpfs", "-o", "mode=755", "pgr-nspawn", str(nspawn))


def mount(*arguments: str) -> None:
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise KeeperError(f"cannot mount {' '.join(arguments)}: {done.stderr.strip()}")


class Keeper:
    """One node, from its empty directory to its removal."""

    def __init__(self, tree: Path, directory: Path, layer: Path) -> None:
        self.tree = tree
        self.directory = directory
        self.layer = layer
        self.files = directory / "files"
        self.mark = f"pgr-node-{directory.name}"
        self.cgroup = cgroup2_root() / self.mark
        self.nspawn: subprocess.Popen[bytes] | None = None
        self.in_use = open(tree / "in-use", "a")
        fcntl.flock(self.in_use, fcntl.LOCK_SH)

    # -- set-up

    def lay_out(self) -> None:
        """tmpfs with the node's own layer, the containers' files, and the merged tree."""
        self.files.mkdir()
        mount("-t", "tmpfs", "-o", "size=4g,mode=755", self.mark, str(self.files))
        for name in ("upper", "work", "merged", "lxc", "vz/images", "vz/snippets", "tools", "shared"):
            (self.files / name).mkdir(parents=True)
        upper = self.files / "upper"
        shutil.copytree(DATA, upper, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(self.layer, upper, symlinks=True, dirs_exist_ok=True)
        self.lay_out_pve(upper / "etc/pve")
        for name in os.listdir(self.layer / "usr/share/pve-node/ct-tools"):
            shutil.move(upper / "usr/share/pve-node/ct-tools" / name, self.files / "tools" / name)
        for mount_point in (
            "usr/share/pve-node/ct",
            "usr/share/pve-node/ct-unpriv",
            "usr/share/pve-node/ct-tools",
            "shared",
        ):
            (upper / mount_point).mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={self.tree}/node,upperdir={upper},workdir={self.files}/work"
        mount("-t", "overlay", "node", "-o", options, str(self.files / "merged"))
        subprocess.run(["ldconfig", "-r", str(self.files / "merged")], check=True)

    @staticmethod
    def lay_out_pve(pve: Path) -> None:
        for name in ("lxc", "qemu-server"):
            (pve / "nodes/pve-test" / name).mkdir(parents=True)
            (pve / name).symlink_to(f"nodes/pve-test/{name}")
        (pve / "local").symlink_to("nodes/pve-test")
        os.chmod(pve, 0o755)

    def command(self) -> list[str]:
        binds = {
            "lxc": "/var/lib/lxc",
            "vz": "/var/lib/vz",
            "tools": "/usr/share/pve-node/ct-tools",
            "shared": "/shared",
        }
        command = [
            "systemd-nspawn",
            "--directory",
            str(self.files / "merged"),
            "--register=no",
            "--keep-unit",
            "--boot",
        ]
        command += [f"--machine=pgr-{self.directory.name}", "--hostname=pve-test", "--console=pipe", "--capability=all"]
        command += [
            "--private-network",
            "--notify-ready=yes",
            "--resolv-conf=off",
            "--timezone=off",
            "--link-journal=no",
        ]
        command += [f"--bind={self.files / source}:{target}" for source, target in binds.items()]
        command += [f"--bind-ro={self.tree / name}:/usr/share/pve-node/{name}" for name in ("ct", "ct-unpriv")]
        if Path("/dev/fuse").exists():
            command += ["--bind=/dev/fuse"]
        return [*command, "systemd.show_status=0"]

    def boot(self) -> dict[str, object]:
        """Start systemd and wait until it says READY. Returns what node.py needs."""
        self.cgroup.mkdir(exist_ok=True)
        notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        address = str(self.directory / "notify")
        Path(address).unlink(missing_ok=True)
        notify.bind(address)
        environment = {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "NOTIFY_SOCKET": address,
            "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
            "SYSTEMD_SECCOMP": "0",
        }

        def enter_cgroup() -> None:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            (self.cgroup / "cgroup.procs").write_text("0")
            os.setsid()

        with open(self.directory / "console.log", "wb") as console:
            self.nspawn = subprocess.Popen(
                self.command(),
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=console,
                env=environment,
                preexec_fn=enter_cgroup,
            )
        with notify:
            leader = self.wait_ready(notify)
        return {"leader": leader, "payload": str(self.payload(leader))}

    def wait_ready(self, notify: socket.socket) -> int:
        assert self.nspawn
        exited = os.pidfd_open(self.nspawn.pid)
        leader, deadline = 0, time.monotonic() + BOOT_TIMEOUT
        poll = select.poll()
        for fd in (notify.fileno(), exited, 0):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        try:
            while (left := deadline - time.monotonic()) > 0:
                ready = {fd for fd, _ in poll.poll(left * 1000)}
                if exited in ready or 0 in ready:
                    break
                if not ready:
                    continue
                for line in notify.recv(4096).decode().splitlines():
                    key, _, value = line.partition("=")
                    if key == "X_NSPAWN_LEADER_PID":
                        leader = int(value)
                    if key == "READY" and value == "1":
                        return leader
        finally:
            os.close(exited)
        console = (self.directory / "console.log").read_text(errors="replace")[-2000:]
        raise KeeperError(f"cannot boot the node: systemd did not get ready\n{console}")

    def payload(self, leader: int) -> Path:
        """The cgroup that the node takes for its root."""
        own = Path(f"/proc/{leader}/cgroup").read_text().rpartition("0::")[2].strip()
        return cgroup2_root() / own.removesuffix("/init.scope").strip("/")

    # -- tear-down

    def halt(self) -> None:
        """End every process of the node, the unkillable ones by thawing what they wait for."""
        thaw_and_detach(self.mark)
        if self.cgroup.is_dir():
            kill_cgroup(self.cgroup)
        if self.nspawn:
            self.nspawn.wait()
        thaw_and_detach(self.mark)
        remove_cgroup_tree(self.cgroup)

    def tear_down(self) -> None:
        self.halt()
        subprocess.run(["umount", "-l", "-R", str(self.files)], check=False, capture_output=True)
        shutil.rmtree(self.directory, ignore_errors=True)


def loops_of(mark: str) -> list[str]:
    """Loop devices whose backing file carries the node's mark."""
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            if mark in backing.read_text():
                found.append("/dev/" + backing.parent.parent.name)
    return found


def thaw_and_detach(mark: str) -> None:
    """Mount each loop file system of the node once more (same superblock), thaw it, and let it go."""
    for device in loops_of(mark):
        target = Path(f"/run/pgr-thaw-{os.getpid()}")
        target.mkdir(exist_ok=True)
        done = subprocess.run(["mount", "-t", "ext4", device, str(target)], capture_output=True, check=False)
        if done.returncode == 0:
            fd = os.open(target, os.O_RDONLY)
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, FITHAW, 0)
            os.close(fd)
            subprocess.run(["umount", str(target)], check=False)
        target.rmdir()
        subprocess.run(["losetup", "-d", device], capture_output=True, check=False)


def kill_cgroup(directory: Path, timeout: float = 20) -> None:
    """SIGKILL for everything below, then wait for `populated 0` on the event file."""
    (directory / "cgroup.kill").write_text("1")
    deadline = time.monotonic() + timeout
    with open(directory / "cgroup.events") as events:
        poll = select.poll()
        poll.register(events, select.POLLPRI)
        while time.monotonic() < deadline:
            events.seek(0)
            if "populated 0" in events.read():
                return
            poll.poll(1000)
    raise KeeperError(f"cannot empty {directory}: a process does not die")


def remove_cgroup_tree(directory: Path) -> None:
    if not directory.is_dir():
        return
    for path, names, _ in os.walk(directory, topdown=False):
        for name in names:
            with contextlib.suppress(OSError):
                os.rmdir(os.path.join(path, name))
    with contextlib.suppress(OSError):
        directory.rmdir()


def sweep(run: Path) -> None:
    """Take down what a killed keeper left: directories whose lock nobody holds."""
    for directory in (entry for entry in run.iterdir() if entry.is_dir()):
        lock = open(directory / "lock", "a")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            thaw_and_detach(f"pgr-node-{directory.name}")
            cgroup = cgroup2_root() / f"pgr-node-{directory.name}"
            if cgroup.is_dir():
                with contextlib.suppress(KeeperError, OSError):
                    kill_cgroup(cgroup)
                remove_cgroup_tree(cgroup)
            shutil.rmtree(directory, ignore_errors=True)


def claim(directory: Path) -> TextIO:
    """Make the node's directory and lock it, after sweeping what killed keepers left; the lock lives as long as we do."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.parent / ".lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        sweep(directory.parent)
        directory.mkdir()
        lock = open(directory / "lock", "a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock


def say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def requests() -> Iterator[str]:
    """The lines on standard input, until it closes."""
    buffer = b""
    while data := os.read(0, 4096):
        *lines, buffer = (buffer + data).split(b"\n")
        yield from (line.decode() for line in lines)


def serve(keeper: Keeper) -> None:
    private_mounts()
    keeper.lay_out()
    say({"ready": keeper.boot()})
    for request in requests():
        if request == "boot":
            keeper.halt()
            say({"ready": keeper.boot()})


def main(arguments: list[str]) -> int:
    tree, directory, layer = map(Path, arguments)

    def end(_signum: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setsid()
    lock = claim(directory)
    keeper = Keeper(tree, directory, layer)
    try:
        serve(keeper)
    except (KeeperError, OSError, subprocess.CalledProcessError, KeyboardInterrupt) as error:
        say({"error": str(error) or type(error).__name__})
        return 1
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        keeper.tear_down()
        lock.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
