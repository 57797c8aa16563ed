"""The scan on real processes: every way to have a device open, stuck ones, hostile ones, a file server that hangs."""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hostd import disposable, syscalls
from hostd.disposable import Outcome, call_with_deadline
from hostd.model import DeviceId, OpenNodes
from hostd.system import scanhelper as module
from hostd.system.rings import parse_registered
from hostd.system.scan import DETAIL, Scanner, scan_here

pytestmark = pytest.mark.root

VCS = frozenset({7})
NODE = DeviceId(7, 50)
"""/dev/vcs50: opens without effect and nobody else has it open."""
DEADLINE_S = 60.0
MEM = frozenset({1})
ZERO = DeviceId(1, 5)
OF_ZERO = OpenNodes(by_map=frozenset({ZERO}))
OF_NODE = OpenNodes(by_fd=frozenset({NODE}))


@contextmanager
def running(code: str, *arguments: str) -> Iterator[int]:
    """A Python process that has run `code` and waits; stdin and stdout are pipes, stderr is nobody's device."""
    script = f"import os, sys\n{code}\nos.write(1, b'ready\\n')\nos.read(0, 1)"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        try:
            said, _, _ = select.select([child.stdout], [], [], DEADLINE_S)
            if not said or child.stdout.readline() != b"ready\n":
                child.kill()
                pytest.fail(child.stderr.read().decode() or f"no word from the child within {DEADLINE_S:g} s")
            yield child.pid
        finally:
            child.kill()


@pytest.fixture
def scanner() -> Iterator[Scanner]:
    with Scanner(deadline_s=5, budget_s=60) as made:
        yield made


@pytest.fixture
def node(tmp_path: Path) -> str:
    """A device node of our own: its name, path and inode say nothing."""
    path = tmp_path / "no-gpu-at-all.txt"
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(*NODE))
    return str(path)


@pytest.fixture
def zero(tmp_path: Path) -> str:
    path = tmp_path / "zero"
    os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(*ZERO))
    return str(path)


OPEN = "fd = os.open(sys.argv[1], os.O_RDONLY | os.O_NOCTTY)\n"
MAP = (
    "import mmap\n"
    "fd = os.open(sys.argv[1], os.O_RDWR)\n"
    "m = mmap.mmap(fd, 8192, mmap.MAP_PRIVATE)\n"
    "os.close(fd)\n"
    "for n in range(3, 64):\n"
    "    try: os.close(n)\n"
    "    except OSError: pass\n"
)
DIE = "import ctypes; ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)\n"
DEAD_LEADER = (
    "import threading\n"
    "def live():\n"
    "    while open('/proc/%d/stat' % os.getpid()).read().rsplit(')')[1].split()[0] != 'Z': pass\n"
    "    os.write(1, b'ready\\n'); os.read(0, 1)\n"
    "threading.Thread(target=live).start()\n" + DIE
)
UNSHARED_THREAD = (
    "import ctypes, threading\n"
    "done = threading.Event()\n"
    "def run():\n"
    "    assert ctypes.CDLL(None).unshare(0x400) == 0\n"
    "    {inner}\n"
    "    done.set(); os.read(0, 1)\n"
    "threading.Thread(target=run, daemon=True).start(); done.wait()\n"
)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


# --- finding ---


def test_a_descriptor_is_found_by_device_number_with_the_command_line(scanner: Scanner, node: str) -> None:
    with running(OPEN, node) as pid, running("pass") as other:
        result = scanner.scan([pid, other], VCS)
    assert result.open == {pid: OF_NODE}
    assert result.cmdlines.keys() == {pid}
    assert result.cmdlines[pid].startswith(os.fsencode(sys.executable) + b"\0-S\0-c\0")
    assert result.cmdlines[pid].endswith(os.fsencode(node) + b"\0")
    assert (result.blind_spots, result.gone, result.complete) == ([], set(), True)


def test_other_majors_and_regular_files_are_nothing(scanner: Scanner, node: str) -> None:
    with running(OPEN + "os.open('/etc/passwd', 0)", node) as pid:
        assert scanner.scan([pid], {195, 511}).open == {}
        assert scanner.scan([pid], ()).open == {}
        assert scanner.scan([], VCS).open == {}


def test_a_deleted_node_and_one_with_a_path_longer_than_any_link_text_are_found(
    scanner: Scanner, node: str, tmp_path: Path
) -> None:
    deep = (
        f"os.chdir({str(tmp_path)!r})\n"
        "for _ in range(30):\n"
        "    os.mkdir('d' * 250); os.chdir('d' * 250)\n"
        "os.mknod('n', 0o20600, os.makedev(7, 50)); os.open('n', os.O_NOCTTY)\n"
    )
    with running(OPEN + "os.unlink(sys.argv[1])", node) as pid, running(deep) as hidden:
        assert scanner.scan([pid, hidden], VCS).open == {pid: OF_NODE, hidden: OF_NODE}
    subprocess.run(["rm", "-rf", str(tmp_path / ("d" * 250))], check=True)


def test_an_inherited_descriptor_is_found_in_the_child_of_a_dead_parent(scanner: Scanner, node: str) -> None:
    reader, writer = os.pipe()
    parent = os.fork()
    if parent == 0:
        os.open(node, os.O_NOCTTY)
        child = os.fork()
        if child == 0:
            os.close(reader)
            signal.pause()
        os.write(writer, b"%d\n" % child)
        os._exit(0)
    os.waitpid(parent, 0)
    child = int(os.read(reader, 100))
    os.close(reader)
    os.close(writer)
    try:
        assert scanner.scan([child], VCS).open == {child: OF_NODE}
    finally:
        os.kill(child, 9)


def test_a_mapping_without_descriptor_is_found(scanner: Scanner, zero: str) -> None:
    with running(MAP, zero) as pid, running("pass") as other:
        result = scanner.scan([pid, other], MEM)
    assert result.open == {pid: OF_ZERO}
    assert result.cmdlines.keys() == {pid}


def test_both_kinds_of_evidence_are_kept_apart(scanner: Scanner, zero: str) -> None:
    code = "import mmap\nfd = os.open(sys.argv[1], os.O_RDWR)\nm = mmap.mmap(fd, 4096, mmap.MAP_PRIVATE)\n"
    with running(code, zero) as pid:
        assert scanner.scan([pid], MEM).open == {pid: OpenNodes(frozenset({ZERO}), frozenset({ZERO}))}


def test_a_dead_leader_hides_neither_descriptor_nor_mapping_nor_command_line(
    scanner: Scanner, node: str, zero: str
) -> None:
    with running(OPEN + DEAD_LEADER, node) as by_fd, running(MAP + DEAD_LEADER, zero) as by_map:
        assert os.listdir(f"/proc/{by_fd}/fd") == []
        result = scanner.scan([by_fd, by_map], VCS)
        assert result.open == {by_fd: OF_NODE}
        assert result.cmdlines[by_fd].endswith(os.fsencode(node) + b"\0")
        assert scanner.scan([by_map], MEM).open == {by_map: OF_ZERO}


def test_a_thread_with_a_table_of_its_own_is_looked_at(scanner: Scanner, node: str) -> None:
    inner = f"os.open({node!r}, os.O_NOCTTY)"
    with running(UNSHARED_THREAD.format(inner=inner)) as pid:
        assert scanner.scan([pid], VCS).open == {pid: OF_NODE}


def test_a_table_that_only_threads_of_a_dead_leader_have_is_looked_at(scanner: Scanner, node: str) -> None:
    inner = f"os.open({node!r}, os.O_NOCTTY)"
    with running(UNSHARED_THREAD.format(inner=inner) + DEAD_LEADER) as pid:
        assert scanner.scan([pid], VCS).open == {pid: OF_NODE}


def test_without_kcmp_every_table_is_walked(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(syscalls, "kcmp_files", lambda *_: None)
    with running(UNSHARED_THREAD.format(inner=f"os.open({node!r}, os.O_NOCTTY)")) as pid:
        assert scan_here([pid], VCS).open == {pid: OF_NODE}


def test_many_processes_in_several_helpers_give_the_same(scanner: Scanner, node: str) -> None:
    with ExitStack() as stack:
        holders = [stack.enter_context(running(OPEN, node)) for _ in range(8)]
        others = [stack.enter_context(running("pass")) for _ in range(24)]
        mixed = [pid for pair in zip(others, holders * 3, strict=True) for pid in pair]
        result = scanner.scan(mixed, VCS)
        assert result.open == dict.fromkeys(holders, OF_NODE)
        assert result.cmdlines.keys() == set(holders)
        here = scan_here(mixed, VCS)
        assert (here.open, here.cmdlines, here.blind_spots) == (result.open, result.cmdlines, [])
    assert scanner.scan(mixed, VCS).gone == set(mixed)


def test_gone_is_neither_open_nor_blind(scanner: Scanner) -> None:
    child = subprocess.Popen(["true"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    zombie = scanner.scan([child.pid], VCS)
    assert (zombie.open, zombie.blind_spots, zombie.gone) == ({}, [], set())
    child.wait()
    assert scanner.scan([child.pid], VCS).gone == {child.pid}


def test_kernel_threads_are_nothing(scanner: Scanner) -> None:
    result = scanner.scan([2], VCS)
    assert (result.open, result.blind_spots) == ({}, [])


def test_its_own_helpers_move_descriptors_all_the_time_and_are_nothing(scanner: Scanner) -> None:
    """A look at the whole host meets them."""
    scanner.scan([os.getpid()], VCS)
    ours = [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) == os.getpid()]
    assert ours
    result = scanner.scan(ours, VCS)
    assert (result.open, result.blind_spots) == ({}, [])


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_an_enormous_command_line_is_cut(scanner: Scanner, node: str) -> None:
    with running(OPEN, node, *["x" * 100_000] * 10) as pid:
        assert len(scanner.scan([pid], VCS).cmdlines[pid]) <= module.CMDLINE_LIMIT


# --- io_uring: registered and closed, so that no table of descriptors has it ---

REGISTER = """
import ctypes, socket
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 4, (ctypes.c_char * 120)())
assert ring >= 0, os.strerror(ctypes.get_errno())
fds = [-1, *({files}), -1]
assert libc.syscall(427, ring, 2, (ctypes.c_int * len(fds))(*fds), len(fds)) == 0
for fd in fds[1:-1]:
    os.close(fd)
"""
THE_NODE = "os.open(sys.argv[1], os.O_RDONLY | os.O_NOCTTY),"


@pytest.fixture
def ring() -> None:
    buffer = (ctypes.c_char * 120)()
    fd = ctypes.CDLL(None).syscall(425, 4, buffer)  # io_uring_setup(2): the same number on every architecture
    if fd < 0:
        pytest.skip("no io_uring here")
    os.close(fd)


def test_a_descriptor_that_is_registered_in_an_io_uring_and_closed_is_found(
    scanner: Scanner, node: str, ring: None
) -> None:
    with running(REGISTER.format(files=THE_NODE), node) as pid:
        assert not [fd for fd in os.listdir(f"/proc/{pid}/fd") if os.readlink(f"/proc/{pid}/fd/{fd}") == node]
        result = scanner.scan([pid], VCS)
        assert (result.open, result.blind_spots) == ({pid: OF_NODE}, [])
        assert scanner.scan([pid], MEM).open == {}


@pytest.mark.parametrize("gone", [os.unlink, lambda path: os.rename(path, path + " moved")], ids=["unlinked", "moved"])
def test_a_registered_node_that_is_no_longer_at_its_path_is_a_blind_spot_or_found(
    scanner: Scanner, node: str, ring: None, gone: Callable[[str], None]
) -> None:
    with running(REGISTER.format(files=THE_NODE), node) as pid:
        gone(node)
        result = scanner.scan([pid], VCS)
        assert result.open == {pid: OF_NODE} or [spot.code for spot in result.blind_spots] == ["descriptors-unreadable"]


def test_what_servers_register_is_nothing(scanner: Scanner, tmp_path: Path, ring: None) -> None:
    path = tmp_path / "a file\twith\nodd \\ names"
    path.touch()
    files = f"{THE_NODE} socket.socket().detach(), *os.pipe(), os.memfd_create('x'), os.eventfd(0)"
    with running(REGISTER.format(files=files), str(path)) as pid, running(REGISTER.format(files=""), "") as empty:
        result = scanner.scan([pid, empty], VCS)
        assert (result.open, result.blind_spots) == ({}, [])


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        (b"pos:\t0\nUserFiles:\t0\nUserBufs:\t0\n", []),
        (b"UserFiles:\t3\n    0: /dev/nvidia0\n    2: socket:[7]\nUserBufs:\t1\n    0: 0x7f/4096\n", [b"/dev/nvidia0"]),
        (b"UserFiles:\t1\n    0: /a\\040b\\134c\nUserBufs:\t0\n", [b"/a b\\c"]),
        (b"UserFiles:\t2\n    0: nvidia0\n    1: <none>\nUserBufs:\t0\n", [b"nvidia0"]),
        (b"UserFiles:\t2\nUserBufs:\t0\n", None),
        (b"pos:\t0\nflags:\t02000002\nmnt_id:\t17\n", None),
    ],
    ids=["none", "a node and a socket", "escaped", "an old kernel names no path", "no lock", "no lock, nothing"],
)
def test_fdinfo_of_a_ring(text: bytes, paths: list[bytes] | None) -> None:
    assert parse_registered(text) == paths


# --- not being able to look ---


def test_another_user_s_process_is_a_blind_spot_and_never_nothing_open(node: str) -> None:
    with running(OPEN, node) as pid:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
                with Scanner(5, 30) as scanner:
                    result = scanner.scan([pid], VCS)
                assert {spot.code for spot in result.blind_spots} == {"descriptors-unreadable", "mappings-unreadable"}
                assert all(f"process {pid}" in spot.what and "denied" in spot.error for spot in result.blind_spots)
                assert not result.complete
                assert (result.open, result.gone) == ({}, set())
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(scope="module")
def frozen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A frozen ext4 with a file `page` on it (FACTS, Kernel); thawed, whatever happens: a guard does it when we are killed."""
    where = tmp_path_factory.mktemp("frozen")
    image, mount = where / "image", where / "mount"
    mount.mkdir()
    image.write_bytes(b"")
    os.truncate(image, 16 << 20)
    made = subprocess.run(["mkfs.ext4", "-q", image], capture_output=True)
    if made.returncode or subprocess.run(["mount", "-o", "loop", image, mount], capture_output=True).returncode:
        pytest.skip("cannot mount a loop device here")
    watch = 'read -r _; fsfreeze -u "$1" 2>/dev/null'  # our end of its standard input closes with us
    guard = subprocess.Popen(["sh", "-c", watch, "guard", mount], stdin=subprocess.PIPE, start_new_session=True)
    try:
        (mount / "page").write_bytes(bytes(4096))
        os.sync()
        subprocess.run(["fsfreeze", "-f", mount], check=True)
        yield mount
    finally:
        guard.communicate()
        end = time.monotonic() + DEADLINE_S
        while subprocess.run(["umount", mount], capture_output=True).returncode and time.monotonic() < end:
            time.sleep(0.01)


# One thread write-faults a mapping of the frozen file; it holds only that mapping's lock (Linux >= 6.4). A second one
# takes that mapping away: it holds the whole map's lock and waits, so that every reader of the map waits, too.
STUCK = (
    "import mmap, threading, time\n"
    "file = os.open(sys.argv[2], os.O_RDWR); page = mmap.mmap(file, 4096)\n"
    "import ctypes; libc = ctypes.CDLL(None)\n"
    "address = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
    "def fault(): libc.memset(ctypes.c_void_p(address), 1, 1)\n"
    # The main thread must be at rest by then: it too would wait for the map at its next page fault.
    "def change(): time.sleep(0.3); libc.munmap(ctypes.c_void_p(address), 4096)\n"
    "for target in (fault, change): threading.Thread(target=target, daemon=True).start()\n"
)


def wait_for_tasks_in_d_state(pid: int, count: int) -> None:
    """Seen from outside: a process that looks at itself may get stuck in its own memory map."""
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        stats = [Path(entry, "stat").read_bytes() for entry in Path(f"/proc/{pid}/task").iterdir()]
        if sum(stat.rpartition(b") ")[2][:1] == b"D" for stat in stats) >= count:
            return
        time.sleep(0.005)
    pytest.fail(f"process {pid} does not get stuck")


@contextmanager
def stuck(frozen: Path, prelude: str, node: str) -> Iterator[int]:
    """A process whose memory map is stuck; thaws at the end so that it can go."""
    with running(prelude + STUCK, node, str(frozen / "page")) as pid:
        try:
            wait_for_tasks_in_d_state(pid, 2)
            yield pid
        finally:
            subprocess.run(["fsfreeze", "-u", frozen], check=True)
            os.kill(pid, 9)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            subprocess.run(["fsfreeze", "-f", frozen], check=True)


def test_a_stuck_process_without_descriptors_is_a_blind_spot_and_delays_only_itself(
    frozen: Path, node: str, zero: str
) -> None:
    with stuck(frozen, "", node) as pid, running(MAP, zero) as other, Scanner(deadline_s=0.3, budget_s=30) as scanner:
        started = time.monotonic()
        result = scanner.scan([pid, other], MEM)
        took = time.monotonic() - started
        assert result.open == {other: OF_ZERO}
        assert [(spot.code, spot.what) for spot in result.blind_spots] == [
            ("mappings-unreadable", f"mappings of process {pid}")
        ]
        assert not result.complete
        assert 0.3 <= took < 10
        again = scanner.scan([pid, other], MEM)
        assert again.open == {other: OF_ZERO}
        assert [spot.error for spot in again.blind_spots] == ["no answer within 0.1 s"]  # known by now
    wait_for(lambda: disposable.reap_abandoned() == 0)


def test_a_stuck_holder_is_found_by_its_descriptor_and_what_is_missing_is_a_detail(frozen: Path, node: str) -> None:
    with stuck(frozen, OPEN, node) as pid, Scanner(deadline_s=0.3, budget_s=30) as scanner:
        result = scanner.scan([pid], VCS)
        assert result.open == {pid: OF_NODE}
        assert {spot.code for spot in result.blind_spots} == {DETAIL}
        assert result.complete
        assert result.cmdlines == {}


def test_more_stuck_processes_than_the_budget_allows_cost_the_budget(frozen: Path, node: str) -> None:
    with ExitStack() as stack:
        pids = [stack.enter_context(running(STUCK, node, str(frozen / "page"))) for _ in range(6)]
        try:
            for pid in pids:
                wait_for_tasks_in_d_state(pid, 2)
            with Scanner(deadline_s=1.0, budget_s=1.0) as scanner:
                started = time.monotonic()
                result = scanner.scan(pids, VCS)
                assert time.monotonic() - started < 5  # of 6 at least
                assert result.open == {}
                assert not result.complete
                assert any("not reached within 1 s" in spot.error for spot in result.blind_spots)
        finally:
            subprocess.run(["fsfreeze", "-u", frozen], check=True)
            for pid in pids:
                os.kill(pid, 9)
                os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            subprocess.run(["fsfreeze", "-f", frozen], check=True)


def test_after_a_scan_that_no_helper_could_be_started_for_the_next_one_works(node: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with running(OPEN, node) as pid, Scanner() as scanner:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match="Too many open files"):
                    scanner.scan([pid], VCS)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert scanner.scan([pid], VCS).open == {pid: OF_NODE}


def test_mappings_and_descriptors_by_the_ten_thousand_cost_no_more_than_the_budget(node: str) -> None:
    many = (
        "import ctypes, resource\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))\n"
        "fd = os.open('/proc/self/exe', 0); libc = ctypes.CDLL(None)\n"
        "for n in range(60_000): assert libc.mmap(None, 4096, 1, 2, fd, ctypes.c_long(0)) != -1\n"
        "for n in range(min(hard, 50_000) - 100): os.dup(0)\n"
    )
    with running(many) as pid, running(OPEN, node) as other:
        with Scanner(deadline_s=5, budget_s=60) as scanner:
            result = scanner.scan([pid, other], VCS)
            assert (result.open, result.blind_spots) == ({other: OF_NODE}, [])
        with Scanner(deadline_s=5, budget_s=0.05) as scanner:
            started = time.monotonic()
            result = scanner.scan([pid, other], VCS)
            assert time.monotonic() - started < 20
            assert not result.complete
    wait_for(lambda: disposable.reap_abandoned() == 0)  # on a busy machine a killed helper takes longer than we wait


def test_a_helper_that_is_killed_costs_one_process_and_the_rest_is_still_looked_at(node: str) -> None:
    with running(OPEN, node) as pid, running(OPEN, node) as other, Scanner(deadline_s=5, budget_s=30) as scanner:
        assert len(scanner.scan([pid, other], VCS).open) == 2
        helper = scanner._lanes[0]._helper
        assert helper is not None
        os.kill(helper.pid, 9)
        os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
        assert scanner.scan([pid, other], VCS).open == {pid: OF_NODE, other: OF_NODE}


def test_close_ends_the_helpers_and_the_scanner_can_be_used_again(node: str) -> None:
    before = set(os.listdir("/proc/self/fd"))
    scanner = Scanner()
    with running(OPEN, node) as pid:
        for _ in range(2):
            assert scanner.scan([pid], VCS).open == {pid: OF_NODE}
            helper = scanner._lanes[0]._helper
            assert helper is not None
            scanner.close()
            with pytest.raises(ProcessLookupError):
                os.kill(helper.pid, 0)
    assert set(os.listdir("/proc/self/fd")) == before


# --- a FUSE server that hangs ---

FUSE_INIT, FUSE_LOOKUP, FUSE_GETATTR, FUSE_OPEN, FUSE_FLUSH = 26, 1, 3, 14, 25


class Fuse:
    """A raw FUSE server in a process of its own with one file, `file`; it answers until SIGUSR1, then never again."""

    def __init__(self, mount: str) -> None:
        self.mount = mount
        self.device = os.open("/dev/fuse", os.O_RDWR)
        libc = ctypes.CDLL(None, use_errno=True)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0".encode()
        if libc.mount(b"pgr-test", mount.encode(), b"fuse", 0, options):
            os.close(self.device)
            pytest.skip(f"cannot mount FUSE: {os.strerror(ctypes.get_errno())}")
        self.told, tell = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self.mute = False
                signal.signal(signal.SIGUSR1, lambda *_: [os.write(tell, b"x"), signal.pause()])
                signal.signal(signal.SIGUSR2, lambda *_: [os.write(tell, b"x"), setattr(self, "mute", True)])
                os.write(tell, b"x")
                while True:
                    request = os.read(self.device, 1 << 20)
                    if self.mute:
                        os.write(tell, b"x")
                        signal.pause()
                    self.serve(request)
            finally:
                os._exit(1)
        os.close(self.device)
        os.close(tell)
        assert os.read(self.told, 1) == b"x"
        os.stat(mount)  # after INIT, so that what comes next is a request of the test

    def serve(self, request: bytes) -> None:
        _, opcode, unique, node = struct.unpack_from("=IIQQ", request)
        body, error = b"", 0
        if opcode == FUSE_INIT:
            body = struct.pack("=IIIIHHIIHHIIIII", 7, 31, 65536, 0, 16, 12, 65536, 1, 0, 0, 0, 0, 0, 0, 0)
            body = body.ljust(64, b"\0")
        elif opcode == FUSE_LOOKUP and request[40:].rstrip(b"\0") == b"file":
            body = struct.pack("=QQQQII", 2, 1, 3600, 0, 0, 0) + self.attributes(2)
        elif opcode == FUSE_GETATTR:
            body = struct.pack("=QII", 0, 0, 0) + self.attributes(node)
        elif opcode == FUSE_OPEN:
            body = struct.pack("=QII", 1, 0, 0)
        elif opcode in (2, 42):
            return  # FORGET: no answer wanted
        else:
            error = -38
        os.write(self.device, struct.pack("=IiQ", 16 + len(body), error, unique) + body)

    @staticmethod
    def attributes(node: int) -> bytes:
        mode = 0o40755 if node == 1 else 0o100644
        return struct.pack("=QQQQQQIIIIIIIIII", node, 0, 0, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0)

    def hang(self) -> None:
        """Take no request any more."""
        os.kill(self.pid, signal.SIGUSR1)
        assert os.read(self.told, 1) == b"x"

    def swallow(self) -> None:
        """Take the next request and never answer it."""
        os.kill(self.pid, signal.SIGUSR2)
        assert os.read(self.told, 1) == b"x"

    def end(self) -> None:
        os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)  # the device is closed: every waiter gets ENOTCONN
        os.close(self.told)
        subprocess.run(["umount", "-l", self.mount], check=True)


@pytest.fixture
def fuse() -> Iterator[Fuse]:
    with tempfile.TemporaryDirectory() as mount:
        made = Fuse(mount)
        try:
            yield made
        finally:
            made.end()


def test_a_file_on_a_hanging_fuse_mount_blocks_stat_but_not_the_scan(fuse: Fuse, node: str) -> None:
    # The first close teaches the kernel that this server knows no FLUSH, so that the end does not wait for one.
    both = OPEN + "os.close(os.open(sys.argv[2], 0)); os.open(sys.argv[2], 0)"
    with running(both, node, f"{fuse.mount}/file") as pid, Scanner(0.5, 30) as scanner:
        (number,) = (
            int(name)
            for name in os.listdir(f"/proc/{pid}/fd")
            if os.readlink(f"/proc/{pid}/fd/{name}").startswith(fuse.mount)
        )
        fuse.hang()
        result = scanner.scan([pid], VCS)
        assert (result.open, result.blind_spots) == ({pid: OF_NODE}, [])
        plain = call_with_deadline(lambda: b"%d" % os.stat(f"/proc/{pid}/fd/{number}").st_mode, 0.3)
        assert plain.outcome is Outcome.TIMEOUT
        # The server never saw that request, so SIGKILL ends the helper.
        wait_for(lambda: disposable.reap_abandoned() == 0)


def test_a_helper_in_the_hands_of_a_hanging_server_is_left_behind_and_collected_later() -> None:
    with tempfile.TemporaryDirectory() as mount:
        fuse = Fuse(mount)
        try:
            fuse.swallow()
            started = time.monotonic()
            # Once the server has the request the kernel waits for the answer and heeds no SIGKILL (fs/fuse/dev.c).
            answer = call_with_deadline(lambda: b"%d" % os.stat(f"{mount}/file").st_mode, 0.2)
            assert answer.outcome is Outcome.TIMEOUT
            assert os.read(fuse.told, 1) == b"x"
            assert time.monotonic() - started < 20
            (left,) = disposable.abandoned()
            assert disposable.reap_abandoned() == 1
        finally:
            fuse.end()
        os.waitid(os.P_PID, left, os.WEXITED | os.WNOWAIT)
        assert disposable.reap_abandoned() == 0


def test_scans_within_one_budget_share_it(node: str) -> None:
    with running(OPEN, node) as pid, Scanner(deadline_s=5, budget_s=30) as scanner:
        with scanner.within():
            assert scanner.scan([pid], VCS).complete and not scanner.spent
        with scanner.within(0.0):
            assert scanner.spent
            result = scanner.scan([pid], VCS)
            assert not result.complete and "not reached in the time for one look" in result.blind_spots[0].error
            with scanner.within(60):
                assert scanner.spent, "the wider one stays in force"
        assert not scanner.spent and scanner.scan([pid], VCS).open == {pid: OF_NODE}
    wait_for(lambda: disposable.reap_abandoned() == 0)
