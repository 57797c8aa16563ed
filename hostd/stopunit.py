"""Supervised jobs: asking a holder's own supervisor to stop it (rung 0), and killing what it keeps starting.

What may be touched is decided here, once: the cgroup of one unit or nested container below the container's own
cgroup, opened beneath a descriptor of it. Never the container's root or inner cgroup, a slice, `init.scope`, `.lxc`, a
login session, the service of a container engine or of the system itself, nor anything that its init lives in.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from hostd import syscalls
from hostd.membership import ContainerView, Members
from hostd.model import Holder, Process, ProcessRef, Supervisor
from hostd.sources import Sources
from hostd.supervisor import user_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hostd.system.managers import Asking, Request

ASK_DEADLINE_S = 5.0
"""On a manager's answer that it has begun to stop the job (not on the end of the job)."""
MOST_UNITS = 16
"""Asked at a time: each request is a process."""

SUPERVISED = ("systemd", "systemd-user", "docker", "podman", "containerd", "openrc")
_PROTECTED = re.compile(
    r"^(?:init\.scope|\.lxc|ns|.*\.slice|user@.*\.service|session-.*\.scope|systemd-.*\.service|dbus(?:-broker)?\.service"
    r"|docker\.service|docker\.socket|containerd\.service|podman\.service|crio\.service|kubelet\.service|k3s.*\.service"
    r"|sshd?(?:@.*)?\.service|getty@.*\.service|console-getty\.service|cron\.service|networking\.service)$"
)


def protected_service(cgroup: str) -> str:
    """The service that this is the cgroup of, if it serves more than one job; else empty. The process that systemd has
    started there is never ended for one of them; what a cron job or a login has started is no such process."""
    name = cgroup.rpartition("/")[2]
    return name if name.endswith(".service") and _PROTECTED.match(name) else ""


def why_protected(supervisor: Supervisor, vmid: int, init_cgroup: str = "") -> str:
    """Why the cgroup of this supervisor may not be stopped as a whole; empty when it may. Pure."""
    if supervisor.kind not in SUPERVISED:
        return f"{supervisor.name} is no unit that can be stopped"
    if not supervisor.cgroup.startswith(f"/lxc/{vmid}/"):
        return f"{supervisor.cgroup} is not below /lxc/{vmid}"
    if _PROTECTED.match(supervisor.cgroup.rpartition("/")[2]):
        return f"{supervisor.name} serves more than this job"
    if f"{init_cgroup}/".startswith(f"{supervisor.cgroup}/"):
        return f"the container's init is in {supervisor.name}"
    return ""


@dataclass(slots=True)
class Stopped:
    """What one attempt on the units of some holders did."""

    reached: set[ProcessRef] = field(default_factory=set)
    """Holders whose unit was asked, or killed."""
    notes: list[str] = field(default_factory=list)


class UnitStopper:
    """The two things that `--stop-units` allows, for one release. Close it: requests under way are then given up."""

    def __init__(self, sources: Sources, view: ContainerView) -> None:
        self._sources = sources
        self._view = view
        try:
            self._cgroup = sources.cgroups.open(view.vmid)
        except OSError:
            self._cgroup = None
        """The incarnation that the release began with: a container that is started again meanwhile has another one."""
        self._asking: list[Asking] = []
        self._asked: set[str] = set()

    def close(self) -> None:
        for asking in self._asking:
            asking.close()
        self._asking.clear()
        if self._cgroup is not None:
            self._cgroup.close()

    # --- rung 0 ---

    def ask(self, holders: Iterable[Holder], grace_s: float) -> Stopped:
        """Asks each holder's supervisor to stop the job. Returns when they have said yes or no; jobs end later."""
        members = self._view.members()
        done = Stopped()
        begun: list[tuple[Supervisor, list[Holder], Asking]] = []
        for supervisor, theirs in by_unit(holders):
            why = why_protected(supervisor, self._view.vmid, members.init.cgroup if members.init else "")
            if why:
                done.notes.append(why)
                continue
            if len(begun) == MOST_UNITS:
                done.notes.append(f"{supervisor.name}: more than {MOST_UNITS} units, not asked")
                continue
            try:
                begun.append((supervisor, theirs, self._begin(supervisor, theirs[0], members, grace_s)))
            except (OSError, LookupError) as exc:
                done.notes.append(f"{supervisor.name}: cannot ask its supervisor: {exc}")
        end_s = time.monotonic() + ASK_DEADLINE_S
        for supervisor, theirs, asking in begun:
            self._asking.append(asking)
            reply = asking.reply(max(0.05, end_s - time.monotonic()))
            done.notes.append(reply.text if reply.asked else f"{supervisor.name}: {reply.text}")
            if reply.asked:
                done.reached |= {h.ref for h in theirs}
        return done

    def _begin(self, supervisor: Supervisor, holder: Holder, members: Members, grace_s: float) -> Asking:
        """Raises LookupError when there is nobody to ask, OSError when it cannot be done."""
        from hostd.system.managers import Asking, Place

        manager = _manager(supervisor, holder.process, members)
        if manager is None:
            raise LookupError("the process that runs its supervisor was not found")
        with contextlib.ExitStack() as fds:
            here = _open(fds, f"/proc/{manager.pid}", os.O_RDONLY | os.O_DIRECTORY)
            if syscalls.read_start_time(here) != manager.start_time:
                raise LookupError("its supervisor has just gone")
            maps = _read(here, "uid_map"), _read(here, "gid_map")
            request = _request(supervisor, manager, members, maps, grace_s)
            root_fd = _open(fds, "root", os.O_PATH | os.O_DIRECTORY, here)
            if request.kind != "systemd":
                return Asking(Place(root_fd), request)
            mount_fd, pid_fd = (_open(fds, f"ns/{name}", os.O_RDONLY, here) for name in ("mnt", "pid"))
            return Asking(Place(root_fd, mount_fd, pid_fd), request)

    # --- killing a whole unit ---

    def kill(self, holders: Iterable[Holder]) -> Stopped:
        """SIGKILL to everything in the unit's cgroup at once: the kernel does it, so forks do not get away."""
        done = Stopped()
        members = self._view.members()
        for supervisor, theirs in by_unit(holders):
            try:
                why = why_protected(supervisor, self._view.vmid, members.init.cgroup if members.init else "")
                why = why or self._kill_one(supervisor, members)
            except OSError as exc:
                why = f"{supervisor.name}: cannot kill its cgroup: {exc.strerror or exc}"
            if why:
                done.notes.append(why)
                continue
            done.reached |= {h.ref for h in theirs}
            done.notes.append(f"everything in {supervisor.name} was killed")
        return done

    def _kill_one(self, supervisor: Supervisor, members: Members) -> str:
        """Why it was not killed; empty when it was, or is gone."""
        relative = supervisor.cgroup.removeprefix(f"/lxc/{self._view.vmid}/")
        unit = self._cgroup.sub(relative) if self._cgroup is not None else None
        if unit is None:
            return ""
        with unit:
            inside, _ = unit.pids()
            if {init.pid for init in members.inits} & inside:
                return f"the container's init is in {supervisor.name}"
            try:
                unit.kill()
            except OSError as exc:
                if exc.errno != errno.EOPNOTSUPP:
                    raise
                return f"{supervisor.name}: a threaded cgroup cannot be killed as a whole"
        return ""

    def may_kill(self, holder: Holder) -> bool:
        """True when the holder's unit may be killed as a whole."""
        supervisor = holder.supervisor
        return supervisor is not None and not why_protected(supervisor, self._view.vmid)


def by_unit(holders: Iterable[Holder]) -> list[tuple[Supervisor, list[Holder]]]:
    """Holders grouped by the unit or nested container that runs them; those without one are left out."""
    groups: dict[str, tuple[Supervisor, list[Holder]]] = {}
    for holder in holders:
        supervisor = holder.supervisor
        if supervisor is not None and supervisor.kind in SUPERVISED:
            groups.setdefault(supervisor.cgroup, (supervisor, []))[1].append(holder)
    return list(groups.values())


def _manager(supervisor: Supervisor, process: Process, members: Members) -> Process | None:
    """The process in whose root the supervisor's socket is: pid 1 of the job's PID namespace for a service, of the
    next one outwards for a nested container."""
    inits = [p for p in members.processes.values() if p.ns_pids and p.ns_pids[-1] == 1]
    depth = len(process.ns_pids)
    if supervisor.kind in ("systemd", "systemd-user", "openrc"):
        return next((p for p in inits if p.pidns == process.pidns), None)
    outer = [p for p in inits if len(p.ns_pids) == depth - 1 and p.pidns != process.pidns]
    if len(outer) > 1:  # containers beside each other: the one whose cgroup encloses the job's
        engine = supervisor.cgroup
        outer = [p for p in outer if engine.startswith(_enclosing(p.cgroup))]
        outer.sort(key=lambda p: len(_enclosing(p.cgroup)), reverse=True)
    return outer[0] if outer else members.init


def _enclosing(cgroup: str) -> str:
    return cgroup.removesuffix("/init.scope") + "/"


def _request(
    supervisor: Supervisor, manager: Process, members: Members, maps: tuple[bytes, bytes], grace_s: float
) -> Request:
    """What to ask of whom. Raises LookupError when that cannot be said."""
    from hostd.system.managers import DOCKER_SOCKETS, PODMAN_SOCKETS, SYSTEMD_PRIVATE, Request, kernel_id

    sockets: tuple[str, ...]
    level, inner = len(manager.ns_pids) - 1, 0
    kind, peers = "systemd", frozenset({1})
    if supervisor.kind == "systemd":
        sockets = (SYSTEMD_PRIVATE,)
    elif supervisor.kind == "systemd-user":
        inner = user_of(supervisor.cgroup)
        sockets = (f"run/user/{inner}/systemd/private",)
        peers = frozenset(p.ns_pids[level] for p in members.processes.values() if len(p.ns_pids) > level)
    elif supervisor.kind in ("docker", "podman"):
        kind, sockets = "http", DOCKER_SOCKETS if supervisor.kind == "docker" else PODMAN_SOCKETS
        peers = frozenset(members.processes)
    else:
        raise LookupError(f"{supervisor.kind} takes no requests")
    uid, gid = (kernel_id(text, inner) for text in maps) if inner >= 0 else (None, None)
    if uid is None or gid is None:
        raise LookupError(f"user {inner} of the container has no number on the host")
    return Request(kind, supervisor.name, sockets, uid, gid, inner, peers, max(1, round(grace_s)))


def _open(fds: contextlib.ExitStack, path: str, flags: int, dir_fd: int | None = None) -> int:
    fd = os.open(path, flags | os.O_CLOEXEC, dir_fd=dir_fd)
    fds.callback(os.close, fd)
    return fd


def _read(dir_fd: int, name: str) -> bytes:
    fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=dir_fd)
    try:
        return os.read(fd, 65536)
    finally:
        os.close(fd)


__all__ = ["Stopped", "UnitStopper", "by_unit", "why_protected"]
