"""Checks of device nodes and device rules against each container's configuration."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from typing import NamedTuple

from hostd import syscalls
from hostd.doctor import mends
from hostd.doctor.facts import Facts, Look
from hostd.doctor.finding import Blind, Finding, Results
from hostd.doctor.kinds import found
from hostd.doctor.shell import Shell, remark
from hostd.errors import is_gone
from hostd.model import DeviceId, DriverNumbers
from hostd.system.pve import ContainerConfig, MountEntry

_DYNAMIC = (*range(234, 255), *range(384, 512))
"""Majors that the kernel hands out (include/linux/fs.h, CHRDEV_MAJOR_DYN_*)."""
_RULE = re.compile(r"([abc])(?:\s+(\*|\d{1,10}):(\*|\d{1,10})(?:\s+([rwm]+))?)?", re.ASCII)
CAPS = "/dev/nvidia-caps"
UVM = "/dev/nvidia-uvm"


class Given(NamedTuple):
    """A path at or below /dev/nvidia* that a container is given."""

    path: str
    inside: str
    """Where it is in the container, without a leading slash."""
    key: str
    """`dev0` or `lxc.mount.entry`."""
    mount: MountEntry | None


class Rule(NamedTuple):
    """One `lxc.cgroup2.devices.allow`. None: every number."""

    text: str
    kind: str
    major: int | None
    minor: int | None

    def covers(self, node: DeviceId) -> bool:
        return (
            self.kind in "ac" and self.major in (None, node.major) and self.minor in (None, node.minor)
        )


def given_to(config: ContainerConfig) -> list[Given]:
    """Everything of NVIDIA's that a configuration hands over, in order."""
    entries = [Given(os.path.normpath(d.path), d.path.lstrip("/"), d.key, None) for d in config.dev_entries]
    entries += [
        Given(os.path.normpath(m.source), m.target.lstrip("/"), "lxc.mount.entry", m) for m in config.mount_entries
    ]
    return [entry for entry in entries if entry.path.startswith("/dev/nvidia")]


def parse_rule(text: str) -> Rule | None:
    """`c 195:* rwm`, `a`; None for what is no device rule."""
    match = _RULE.fullmatch(text.strip())
    if match is None:
        return None
    kind, major, minor, _ = match.groups()
    return Rule(text.strip(), kind, _number(major), _number(minor))


def _number(text: str | None) -> int | None:
    return None if text in (None, "*") else int(text or 0)


def whose(major: int, owners: dict[int, str]) -> str:
    return f"the driver {owners[major]!r}" if major in owners else "no driver"


def kind_of(mode: int) -> str:
    """A file type in words."""
    names = (
        (stat.S_ISREG, "a regular file"),
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISBLK, "a block device"),
        (stat.S_ISLNK, "a symbolic link"),
    )
    return next((name for test, name in names if test(mode)), "something else")


def host_nodes(facts: Facts) -> Results:
    """The nodes on the host, as each container that is given them would find them at its next start."""
    for vmid, config in facts.get("gpu_containers").items():
        optional: list[str] = []
        for given in given_to(config):
            yield from _host_node(facts, vmid, given)
            if given.mount is not None and given.mount.optional and os.path.exists(given.path):
                optional.append(given.path)
        if optional:
            entries = "; ".join(f"lxc.mount.entry {path}: optional" for path in optional)
            mend = mends.mandatory_mounts(vmid)
            yield found("optional-mount", entries, vmid=vmid, paths=", ".join(optional), mend=mend)


def _host_node(facts: Facts, vmid: int, given: Given) -> Results:
    try:
        info = os.stat(given.path)
    except (OSError, ValueError) as exc:  # ValueError: a NUL byte in the path
        if not isinstance(exc, OSError) or not is_gone(exc):
            yield Blind(f"{given.path} of container {vmid}", str(exc))
            return
        optional = given.mount is not None and given.mount.optional
        code = "optional-mount-hides-loss" if optional else "device-missing"
        make = mends.make_node(given.path, vmid, given.key, given.mount)
        yield found(code, f"{given.path}: no such file", vmid=vmid, path=given.path, key=given.key, make=make)
        return
    if stat.S_ISDIR(info.st_mode) and given.mount is not None and "create=dir" in given.mount.options:
        return
    evidence = f"{given.path}: {describe(info)}"
    mend = mends.replace_node(given.path, stat.S_ISDIR(info.st_mode), vmid, given.key, given.mount)
    if not stat.S_ISCHR(info.st_mode):
        kind = kind_of(info.st_mode)
        yield found(
            "device-wrong-type", evidence, vmid=vmid, path=given.path, kind=kind, key=given.key, mend=mend
        )
        return
    major = os.major(info.st_rdev)
    if facts.driver.present and major not in facts.driver:
        owner = whose(major, facts.get("device_owners"))
        yield found(
            "device-stale", evidence, vmid=vmid, path=given.path, major=major, whose=owner, key=given.key, mend=mend
        )


def describe(info: os.stat_result) -> str:
    if stat.S_ISCHR(info.st_mode):
        return f"character device {os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
    return kind_of(info.st_mode)


def nodes_inside(facts: Facts) -> Results:
    """The nodes in the /dev of containers that run."""
    runtime = facts.get("runtime")
    for vmid, config in facts.get("gpu_containers").items():
        init = runtime[vmid].init_pid if vmid in runtime else None
        if init is not None:
            yield from _nodes_of(facts, vmid, init, config)


def _nodes_of(facts: Facts, vmid: int, init: int, config: ContainerConfig) -> Results:
    try:
        root = os.open(f"/proc/{init}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        if not is_gone(exc):
            yield Blind(f"file tree of container {vmid}", str(exc))
        return
    try:
        for given in given_to(config):
            try:
                if "\0" in given.inside:  # openat2 would look at what stands before it
                    raise OSError(errno.EINVAL, "embedded null byte")
                fd = syscalls.name_in_root(root, given.inside)
            except OSError as exc:
                if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    yield Blind(f"/{given.inside} in container {vmid}", str(exc))
                continue
            try:
                info = os.fstat(fd)
            finally:
                os.close(fd)
            yield from _node_inside(facts, vmid, f"/{given.inside}", info, given)
    finally:
        os.close(root)


def _node_inside(facts: Facts, vmid: int, path: str, info: os.stat_result, given: Given) -> Results:
    if stat.S_ISDIR(info.st_mode) and given.mount is not None:
        return
    evidence = f"{path} in container {vmid}: {describe(info)}"
    if not stat.S_ISCHR(info.st_mode):
        recursive = Shell("-r " if stat.S_ISDIR(info.st_mode) else "")
        kind = kind_of(info.st_mode)
        yield found("container-node-wrong-type", evidence, vmid=vmid, path=path, kind=kind, recursive=recursive)
    elif facts.driver.present and os.major(info.st_rdev) not in facts.driver:
        major = os.major(info.st_rdev)
        owner = whose(major, facts.get("device_owners"))
        yield found("container-node-stale", evidence, vmid=vmid, path=path, major=major, whose=owner)


# --- rules -----------------------------------------------------------------------------------------------------------


def rules(facts: Facts) -> Results:
    """Is what a container is given enough for CUDA, and do its device rules fit the driver's majors of today?"""
    look: Look = facts.get("look")
    mig = any(gpu.mig for gpu in look.snapshot.gpus)
    for vmid, config in facts.get("gpu_containers").items():
        paths = {given.path for given in given_to(config)}
        gpus = sorted(path for path in paths if re.fullmatch(r"/dev/nvidia\d+", path))
        free = mends.free_keys(config)
        if gpus and UVM not in paths:
            mend = mends.give(vmid, free, UVM)
            yield found("uvm-not-given", f"given: {', '.join(sorted(paths))}", vmid=vmid, mend=mend)
            free = free[1:]
        if gpus and mig and not any(path.startswith(CAPS) for path in paths):
            yield found("caps-not-given", f"given: {', '.join(sorted(paths))}", vmid=vmid, key=free[0] if free else "devN")
        if facts.driver.present:
            yield from check_rules(vmid, config, mounted_nodes(config), facts.driver, facts.get("device_owners"))


def mounted_nodes(config: ContainerConfig) -> dict[str, DeviceId]:
    """Device nodes that a container gets by mounts (for devN Proxmox makes the rule itself)."""
    nodes = {}
    for given in given_to(config):
        if given.mount is None:
            continue
        below = given.path
        try:
            names = [f"{below}/{name}" for name in sorted(os.listdir(below))] if os.path.isdir(below) else [below]
            for path in names:
                info = os.stat(path)
                if stat.S_ISCHR(info.st_mode):
                    nodes[path] = DeviceId(os.major(info.st_rdev), os.minor(info.st_rdev))
        except (OSError, ValueError):
            continue  # what is missing, or no path at all, is another check's finding
    return nodes


def check_rules(
    vmid: int,
    config: ContainerConfig,
    nodes: dict[str, DeviceId],
    driver: DriverNumbers,
    owners: dict[int, str],
) -> Iterator[Finding]:
    """Pure. `nodes`: what the container gets by mounts, by path."""
    parsed = [rule for text in config.devices_allow if (rule := parse_rule(text)) is not None]
    missing = {
        path: node
        for path, node in nodes.items()
        if node.major in driver and not any(rule.covers(node) for rule in parsed)
    }
    shown = "; ".join(config.devices_allow) or "none"
    for major in sorted({node.major for node in missing.values()}):
        path, node = next((p, n) for p, n in missing.items() if n.major == major)
        yield found(
            "allow-missing-major",
            f"{path} is {node.major}:{node.minor}; rules: {shown}",
            vmid=vmid, path=path, device=f"{node.major}:{node.minor}", major=major,
        )  # fmt: skip
    now = ", ".join(f"{major} {'/'.join(sorted(names))}" for major, names in sorted(driver.by_major.items()))
    for rule in parsed:
        major = -1 if rule.major is None else rule.major
        if rule.kind != "c" or major in driver or major not in (*_DYNAMIC, 195):
            continue
        if major not in owners or missing:
            owner = whose(major, owners)
            evidence = f"rule {rule.text}; NVIDIA's majors now: {now}"
            yield found(
                "allow-stale-major", evidence, vmid=vmid, rule=rule.text, major=major, whose=owner, now=remark(now),
                mend=mends.take_out_rule(vmid, rule.text),
            )  # fmt: skip
