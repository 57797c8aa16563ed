"""System calls and ioctls that Python 3.11's standard library lacks. Every function raises OSError with errno.

Numbers are those of the kernel's UAPI headers; the calls added since Linux 5.1 share one number on all architectures
(include/uapi/asm-generic/unistd.h). No state, no policy: what an errno means is decided by the caller.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Callable, Iterable

AT_FDCWD = -100

# statx(2): do not ask a remote or FUSE server, do not trigger an automount.
_AT_NO_AUTOMOUNT = 0x800
_AT_STATX_DONT_SYNC = 0x4000
_STATX_TYPE = 0x1
STATX_FLAGS = _AT_STATX_DONT_SYNC | _AT_NO_AUTOMOUNT

# linux/openat2.h
RESOLVE_NO_XDEV = 0x01
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

# linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4

# linux/nsfs.h: NSIO is 0xb7. 6 to 9 exist since Linux 6.11.
_NS_GET_PARENT = 0xB702
_NS_GET_TGID_FROM_PIDNS = 0x8004B707
_NS_GET_TGID_IN_PIDNS = 0x8004B709

_SYS_FSOPEN = 430
_SYS_FSCONFIG = 431
_SYS_FSMOUNT = 432
_SYS_CLOSE_RANGE = 436
_SYS_OPENAT2 = 437
_FSOPEN_CLOEXEC = 1
_FSMOUNT_CLOEXEC = 1
_FSCONFIG_SET_FD = 5
_FSCONFIG_CMD_CREATE = 6
_MOUNT_ATTRS = 0x02 | 0x04 | 0x08  # nosuid, nodev, noexec
CLONE_NEWNS = 0x00020000
CLONE_NEWPID = _CLONE_NEWPID = 0x20000000
_SYS_KCMP = {"x86_64": 312, "aarch64": 272}.get(os.uname().machine)
_KCMP_FILES = 2
_PROC_SUPER_MAGIC = 0x9FA0

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
# Without releasing the interpreter lock, and without saving errno: a third of the cost in the scan's inner loop.
_fast_statx = ctypes.PyDLL(None).statx


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


# --- statx ---------------------------------------------------------------------------------------------------------


def statx_rdev(path: bytes, dir_fd: int = AT_FDCWD) -> tuple[int, int, int]:
    """(mode, rdev major, rdev minor) of `path`, links followed, without asking a file server.

    A plain stat(2) of /proc/PID/fd/N whose file lies on a FUSE mount with a hanging server blocks, as the kernel asks
    the server for fresh attributes; AT_STATX_DONT_SYNC answers from the inode (statx(2)). What is still able to block
    is a network file system that revalidates the last component of a magic link (d_weak_revalidate of NFS and 9p), so
    callers on hostile ground run this in a disposable helper.
    """
    buffer = ctypes.create_string_buffer(256)
    _check(_libc.statx(dir_fd, path, STATX_FLAGS, _STATX_TYPE, buffer), os.fsdecode(path))
    (mode,) = struct.unpack_from("=H", buffer, 28)
    major, minor = struct.unpack_from("=II", buffer, 128)
    return mode, major, minor


class FastStatx:
    """One statx buffer and its call for an inner loop: `if not call(dir_fd, name, FLAGS, 1, where): words[32]`.

    `call` returns 0 or -1 and keeps no errno: repeat a failed one with `statx_rdev` to learn why. `words` views the
    buffer as 32 bit words: 7 is the mode (its low 16 bits), 32 and 33 are the rdev's major and minor, 34 and 35 the
    file system's device (struct statx, linux/stat.h). Holds the interpreter lock: for single-threaded processes only.
    """

    __slots__ = ("_buffer", "call", "where", "words")

    def __init__(self) -> None:
        self._buffer = ctypes.create_string_buffer(256)
        self.call: Callable[..., int] = _fast_statx
        self.where = ctypes.byref(self._buffer)
        self.words = memoryview(self._buffer).cast("B").cast("I")


def fs_type(path: bytes | int) -> int:
    """`f_type` of statfs(2) for a path or a descriptor: the magic number of the file system. May block (FUSE, NFS)."""
    buffer = ctypes.create_string_buffer(256)
    if isinstance(path, int):
        _check(_libc.fstatfs(path, buffer), f"fd {path}")
    else:
        _check(_libc.statfs(path, buffer), os.fsdecode(path))
    return int(ctypes.c_ulong.from_buffer(buffer).value)


# --- processes -----------------------------------------------------------------------------------------------------


def kcmp_files(pid1: int, pid2: int) -> bool | None:
    """Do two tasks share one descriptor table (kcmp(2), KCMP_FILES)? None when the kernel has no kcmp.

    Two dead tasks compare equal (neither has a table). ESRCH: one of them is gone; EPERM: no ptrace rights.
    """
    if _SYS_KCMP is None:
        return None
    result = _syscall(_SYS_KCMP, pid1, pid2, _KCMP_FILES, 0, 0)
    if result >= 0:
        return bool(result == 0)
    import errno

    if ctypes.get_errno() == errno.ENOSYS:
        return None
    _check(result, f"kcmp {pid1} {pid2}")
    return None


def read_start_time(proc_pid_fd: int) -> int:
    """Start time (clock ticks since boot) of the process behind a descriptor of its /proc/PID directory.

    Such a descriptor stays with that process: after its end every read says ESRCH, also when the pid was given to
    another one. That makes it a race-free anchor for several reads.
    """
    fd = os.open("stat", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc_pid_fd)
    try:
        text = os.read(fd, 4096)
    finally:
        os.close(fd)
    return int(text[text.rindex(b")") + 2 :].split(None, 20)[19])


def set_pdeathsig(sig: int) -> None:
    """Send `sig` to this process when the thread that forked it dies (prctl(2), PR_SET_PDEATHSIG)."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, sig, 0, 0, 0), "PR_SET_PDEATHSIG")


def set_dumpable(on: bool) -> None:
    """Whether others of the same uid may trace this process and open its /proc files (PR_SET_DUMPABLE)."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(on), 0, 0, 0), "PR_SET_DUMPABLE")


def setns(ns_fd: int, kind: int) -> None:
    """Joins a namespace (setns(2)); a PID namespace only for the children. `kind`: CLONE_NEWNS or CLONE_NEWPID."""
    _check(_libc.setns(ns_fd, kind), "setns")


def drop_capabilities() -> None:
    """Gives every capability up for good, also as uid 0 (capset(2), version 3 of the header)."""
    header = struct.pack("=Ii", 0x20080522, 0)
    _check(_libc.capset(header, b"\0" * 24), "capset")


def close_other_fds(keep: Iterable[int]) -> None:
    """Close every descriptor of this process but those in `keep` (close_range(2); Linux >= 5.9)."""
    first = 0
    for fd in sorted(set(keep)):
        if fd > first:
            _check(_syscall(_SYS_CLOSE_RANGE, first, fd - 1, 0), "close_range")
        first = fd + 1
    _check(_syscall(_SYS_CLOSE_RANGE, first, 0xFFFFFFFF, 0), "close_range")


def openat2(dir_fd: int, path: bytes | str, flags: int, resolve: int) -> int:
    """openat2(2) with RESOLVE_* flags: a descriptor, close-on-exec. ELOOP, EXDEV: the path tried to leave."""
    how = struct.pack("=QQQ", flags | os.O_CLOEXEC, 0, resolve)
    return _check(_syscall(_SYS_OPENAT2, dir_fd, os.fsencode(path), how, len(how)), os.fsdecode(path))


def name_in_root(root_fd: int, path: bytes | str) -> int:
    """An O_PATH descriptor of what a path names below a root, a last link itself; absolute paths and links stay below."""
    return openat2(root_fd, path, os.O_PATH | os.O_NOFOLLOW, RESOLVE_IN_ROOT)


# --- PID namespaces ------------------------------------------------------------------------------------------------


def ns_get_tgid_from_pidns(ns_fd: int, ns_pid: int) -> int:
    """Pid (in our namespace) of the process that is `ns_pid` in the PID namespace behind `ns_fd`.

    Linux >= 6.11 (linux/nsfs.h NS_GET_TGID_FROM_PIDNS). ESRCH: no such process. ENOTTY: the kernel is older.
    """
    return fcntl.ioctl(ns_fd, _NS_GET_TGID_FROM_PIDNS, ns_pid)


def ns_get_tgid_in_pidns(ns_fd: int, pid: int) -> int:
    """Pid inside the namespace behind `ns_fd` of our process `pid`. ESRCH: none there. ENOTTY: kernel < 6.11."""
    return fcntl.ioctl(ns_fd, _NS_GET_TGID_IN_PIDNS, pid)


def ns_get_parent(ns_fd: int) -> int:
    """Descriptor of the parent namespace (ioctl_nsfs(2)). EPERM: the parent is not below our own namespace."""
    fd = fcntl.ioctl(ns_fd, _NS_GET_PARENT)
    os.set_inheritable(fd, False)
    return fd


def _fs_mount_proc(ns_fd: int | None) -> int:
    """A detached mount of a new procfs instance, for the namespace behind `ns_fd` or for our own."""
    context = _check(_syscall(_SYS_FSOPEN, b"proc", _FSOPEN_CLOEXEC), "fsopen proc")
    try:
        if ns_fd is not None:
            _check(_syscall(_SYS_FSCONFIG, context, _FSCONFIG_SET_FD, b"pidns", None, ns_fd), "fsconfig pidns")
        _check(_syscall(_SYS_FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0), "fsconfig create")
        return _check(_syscall(_SYS_FSMOUNT, context, _FSMOUNT_CLOEXEC, _MOUNT_ATTRS), "fsmount")
    finally:
        os.close(context)


def _readable(mount_fd: int) -> int:
    """fsmount gives an O_PATH descriptor; reading the directory needs a real one."""
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=mount_fd)
    finally:
        os.close(mount_fd)


def proc_for_pidns(ns_fd: int, deadline_s: float = 2.0) -> int:
    """A directory descriptor of a procfs that shows exactly the members of the PID namespace behind `ns_fd`.

    It is mounted nowhere and goes away with the descriptor. Linux >= 6.17 takes the namespace as the mount option
    `pidns`; before that a child enters the namespace for milliseconds (`proc_by_entering`). Needs CAP_SYS_ADMIN.
    """
    try:
        return _readable(_fs_mount_proc(ns_fd))
    except OSError:
        return proc_by_entering(ns_fd, deadline_s)


def proc_by_entering(ns_fd: int, deadline_s: float = 2.0) -> int:
    """As `proc_for_pidns`, for kernels before 6.17: setns + fork, the descriptor comes back over a socket.

    The child in the namespace is not dumpable and has nothing open but namespace and socket (DESIGN 12). What it sends
    is believed only if it is a procfs. ETIMEDOUT, ECONNRESET: the child was stopped or killed from inside.
    """
    import errno
    import select
    import signal
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    if child == 0:
        _enter_and_send(ns_fd, theirs)
    theirs.close()
    try:
        poll = select.poll()
        poll.register(ours, select.POLLIN)
        if not poll.poll(deadline_s * 1000):
            os.kill(child, signal.SIGKILL)
            raise TimeoutError(errno.ETIMEDOUT, "cannot get a procfs from inside the PID namespace in time")
        data, fds, _, _ = socket.recv_fds(ours, 16, 1)
        if not fds:
            code = struct.unpack("=I", data)[0] if len(data) == 4 else errno.ECONNRESET
            raise OSError(code, os.strerror(code), "procfs of the PID namespace")
        os.set_inheritable(fds[0], False)
        if fs_type(fds[0]) != _PROC_SUPER_MAGIC:
            os.close(fds[0])
            raise OSError(errno.ECONNRESET, "not a procfs", "procfs of the PID namespace")
        return _readable(fds[0])
    finally:
        ours.close()
        _end_after(child, deadline_s)


def _end_after(child: int, patience_s: float) -> None:
    """Let a child of ours end by itself, so that the one inside is gone from the namespace too; kill it if it does not.

    It only forks, sends and waits: it is never in D state for long.
    """
    import select
    import signal

    pidfd = os.pidfd_open(child)
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        if not poll.poll(patience_s * 1000):
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    finally:
        os.close(pidfd)


def _enter_and_send(ns_fd: int, sock: object) -> None:
    """The child's part of `proc_by_entering`; never returns."""
    import signal
    import socket

    assert isinstance(sock, socket.socket)
    try:
        set_pdeathsig(signal.SIGKILL)
        set_dumpable(False)
        close_other_fds((ns_fd, sock.fileno()))
        try:
            _check(_libc.setns(ns_fd, _CLONE_NEWPID), "setns")
            inner = os.fork()
            if inner == 0:
                set_pdeathsig(signal.SIGKILL)
                socket.send_fds(sock, [b"+"], [_fs_mount_proc(None)])
                os._exit(0)
            os.waitpid(inner, 0)
        except OSError as exc:
            sock.send(struct.pack("=I", exc.errno or 0))
    finally:
        os._exit(0)
