"""Who would start a job again, read off its cgroup path. Pure; the path's tail is the container's word (hostile)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hostd.model import Process, Supervisor

_NESTED = (
    ("docker", re.compile(r"^docker-([0-9a-f]{12,64})\.scope$")),
    ("podman", re.compile(r"^libpod-(?!conmon)([0-9a-f]{12,64})(?:\.scope)?$")),
    ("containerd", re.compile(r"^cri-containerd-([0-9a-f]{12,64})\.scope$")),
)
_OPENRC = re.compile(r"^openrc\.([^/]+)$")
_JOB_SCOPE = re.compile(r"^run-.+\.scope$")
_HEX_ID = re.compile(r"^[0-9a-f]{12,64}$")


def supervisor_of(cgroup: str, vmid: int | None) -> Supervisor | None:
    """The innermost supervisor of a process in `/lxc/VMID/ns/...`, or of the host's when `vmid` is None.

    `.service` is systemd's (systemd.service(5); below `user@UID.service` it is the user manager's), so is the
    `run-....scope` of systemd-run; `docker/<id>` and
    `docker-<id>.scope` are Docker's with the cgroupfs and the systemd driver, `libpod-<id>.scope` Podman's,
    `cri-containerd-<id>.scope` and `kubepods*/.../<id>` containerd's, `openrc.NAME` OpenRC's, `session-N.scope` a login
    (no restarts). None: nothing that would start it again is known; a process of the container outside its cgroup
    (by PID namespace) has none either: that cgroup is the host's.
    """
    if vmid and not cgroup.startswith(f"/lxc/{vmid}/"):
        return None
    parts = cgroup.split("/")
    best: Supervisor | None = None
    in_user_manager = False
    for depth, part in enumerate(parts):
        path = "/".join(parts[: depth + 1])
        found = _nested(parts, depth, path)
        if found is None and (part.endswith(".service") or _JOB_SCOPE.match(part)):
            if part.startswith("user@"):
                in_user_manager = True
                continue
            # A name that would clash with a file of cgroupfs has a leading "_" (systemd, cg_escape).
            name = part.removeprefix("_")
            found = Supervisor("systemd-user" if in_user_manager else "systemd", name, path)
        if found is None and (match := _OPENRC.match(part)):
            found = Supervisor("openrc", match[1], path)
        if found is None and part.endswith(".scope") and part.startswith("session-"):
            found = Supervisor("session", part, path)
        best = found or best
    return best


def _nested(parts: list[str], depth: int, path: str) -> Supervisor | None:
    part = parts[depth]
    for kind, pattern in _NESTED:
        match = pattern.match(part)
        if match:
            return Supervisor(kind, match[1], path)
    if depth and _HEX_ID.match(part):
        parent = parts[depth - 1]
        if parent == "docker":
            return Supervisor("docker", part, path)
        if any(p.startswith("kubepods") for p in parts[:depth]):
            return Supervisor("containerd", part, path)
    return None


def user_of(cgroup: str) -> int:
    """The uid, as the container numbers it, of a user manager by its cgroup `.../user@1000.service/...`; -1: none."""
    match = re.search(r"/user@(\d{1,9})\.service/", cgroup)
    return int(match[1]) if match else -1


def how_to_stop(vmid: int, supervisors: Iterable[Supervisor], restarters: Iterable[Process]) -> str:
    """The command for people that stops what brings a job back; empty when there is none to give."""
    import shlex

    ways = []
    for supervisor in supervisors:
        name = shlex.quote(supervisor.name)
        command = {
            "systemd": f"systemctl stop {name}",
            "systemd-user": f"systemctl --user -M {user_of(supervisor.cgroup)}@ stop {name}",
            "docker": f"docker stop {name[:12]}",
            "podman": f"podman stop {name[:12]}",
            "containerd": f"crictl stop {name[:12]}",
            "openrc": f"rc-service {name} stop",
        }.get(supervisor.kind)
        if command:
            ways.append(f"pct exec {vmid} -- {command}")
    ways += [
        f"pct exec {vmid} -- kill {process.ns_pids[0]}" if process.ns_pids else f"kill {process.pid}"
        for process in restarters
    ]
    return "; ".join(ways[:3])
