"""What the real pynvml says, as JSON: executed inside a node or container by `scope.nvml()`; argv: one path to add."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

if len(sys.argv) > 1:
    sys.path.insert(0, sys.argv[1])
import pynvml

LISTS = {
    "compute": pynvml.nvmlDeviceGetComputeRunningProcesses,
    "graphics": pynvml.nvmlDeviceGetGraphicsRunningProcesses,
    "mps": pynvml.nvmlDeviceGetMPSComputeRunningProcesses,
}
# A missing versioned symbol raises this one in some releases; it is no NVMLError.
MISMATCHES = (pynvml.NVMLLibraryMismatchError,) if hasattr(pynvml, "NVMLLibraryMismatchError") else ()
MIB = 1 << 20


def said(call: Callable[[], Any]) -> Any:
    """The answer, or "NVMLError_…" as text."""
    try:
        return call()
    except (pynvml.NVMLError, *MISMATCHES) as error:
        return f"{type(error).__name__}: {error}"


def clients(function: Callable[[Any], Any], handle: Any) -> Any:
    listed = said(lambda: function(handle))
    if isinstance(listed, str):
        return listed
    return {str(c.pid): None if c.usedGpuMemory is None else c.usedGpuMemory // MIB for c in listed}


def memory(handle: Any, *version: int) -> Any:
    figures = said(lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, *version))
    if isinstance(figures, str):
        return figures
    return {name: getattr(figures, name) // MIB for name, _ in figures._fields_ if name != "version"}


def recovery_action(handle: Any) -> Any:
    value = pynvml.nvmlDeviceGetFieldValues(handle, [230])[0]
    return value.value.uiVal if value.nvmlReturn == 0 else f"error {value.nvmlReturn}"


def describe(index: int) -> dict[str, Any]:
    handle = said(lambda: pynvml.nvmlDeviceGetHandleByIndex(index))
    if isinstance(handle, str):
        return {"index": index, "error": handle}
    return {
        "index": index,
        "minor": said(lambda: pynvml.nvmlDeviceGetMinorNumber(handle)),
        "uuid": said(lambda: pynvml.nvmlDeviceGetUUID(handle)),
        "pci": said(lambda: pynvml.nvmlDeviceGetPciInfo(handle).busId),
        "name": said(lambda: pynvml.nvmlDeviceGetName(handle)),
        "memory": memory(handle),
        "memory_v2": memory(handle, pynvml.nvmlMemory_v2),
        "bar1": memory_bar1(handle),
        **{name: clients(function, handle) for name, function in LISTS.items()},
        "mig": said(lambda: pynvml.nvmlDeviceGetMigMode(handle)),
        "persistence": said(lambda: pynvml.nvmlDeviceGetPersistenceMode(handle)),
        "compute_mode": said(lambda: pynvml.nvmlDeviceGetComputeMode(handle)),
        "recovery_action": said(lambda: recovery_action(handle)),
        "nvlink": said(lambda: pynvml.nvmlDeviceGetNvLinkState(handle, 0)),
        "nvlink_peer": said(lambda: pynvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, 0).busId),
    }


def memory_bar1(handle: Any) -> Any:
    return said(lambda: pynvml.nvmlDeviceGetBAR1MemoryInfo(handle).bar1Used // MIB)


def main() -> None:
    pynvml.nvmlInit()
    gpus = [describe(index) for index in range(pynvml.nvmlDeviceGetCount())]
    version = said(pynvml.nvmlSystemGetDriverVersion)
    pynvml.nvmlShutdown()
    print(json.dumps({"driver": version, "gpus": gpus}))


if __name__ == "__main__":
    try:
        main()
    except pynvml.NVMLError as error:
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "gpus": []}))
