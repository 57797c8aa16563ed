"""/etc/pve/storage.cfg: directory storages, as far as snippets go."""

from __future__ import annotations

from pathlib import Path

from pvenode.conf import PVE
from pvenode.run import PveError


def storages() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for line in (PVE / "storage.cfg").read_text().splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if not line[0].isspace():
            kind, _, name = line.partition(":")
            current = found[name.strip()] = {"type": kind.strip(), "storage": name.strip()}
        else:
            key, _, value = line.strip().partition(" ")
            current[key] = value.strip() or "1"
    return found


def save_storages(all_of_them: dict[str, dict[str, str]]) -> None:
    text = ""
    for name, options in all_of_them.items():
        text += f"{options['type']}: {name}\n"
        text += "".join(f"\t{key} {value}\n" for key, value in options.items() if key not in ("type", "storage")) + "\n"
    (PVE / "storage.cfg").write_text(text)


def snippet_dir(storage: dict[str, str]) -> Path:
    for part in storage.get("content-dirs", "").split(","):
        if part.startswith("snippets="):
            return Path(storage["path"]) / part.removeprefix("snippets=")
    return Path(storage["path"]) / "snippets"


def volume_path(volid: str) -> Path:
    """Path of a snippet volume; says what Proxmox says when there is none."""
    name, _, volume = volid.partition(":")
    storage = storages().get(name)
    if storage is None or not volume:
        raise PveError(f"storage '{name}' does not exist")
    kind, _, leaf = volume.partition("/")
    if kind != "snippets" or not leaf or "/" in leaf:
        raise PveError(f"unable to parse directory volume name '{volume}'")
    return snippet_dir(storage) / leaf


def check_hookscript(volid: str) -> Path:
    path = volume_path(volid)
    if not path.is_file():
        raise PveError(f"script '{volid}' does not exist")
    if not path.stat().st_mode & 0o111:
        raise PveError(f"script '{volid}' is not executable")
    return path
