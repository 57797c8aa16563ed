"""What Proxmox knows about guests: the files below /etc/pve.

/etc/pve is a FUSE file system (pmxcfs) and hangs when its daemon does: every read happens in a helper with a deadline.
Nothing here takes Proxmox's locks, writes, or calls its tools (hooks run while they are held).
"""

from __future__ import annotations

import errno
import marshal
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from hostd.disposable import Outcome, call_with_deadline
from hostd.errors import UnreadableError

ROOT = "/etc/pve"
SIZE_LIMIT = 1 << 20
"""Bytes read of one file: pmxcfs itself allows no more than 1 MiB (memdb.h, MEMDB_MAX_FILE_SIZE)."""

_SECTION = re.compile(r"\[.+\]\s*")
_LXC_LINE = re.compile(r"(lxc\.[a-z0-9_.-]+)\s*[:=]\s*(.*)")
_LINE = re.compile(r"([a-z][a-z_]*[0-9]*)\s*:\s*(.*)")
_OCTAL = re.compile(r"\\([0-7]{3})")
_CONF_NAME = re.compile(r"([1-9][0-9]{2,8})\.conf", re.ASCII)
_HOSTPCI = re.compile(r"hostpci[0-9]+")


class DevEntry(NamedTuple):
    """`devN: PATH,OPTION=VALUE,…`: Proxmox makes a node of its own with the same number in the container."""

    key: str
    path: str
    options: dict[str, str]


class MountEntry(NamedTuple):
    """One `lxc.mount.entry`."""

    source: str
    target: str
    options: tuple[str, ...]

    @property
    def optional(self) -> bool:
        """True when the container starts without a word if the source is missing."""
        return "optional" in self.options


@dataclass(frozen=True, slots=True)
class ContainerConfig:
    """What a container's configuration says, as far as GPUs are concerned; its current section only."""

    hostname: str = ""
    unprivileged: bool = False
    ostype: str = ""
    hookscript: str = ""
    dev_entries: tuple[DevEntry, ...] = ()
    mount_entries: tuple[MountEntry, ...] = ()
    devices_allow: tuple[str, ...] = ()
    """Values of `lxc.cgroup2.devices.allow`."""
    lxc: tuple[tuple[str, str], ...] = ()
    """Every `lxc.*` line, in order."""

    @property
    def gpu_paths(self) -> tuple[str, ...]:
        """Host paths at or below /dev/nvidia* that it is given, in order, each once."""
        paths = [d.path for d in self.dev_entries] + [m.source for m in self.mount_entries]
        return tuple(dict.fromkeys(p for p in map(os.path.normpath, paths) if p.startswith("/dev/nvidia")))

    @property
    def wants_gpu(self) -> bool:
        """True when it is given a node of NVIDIA's, or runs LXC's own nvidia hook."""
        return bool(self.gpu_paths) or any(
            key.startswith("lxc.hook.") and os.path.basename(value) == "nvidia" for key, value in self.lxc
        )


class VmPassthrough(NamedTuple):
    """A VM with `hostpciN:`."""

    vmid: int
    name: str
    addresses: tuple[str, ...]
    """PCI addresses as written: `0000:3b:00.0`, or `3b:00` for every function."""
    mappings: tuple[str, ...]
    """Names of cluster-wide resource mappings (`mapping=NAME`)."""


class Pve:
    """Reads `root` (/etc/pve). Every method answers within `deadline_s`."""

    def __init__(self, root: str = ROOT, deadline_s: float = 2.0) -> None:
        self._root = root
        self._deadline_s = deadline_s

    def read_container(self, vmid: int) -> ContainerConfig | None:
        """The container's configuration; None when this node has none (no /etc/pve at all included).

        Raises UnreadableError (`pve-unreadable`) on every other error, a hanging /etc/pve included.
        """
        path = os.path.join(self._root, "lxc", f"{vmid:d}.conf")
        raw = self._call(path, lambda: _read_first_section(path), vmid)
        return None if raw is None else parse_container_config(raw.decode("utf-8", "replace"))

    def containers(self) -> list[int]:
        """Containers of this node, ascending; empty without /etc/pve. Raises UnreadableError."""
        path = os.path.join(self._root, "lxc")
        return _unpack(self._call(path, lambda: marshal.dumps(_vmids_in(path)))) or []

    def find_node(self, vmid: int) -> str | None:
        """The other node of the cluster that has this container. Only for a message: None also when it cannot be
        read.
        """
        try:
            found = self._call(self._root, lambda: os.fsencode(_find_node(self._root, vmid) or ""))
        except UnreadableError:
            return None
        return os.fsdecode(found) if found else None

    def vms_with_hostpci(self) -> list[VmPassthrough]:
        """VMs of this node to which PCI devices are passed through. Raises UnreadableError."""
        path = os.path.join(self._root, "qemu-server")
        texts = _unpack(self._call(path, lambda: marshal.dumps(_read_all(path)))) or []
        found = (parse_vm_config(vmid, raw.decode("utf-8", "replace")) for vmid, raw in texts)
        return [vm for vm in found if vm.addresses or vm.mappings]

    def _call(self, what: str, read: Callable[[], bytes], vmid: int | None = None) -> bytes | None:
        """What `read` gives in a helper; None when the file or directory does not exist."""
        try:
            answer = call_with_deadline(read, self._deadline_s)
        except OSError as exc:  # no process to be had
            raise _unreadable(what, str(exc), vmid) from exc
        if answer.outcome is Outcome.ANSWER:
            return answer.data
        if answer.outcome is Outcome.FAILED and answer.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise _unreadable(what, os.strerror(answer.errno) if answer.errno else answer.error, vmid)


def _unreadable(what: str, cause: str, vmid: int | None) -> UnreadableError:
    return UnreadableError(f"cannot read {what}: {cause}", reason="pve-unreadable", vmid=vmid)


def _unpack(packed: bytes | None) -> Any:
    return None if packed is None else marshal.loads(packed)


def parse_container_config(text: str) -> ContainerConfig:
    """The current section of a container's configuration; lines it does not know are passed over, as Proxmox does."""
    values: dict[str, str] = {}
    lxc: list[tuple[str, str]] = []
    for line in _current_section(text):
        if match := _LXC_LINE.fullmatch(line):
            lxc.append((match.group(1), match.group(2).strip()))
        elif match := _LINE.fullmatch(line):
            values[match.group(1)] = match.group(2).strip()
    mounts = (_parse_mount_entry(value) for key, value in lxc if key == "lxc.mount.entry")
    devs = sorted((int(key[3:]), key) for key in values if key[:3] == "dev" and key[3:].isdigit())
    return ContainerConfig(
        hostname=values.get("hostname", ""),
        unprivileged=values.get("unprivileged", "0") == "1",
        ostype=values.get("ostype", ""),
        hookscript=values.get("hookscript", ""),
        dev_entries=tuple(dev for _, key in devs if (dev := _parse_dev_entry(key, values[key])) is not None),
        mount_entries=tuple(mount for mount in mounts if mount is not None),
        devices_allow=tuple(value for key, value in lxc if key == "lxc.cgroup2.devices.allow"),
        lxc=tuple(lxc),
    )


def parse_vm_config(vmid: int, text: str) -> VmPassthrough:
    """The `hostpciN:` entries of a VM's current section: `[host=]ADDR[;ADDR…]` or `mapping=NAME`, then options."""
    name = ""
    addresses: list[str] = []
    mappings: list[str] = []
    for line in _current_section(text):
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        key, value = match.groups()
        if key == "name":
            name = value.strip()
        if not _HOSTPCI.fullmatch(key):
            continue
        for option in value.split(","):
            kind, equals, content = option.strip().partition("=")
            if not equals or kind == "host":
                addresses += [a.strip() for a in (content if equals else kind).split(";") if a.strip()]
            elif kind == "mapping":
                mappings.append(content)
    return VmPassthrough(vmid, name, tuple(addresses), tuple(mappings))


def _current_section(text: str) -> list[str]:
    """Lines before the first `[section]` (snapshots and pending changes follow), without the description's `#`
    lines.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if _SECTION.fullmatch(line):
            break
        if not line.startswith("#"):
            lines.append(line.rstrip())
    return lines


def _parse_dev_entry(key: str, value: str) -> DevEntry | None:
    path = ""
    options: dict[str, str] = {}
    for part in value.split(","):
        name, equals, content = part.strip().partition("=")
        if not equals or name == "path":
            path = path or (content if equals else name)
        else:
            options[name] = content
    return DevEntry(key, path, options) if path else None


def _parse_mount_entry(value: str) -> MountEntry | None:
    """fstab(5) fields: source, target, type, options; `\\040` is a space."""
    fields = [_OCTAL.sub(lambda m: chr(int(m.group(1), 8) & 0xFF), field) for field in value.split()]
    if len(fields) < 2:
        return None
    return MountEntry(fields[0], fields[1], tuple(fields[3].split(",")) if len(fields) > 3 else ())


# --- in the helper ---------------------------------------------------------------------------------------------------


def _read_first_section(path: str) -> bytes:
    """The file up to the first line that begins with `[`. Raises OSError, EFBIG past the size limit."""
    data = b""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while part := os.read(fd, 65536):
            data += part
            if data.startswith(b"[") or b"\n[" in data:
                break
            if len(data) > SIZE_LIMIT:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), path)
    finally:
        os.close(fd)
    return data


def _vmids_in(path: str) -> list[int]:
    matches = (_CONF_NAME.fullmatch(name) for name in os.listdir(path))
    return sorted(int(match.group(1)) for match in matches if match is not None)


def _read_all(path: str) -> list[tuple[int, bytes]]:
    found = []
    for vmid in _vmids_in(path):
        try:
            found.append((vmid, _read_first_section(os.path.join(path, f"{vmid}.conf"))))
        except FileNotFoundError:
            pass
    return found


def _find_node(root: str, vmid: int) -> str | None:
    nodes = os.path.join(root, "nodes")
    local = os.path.realpath(os.path.join(root, "lxc"))
    for name in sorted(os.listdir(nodes)):
        folder = os.path.join(nodes, name, "lxc")
        if os.path.realpath(folder) != local and os.path.exists(os.path.join(folder, f"{vmid:d}.conf")):
            return name
    return None
