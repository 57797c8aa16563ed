"""Checks of what makes Proxmox and systemd call us: hookscripts, drop-ins, the boot unit."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator

import hostd
from hostd import snippet
from hostd.doctor import mends
from hostd.doctor.cluster import Storage, parse_volume
from hostd.doctor.facts import Facts
from hostd.doctor.finding import Blind, Finding, Results, Skipped
from hostd.doctor.kinds import found
from hostd.doctor.kinds.hooks import FROM_FILE, RELOADED
from hostd.doctor.shell import Shell, word
from hostd.doctor.units import DROPIN, VENDOR, UnitFile, UnitFiles
from hostd.errors import is_gone

MARK = b"pve-gpu-release"
"""In every snippet of ours, chained ones included."""
UNITS = ("pve-container@.service", "pve-container-debug@.service")
SOURCES_OF_START = frozenset(("ExecStart", "ExecStop", "KillMode", "Type", "Delegate", "Slice"))
RESETS = ("ExecStartPre", "ExecStopPost")
SHIPPED = os.path.join(os.path.dirname(os.path.dirname(hostd.__file__)), "hookscripts", snippet.NAME)
"""The package's own, which `hook enable` copies."""
REINSTALLED = RELOADED + FROM_FILE
_HEAD_BYTES = 1 << 16


def hookscripts(facts: Facts) -> Results:
    yield from facts.unread
    local: set[str] = set()
    for vmid, config in facts.get("gpu_containers").items():
        if not config.hookscript:
            yield found("no-hookscript", f"configuration of container {vmid}: no hookscript line", vmid=vmid)
            continue
        storage = yield from _hookscript(facts, vmid, config.hookscript)
        if storage is not None and not storage.shared:
            local.add(config.hookscript)
    others = facts.get("other_nodes")
    for volume in sorted(local) if others else ():
        look = Shell("; ".join(f"ssh {word(node)} pve-gpu-release doctor" for node in others))
        told = ", ".join(others)
        yield found("snippet-other-nodes", f"nodes: {told}", volume=volume, nodes=told, look=look)


def _hookscript(facts: Facts, vmid: int, text: str) -> Generator[Finding | Blind, None, Storage | None]:
    """The storage when the snippet is there and fine."""
    volume = parse_volume(text)
    storage: Storage | None = facts.get("storages").get(volume.storage) if volume else None
    if volume is None or storage is None:
        why = "it is no snippet volume" if volume is None else f"there is no storage {volume.storage}"
        mend = mends.enable(vmid, "")
        node = facts.node_name
        yield found("snippet-storage", f"hookscript: {text}", vmid=vmid, volume=text, node=node, why=why, mend=mend)
        return None
    for node in (facts.node_name, *facts.get("other_nodes")):
        objection = storage.objection(node)
        restricted = storage.nodes and node not in storage.nodes
        if objection and (node == facts.node_name or restricted):
            mend = mends.open_storage(storage, node) or mends.enable(vmid, "")
            yield found(
                "snippet-storage", f"storage.cfg: {objection}", vmid=vmid, volume=text, node=node, why=objection, mend=mend
            )
            if node == facts.node_name:
                return None
    path = os.path.join(storage.snippets, volume.name)
    try:
        info = os.stat(path)
        content = _head(path) if stat.S_ISREG(info.st_mode) else b""
    except (OSError, ValueError) as exc:  # ValueError: a NUL byte in the path
        if not isinstance(exc, OSError) or not is_gone(exc):
            yield Blind(f"hookscript {text} of container {vmid}", str(exc))
            return None
        mend = mends.enable(vmid, text)
        yield found("snippet-missing", f"{path}: {exc.strerror}", vmid=vmid, volume=text, path=path, enable=mend)
        return None
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o111:
        evidence = f"{path}: mode {stat.filemode(info.st_mode)}"
        aside = f"mv {word(path)} {word(f'{path}.off')} && {mends.enable(vmid, text)}"
        mend = Shell(f"chmod 755 {word(path)}" if stat.S_ISREG(info.st_mode) else aside)
        yield found("snippet-not-executable", evidence, vmid=vmid, volume=text, path=path, mend=mend)
        return None
    if MARK not in content:
        yield found("foreign-hookscript", f"{path} does not call pve-gpu-release", vmid=vmid, volume=text)
    elif is_outdated(content, _shipped_snippet()):
        yield found("snippet-outdated", f"{path} differs from {SHIPPED}", vmid=vmid, volume=text, path=path)
    return storage


def _shipped_snippet() -> bytes:
    """Empty when the package has lost it."""
    try:
        return _head(SHIPPED)
    except FileNotFoundError:
        return b""


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_BYTES)


def is_outdated(content: bytes, shipped: bytes) -> bool:
    """Pure: a copy of ours that differs in more than the other hookscript that it calls. One that only calls us, in
    another's own words, is no copy."""
    return bool(shipped) and snippet.is_ours(content.decode("utf-8", "replace")) and _fixed(content) != _fixed(shipped)


def _fixed(text: bytes) -> list[bytes]:
    return [line for line in text.splitlines() if not line.startswith((b"chained=", b"chain_limit="))]


# --- drop-ins --------------------------------------------------------------------------------------------------------


def container_units(facts: Facts) -> Results:
    """The units that start and stop containers, as files."""
    files: UnitFiles = facts.unit_files
    if files.find(UNITS[0]) is None:
        yield found("no-proxmox", f"no {UNITS[0]} in {', '.join(files.search)}")
        return
    for name in UNITS:
        unit = files.find(name)
        if unit is not None:
            yield from check_unit(name, unit, files.dropins(name))


def check_unit(name: str, unit: UnitFile, dropins: list[UnitFile]) -> Results:
    """Pure: one container unit and its drop-ins in systemd's order."""
    if unit.masked or os.path.dirname(unit.path) not in VENDOR:
        why = f"{unit.path} is masked" if unit.masked else f"{unit.path} is used instead of the shipped file"
        yield found("container-unit-overridden", unit.path, unit=name, why=why, mend=_as_shipped(unit))
    ours = next((dropin for dropin in dropins if dropin.name == DROPIN), None)
    if ours is None:
        shown = ", ".join(dropin.path for dropin in dropins) or "none"
        yield found("dropin-missing", f"no {DROPIN}; drop-ins of {name}: {shown}", unit=name)
    elif ours.masked:
        mend = Shell(REINSTALLED if mends.shipped(ours.path) else f"rm {word(ours.path)} && {mends.RELOAD}")
        yield found("dropin-masked", f"{ours.path} is empty or a link to /dev/null", unit=name, mend=mend)
    else:
        yield from _effect(name, ours, dropins)
    for dropin in dropins:
        if dropin is ours:
            continue
        changed = sorted({a.key for a in dropin.assignments if a.section == "Service" and a.key in SOURCES_OF_START})
        if changed:
            why = f"{dropin.path} sets {', '.join(f'{key}=' for key in changed)}"
            yield found("container-unit-overridden", why, unit=name, why=why, mend=mends.put_aside(dropin.path))


def _as_shipped(unit: UnitFile) -> Shell:
    if mends.shipped(unit.path):
        return Shell(f"apt install --reinstall pve-container && {mends.RELOAD}")
    return mends.put_aside(unit.path)


def _effect(name: str, ours: UnitFile, dropins: list[UnitFile]) -> Results:
    """Does our drop-in call us, and does nothing after it take that back?"""
    for key in RESETS:
        calls = [a for a in ours.assignments if a.key == key and "pve-gpu-release" in a.value]
        if not calls:
            why = f"{ours.path} has no {key}= that calls pve-gpu-release"
            mend = Shell(REINSTALLED if mends.shipped(ours.path) else f"rm {word(ours.path)} && {mends.RELOAD}")
            yield found("dropin-overridden", why, unit=name, why=why, mend=mend)
    after = dropins[dropins.index(ours) + 1 :]
    for dropin in after:
        for key in sorted({a.key for a in dropin.assignments if a.key in RESETS and not a.value}):
            why = f"{dropin.path} takes back {key}="
            yield found("dropin-overridden", why, unit=name, why=why, mend=mends.read_before_ours(dropin.path))


def units_loaded(facts: Facts) -> Results:
    """What systemd has loaded beside what the files say."""
    if not facts.booted:
        yield Skipped("systemd does not run")
        return
    files: UnitFiles = facts.unit_files
    told: set[str] = set()
    for unit, shown in facts.get("units").items():
        template = f"{unit.partition('@')[0]}@.service"
        if template not in UNITS or template in told:
            continue
        ours = next((d for d in files.dropins(template) if d.name == DROPIN and not d.masked), None)
        if ours is None or files.find(template) is None:
            continue
        loaded = any(path.endswith(f"/{DROPIN}") for path in shown.get("DropInPaths", "").split())
        if not loaded or shown.get("NeedDaemonReload") == "yes":
            told.add(template)
            facts_of_it = " ".join(f"{key}={shown.get(key, '')}" for key in ("DropInPaths", "NeedDaemonReload"))
            yield found("dropin-not-loaded", f"{unit}: {facts_of_it}", unit=template)


def boot_unit(facts: Facts) -> Results:
    """The unit that makes the nodes before the guests start: any of ours that is ordered before pve-guests.service."""
    files: UnitFiles = facts.unit_files
    seen = False
    for name in files.matching("pve-gpu-", ".service"):
        unit = files.find(name)
        if unit is None or "@" in name or name == "pve-gpu-hostd.service":
            continue
        before = {word for a in unit.assignments if a.key == "Before" for word in a.value.split()}
        if not unit.masked and "pve-guests.service" not in before:
            continue
        seen = True
        enable = f"systemctl unmask {word(name)}; systemctl enable {word(name)}"
        if unit.masked:
            mend = Shell(REINSTALLED if mends.shipped(unit.path) else enable)
            yield found("boot-unit-disabled", f"{unit.path} is masked", unit=name, state="masked", mend=mend)
        elif not files.enabled(name):
            yield found(
                "boot-unit-disabled", f"{unit.path}: no unit wants it", unit=name, state="not enabled", mend=Shell(enable)
            )
    if not seen:
        yield found("boot-unit-missing", f"no pve-gpu-*.service before pve-guests.service in {', '.join(files.search)}")
