"""Who would start a job again, read off its cgroup path. Pure; the path's tail is the container's word (hostile)."""

from __future__ import annotations

import re

from hostd.model import Supervisor

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
