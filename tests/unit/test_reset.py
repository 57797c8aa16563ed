"""Whom a reset would hit: pure, from what was seen."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostd.model import DeviceId, Evidence, GpuInfo, Holder, NvmlGpu, NvmlSnapshot, Process, ProcessRef
from hostd.reset import Journal, recover
from hostd.resetplan import radius_of, vfio_pci

A, B, C = "0000:18:00.0", "0000:3b:00.0", "0000:5e:00.0"
GPU_MAJOR, UVM_MAJOR = 195, 507


def gpu(index: int, pci: str, *peers: str, mig: bool = False, recovery: int = 0, persistence: bool = True) -> NvmlGpu:
    info = GpuInfo(index, f"GPU-{index}", pci, "H200", index)
    return NvmlGpu(info, 1000, 0, 0, 0, (), (), recovery, persistence, mig, peers)


def holder(
    pid: int, minor: int, vmid: int | None, cgroup: str = "/x", major: int = GPU_MAJOR, memory: bool = False
) -> Holder:
    process = Process(pid, 1, (), f"p{pid}", "S", 0, 1, 1, cgroup, 1)
    nodes = frozenset({DeviceId(major, minor)})
    return Holder(process, vmid, frozenset({Evidence.FD}), (minor,) if memory else (), nodes)


def others(*holders: Holder, gpus: tuple[NvmlGpu, ...] = (gpu(0, A), gpu(1, B)), **options: object) -> tuple[str, ...]:
    return radius_of(NvmlSnapshot(gpus), [A], holders, [ProcessRef(9, 1)], gpu_majors=(GPU_MAJOR,), **options).others  # type: ignore[arg-type]


def test_an_idle_gpu_is_alone() -> None:
    found = radius_of(NvmlSnapshot((gpu(0, A), gpu(1, B, persistence=False))), [A], [], [])
    assert found.others == () and [g.pci_bus_id for g in found.gpus] == [A]
    assert dict(found.persistence) == {"GPU-0": True}


@pytest.mark.parametrize("memory", [True, False], ids=["memory", "descriptor"])
def test_other_containers_and_the_host_are_named(memory: bool) -> None:
    assert others(holder(5, 0, 130, memory=memory)) == ("pid 5 (p5) of container 130",)
    assert others(holder(6, 0, None, memory=memory)) == ("pid 6 (p6) of the host",)
    assert others(holder(7, 1, 130, memory=memory)) == (), "another GPU"
    assert others(holder(8, 0, 129, memory=memory)) == ("pid 8 (p8) of container 129",), "not dealt with"
    assert others(holder(9, 0, 129, memory=memory)) == (), "the one that it is for"


def test_a_minor_of_another_driver_is_no_gpu() -> None:
    assert others(holder(5, 0, 130, major=UVM_MAJOR)) == ()


def test_declared_services_are_no_obstacle_under_their_own_cgroup_only() -> None:
    services = ("nvidia-persistenced.service",)
    assert others(holder(5, 0, None, "/system.slice/nvidia-persistenced.service"), services=services) == ()
    assert others(holder(5, 0, None, "/system.slice/other.service"), services=services)
    assert others(holder(5, 0, 130, "/system.slice/nvidia-persistenced.service"), services=services)


def test_linked_gpus_are_reached_however_far() -> None:
    gpus = (gpu(0, A, B), gpu(1, B, A, C), gpu(2, C, B))
    found = radius_of(NvmlSnapshot(gpus), [A], [holder(5, 2, 130)], [], gpu_majors=(GPU_MAJOR,))
    assert [g.pci_bus_id for g in found.gpus] == [A, B, C] and found.others == ("pid 5 (p5) of container 130",)


def test_mig_a_vm_and_an_unknown_peer_refuse() -> None:
    assert "MIG" in others(gpus=(gpu(0, A, mig=True),))[0]
    assert "vfio-pci" in others(gpus=(gpu(0, A, C),), vfio=(C,))[0]
    assert "unknown" in others(gpus=(gpu(0, A, C),))[0]


def test_the_drivers_wish_for_a_reboot_is_told() -> None:
    assert radius_of(NvmlSnapshot((gpu(0, A, recovery=2),)), [A], [], []).reboot == ("GPU 0",)


def device(root: Path, pci: str, vendor: str = "0x10de", kind: str = "0x030200", driver: str = "") -> None:
    (root / pci).mkdir()
    (root / pci / "vendor").write_text(vendor + "\n")
    (root / pci / "class").write_text(kind + "\n")
    if driver:
        (root / pci / "driver").symlink_to(f"../../drivers/{driver}")


def test_gpus_of_other_drivers(tmp_path: Path) -> None:
    device(tmp_path, A, driver="nvidia")
    device(tmp_path, B, driver="vfio-pci")
    device(tmp_path, C)
    device(tmp_path, "0000:5e:00.1", kind="0x040300", driver="vfio-pci")
    device(tmp_path, "0000:01:00.0", vendor="0x8086", driver="i915")
    assert vfio_pci(str(tmp_path)) == {B: "vfio-pci", C: ""}
    assert vfio_pci(str(tmp_path / "none")) == {}


def test_records_survive_and_names_are_checked(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.make()
    journal.write({"release_id": "0a", "stopped": ["x.service"]})
    assert journal.names() == ["0a"] and journal.read("0a") == {"release_id": "0a", "stopped": ["x.service"]}
    for name in ("", "../a", "a/b", "g"):
        assert journal.read(name) is None
        with pytest.raises(ValueError):
            journal.write({"release_id": name})
    journal.remove("0a")
    assert journal.names() == [] and recover(str(tmp_path)) == []


def test_one_reset_at_a_time(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    with journal.lock(0) as first, journal.lock(0) as second:
        assert first >= 0 and second == -1
    with journal.lock(0) as third:
        assert third >= 0


def test_a_record_under_a_running_reset_is_left_alone(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    with journal.lock(0):
        journal.write({"release_id": "0a", "pid": 1, "stopped": [], "persistence": {}})
        assert recover(str(tmp_path)) == [] and journal.names() == ["0a"]
    said = recover(str(tmp_path))
    assert said == ["the reset of release 0a was cut off: services and persistence mode are as they were"]
    assert journal.names() == []


def test_a_broken_record_is_removed(tmp_path: Path) -> None:
    journal = Journal(str(tmp_path))
    journal.make()
    (Path(journal.path) / "0b.json").write_text("{")
    assert recover(str(tmp_path)) == [] and journal.names() == []
