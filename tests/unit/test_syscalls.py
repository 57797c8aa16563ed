"""System calls against the standard library's answers and real objects."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hostd import syscalls


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", "/etc/passwd", "/", "/proc/self/fd/0"])
def test_statx_says_what_stat_says(path: str) -> None:
    known = os.stat(path)
    assert syscalls.statx_rdev(path.encode()) == (known.st_mode, os.major(known.st_rdev), os.minor(known.st_rdev))


def test_statx_works_from_a_directory_and_raises_with_errno() -> None:
    fd = os.open("/dev", os.O_RDONLY)
    try:
        mode, major, minor = syscalls.statx_rdev(b"null", fd)
        assert (stat.S_ISCHR(mode), major, minor) == (True, 1, 3)
        with pytest.raises(FileNotFoundError):
            syscalls.statx_rdev(b"no such thing", fd)
    finally:
        os.close(fd)


@pytest.mark.root
def test_the_fast_form_sees_large_minors(tmp_path: Path) -> None:
    node = tmp_path / "node"
    os.mknod(node, stat.S_IFCHR | 0o600, os.makedev(511, 70_000))
    fast = syscalls.FastStatx()
    assert fast.call(syscalls.AT_FDCWD, os.fsencode(node), syscalls.STATX_FLAGS, 1, fast.where) == 0
    assert (fast.words[32], fast.words[33]) == (511, 70_000)
    assert fast.words[7] & 0o170000 == 0o020000
    assert syscalls.statx_rdev(os.fsencode(node))[1:] == (511, 70_000)
    assert fast.call(syscalls.AT_FDCWD, b"/nowhere", syscalls.STATX_FLAGS, 1, fast.where) == -1


def test_fs_type_tells_procfs() -> None:
    assert syscalls.fs_type(b"/proc/self") == 0x9FA0
    with pytest.raises(FileNotFoundError):
        syscalls.fs_type(b"/nowhere")


def test_kcmp_tells_a_shared_table_from_a_copied_one() -> None:
    stop, tids = threading.Event(), []

    def run(unshare: bool) -> None:
        if unshare:
            syscalls._check(syscalls._libc.unshare(0x400), "unshare")
        tids.append(threading.get_native_id())
        ready.release()
        stop.wait()

    ready = threading.Semaphore(0)
    threads = [threading.Thread(target=run, args=(unshare,)) for unshare in (False, True)]
    for thread in threads:
        thread.start()
        ready.acquire()
    try:
        assert syscalls.kcmp_files(os.getpid(), tids[0]) in (True, None)
        assert syscalls.kcmp_files(os.getpid(), tids[1]) in (False, None)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_kcmp_of_a_pid_that_nobody_has_raises() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        syscalls.kcmp_files(os.getpid(), child.pid)


def test_start_time_comes_from_the_process_behind_the_descriptor() -> None:
    child = subprocess.Popen(["sleep", "600"])
    here = os.open(f"/proc/{child.pid}", os.O_RDONLY)
    try:
        text = Path(f"/proc/{child.pid}/stat").read_text()
        assert syscalls.read_start_time(here) == int(text.rpartition(")")[2].split()[19])
        child.kill()
        child.wait()
        with pytest.raises(ProcessLookupError):
            syscalls.read_start_time(here)
    finally:
        os.close(here)
        child.kill()
        child.wait()


def in_a_child(code: str) -> None:
    root = Path(__file__).resolve().parents[2]
    script = f"import os, signal, sys; sys.path.insert(0, {str(root)!r})\nfrom hostd import syscalls\n{code}"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_close_other_fds_leaves_what_was_named() -> None:
    in_a_child(
        "a = os.dup2(1, 50); b = os.dup2(1, 1000)\n"
        "syscalls.close_other_fds([1, 50])\n"
        "import errno\n"
        "def is_open(n):\n"
        "    try: os.fstat(n); return True\n"
        "    except OSError: return False\n"
        "assert [n for n in range(1100) if is_open(n)] == [1, 50]"
    )


def test_not_dumpable_and_death_signal_take_effect() -> None:
    in_a_child(
        "syscalls.set_dumpable(False); syscalls.set_pdeathsig(signal.SIGKILL)\n"
        "import ctypes; libc = ctypes.CDLL(None); out = ctypes.c_int()\n"
        "assert libc.prctl(3, 0, 0, 0, 0) == 0\n"
        "assert libc.prctl(2, ctypes.byref(out), 0, 0, 0) == 0 and out.value == signal.SIGKILL"
    )


def test_openat2_does_not_leave_its_root(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text("inside")
    (tmp_path / "absolute").symlink_to("/etc/passwd")
    (tmp_path / "up").symlink_to("../../../../../../etc/passwd")
    (tmp_path / "magic").symlink_to("/proc/self/root/etc/passwd")
    root = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in ("etc/passwd", "absolute", "up", "/etc/passwd", "../etc/passwd"):
            fd = syscalls.openat2(root, name, os.O_RDONLY, syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS)
            assert os.read(fd, 100) == b"inside"
            assert not os.get_inheritable(fd)
            os.close(fd)
        with pytest.raises(OSError):
            syscalls.openat2(root, "up", os.O_RDONLY, syscalls.RESOLVE_BENEATH)
    finally:
        os.close(root)


def test_what_a_path_names_in_a_root_is_never_outside(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/mine").write_text("")
    for link, target in (("absolute", "/etc"), ("up", "../../../../../../../../etc")):
        (tmp_path / link).symlink_to(target)
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        for name in ("absolute/mine", "up/mine", b"/absolute/mine"):
            fd = syscalls.name_in_root(root, name)
            assert os.fstat(fd).st_ino == (tmp_path / "etc/mine").stat().st_ino
            os.close(fd)
            with pytest.raises(FileNotFoundError):
                syscalls.name_in_root(
                    root,
                    name.replace(b"mine", b"passwd") if isinstance(name, bytes) else name.replace("mine", "passwd"),
                )
        fd = syscalls.name_in_root(root, "absolute")
        assert os.readlink(f"/proc/self/fd/{fd}") == str(tmp_path / "absolute"), "the link itself"
        os.close(fd)
    finally:
        os.close(root)


DUMPABLE = "import ctypes; libc = ctypes.CDLL(None)\ndef dumpable(): return libc.prctl(3, 0, 0, 0, 0)\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="enters a PID namespace: needs root")
def test_the_child_in_a_pid_namespace_is_not_dumpable_and_has_nothing_of_ours_open(tmp_path: Path) -> None:
    """DESIGN 12. Newer kernels never take that way, so it is watched from inside."""
    in_a_child(
        DUMPABLE + f"extra = os.open({str(tmp_path)!r}, os.O_RDONLY)\n"
        "FD = '/proc/self/fd'\n"
        "def spy(ns):\n"
        f"    open({str(tmp_path / 'seen')!r}, 'w').write(f'{{dumpable()}} {{len(os.listdir(FD))}}')\n"
        "    raise OSError(5, 'enough')\n"
        "syscalls._fs_mount_proc = spy\n"
        "ns = os.open('/proc/self/ns/pid', os.O_RDONLY)\n"
        "try: syscalls.proc_by_entering(ns)\n"
        "except OSError as exc: assert exc.errno == 5, exc\n"
    )
    dumpable, descriptors = (tmp_path / "seen").read_text().split()
    assert dumpable == "0" and int(descriptors) <= 4, "the namespace, the socket, the file and the listing"


@pytest.mark.skipif(os.geteuid() != 0, reason="enters a PID namespace: needs root")
def test_what_the_child_in_a_pid_namespace_sends_is_a_procfs_or_nothing(tmp_path: Path) -> None:
    in_a_child(
        f"syscalls._fs_mount_proc = lambda ns: os.open({str(tmp_path)!r}, os.O_PATH)\n"
        "ns = os.open('/proc/self/ns/pid', os.O_RDONLY)\n"
        "try: syscalls.proc_by_entering(ns)\n"
        "except OSError as exc: assert 'not a procfs' in str(exc), exc\n"
        "else: raise AssertionError('believed')\n"
    )


@pytest.mark.parametrize("step", ["_enter", "_become"])
def test_who_asks_a_manager_in_a_container_is_not_dumpable(tmp_path: Path, step: str) -> None:
    """Before it enters, and again when its ids have changed, which resets it (prctl(2))."""
    in_a_child(
        DUMPABLE + "from hostd.system import managers\n"
        f"seen = {str(tmp_path / 'seen')!r}\n"
        "def spy(*_):\n"
        "    open(seen, 'w').write(str(dumpable()))\n"
        "    raise OSError(5, 'enough')\n"
        f"if {step!r} == '_enter':\n"
        "    managers._enter = spy\n"
        "    end, held = os.pipe(); out, told = os.pipe(); os.close(held)\n"
        "    managers._serve(end, told, managers.Place(-1), None)\n"
        "else:\n"
        "    syscalls.drop_capabilities = lambda: libc.prctl(4, 1, 0, 0, 0)\n"
        "    syscalls.set_pdeathsig = spy\n"
        "    request = managers.Request('systemd', 'x.service', (), 0, 0, 0, frozenset())\n"
        "    try: managers._become(request)\n"
        "    except OSError: pass\n"
    )
    assert (tmp_path / "seen").read_text() == "0"


def test_openat2_refuses_magic_links() -> None:
    root = os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    try:
        with pytest.raises(OSError) as caught:
            syscalls.openat2(
                root, "proc/self/exe", os.O_RDONLY, syscalls.RESOLVE_IN_ROOT | syscalls.RESOLVE_NO_MAGICLINKS
            )
        assert caught.value.errno == errno.ELOOP
    finally:
        os.close(root)


def test_the_parent_of_our_own_namespace_is_refused() -> None:
    fd = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        with pytest.raises(PermissionError):
            syscalls.ns_get_parent(fd)
    finally:
        os.close(fd)


@pytest.mark.root
@pytest.mark.parametrize("way", [syscalls.proc_for_pidns, syscalls.proc_by_entering])
def test_a_procfs_of_a_namespace_shows_its_members_only(way: object) -> None:
    assert callable(way)
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "sh", "-c", "sleep 600 & echo ready; wait"], stdout=subprocess.PIPE
    ) as outer:
        assert outer.stdout is not None
        outer.stdout.readline()
        (init,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        before = set(os.listdir("/proc/self/fd"))
        ns_fd = os.open(f"/proc/{init}/ns/pid", os.O_RDONLY)
        try:
            instance = way(ns_fd)
            assert sorted(name for name in os.listdir(instance) if name.isdecimal()) == ["1", "2"]
            assert not os.get_inheritable(instance)
            os.close(instance)
        finally:
            os.close(ns_fd)
            os.kill(init, 9)
        assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.root
@pytest.mark.parametrize("way", [syscalls.proc_for_pidns, syscalls.proc_by_entering])
def test_a_dead_namespace_raises_or_is_empty(way: object) -> None:
    assert callable(way)
    with subprocess.Popen(
        ["unshare", "--pid", "--fork", "sh", "-c", "echo ready; read x"], stdin=-1, stdout=-1
    ) as outer:
        assert outer.stdout is not None
        outer.stdout.readline()
        (init,) = map(int, Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split())
        ns_fd = os.open(f"/proc/{init}/ns/pid", os.O_RDONLY)
        os.kill(init, 9)
    try:
        instance = way(ns_fd)
    except OSError:
        pass
    else:
        assert not [name for name in os.listdir(instance) if name.isdecimal()]
        os.close(instance)
    finally:
        os.close(ns_fd)
