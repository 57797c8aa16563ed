"""Through which mount a device node was opened: that tells where a descriptor was made, whoever has it now.

Every mount of every mount namespace has a number of its own (`mnt_id` of /proc/PID/fdinfo, proc_pid_fdinfo(5); first
field of mountinfo, proc_pid_mountinfo(5)). A descriptor keeps the mount it was opened through, also when it is inherited
or passed to a process of another container, and whether the node is the container's own or bind-mounted from the host.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable

from hostd import syscalls
from hostd.disposable import Outcome, call_with_deadline
from hostd.errors import is_gone

_MOST_TASKS = 8
_ENTRY = struct.Struct("=IIQ")


def mount_namespace(pid: int) -> int | None:
    """Inode of the mount namespace that a process is in; None when it is gone, dead or cannot be read."""
    try:
        return os.stat(f"/proc/{pid}/ns/mnt").st_ino
    except OSError:
        return None


def read_mount_ids(pid: int) -> frozenset[int]:
    """The numbers of all mounts in the mount namespace of a process; empty when it is gone or cannot be read."""
    try:
        with open(f"/proc/{pid}/mountinfo", "rb") as file:
            return parse_mount_ids(file.read())
    except OSError:
        return frozenset()


def parse_mount_ids(text: bytes) -> frozenset[int]:
    """From the text of a mountinfo."""
    return frozenset(int(line.split(b" ", 1)[0]) for line in text.splitlines() if line[:1].isdigit())


def parse_mount_id(text: bytes) -> int | None:
    """`mnt_id` from the text of an fdinfo."""
    for line in text.splitlines():
        if line.startswith(b"mnt_id:"):
            return int(line[7:])
    return None


def opened_through(pids: Iterable[int], majors: Iterable[int], deadline_s: float) -> dict[int, frozenset[int]]:
    """Pid -> the mounts through which its descriptors of these majors were opened. Left out: whose could not be read.

    In a helper: asking a descriptor for its device can wait for a file server (syscalls.statx_rdev).
    """
    wanted, numbers = list(pids), frozenset(majors)

    def read_all() -> bytes:
        return b"".join(_ENTRY.pack(pid, 0, mount) for pid in wanted for mount in _mounts_of(pid, numbers))

    answer = call_with_deadline(read_all, deadline_s) if wanted else None
    if answer is None or answer.outcome is not Outcome.ANSWER:
        return {}
    found: dict[int, set[int]] = {}
    for pid, _, mount in _ENTRY.iter_unpack(answer.data):
        found.setdefault(pid, set()).add(mount)
    return {pid: frozenset(mounts) for pid, mounts in found.items()}


def _mounts_of(pid: int, majors: frozenset[int]) -> set[int]:
    found: set[int] = set()
    try:
        for tid in os.listdir(f"/proc/{pid}/task")[:_MOST_TASKS]:
            found |= _mounts_of_task(f"/proc/{pid}/task/{tid}", majors)
            if found:
                break
    except OSError as exc:
        if not is_gone(exc):
            return set()
    return found


def _mounts_of_task(task: str, majors: frozenset[int]) -> set[int]:
    found: set[int] = set()
    for name in os.listdir(f"{task}/fd"):
        try:
            _, major, _ = syscalls.statx_rdev(os.fsencode(f"{task}/fd/{name}"))
            if major in majors:
                with open(f"{task}/fdinfo/{name}", "rb") as file:
                    mount = parse_mount_id(file.read())
                if mount is not None:
                    found.add(mount)
        except OSError:
            continue  # closed meanwhile
    return found
