"""The driver's word, asked by the test itself with the real pynvml: the check that does not trust the product."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

MIB = 1 << 20


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML names it."""

    index: int
    minor: int
    uuid: str
    pci_bus_id: str
    name: str
    total_mib: int

    def __str__(self) -> str:
        return f"GPU {self.index} (minor {self.minor}, {self.uuid}, {self.pci_bus_id})"


@dataclass(frozen=True)
class Memory:
    """The v2 figures: `used` is without the driver's reserve (FACTS)."""

    used_mib: int
    reserved_mib: int
    free_mib: int
    used_bytes: int


def _text(value: Any) -> str:
    """Old versions of pynvml answer bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)


class Driver:
    """An open NVML session for the whole test run. The pytest process so is a client of the nodes, in none of the
    driver's lists: one more host process that must never be touched."""

    def __init__(self) -> None:
        import pynvml

        self.nvml = pynvml
        pynvml.nvmlInit()
        self.version = _text(pynvml.nvmlSystemGetDriverVersion())
        self.gpus: list[Gpu] = []
        self._handles: dict[str, Any] = {}
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpu = Gpu(
                index=index,
                minor=int(pynvml.nvmlDeviceGetMinorNumber(handle)),
                uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                pci_bus_id=_text(pynvml.nvmlDeviceGetPciInfo(handle).busId),
                name=_text(pynvml.nvmlDeviceGetName(handle)),
                total_mib=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total) // MIB,
            )
            self.gpus.append(gpu)
            self._handles[gpu.uuid] = handle

    def close(self) -> None:
        self.nvml.nvmlShutdown()

    def memory(self, gpu: Gpu) -> Memory:
        """The v2 call. Raises NVMLError."""
        said = self.nvml.nvmlDeviceGetMemoryInfo(self._handles[gpu.uuid], version=self.nvml.nvmlMemory_v2)
        used, reserved, free = int(said.used), int(said.reserved), int(said.free)
        return Memory(used // MIB, reserved // MIB, free // MIB, used)

    def used_mib(self, gpu: Gpu) -> int:
        return self.memory(gpu).used_mib

    def lists(self, gpu: Gpu) -> dict[str, dict[int, int | None]]:
        """List name -> pid -> MiB (None where the driver does not say)."""
        calls = {
            "compute": "nvmlDeviceGetComputeRunningProcesses",
            "graphics": "nvmlDeviceGetGraphicsRunningProcesses",
            "mps": "nvmlDeviceGetMPSComputeRunningProcesses",
        }
        found: dict[str, dict[int, int | None]] = {}
        for name, call in calls.items():
            try:
                said = getattr(self.nvml, call)(self._handles[gpu.uuid])
            except (AttributeError, self.nvml.NVMLError):
                continue
            found[name] = {int(p.pid): None if p.usedGpuMemory is None else int(p.usedGpuMemory) // MIB for p in said}
        return found

    def clients(self, gpu: Gpu) -> dict[int, int | None]:
        """pid -> MiB over all lists, each pid once."""
        merged: dict[int, int | None] = {}
        for listed in self.lists(gpu).values():
            merged.update(listed)
        return merged

    def wait_used_at_most(self, gpu: Gpu, mib: int, timeout_s: float) -> float:
        """Wait until the GPU uses no more than that -> seconds waited. Raises TimeoutError."""
        began = time.monotonic()
        while (used := self.used_mib(gpu)) > mib:
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"{gpu} still uses {used} MiB (wanted at most {mib}) after {timeout_s:g} s")
            time.sleep(0.01)
        return time.monotonic() - began

    def describe(self) -> str:
        """Every figure and list, for a failure report."""
        lines = [f"driver {self.version}"]
        for gpu in self.gpus:
            try:
                now = self.memory(gpu)
                lines.append(f"{gpu}: used {now.used_mib} reserved {now.reserved_mib} free {now.free_mib} MiB")
                lines.append(f"  lists (pid: MiB): {self.lists(gpu)}")
            except self.nvml.NVMLError as exc:
                lines.append(f"{gpu}: {exc}")
        return "\n".join(lines)
