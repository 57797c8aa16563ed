"""Checks of what makes Proxmox and systemd call us: hookscripts, drop-ins, the boot unit."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator

from hostd.doctor.cluster import Storage, parse_volume
from hostd.doctor.facts import Facts
from hostd.doctor.finding import Finding, Results, Skipped
from hostd.doctor.kinds import found
from hostd.doctor.units import DROPIN, VENDOR, UnitFile, UnitFiles
from hostd.errors import is_gone

MARK = b"pve-gpu-release"
"""In every snippet of ours, chained ones included."""
UNITS = ("pve-container@.service", "pve-container-debug@.service")
SOURCES_OF_START = frozenset(("ExecStart", "ExecStop", "KillMode", "Type", "Delegate", "Slice"))
RESETS = ("ExecStartPre", "ExecStopPost")
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
        yield found("snippet-other-nodes", f"nodes: {', '.join(others)}", volume=volume, nodes=", ".join(others))


def _hookscript(facts: Facts, vmid: int, text: str) -> Generator[Finding, None, Storage | None]:
    """The storage when the snippet is there and fine."""
    volume = parse_volume(text)
    storage: Storage | None = facts.get("storages").get(volume.storage) if volume else None
    if volume is None or storage is None:
        why = "it is no snippet volume" if volume is None else f"there is no storage {volume.storage}"
        yield found("snippet-storage", f"hookscript: {text}", vmid=vmid, volume=text, node=facts.node_name, why=why)
        return None
    for node in (facts.node_name, *facts.get("other_nodes")):
        objection = storage.objection(node)
        restricted = storage.nodes and node not in storage.nodes
        if objection and (node == facts.node_name or restricted):
            yield found(
                "snippet-storage", f"storage.cfg: {objection}", vmid=vmid, volume=text, node=node, why=objection
            )
            if node == facts.node_name:
                return None
    path = os.path.join(storage.snippets, volume.name)
    try:
        info = os.stat(path)
    except OSError as exc:
        if not is_gone(exc):
            raise
        yield found("snippet-missing", f"{path}: {exc.strerror}", vmid=vmid, volume=text, path=path)
        return None
    if not stat.S_ISREG(info.st_mode) or not info.st_mode & 0o111:
        evidence = f"{path}: mode {stat.filemode(info.st_mode)}"
        yield found("snippet-not-executable", evidence, vmid=vmid, volume=text, path=path)
        return None
    with open(path, "rb") as file:
        if MARK not in file.read(_HEAD_BYTES):
            yield found("foreign-hookscript", f"{path} does not call pve-gpu-release", vmid=vmid, volume=text)
    return storage


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
        yield found("container-unit-overridden", unit.path, unit=name, why=why, path=unit.path)
    ours = next((dropin for dropin in dropins if dropin.name == DROPIN), None)
    if ours is None:
        shown = ", ".join(dropin.path for dropin in dropins) or "none"
        yield found("dropin-missing", f"no {DROPIN}; drop-ins of {name}: {shown}", unit=name)
    elif ours.masked:
        yield found("dropin-masked", f"{ours.path} is empty or a link to /dev/null", unit=name, path=ours.path)
    else:
        yield from _effect(name, ours, dropins)
    for dropin in dropins:
        if dropin is ours:
            continue
        changed = sorted({a.key for a in dropin.assignments if a.section == "Service" and a.key in SOURCES_OF_START})
        if changed:
            why = f"{dropin.path} sets {', '.join(f'{key}=' for key in changed)}"
            yield found("container-unit-overridden", why, unit=name, why=why, path=dropin.path)


def _effect(name: str, ours: UnitFile, dropins: list[UnitFile]) -> Results:
    """Does our drop-in call us, and does nothing after it take that back?"""
    for key in RESETS:
        calls = [a for a in ours.assignments if a.key == key and "pve-gpu-release" in a.value]
        if not calls:
            why = f"{ours.path} has no {key}= that calls pve-gpu-release"
            yield found("dropin-overridden", why, unit=name, why=why, path=ours.path)
    after = dropins[dropins.index(ours) + 1 :]
    for dropin in after:
        for key in sorted({a.key for a in dropin.assignments if a.key in RESETS and not a.value}):
            why = f"{dropin.path} takes back {key}="
            yield found("dropin-overridden", why, unit=name, why=why, path=dropin.path)


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
        if unit.masked:
            yield found("boot-unit-disabled", f"{unit.path} is masked", unit=name, state="masked")
        elif not files.enabled(name):
            yield found("boot-unit-disabled", f"{unit.path}: no unit wants it", unit=name, state="not enabled")
    if not seen:
        yield found("boot-unit-missing", f"no pve-gpu-*.service before pve-guests.service in {', '.join(files.search)}")
