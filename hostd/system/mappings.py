"""Which device nodes one process maps, told by device number."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable

from hostd import syscalls
from hostd.errors import is_gone

_BEAT_EVERY = 256
_UNSTABLE_TRIES = 4

# File systems whose inode numbers name one file per device number (statfs(2)): ext2/3/4, xfs, f2fs, squashfs, erofs.
# Not btrfs, bcachefs (one number per subvolume), overlayfs and FUSE (numbers of their own making).
_ONE_INODE_ONE_FILE = frozenset({0xEF53, 0x58465342, 0xF2F52010, 0x73717368, 0xE0F5E1E2})


class Mappings:
    """Asks for character devices of some majors. `beat` is called while a long answer goes on. What it does can block
    (a process whose memory map is stuck): for a helper process. What it has learnt about files holds for one scan only."""

    def __init__(self, majors: Iterable[int], beat: Callable[[], None]) -> None:
        self._majors = frozenset(majors)
        self._beat = beat
        self._plain: set[bytes] = set()
        """Mappings' `dev inode path` known to be no GPU node, where that text names one file."""
        self._devices: dict[bytes, bool] = {}
        """Device number as `maps` writes it -> do its inode numbers name one file?"""

    def read(self, pid: int) -> set[tuple[int, int]]:
        """(major, minor) of the nodes that the process maps. Raises OSError, one that `is_gone` when it left.

        `maps` names the device of the file system, never the rdev (FACTS), so each mapped file is asked through
        `map_files`; `maps` serves to ask each file only once where its inode number names it.
        """
        found: set[tuple[int, int]] = set()
        if self._map_of(pid, found):
            return found
        # The leader is dead (or a kernel thread): any live task shows the same map, under /proc/TID only (FACTS).
        any(self._map_of(tid, found) for tid in other_tids(pid))
        return found

    def _map_of(self, tid: int, found: set[tuple[int, int]]) -> bool:
        """Add what one task maps; False when it has no memory map (dead, kernel thread) or is gone."""
        for _ in range(_UNSTABLE_TRIES):
            try:
                fd = os.open(b"/proc/%d/maps" % tid, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    text = self._all(fd)
                finally:
                    os.close(fd)
            except OSError as exc:
                if is_gone(exc):
                    return False
                raise
            if not text:
                return False
            if self._ask_mappings(tid, text, found):
                return True
        raise OSError(errno.EAGAIN, "mappings change faster than they can be read")

    def _all(self, fd: int) -> bytes:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
            if len(parts) % 64 == 0:
                self._beat()
        return b"".join(parts)

    def _ask_mappings(self, tid: int, text: bytes, found: set[tuple[int, int]]) -> bool:
        """False when a mapping left between the two reads: then it may be split or moved, so look again."""
        plain, beat = self._plain, _BEAT_EVERY
        # address perms offset dev inode path; the kernel escapes line feeds in paths (proc_pid_maps(5)).
        for line in text.split(b"\n"):
            beat -= 1
            if not beat:
                beat = _BEAT_EVERY
                self._beat()
            parts = line.split(b" ", 3)
            if len(parts) < 4 or parts[3] in plain:
                continue
            identity = parts[3]
            if identity.startswith(b"00:00 "):
                continue  # anonymous memory, [stack], [vdso]
            start, _, end = parts[0].partition(b"-")
            # map_files has no leading zeros and refuses them (fs/proc/base.c, dname_to_vma_addr).
            path = b"/proc/%d/map_files/%s-%s" % (tid, start.lstrip(b"0") or b"0", end.lstrip(b"0"))
            try:
                mode, major, minor = syscalls.statx_rdev(path)
            except OSError as exc:
                if is_gone(exc):
                    return not os.path.exists(b"/proc/%d/maps" % tid)  # the whole task is gone
                raise
            if major in self._majors and mode & 0o170000 == 0o020000:
                found.add((major, minor))
            elif self._names_one_file(identity, path):
                plain.add(identity)
        return True

    def _names_one_file(self, identity: bytes, path: bytes) -> bool:
        device = identity.split(b" ", 1)[0]
        known = self._devices.get(device)
        if known is None:
            if device.startswith(b"00:"):
                # No block device: ask nobody (statfs of a FUSE or NFS file waits for its server).
                known = device in _zfs_devices()
                if known is False and len(self._devices) > 4096:
                    return False
            else:
                try:
                    known = syscalls.fs_type(path) in _ONE_INODE_ONE_FILE
                except OSError:
                    return False
            self._devices[device] = known
        return known


def other_tids(pid: int) -> list[int]:
    """Tasks of a process without its leader. Raises OSError."""
    return [tid for name in os.listdir(b"/proc/%d/task" % pid) if (tid := int(name)) != pid]


def _zfs_devices() -> frozenset[bytes]:
    """Device numbers of mounted ZFS data sets, as `maps` writes them. Object numbers name one file per data set.

    Proxmox mounts a container's data set on the host, so that our own mount table has it.
    """
    found = set()
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            for line in file:
                left, _, right = line.partition(b" - ")
                if right.startswith(b"zfs "):
                    major, _, minor = left.split(b" ", 3)[2].partition(b":")
                    found.add(b"%02x:%02x" % (int(major), int(minor)))
    except (OSError, ValueError):
        pass  # then each mapping is asked
    return frozenset(found)
