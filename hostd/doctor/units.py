"""Unit files and drop-ins as systemd finds them (systemd.unit(5)), read as files; and what `systemctl show` says."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

SEARCH = (
    "/etc/systemd/system",
    "/run/systemd/system",
    "/usr/local/lib/systemd/system",
    "/usr/lib/systemd/system",
    "/lib/systemd/system",
)
"""Earlier ones win."""
VENDOR = ("/usr/lib/systemd/system", "/lib/systemd/system")
DROPIN = "50-pve-gpu-release.conf"
_MAX_BYTES = 1 << 18


class Assignment(NamedTuple):
    """`Key=value` in a section of a unit file; an empty value takes back what was said before."""

    section: str
    key: str
    value: str


@dataclass(frozen=True, slots=True)
class UnitFile:
    """A unit file or a drop-in. `masked`: empty, or a link to /dev/null."""

    path: str
    masked: bool
    text: str

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def assignments(self) -> list[Assignment]:
        return [] if self.masked else parse_unit(self.text)


def parse_unit(text: str) -> list[Assignment]:
    """The assignments of a unit file, in order; a backslash at the end of a line joins the next one."""
    found: list[Assignment] = []
    section, pending = "", ""
    for raw in text.splitlines():
        line = raw.strip()
        if line.startswith(("#", ";")):
            continue
        line, pending = pending + line, ""
        if line.endswith("\\"):
            pending = line[:-1] + " "
        elif line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif "=" in line:
            key, _, value = line.partition("=")
            found.append(Assignment(section, key.strip(), value.strip()))
    return found


def parse_show(text: str) -> dict[str, dict[str, str]]:
    """`systemctl show` of several units: Id -> properties."""
    found = {}
    for block in text.split("\n\n"):
        pairs = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        if pairs.get("Id"):
            found[pairs["Id"]] = pairs
    return found


class UnitFiles:
    """The search path of systemd as directories."""

    def __init__(self, search: Iterable[str] = SEARCH) -> None:
        self.search = tuple(search)

    def find(self, name: str) -> UnitFile | None:
        """The unit file that counts; None when there is none. Raises OSError."""
        for directory in self.search:
            path = f"{directory}/{name}"
            if os.path.lexists(path):
                return _read(path)
        return None

    def dropins(self, name: str) -> list[UnitFile]:
        """Drop-ins of a unit in systemd's order: by file name, of one name the first directory that has it."""
        folders = [f"{name}.d", f"{name.rpartition('.')[2]}.d"]
        template, at, rest = name.partition("@")
        if at and not rest.startswith("."):
            folders.insert(1, f"{template}@.{rest.rpartition('.')[2]}.d")
        chosen: dict[str, str] = {}
        for folder in folders:
            for directory in self.search:
                path = f"{directory}/{folder}"
                if not os.path.isdir(path):
                    continue
                for entry in os.listdir(path):
                    if entry.endswith(".conf"):
                        chosen.setdefault(entry, f"{path}/{entry}")
        return [_read(chosen[entry]) for entry in sorted(chosen)]

    def matching(self, prefix: str, suffix: str) -> list[str]:
        """Names of unit files, sorted."""
        names: set[str] = set()
        for directory in self.search:
            if os.path.isdir(directory):
                names.update(n for n in os.listdir(directory) if n.startswith(prefix) and n.endswith(suffix))
        return sorted(names)

    def enabled(self, name: str) -> bool:
        """Some unit wants or requires it by a link."""
        for directory in self.search:
            if not os.path.isdir(directory):
                continue
            for folder in os.listdir(directory):
                if folder.endswith((".wants", ".requires")) and os.path.lexists(f"{directory}/{folder}/{name}"):
                    return True
        return False


def _read(path: str) -> UnitFile:
    if os.path.realpath(path) == "/dev/null":
        return UnitFile(path, True, "")
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:  # a dangling link
        return UnitFile(path, True, "")
    return UnitFile(path, not text, text)
