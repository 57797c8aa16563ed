"""Checks of what makes Proxmox and systemd call us: hookscripts, drop-ins, the boot unit."""

from __future__ import annotations

import os
import shlex
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

CALL = "hookscripts/pve-gpu-release"
"""What a script of somebody else's runs that calls ours itself."""
UNITS = ("pve-container@.service", "pve-container-debug@.service")
SOURCES_OF_START = frozenset(("ExecStart", "ExecStop", "KillMode", "Type", "Delegate", "Slice"))
RESETS = ("ExecStartPre", "ExecStopPost")
SHIPPED = os.path.join(os.path.dirname(os.path.dirname(hostd.__file__)), "hookscripts", snippet.NAME)
"""The package's own, which `hook enable` copies."""
REINSTALLED = RELOADED + FROM_FILE
_HEAD_BYTES = 1 << 16


def hookscripts(facts: Facts) -> Results:
    yield from facts.unread
    local: dict[str, str] = {}
    for vmid, config in facts.get("gpu_containers").items():
        if not config.hookscript:
            yield found("no-hookscript", f"configuration of container {vmid}: no hookscript line", vmid=vmid)
            continue
        path = yield from _hookscript(facts, vmid, config.hookscript)
        if path:
            local[config.hookscript] = path
    others = facts.get("other_nodes")
    for volume, path in sorted(local.items()) if others else ():
        copy = Shell("; ".join(f"scp -p {word(path)} {word(f'{node}:{path}')}" for node in others))
        told = ", ".join(others)
        yield found("snippet-other-nodes", f"nodes: {told}", volume=volume, nodes=told, copy=copy)


def _hookscript(facts: Facts, vmid: int, text: str) -> Generator[Finding | Blind | Skipped, None, str]:
    """The snippet's path when it is there, can be run, and other nodes do not see the same file; else empty."""
    volume = parse_volume(text)
    storage: Storage | None = facts.get("storages").get(volume.storage) if volume else None
    if volume is None or storage is None or not storage.snippets:
        name = "" if volume is None else volume.storage
        why = f"storage {name} has no directory" if storage else f"there is no storage {name}"
        why = why if volume else "it is no snippet volume"
        mend = mends.enable(vmid, "")
        node = facts.node_name
        yield found("snippet-storage", f"hookscript: {text}", vmid=vmid, volume=text, node=node, why=why, mend=mend)
        return ""
    for node in (facts.node_name, *facts.get("other_nodes")):
        objection = storage.objection(node)
        restricted = storage.nodes and node not in storage.nodes
        if objection and (node == facts.node_name or restricted):
            # Proxmox asks neither for content nor for nodes when it runs a hookscript (PVE::GuestHelpers).
            seen, mend = f"storage.cfg: {objection}", mends.open_storage(storage, node)
            yield found("snippet-storage-closed", seen, vmid=vmid, volume=text, node=node, why=objection, mend=mend)
    path = os.path.join(storage.snippets, volume.name)
    try:
        info = os.stat(path)
        content = _head(path) if stat.S_ISREG(info.st_mode) else b""
    except (OSError, ValueError) as exc:  # ValueError: a NUL byte in the path
        if not isinstance(exc, OSError) or not is_gone(exc):
            yield Blind(f"hookscript {text} of container {vmid}", str(exc))
            return ""
        mend = mends.enable(vmid, text)
        yield found("snippet-missing", f"{path}: {exc.strerror}", vmid=vmid, volume=text, path=path, enable=mend)
        return ""
    if not stat.S_ISREG(info.st_mode) or not os.access(path, os.X_OK):
        evidence = f"{path}: mode {stat.filemode(info.st_mode)}"
        why, mend = _cannot_run(path, info, mends.enable(vmid, text))
        yield found("snippet-not-executable", evidence, vmid=vmid, volume=text, why=why, mend=mend)
        return ""
    if not calls_us(content.decode("utf-8", "replace")):
        yield found("foreign-hookscript", f"{path} does not call pve-gpu-release", vmid=vmid, volume=text)
    elif is_outdated(content, _shipped_snippet()):
        yield found("snippet-outdated", f"{path} differs from {SHIPPED}", vmid=vmid, volume=text, path=path)
    yield from _chained(vmid, content.decode("utf-8", "surrogateescape"))
    return "" if storage.shared else path


def _cannot_run(path: str, info: os.stat_result, instead: Shell) -> tuple[str, Shell]:
    """Why a file cannot be executed, and what makes it so."""
    if not stat.S_ISREG(info.st_mode):
        return f"{path} is no file", Shell(f"mv {word(path)} {word(f'{path}.off')} && {instead}")
    if not info.st_mode & 0o111:
        return f"{path} is not executable", Shell(f"chmod 755 {word(path)}")
    return f"{path} is on a file system mounted noexec", mends.remount(path, "exec")


def _chained(vmid: int, text: str) -> Results:
    """The other hookscript that a snippet of ours calls."""
    chained = snippet.chained_volume(text) if snippet.is_ours(text) else ""
    path = chained_path(text) if chained else ""
    if not path:
        return
    instead = mends.enable(vmid, chained)
    why, mend = "does not exist", instead
    try:
        info = os.stat(path)
        if stat.S_ISREG(info.st_mode) and os.access(path, os.X_OK):
            return
        why, mend = _cannot_run(path, info, instead)
        why = f"cannot be executed: {why}"
    except (OSError, ValueError) as exc:
        if not isinstance(exc, OSError) or not is_gone(exc):
            yield Blind(f"hookscript {chained}, chained for container {vmid}", str(exc))
            return
    yield found("chained-missing", f"{path}: {why}", vmid=vmid, chained=chained, path=path, why=why, mend=mend)


def chained_path(text: str) -> str:
    """The file behind `chained=` of a snippet of ours; empty when there is none."""
    for line in text.splitlines():
        if line.startswith("chained="):
            try:
                return next(iter(shlex.split(line.removeprefix("chained="), comments=True)), "")
            except ValueError:  # a quotation without end: nobody can run that
                return ""
    return ""


def calls_us(text: str) -> bool:
    """A snippet of ours, or a script of somebody's with a line that calls our hookscript."""
    return snippet.is_ours(text) or any(CALL in line.partition("#")[0] for line in text.splitlines())


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
    yield from check_target(SHIPPED)
    for name in UNITS:
        unit = files.find(name)
        if unit is not None:
            yield from check_unit(name, unit, files.dropins(name))


def check_target(path: str) -> Results:
    """What the drop-ins run, if they can."""
    if not os.access(path, os.X_OK):
        why = "cannot be executed" if os.path.exists(path) else "does not exist"
        yield found("dropin-target", f"{path} {why}", path=path)


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
        mend = _shipped_again(ours.path)
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


def _shipped_again(path: str) -> Shell:
    """Our own drop-in: as the package has it, or without the administrator's in its place."""
    return Shell(REINSTALLED if mends.shipped(path) else f"rm {word(path)} && {mends.RELOAD}")


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
            mend = _shipped_again(ours.path)
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
