"""A process that holds GPUs, in every shape the tests need: `python3 -I -S holder.py --status-fd N ...`.

Standard library and `cuda.py` beside it only. It says what it did as JSON messages on the socket `--status-fd` (the
kernel tells the reader our pid in *his* PID namespace, unix(7) SO_PASSCRED) and obeys commands: `check`, `exit`.
It ends by itself when the other end of that socket is closed. No message is sent before the thing said is true.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from . import cuda
else:
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import cuda

MIB = 1 << 20
PATTERN = 0xA5
PINNED_CHUNK_MIB = 1024
PR_SET_NAME = 15
SYS_EXIT = {"x86_64": 60, "aarch64": 93}


class Status:
    """Our end of the socket to the test."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)

    def send(self, event: str, **facts: object) -> None:
        try:
            self.socket.send(json.dumps({"event": event, "pid": os.getpid(), **facts}).encode())
        except OSError:
            os._exit(4)

    def receive(self) -> dict[str, str] | None:
        """The next command; None when the test is gone."""
        try:
            raw = self.socket.recv(65536)
        except OSError:
            return None
        if not raw:
            return None
        command: dict[str, str] = json.loads(raw)
        return command

    def is_closed(self) -> bool:
        poller = select.poll()
        poller.register(self.socket, select.POLLHUP)
        return bool(poller.poll(0))


def rename_comm(name: str) -> None:
    """comm, 15 bytes at most; prctl(2)."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def rewrite_argv(text: str) -> None:
    """Overwrite the argument area in place, as setproctitle does; fields 48 and 49 of proc_pid_stat(5) say where."""
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    start, end = int(fields[45]), int(fields[46])
    room = end - start
    raw = text.encode()[: room - 1]
    ctypes.memmove(start, raw + b"\0" * (room - len(raw)), room)


class Memory:
    """What this process holds on GPUs, and the proof that it still does."""

    def __init__(self, args: argparse.Namespace, library: ctypes.CDLL | None = None) -> None:
        self.blocks: list[tuple[int, int, int]] = []
        """(ordinal, device pointer, bytes)"""
        self.pinned: list[int] = []
        self.rounds = 0
        self.facts: dict[str, object] = {}
        self.cuda = cuda.Cuda(library)
        ordinals = {device.uuid: device.ordinal for device in self.cuda.devices()}
        wanted = [spec.split("=") for spec in args.gpu]
        for uuid, mib in wanted:
            self.cuda.use(ordinals[uuid])
            if int(mib):
                pointer = self.cuda.allocate(int(mib) * MIB)
                self.cuda.fill(pointer, PATTERN, int(mib) * MIB)
                self.blocks.append((ordinals[uuid], pointer, int(mib) * MIB))
        left = args.pinned
        while left > 0:
            self.pinned.append(self.cuda.allocate_pinned(min(left, PINNED_CHUNK_MIB) * MIB))
            left -= PINNED_CHUNK_MIB
        if args.ipc_export:
            self.export(args.ipc_export, wanted[0][0])
        if args.ipc_import:
            self.attach(args.ipc_import, ordinals)
        if args.busy:
            threading.Thread(target=self.work, daemon=True).start()

    def export(self, path: str, uuid: str) -> None:
        """Leave a handle of the first block in a file."""
        ordinal, pointer, _size = self.blocks[0]
        self.cuda.use(ordinal)
        handle = self.cuda.ipc_export(pointer).hex()
        with open(path + ".new", "w", encoding="utf-8") as file:
            json.dump({"uuid": uuid, "handle": handle}, file)
        os.rename(path + ".new", path)

    def attach(self, path: str, ordinals: dict[str, int]) -> None:
        """Map what another process exported; read a little of it, so that it is really mapped."""
        with open(path, encoding="utf-8") as file:
            said = json.load(file)
        self.cuda.use(ordinals[said["uuid"]])
        pointer = self.cuda.ipc_import(bytes.fromhex(said["handle"]))
        self.facts["imported_ok"] = self.cuda.read(pointer, 8) == bytes([PATTERN]) * 8

    def work(self) -> None:
        """Write every block over and over, as a computing job would."""
        while True:
            for ordinal, pointer, size in self.blocks:
                self.cuda.use(ordinal)
                self.cuda.fill(pointer, PATTERN, size)
            self.rounds += 1

    def check(self) -> dict[str, object]:
        """Read the ends of every block back. `intact` is the answer, the rest is for people."""
        intact = True
        free = {}
        for ordinal, pointer, size in self.blocks:
            self.cuda.use(ordinal)
            for offset in (0, size // 2, size - 8):
                intact = intact and self.cuda.read(pointer + offset, 8) == bytes([PATTERN]) * 8
            free[ordinal] = self.cuda.memory_info_mib()[0]
        return {"intact": intact, "rounds": self.rounds, "free_mib": free}


def obey(status: Status, memory: Memory | None) -> None:
    """Serve commands until told to exit or until the test is gone."""
    while True:
        command = status.receive()
        if command is None or command["cmd"] == "exit":
            return
        if command["cmd"] == "check":
            try:
                status.send("check", **(memory.check() if memory else {"intact": True, "rounds": 0}))
            except cuda.CudaError as exc:
                status.send("check", intact=False, error=str(exc))


def inherit(status: Status, number: int) -> NoReturn:
    """The life of a forked child: it has the parent's descriptors and mappings and never calls CUDA."""
    status.send("child", number=number)
    while True:
        signal.pause()


def wait_until_leader_is_dead() -> None:
    """/proc/self/stat goes on to answer for a dead leader whose threads live."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
            if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                return
        time.sleep(0.002)
    raise TimeoutError("the leader did not exit")


def hold(
    args: argparse.Namespace,
    status: Status,
    *,
    library: ctypes.CDLL | None = None,
    round_number: int = 0,
    allocated: threading.Event | None = None,
) -> None:
    """Take what the options say, tell the test, stay."""
    opened = [os.open(path, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC) for path in args.open]
    memory = None if args.no_cuda else Memory(args, library)
    for number in range(args.fork):
        if os.fork() == 0:
            inherit(status, number)
    if allocated is not None:
        allocated.set()
        wait_until_leader_is_dead()
    facts = memory.facts if memory else {}
    status.send("ready", round=round_number, opened=len(opened), **facts)
    if args.stop_self:
        os.kill(os.getpid(), signal.SIGSTOP)
    obey(status, memory)


def report_crash(status: Status) -> NoReturn:
    status.send("error", what=traceback.format_exc())
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(3)


def hold_with_a_dead_leader(args: argparse.Namespace, status: Status) -> NoReturn:
    """The first thread leaves by the raw exit(2) of its own thread; another thread holds the GPU and lives on."""
    allocated = threading.Event()

    def body() -> None:
        try:
            hold(args, status, allocated=allocated)
        except BaseException:  # noqa: BLE001 - the test shows it
            report_crash(status)
        os._exit(0)

    threading.Thread(target=body).start()
    allocated.wait()
    ctypes.CDLL(None).syscall(SYS_EXIT[platform.machine()], 0)
    raise AssertionError("exit(2) came back")


def supervise(args: argparse.Namespace, status: Status) -> None:
    """Start the job, wait for its end, start it again at once. This process itself never opens a GPU: it only has the
    library loaded, so that a new child opens the device within milliseconds of its predecessor's end."""
    library = None if args.no_cuda else cuda.load_library()
    status.send("supervisor")
    round_number = 0
    while not status.is_closed():
        round_number += 1
        child = os.fork()
        if child == 0:
            try:
                hold(args, status, library=library, round_number=round_number)
            except BaseException:  # noqa: BLE001 - the test shows it
                report_crash(status)
            os._exit(0)
        os.waitpid(child, 0)


def set_signals(args: argparse.Namespace, status: Status) -> None:
    """Ignore or report signals, as asked."""
    polite = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    if args.ignore_term:
        for number in polite:
            signal.signal(number, signal.SIG_IGN)
    if args.report_signals:
        for number in (*polite, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            signal.signal(number, lambda signo, _frame: status.send("signal", signo=signo))


def probe(args: argparse.Namespace, status: Status) -> None:
    """Say which GPUs CUDA sees; also loads the kernel modules and makes their nodes on a fresh machine."""
    devices = cuda.Cuda().devices()
    cuda_devices = [{"uuid": d.uuid, "name": d.name, "total_mib": d.total_mib} for d in devices]
    status.send("probe", devices=cuda_devices)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--cgroup", help="cgroup directory to move into first")
    parser.add_argument("--gpu", action="append", default=[], metavar="UUID=MIB", help="context and memory there")
    parser.add_argument("--pinned", type=int, default=0, metavar="MIB", help="pinned host memory")
    parser.add_argument("--open", action="append", default=[], metavar="PATH", help="open this node")
    parser.add_argument("--no-cuda", action="store_true", help="never touch CUDA")
    parser.add_argument("--busy", action="store_true", help="compute all the time")
    parser.add_argument("--ignore-term", action="store_true")
    parser.add_argument("--report-signals", action="store_true", help="survive and report polite signals")
    parser.add_argument("--stop-self", action="store_true", help="SIGSTOP once ready")
    parser.add_argument("--fork", type=int, default=0, metavar="N", help="fork N children without exec")
    parser.add_argument("--dead-leader", action="store_true")
    parser.add_argument("--supervise", action="store_true", help="be the parent that starts the job again and again")
    parser.add_argument("--comm")
    parser.add_argument("--title", help="overwrite the command line")
    parser.add_argument("--ipc-export", metavar="FILE")
    parser.add_argument("--ipc-import", metavar="FILE")
    parser.add_argument("--probe", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    status = Status(args.status_fd)
    try:
        if args.cgroup:
            with open(os.path.join(args.cgroup, "cgroup.procs"), "w", encoding="ascii") as file:
                file.write("0")
        set_signals(args, status)
        if args.title:
            rewrite_argv(args.title)
        if args.comm:
            rename_comm(args.comm)
        if args.probe:
            probe(args, status)
        elif args.supervise:
            supervise(args, status)
        elif args.dead_leader:
            hold_with_a_dead_leader(args, status)
        else:
            hold(args, status)
    except Exception:  # noqa: BLE001 - the test shows it
        report_crash(status)
    return 0


if __name__ == "__main__":
    # No interpreter shutdown: the CUDA library's own threads and the work thread are still running.
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
