"""Commands that mend where they depend on what was found: device nodes, lines of a configuration, hookscripts, units."""

from __future__ import annotations

import os
import re

from hostd.doctor.cluster import Storage
from hostd.doctor.shell import Shell, remark, sed_literal, word
from hostd.doctor.units import DROPIN, VENDOR
from hostd.nodes import DEV, UNIT, wanted_paths
from hostd.snippet import NAME
from hostd.system.pve import ContainerConfig, MountEntry

NODES = Shell(f"systemctl start {UNIT}")
RELOAD = "systemctl daemon-reload"
MOST_DEVICES = 256
"""Proxmox knows dev0 to dev255 (pve-container, MAX_DEVICES)."""
_IS = "[[:space:]]*[:=][[:space:]]*"
CAPABILITIES = "/proc/driver/nvidia/capabilities"


# --- device nodes ----------------------------------------------------------------------------------------------------


def make_node(path: str, vmid: int, key: str, mount: MountEntry | None) -> Shell:
    """What brings a missing node back; what takes it out of the configuration where the driver has no such device."""
    name = path.removeprefix(f"{DEV}/")
    wanted = wanted_paths()
    gpus = [p for p in wanted if re.fullmatch(rf"{DEV}/nvidia\d+", p)]
    number = re.fullmatch(r"(nvidia|nvidia-caps/nvidia-cap|nvidia-nvswitch)(\d{1,9})", name, re.ASCII)
    if path in wanted or (number and number[1] == "nvidia" and not gpus):
        return NODES
    if name in _BY_MODPROBE:
        return Shell(f"nvidia-modprobe {_BY_MODPROBE[name]}")
    if number and number[1] == "nvidia-nvswitch":
        return Shell(f"nvidia-modprobe -s -c {number[2]}")
    if number and number[1] == "nvidia-caps/nvidia-cap":
        return Shell(
            f"grep -rlx {word(f'DeviceFileMinor: {number[2]}')} {CAPABILITIES} | xargs -rn1 nvidia-modprobe -f"
            "  # makes nothing when its MIG instance is gone: nvidia-smi mig -lgi"
        )
    why = "nothing of the driver's is known to make it"
    if number:
        why = f"the driver has {', '.join(gpus)} now: unless a GPU is missing, which a reboot of the node may bring back"
    return Shell(f"{_take_out(vmid, key, mount)}  # {remark(why)}")


_BY_MODPROBE = {
    "nvidia-modeset": "-m",
    "nvidia-nvlink": "-l",
    "nvidia-nvswitchctl": "-s -c 255",
    "nvidia-caps": f"-f {CAPABILITIES}/mig/config -f {CAPABILITIES}/mig/monitor",
}
"""Nodes that our unit does not make (nvidia-modprobe, option-table.h)."""


def _take_out(vmid: int, key: str, mount: MountEntry | None) -> str:
    if mount is None:
        return f"pct set {vmid} -delete {word(key)}"
    source = "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in mount.source)
    return edit(vmid, rf"/^lxc[.]mount[.]entry{_IS}{sed_literal(source)}[[:space:]]/d")


def replace_node(path: str, directory: bool, vmid: int, key: str, mount: MountEntry | None) -> Shell:
    """In place of what has no business there."""
    return Shell(f"rm {'-r ' if directory else ''}{word(path)} && {make_node(path, vmid, key, mount)}")


# --- a container's configuration -------------------------------------------------------------------------------------


def edit(vmid: int, script: str) -> str:
    """What pct cannot set: lines of the current section, by sed; the sections of snapshots stay as they are."""
    return f"sed -i -E {word(f'0,/^[[]/{{{script}}}')} /etc/pve/lxc/{vmid}.conf"


def mandatory_mounts(vmid: int) -> Shell:
    """No mount of NVIDIA's is `optional` any more."""
    return Shell(edit(vmid, rf"/^lxc[.]mount[.]entry{_IS}\/dev\/nvidia/s/,optional\b|\boptional,//"))


def take_out_rule(vmid: int, rule: str) -> Shell:
    words = "[[:space:]]+".join(map(sed_literal, rule.split()))
    return Shell(edit(vmid, rf"/^lxc[.]cgroup2[.]devices[.]allow{_IS}{words}[[:space:]]*$/d"))


def free_keys(config: ContainerConfig) -> list[str]:
    """Names of devN that the configuration does not use, the lowest first."""
    used = {int(entry.key[3:]) for entry in config.dev_entries}
    return [f"dev{number}" for number in range(MOST_DEVICES) if number not in used]


def give(vmid: int, keys: list[str], path: str) -> Shell:
    if not keys:
        return Shell(f"pct config {vmid}  # every devN is in use: put {word(path)} in place of one")
    make = "" if os.path.exists(path) else f"{make_node(path, vmid, keys[0], None)} && "
    return Shell(f"{make}pct set {vmid} -{keys[0]} {word(path)}")


# --- hookscripts -----------------------------------------------------------------------------------------------------


def enable(vmid: int, volume: str) -> Shell:
    """Instead of a hookscript that is not there: `hook enable` alone would ask what to do with it."""
    ours = f"pve-gpu-release hook enable {vmid}"
    return Shell(ours if volume.endswith(f":snippets/{NAME}") else f"pct set {vmid} -delete hookscript && {ours}")


def open_storage(storage: Storage, node: str) -> Shell:
    """What answers its objection on that node."""
    command = f"pvesm set {word(storage.name)}"
    if storage.disabled:
        return Shell(f"{command} --disable 0")
    if storage.nodes and node not in storage.nodes:
        return Shell(f"{command} --nodes {word(','.join(sorted({*storage.nodes, node})))}")
    content = sorted({*storage.content, "snippets"} - {"", "none"})
    return Shell(f"{command} --content {word(','.join(content))}")


def remount(path: str, option: str) -> Shell:
    """The file system that a path is on, with another option."""
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return Shell(f"mount -o remount,{option} {word(path)}  # for now: what mounts it says otherwise")


# --- units -----------------------------------------------------------------------------------------------------------


def shipped(path: str) -> bool:
    """The file is a package's, not the administrator's."""
    return path.startswith(tuple(f"{directory}/" for directory in VENDOR))


def read_before_ours(path: str) -> Shell:
    """A drop-in keeps its lines, but those of ours come after it."""
    folder, name = os.path.split(path)
    return Shell(f"mv {word(path)} {word(f'{folder}/10-{name}')} && {RELOAD}  # it is then read before {DROPIN}")


def put_aside(path: str) -> Shell:
    return Shell(f"mv {word(path)} {word(f'{path}.off')} && {RELOAD}  # unless it is meant to be so")
