"""What the checks are made from: each fact is read once, when it is first asked for, and within a deadline.

A fact that cannot be had raises CannotLookError (or UnreadableError, OSError); `get` remembers that too, so that a
hanging /etc/pve costs its deadline once and not once per check.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hostd.config import DEFAULT_PATH, BrokenConfigError, Config, load
from hostd.disposable import Outcome, call_with_deadline
from hostd.doctor.cluster import Storage, parse_hostpci_keys, parse_pci_mappings, parse_storages
from hostd.doctor.commands import SYSTEMCTL, installed, run_tool
from hostd.doctor.finding import Blind, CannotLookError
from hostd.doctor.units import UnitFiles, parse_show
from hostd.errors import PgrError, UnreadableError, is_gone
from hostd.ladder import Limits
from hostd.model import BlindSpot, DriverNumbers, GpuInfo, NvmlSnapshot
from hostd.nodeview import NodeView, look_at_node
from hostd.sources import open_sources
from hostd.system import devices
from hostd.system.cgroupfs import MONITOR, Cgroupfs, ContainerCgroup, find_mount, owner_of, vmid_of_name
from hostd.system.nvml import Nvml, Wedged, read_wedged
from hostd.system.pidns import own_inode
from hostd.system.procfs import Procfs
from hostd.system.pve import ROOT as PVE_ROOT
from hostd.system.pve import ContainerConfig, Pve, VmPassthrough

PVE_DEADLINE_S = 2.0
TOOL_DEADLINE_S = 5.0
PER_UNIT_S = 0.02
"""systemd loads a unit that nobody has used yet: 800 take more than 5 s."""
CONTAINER_UNIT = "pve-container@.service"
_MAX_SILENT = 2
"""Configurations that may cost their deadline before the rest is not tried."""
SHOWN = "Id,LoadState,ActiveState,SubState,UnitFileState,FragmentPath,DropInPaths,NeedDaemonReload"


class OnceNvml(Nvml):
    """Asks the driver for one snapshot, keeps it with the time it took, and never asks again: nobody adds to a driver
    that does not answer."""

    def __init__(self, deadline_s: float) -> None:
        super().__init__(deadline_s)
        self.answer: NvmlSnapshot | None = None
        self.took_s: float | None = None
        self._begun_s: float | None = None

    def send_snapshot_request(
        self, *, uuids: Iterable[str] | None = None, nvlink: bool = False, deadline_s: float | None = None
    ) -> None:
        if self.answer is None and self._begun_s is None:
            self._begun_s = time.monotonic()
            super().send_snapshot_request(uuids=uuids, nvlink=nvlink, deadline_s=deadline_s)

    def receive_snapshot(self) -> NvmlSnapshot:
        if self.answer is None:
            self.answer = super().receive_snapshot()
            if self._begun_s is not None:
                self.took_s = time.monotonic() - self._begun_s
        return self.answer


@dataclass(frozen=True, slots=True)
class Look:
    """One look at the whole node, the driver included."""

    view: NodeView
    snapshot: NvmlSnapshot
    took_s: float | None
    """From starting the child (library imported, GPUs opened) to its first answer; None when it was not asked."""
    wedged: Wedged | None


@dataclass(frozen=True, slots=True)
class Runtime:
    """A container by its cgroups: what lives in them at this moment."""

    processes: int
    monitors: int
    init_pid: int | None
    frozen: bool


@dataclass(frozen=True, slots=True)
class Settings:
    config: Config
    problems: tuple[str, ...]
    """Not empty: the file is broken and `config` is the built-in defaults."""


class Facts:
    """The node. A test may preset a fact by assigning to it."""

    def __init__(self, pve: Pve | None = None, *, pve_root: str = PVE_ROOT, config_path: str = DEFAULT_PATH) -> None:
        self.pve = pve or Pve(pve_root, PVE_DEADLINE_S)
        self.pve_root = pve_root
        self.config_path = config_path
        self.unread: list[Blind] = []
        """Configurations of containers that could not be read."""
        self._failures: dict[str, Exception] = {}

    def get(self, name: str) -> Any:
        """The fact of that name. Raises what it raised the first time."""
        if name in self._failures:
            raise self._failures[name]
        try:
            return getattr(self, name)
        except (PgrError, OSError, ValueError) as exc:
            self._failures[name] = exc
            raise

    # --- kernel and driver ---

    @cached_property
    def driver(self) -> DriverNumbers:
        return devices.read_driver_numbers()

    @cached_property
    def device_owners(self) -> dict[int, str]:
        """Character major -> names of the drivers that have it now."""
        with open(devices.PROC_DEVICES, encoding="utf-8", errors="replace") as file:
            return parse_majors(file.read())

    @cached_property
    def cgroups(self) -> Cgroupfs:
        return Cgroupfs(find_mount())

    @cached_property
    def look(self) -> Look:
        """Holders, GPUs and the driver's word. The driver is not asked when a call into it is stuck."""
        deadline_s = self._nvml_deadline_s()
        wedged = read_wedged(older_than_s=deadline_s)
        sources = open_sources(nvml_deadline_s=deadline_s, read_deadline_s=1.0)
        nvml = OnceNvml(deadline_s)
        sources.nvml = nvml
        if wedged is not None:
            spot = BlindSpot("nvml", "snapshot", "not asked: a call into the driver is stuck", "driver-silent")
            nvml.answer = NvmlSnapshot((), blind_spots=(spot,))
        try:
            view = look_at_node(sources)
        finally:
            sources.close()
        return Look(view, nvml.answer or NvmlSnapshot(()), nvml.took_s, wedged)

    @cached_property
    def gpus(self) -> tuple[GpuInfo, ...]:
        """Every GPU of the driver, by NVML or by /proc/driver/nvidia."""
        return tuple(state.info for state in self.get("look").view.gpus)

    @cached_property
    def commands(self) -> dict[int, str]:
        """Pid -> name, of every process of the host (those of containers left out)."""
        found = {}
        procfs = Procfs()
        own = own_inode()
        for pid in procfs.pids():
            try:
                process = procfs.read_process(pid)
            except OSError as exc:
                if not is_gone(exc):
                    raise
                continue
            if process and owner_of(process.cgroup) is None and process.pidns in (own, 0):
                found[pid] = process.comm
        return found

    # --- Proxmox ---

    @cached_property
    def containers(self) -> dict[int, ContainerConfig]:
        """Configurations of this node's containers; those that cannot be read are in `unread`."""
        self._need_pve()
        found = {}
        silent = 0
        for vmid in self.pve.containers():
            if silent >= _MAX_SILENT:
                raise CannotLookError(f"cannot read {self.pve_root}: {self.unread[-1].error}")
            begun_s = time.monotonic()
            try:
                config = self.pve.read_container(vmid)
            except (UnreadableError, ValueError) as exc:  # ValueError: a number with thousands of digits
                self.unread.append(Blind(f"configuration of container {vmid}", str(exc)))
                silent += time.monotonic() - begun_s >= PVE_DEADLINE_S
                continue
            if config is not None:
                found[vmid] = config
        return found

    @cached_property
    def gpu_containers(self) -> dict[int, ContainerConfig]:
        """Those that are given a GPU."""
        return {vmid: config for vmid, config in self.get("containers").items() if config.wants_gpu}

    @cached_property
    def vms(self) -> list[VmPassthrough]:
        self._need_pve()
        return self.pve.vms_with_hostpci()

    def hostpci_keys(self, vmid: int) -> dict[str, str]:
        """What is passed through to a VM, an address or the name of a mapping -> its key (`hostpci0`)."""
        return parse_hostpci_keys(self._pve_text(f"qemu-server/{vmid}.conf"))

    @cached_property
    def pve_missing(self) -> bool:
        """A Proxmox VE node on which pmxcfs does not run: its directory is empty, or not there."""
        path = os.path.join(self.pve_root, "local")
        proxmox = self.get("unit_files").find(CONTAINER_UNIT) is not None
        return proxmox and self._read(lambda: os.fsencode(os.readlink(path)), path) is None

    def _need_pve(self) -> None:
        """No configurations is not the same as no containers."""
        if self.get("pve_missing"):
            raise CannotLookError(f"cannot read {self.pve_root}: pmxcfs is not mounted there")

    @cached_property
    def node_name(self) -> str:
        """What /etc/pve calls this node; the host's name where it does not say."""
        path = os.path.join(self.pve_root, "local")
        target = self._read(lambda: os.fsencode(os.readlink(path)), path)
        return os.path.basename(os.fsdecode(target)) if target else os.uname().nodename.partition(".")[0]

    @cached_property
    def other_nodes(self) -> tuple[str, ...]:
        path = os.path.join(self.pve_root, "nodes")
        names = json.loads(self._read(lambda: json.dumps(sorted(os.listdir(path))).encode(), path) or b"[]")
        return tuple(name for name in names if name != self.get("node_name"))

    @cached_property
    def storages(self) -> dict[str, Storage]:
        return parse_storages(self._pve_text("storage.cfg"))

    @cached_property
    def pci_mappings(self) -> dict[str, tuple[str, ...]]:
        return parse_pci_mappings(self._pve_text("mapping/pci.cfg"), self.get("node_name"))

    def _pve_text(self, name: str) -> str:
        path = os.path.join(self.pve_root, name)

        def read() -> bytes:
            with open(path, "rb") as file:
                return file.read(1 << 20)

        return (self._read(read, path) or b"").decode("utf-8", "replace")

    def _read(self, read: Callable[[], bytes], what: str) -> bytes | None:
        """In a helper: /etc/pve may hang. None when it does not exist."""
        answer = call_with_deadline(read, PVE_DEADLINE_S)
        if answer.outcome is Outcome.ANSWER:
            return answer.data
        if answer.outcome is Outcome.FAILED and answer.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise CannotLookError(f"cannot read {what}: {answer.error}")

    # --- containers as they run ---

    @cached_property
    def runtime(self) -> dict[int, Runtime]:
        """Every container that has a cgroup, payload or monitor."""
        cgroups: Cgroupfs = self.get("cgroups")
        vmids, blind = cgroups.containers()
        if blind:
            raise CannotLookError(f"cannot read {blind[0].what}: {blind[0].error}")
        monitors = _vmids(f"{cgroups.mount}/{MONITOR}")
        return {vmid: self._runtime_of(vmid) for vmid in sorted({*vmids, *monitors})}

    def _runtime_of(self, vmid: int) -> Runtime:
        procfs = Procfs()
        own = own_inode()
        pids, frozen = _members(self.get("cgroups").open(vmid))
        monitors, _ = _members(self.get("cgroups").open(vmid, MONITOR))
        live = [p for pid in sorted(pids) if pid > 1 and (p := procfs.read_process(pid)) and not p.is_zombie]
        init = next((p.pid for p in live if p.ns_pids == (1,) and p.pidns not in (0, own)), None)
        return Runtime(len(live), len(monitors), init, frozen)

    # --- systemd ---

    @cached_property
    def booted(self) -> bool:
        """This machine runs systemd (sd_booted(3))."""
        return os.path.isdir("/run/systemd/system")

    @cached_property
    def unit_files(self) -> UnitFiles:
        return UnitFiles()

    @cached_property
    def units(self) -> dict[str, dict[str, str]]:
        """`systemctl show` of our units and those of containers; empty where systemd does not run."""
        if not self.booted:
            return {}
        if not installed(SYSTEMCTL):
            raise CannotLookError(f"cannot run {SYSTEMCTL}: not installed")
        vmids = sorted({*self.get("runtime"), *self.gpu_containers_or_none()}) or [100]
        names = [f"pve-container{kind}@{vmid}.service" for vmid in vmids for kind in ("", "-debug")]
        argv = [SYSTEMCTL, "show", "--no-pager", f"--property={SHOWN}", "pve-gpu-hostd.socket", "pve-gpu-hostd.service"]
        done = run_tool([*argv, *names], TOOL_DEADLINE_S + PER_UNIT_S * len(names))
        if done.status:
            raise CannotLookError(f"cannot ask systemd: {done.err.strip() or f'exit status {done.status}'}")
        return parse_show(done.out)

    def gpu_containers_or_none(self) -> dict[int, ContainerConfig]:
        try:
            found: dict[int, ContainerConfig] = self.get("gpu_containers")
        except (PgrError, OSError, ValueError):
            return {}
        return found

    # --- ours ---

    @cached_property
    def settings(self) -> Settings:
        try:
            return Settings(load(self.config_path), ())
        except BrokenConfigError as exc:
            return Settings(Config(), exc.problems)

    def _nvml_deadline_s(self) -> float:
        try:
            settings: Settings = self.get("settings")
        except (PgrError, OSError, ValueError):
            return Limits().nvml_deadline_s
        return settings.config.nvml.deadline_s


def parse_majors(text: str) -> dict[int, str]:
    """The section "Character devices:" of /proc/devices: major -> names."""
    found: dict[int, str] = {}
    for line in text.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isascii() and number.isdigit():
            found[int(number)] = f"{found[int(number)]}, {name}" if int(number) in found else name
    return found


def _members(cgroup: ContainerCgroup | None) -> tuple[set[int], bool]:
    """(pids here and below, frozen). LXC's inner cgroup may be the frozen one: its parent then says `frozen 0`."""
    if cgroup is None:
        return set(), False
    with cgroup:
        inner = cgroup.sub("ns")
        if inner is None:
            return cgroup.pids()[0], cgroup.frozen()
        with inner:
            return cgroup.pids()[0], cgroup.frozen() or inner.frozen()


def _vmids(path: str) -> list[int]:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    return [vmid for name in names if (vmid := vmid_of_name(name)) is not None]
