"""The v2 cgroup tree: which processes are in a container's part of it, whether it is empty, killing it.

Layout of Proxmox VE (FACTS): payload `/lxc/VMID` and below, monitor `/lxc.monitor/VMID`. A container's cgroup is held
by a directory descriptor: after a removal every access through it fails (ENODEV, ENOENT), also when a new directory
has the same name, so that what was decided about one incarnation never hits the next. Below it everything may be made
by the container: names are hostile, walks are bounded.
"""

from __future__ import annotations

import errno
import os
import select
import time

from hostd.errors import UnreadableError, is_gone
from hostd.model import BlindSpot

_READ = os.O_RDONLY | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_DEPTH = 64
"""Levels below the container's cgroup; Docker in systemd in LXC needs about 8."""
MAX_DIRECTORIES = 20_000

PAYLOAD = "lxc"
MONITOR = "lxc.monitor"


# --- pure ----------------------------------------------------------------------------------------------------------


def parse_mountinfo(text: bytes) -> list[str]:
    """Mount points of whole cgroup2 trees in `/proc/PID/mountinfo`, last mounted first (proc_pid_mountinfo(5)).

    A mount of a part (root not `/`), as a container's own, is none. Octal escapes are undone.
    """
    found = []
    for line in text.split(b"\n"):
        left, separator, right = line.partition(b" - ")
        fields = left.split(b" ")
        if separator and right.split(b" ", 1)[0] == b"cgroup2" and len(fields) >= 5 and fields[3] == b"/":
            found.append(os.fsdecode(_unescape(fields[4])))
    found.reverse()
    return found


def _unescape(field: bytes) -> bytes:
    if b"\\" not in field:
        return field
    for code in (b"\\040", b"\\011", b"\\012"):
        field = field.replace(code, bytes([int(code[1:], 8)]))
    return field.replace(b"\\134", b"\\")


def parse_pids(text: bytes) -> tuple[set[int], bool]:
    """(pids, is there a member that we cannot see?) of `cgroup.procs` or `cgroup.threads`.

    The kernel writes 0 for a member of a PID namespace that is not below ours: never a pid.
    """
    pids = set(map(int, text.split()))
    hidden = 0 in pids
    pids.discard(0)
    return pids, hidden


def parse_events(text: bytes) -> dict[str, bool]:
    """`cgroup.events`: `populated` (a live process here or below), `frozen`."""
    pairs = (line.split() for line in text.decode("ascii", "replace").splitlines())
    return {pair[0]: pair[1] != "0" for pair in pairs if len(pair) == 2}


def vmid_of_name(name: str) -> int | None:
    """The vmid that a directory name in `/lxc` stands for: canonical decimals only, `0129` and `129-1` are none."""
    if name.isascii() and name.isdecimal() and name[0] != "0" and len(name) <= 9:
        return int(name)
    return None


def owner_of(cgroup_path: str) -> int | None:
    """The container that a cgroup path belongs to, by whole components: `/lxc/129` and below -> 129.

    `/lxc/12` is not `/lxc/129`; the monitor (`/lxc.monitor/129`) runs on the host and belongs to nobody.
    """
    parts = cgroup_path.split("/", 3)
    if len(parts) < 3 or parts[0] or parts[1] != PAYLOAD:
        return None
    return vmid_of_name(parts[2])


# --- reading -------------------------------------------------------------------------------------------------------


def find_mount(mountinfo_path: str = "/proc/self/mountinfo") -> str:
    """Where the v2 tree is mounted; on a hybrid host that is `/sys/fs/cgroup/unified`.

    The last mount that can be reached wins (a later mount may hide an earlier one). Raises UnreadableError when there
    is none or mountinfo cannot be read.
    """
    try:
        with open(mountinfo_path, "rb") as file:
            candidates = parse_mountinfo(file.read())
    except OSError as exc:
        raise UnreadableError(f"cannot read {mountinfo_path}: {exc.strerror}") from exc
    for mount in candidates:
        if os.path.exists(f"{mount}/cgroup.controllers"):
            return mount
    raise UnreadableError(
        f"cannot find a cgroup v2 mount in {mountinfo_path}",
        next_step="boot the node with cgroup v2, the default of Proxmox VE 7 and later",
    )


def _read_at(dir_fd: int, name: str) -> bytes:
    fd = os.open(name, _READ, dir_fd=dir_fd)
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


HIDDEN = "foreign-pidns"
"""Code of a blind spot: a member is in a PID namespace that cannot be seen from here (cgroup.procs shows 0 for it)."""


def _blind(path: str, exc: OSError, code: str = "cgroup-unreadable") -> BlindSpot:
    return BlindSpot("cgroupfs", path, exc.strerror or str(exc), code)


class Cgroupfs:
    """The tree at one mount point."""

    def __init__(self, mount: str) -> None:
        self.mount = mount

    def containers(self) -> tuple[list[int], list[BlindSpot]]:
        """Vmids with a payload cgroup, sorted. No `/lxc` means no container; an unreadable one is a blind spot."""
        path = f"{self.mount}/{PAYLOAD}"
        try:
            names = os.listdir(path)
        except FileNotFoundError as exc:
            if os.path.isdir(self.mount):
                return [], []
            return [], [_blind(path, exc)]
        except OSError as exc:
            return [], [_blind(path, exc)]
        return sorted(vmid for name in names if (vmid := vmid_of_name(name)) is not None), []

    def is_frozen(self, path: str) -> bool:
        """True when the cgroup at this path of the hierarchy is frozen now, by itself or from above (cgroup-v2, "frozen").

        False when it is gone or cannot be read: then nobody knows better than to wait.
        """
        if not path.startswith("/") or ".." in path.split("/"):
            return False
        try:
            with open(f"{self.mount}{path}/cgroup.events", "rb") as file:
                return parse_events(file.read(4096)).get("frozen", False)
        except OSError:
            return False

    def open(self, vmid: int, kind: str = PAYLOAD) -> ContainerCgroup | None:
        """The container's cgroup of this moment; None when there is none. OSError else. `kind`: PAYLOAD or MONITOR."""
        path = f"/{kind}/{vmid}"
        self._refuse_covered(f"/{kind}")
        try:
            found = ContainerCgroup(os.open(self.mount + path, _DIRECTORY), path, vmid)
        except OSError as exc:
            if is_gone(exc) and os.path.isdir(self.mount):
                return None
            raise
        try:
            self._refuse_covered(path)
        except OSError:
            found.close()
            raise
        return found


    def _refuse_covered(self, path: str) -> None:
        """Raises OSError (EXDEV) when another file system is mounted over that part of the hierarchy: what is not found
        there may be there all the same."""
        try:
            there = os.stat(self.mount + path).st_dev
        except OSError as exc:
            if is_gone(exc):
                return
            raise
        if there != os.stat(self.mount).st_dev:
            raise OSError(errno.EXDEV, "another file system is mounted over it", path)


class ContainerCgroup:
    """One incarnation of a cgroup directory. Close it; a context manager does."""

    def __init__(self, fd: int, path: str, vmid: int, above: ContainerCgroup | None = None) -> None:
        self.fd = fd
        self.path = path
        """In the v2 hierarchy, for people."""
        self.vmid = vmid
        self._above = above

    @property
    def inode(self) -> int:
        """Of the directory: kernfs never uses one twice, so a cgroup that was made anew has another one."""
        return os.fstat(self.fd).st_ino

    def __enter__(self) -> ContainerCgroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the descriptor back. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def exists(self) -> bool:
        """False once this incarnation was removed. OSError when that cannot be said."""
        return self._events() is not None

    def populated(self) -> bool:
        """A process (zombies do not count) lives here or below; False when this incarnation is gone."""
        events = self._events()
        return events is not None and events.get("populated", False)

    def frozen(self) -> bool:
        """Frozen by the v2 freezer (suspend-mode backup): SIGKILL works, handlers cannot run. False when gone."""
        events = self._events()
        return events is not None and events.get("frozen", False)

    def _events(self) -> dict[str, bool] | None:
        try:
            return parse_events(_read_at(self.fd, "cgroup.events"))
        except OSError as exc:
            if is_gone(exc):
                return None
            raise

    def sub(self, path: str) -> ContainerCgroup | None:
        """A cgroup below this one, by relative path (`ns/system.slice/x.service`), opened component by component.

        None when there is none; ValueError for a path that does not stay below; OSError else. `self` must stay open
        as long as the result is used.
        """
        parts = [part for part in path.split("/") if part and part != "."]
        if path.startswith("/") or ".." in parts or not parts:
            raise ValueError(f"not a path below a cgroup: {path!r}")
        here = self
        try:
            for part in parts:
                below = ContainerCgroup(
                    os.open(part, _DIRECTORY, dir_fd=here.fd), f"{here.path}/{part}", self.vmid, self
                )
                if here is not self:
                    here.close()
                here = below
        except OSError as exc:
            if here is not self:
                here.close()
            if is_gone(exc):
                return None
            raise
        return here

    # --- members ---

    def pids(self) -> tuple[set[int], list[BlindSpot]]:
        """Every process here and below, and what could not be read. Gone meanwhile means empty, not blind.

        Directories beyond MAX_DEPTH or MAX_DIRECTORIES, and members of a PID namespace that is not below ours (the
        kernel shows 0), are blind spots.
        """
        walk = _Walk()
        walk.visit(self.fd, self.path, 0, covered=False)
        return walk.pids, walk.blind_spots

    # --- waiting ---

    def events_fd(self) -> int:
        """A descriptor that polls POLLPRI when `populated` or `frozen` changes after now; the caller closes it.

        Read it (os.pread at 0) to learn the new state and to arm it again (kernfs: cgroup-v2, "cgroup.events").
        OSError (`errors.is_gone`) when this incarnation was removed.
        """
        fd = os.open("cgroup.events", _READ, dir_fd=self.fd)
        try:
            os.pread(fd, 256, 0)
        except OSError:
            os.close(fd)
            raise
        return fd

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no process lives here or below, or this incarnation is gone. False at the timeout."""
        end = time.monotonic() + timeout_s
        try:
            fd = self.events_fd()
        except OSError as exc:
            if is_gone(exc):
                return True
            raise
        try:
            poll = select.poll()
            poll.register(fd, select.POLLPRI)
            while True:
                try:
                    if not parse_events(os.pread(fd, 256, 0)).get("populated", False):
                        return True
                except OSError as exc:
                    if is_gone(exc):
                        return True
                    raise
                left = end - time.monotonic()
                if left <= 0:
                    return False
                poll.poll(left * 1000)
        finally:
            os.close(fd)

    # --- effects ---

    def kill(self, *, climb: bool = False) -> bool:
        """SIGKILL to every process here and below at once (`cgroup.kill`, Linux >= 5.14). False: already gone.

        Accepted is not dead: a task in D state stays (FACTS). OSError EOPNOTSUPP when this cgroup is threaded or
        domain invalid; with `climb` the nearest domain root is killed instead, which takes more with it, but never
        above the cgroup that `sub` was called on. ENOENT with the directory alive (no `cgroup.kill`) propagates.
        """
        try:
            fd = os.open("cgroup.kill", os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as exc:
            if is_gone(exc) and not self.exists():
                return False
            raise
        try:
            os.write(fd, b"1")
        except OSError as exc:
            if is_gone(exc):
                return False
            if exc.errno != errno.EOPNOTSUPP or not climb or self._above is None:
                raise
        else:
            return True
        finally:
            os.close(fd)
        return self._kill_nearest_root()

    def _kill_nearest_root(self) -> bool:
        assert self._above is not None
        relative = self.path[len(self._above.path) + 1 :]
        while "/" in relative:
            relative = relative.rpartition("/")[0]
            below = self._above.sub(relative)
            if below is None:
                return False
            with below:
                try:
                    return below.kill()
                except OSError as exc:
                    if exc.errno != errno.EOPNOTSUPP:
                        raise
        return self._above.kill()

    def remove_empty(self) -> bool:
        """Remove empty directories below, deepest first, and this one if nothing is left. True when it is gone.

        rmdir only: a cgroup with a process says EBUSY. The directory's own name is removed only while it still names
        this incarnation.
        """
        _remove_below(self.fd, 0, [MAX_DIRECTORIES])
        try:
            parent = os.open("..", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError as exc:
            if is_gone(exc):
                return True
            raise
        try:
            name = self.path.rpartition("/")[2]
            now = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if os.path.samestat(now, os.fstat(self.fd)):
                os.rmdir(name, dir_fd=parent)
            return True
        except OSError as exc:
            if is_gone(exc):
                return True
            if exc.errno in (errno.EBUSY, errno.ENOTEMPTY):
                return False
            raise
        finally:
            os.close(parent)


def _remove_below(fd: int, depth: int, budget: list[int]) -> None:
    if depth >= MAX_DEPTH:
        return
    for name in _directories(fd):
        budget[0] -= 1
        if budget[0] < 0:
            return
        try:
            below = os.open(name, _DIRECTORY, dir_fd=fd)
        except OSError:
            continue
        try:
            _remove_below(below, depth + 1, budget)
        finally:
            os.close(below)
        try:
            os.rmdir(name, dir_fd=fd)
        except OSError:
            continue  # populated: what is left is seen by the caller


def _directories(fd: int) -> list[str]:
    """Names of the directories in one directory; empty when it is gone."""
    try:
        with os.scandir(fd) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError as exc:
        if is_gone(exc):
            return []
        raise


class _Walk:
    """One bounded walk over a tree, by descriptor: at most MAX_DEPTH of them open at a time."""

    def __init__(self) -> None:
        self.pids: set[int] = set()
        self.blind_spots: list[BlindSpot] = []
        self._left = MAX_DIRECTORIES
        self._full = False

    def visit(self, fd: int, path: str, depth: int, *, covered: bool) -> None:
        """`covered`: the `cgroup.procs` of a directory above was read; it lists a threaded subtree's processes too."""
        try:
            covered = self._members(fd, path, covered) or covered
            names = _directories(fd)
        except OSError as exc:
            if not is_gone(exc):
                self.blind_spots.append(_blind(path, exc))
            return
        if names and depth >= MAX_DEPTH:
            self._bound(path, f"deeper than {MAX_DEPTH} levels")
            return
        for name in names:
            self._left -= 1
            if self._left < 0:
                self._bound(path, f"more than {MAX_DIRECTORIES} cgroups")
                return
            try:
                below = os.open(name, _DIRECTORY, dir_fd=fd)
            except OSError as exc:
                if not is_gone(exc):
                    self.blind_spots.append(_blind(f"{path}/{name}", exc))
                continue
            try:
                self.visit(below, f"{path}/{name}", depth + 1, covered=covered)
            finally:
                os.close(below)

    def _bound(self, path: str, error: str) -> None:
        if not self._full:
            self._full = True
            self.blind_spots.append(BlindSpot("cgroupfs", path[:200], error, "cgroup-tree-too-large"))

    def _members(self, fd: int, path: str, covered: bool) -> bool:
        """Add the members of one directory; whether its `cgroup.procs` could be read."""
        try:
            text = _read_at(fd, "cgroup.procs")
        except OSError as exc:
            if exc.errno != errno.EOPNOTSUPP:
                raise
            # Threaded: the domain root lists these processes (cgroup-v2, "Threads"). Domain invalid: has none.
            if not covered:
                self._threads(fd, path)
            return False
        self._add(text, path)
        return True

    def _threads(self, fd: int, path: str) -> None:
        """Members by task, for a threaded cgroup whose domain root is above what we may look at."""
        tids, hidden = parse_pids(_read_at(fd, "cgroup.threads"))
        if hidden:
            self._hidden(path)
        for tid in tids:
            try:
                with open(f"/proc/{tid}/status", "rb") as file:
                    text = file.read()
            except OSError as exc:
                if not is_gone(exc):
                    self.blind_spots.append(_blind(f"{path}: task {tid}", exc))
                continue
            self.pids.add(int(text.split(b"\nTgid:", 1)[1].split(None, 1)[0]))

    def _add(self, text: bytes, path: str) -> None:
        if not text:
            return
        pids, hidden = parse_pids(text)
        self.pids |= pids
        if hidden:
            self._hidden(path)

    def _hidden(self, path: str) -> None:
        self.blind_spots.append(
            BlindSpot("cgroupfs", path, "a member is in a PID namespace that cannot be seen from here", HIDDEN)
        )
