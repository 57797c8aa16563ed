"""Storages, PCI mappings and nodes of the cluster as /etc/pve has them: section files of Proxmox, parsed."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from typing import NamedTuple

_HEAD = re.compile(r"(?:([a-z]+):\s*)?(\S+)\s*")
_HOSTPCI = re.compile(r"hostpci[0-9]+")
_NETWORK = frozenset(("nfs", "cifs", "glusterfs", "cephfs"))


class Section(NamedTuple):
    kind: str
    name: str
    values: tuple[tuple[str, str], ...]

    def get(self, key: str, default: str = "") -> str:
        return next((value for name, value in self.values if name == key), default)


def parse_sections(text: str) -> list[Section]:
    """`type: NAME` (or `NAME` alone) and indented `key value` lines below it (pve-common, SectionConfig)."""
    found: list[Section] = []
    values: list[tuple[str, str]] = []
    for line in text.splitlines():
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        if not line[0].isspace():
            match = _HEAD.fullmatch(line)
            values = []
            if match:
                found.append(Section(match.group(1) or "", match.group(2), ()))
        elif found:
            key, _, value = line.strip().partition(" ")
            values.append((key, value.strip()))
            found[-1] = found[-1]._replace(values=tuple(values))
    return found


@dataclass(frozen=True, slots=True)
class Storage:
    name: str
    kind: str
    snippets: str
    """Directory of its snippets; empty when it has no directory."""
    content: frozenset[str]
    nodes: frozenset[str]
    """Empty: every node."""
    shared: bool
    disabled: bool

    def objection(self, node: str) -> str:
        """Why a snippet of this storage cannot be used on that node; empty when it can."""
        if self.disabled:
            return f"storage {self.name} is disabled"
        if self.nodes and node not in self.nodes:
            return f"storage {self.name} is only for {', '.join(sorted(self.nodes))}"
        if "snippets" not in self.content:
            return f"storage {self.name} does not allow snippets"
        if not self.snippets:
            return f"storage {self.name} has no directory"
        return ""


def parse_storages(text: str) -> dict[str, Storage]:
    """storage.cfg; `local` exists also when it is not named there."""
    local = Storage("local", "dir", "/var/lib/vz/snippets", frozenset(("snippets",)), frozenset(), False, False)
    found = {"local": local}
    for section in parse_sections(text):
        path = section.get("path") or (f"/mnt/pve/{section.name}" if section.kind in _NETWORK else "")
        folders = dict(part.partition("=")[::2] for part in section.get("content-dirs").split(",") if "=" in part)
        flags = {key for key, value in section.values if value in ("", "1")}
        found[section.name] = Storage(
            section.name,
            section.kind,
            posixpath.join(path, folders.get("snippets", "snippets").lstrip("/")) if path else "",
            frozenset(part.strip() for part in section.get("content").split(",")),
            frozenset(part.strip() for part in section.get("nodes").split(",") if part.strip()),
            "shared" in flags or section.kind in _NETWORK,
            "disable" in flags,
        )
    return found


class Volume(NamedTuple):
    """`STORAGE:snippets/NAME`."""

    storage: str
    name: str


def parse_volume(text: str) -> Volume | None:
    storage, colon, rest = text.partition(":")
    folder, _, name = rest.partition("/")
    if not colon or folder != "snippets" or not name or "/" in name or name in (".", ".."):
        return None
    return Volume(storage, name)


def parse_hostpci_keys(text: str) -> dict[str, str]:
    """qemu-server/VMID.conf, its current section: each address and each name of a mapping -> `hostpciN`."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("["):
            break
        key, _, value = line.partition(":")
        for option in value.split(",") if _HOSTPCI.fullmatch(key) else ():
            kind, equals, content = option.strip().partition("=")
            if not equals or kind in ("host", "mapping"):
                found |= {part.strip(): key for part in (content if equals else kind).split(";")}
    return found


def parse_pci_mappings(text: str, node: str) -> dict[str, tuple[str, ...]]:
    """mapping/pci.cfg: name -> PCI addresses on that node (`map id=…,node=NAME,path=0000:3b:00`)."""
    found = {}
    for section in parse_sections(text):
        addresses: list[str] = []
        for key, value in section.values:
            options = dict(part.partition("=")[::2] for part in value.split(","))
            if key == "map" and options.get("node") == node:
                addresses += [a for a in options.get("path", "").split(";") if a]
        found[section.name] = tuple(addresses)
    return found
