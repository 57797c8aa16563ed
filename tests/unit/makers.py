"""Facts in short words, for tests of decisions: a container 129 on GPUs of minor 50 (index 0) and 51."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hostd.model import (
    BlindSpot,
    DeviceId,
    DriverNumbers,
    Evidence,
    GpuInfo,
    GpuState,
    Holder,
    NvmlClient,
    NvmlGpu,
    NvmlSnapshot,
    Observation,
    OpenNodes,
    Process,
    ProcessRef,
    Stuck,
    Supervisor,
)

INFOS = {
    50: GpuInfo(50, "GPU-aaaaaaaa-0000", "0000:18:00.0", "H200", 0),
    51: GpuInfo(51, "GPU-bbbbbbbb-0001", "0000:3b:00.0", "H200", 1),
}
DRIVER = DriverNumbers({195: frozenset({"nvidia", "nvidiactl"}), 500: frozenset({"nvidia-uvm"})})
NO_DRIVER = DriverNumbers({})
CTL, UVM = DeviceId(195, 255), DeviceId(500, 0)


def ref(pid: int) -> ProcessRef:
    return ProcessRef(pid, 1000 + pid)


def process(pid: int, cgroup: str = "/lxc/129/ns/init.scope", **more: Any) -> Process:
    given = {
        "comm": f"p{pid}",
        "state": "S",
        "uid": 0,
        "ppid": 1,
        "threads": 1,
        "pidns": 7,
        "ns_pids": (pid % 100,),
        **more,
    }
    return Process(pid=pid, start_time=1000 + pid, cgroup=cgroup, **given)


def holder(pid: int, *gpus: int, seen: str = "fd nvml", vmid: int | None = 129, **more: Any) -> Holder:
    evidence = frozenset(Evidence(word) for word in seen.split())
    cgroup = f"/lxc/{vmid}/ns/init.scope" if vmid else "/system.slice/x.service"
    return Holder(process(pid, cgroup), vmid, evidence, tuple(gpus), **more)


def gpu(minor: int, used: int | None, own: Mapping[int, int] | None = None, **more: Any) -> GpuState:
    """`own` and `foreign`: listed pid -> MiB."""
    foreign: Mapping[int, int | None] = more.pop("foreign", {})
    clients: dict[int, int | None] = {**(own or {}), **foreign}
    dead = more.get("dead_clients", ())
    clients |= {c.pid: c.used_mib for c in dead}
    return GpuState(
        INFOS[minor],
        used,
        615,
        1,
        client_mib=clients,
        own_clients=tuple(own or ()),
        foreign_clients=tuple(foreign),
        **more,
    )


def look(*holders: Holder, gpus: Iterable[GpuState] = (), blind: Iterable[BlindSpot] = (), **more: Any) -> Observation:
    given: dict[str, Any] = {"running": True, "processes": 3, **more}
    return Observation(129, 0.0, tuple(holders), gpus=tuple(gpus), blind_spots=tuple(blind), **given)


def stuck(pid: int, wchan: str = "os_acquire_mutex") -> Stuck:
    return Stuck(ref(pid), pid, "D", wchan, "", True)


def unit(name: str = "vllm.service") -> Supervisor:
    return Supervisor("systemd", name, f"/lxc/129/ns/system.slice/{name}")


def nodes(*minors: int, uvm: bool = True, ctl: bool = True) -> OpenNodes:
    found = {DeviceId(195, minor) for minor in minors} | ({UVM} if uvm else set()) | ({CTL} if ctl else set())
    return OpenNodes(frozenset(found))


def nvml(minor: int, used: int | None, clients: Mapping[int, int | None] | None = None, **more: Any) -> NvmlGpu:
    listed = tuple(NvmlClient(pid, mib, frozenset({"compute"})) for pid, mib in (clients or {}).items())
    return NvmlGpu(INFOS[minor], 143771, used, 615, 1, listed, **more)


def snapshot(*gpus: NvmlGpu, **more: Any) -> NvmlSnapshot:
    return NvmlSnapshot(tuple(gpus), **more)


def silent(code: str = "driver-silent") -> BlindSpot:
    return BlindSpot("nvml", "snapshot", "no answer within the deadline", code)


def blocked(pid: int = 9) -> BlindSpot:
    return BlindSpot("procfs", f"mappings of process {pid}", "no answer within 1 s", "mappings-unreadable")


__all__ = ["INFOS", "replace"]
