"""The few calls of the CUDA driver library that the holders need, through ctypes. Standard library only.

No framework, no kernels, no managed memory: plain `cuMemAlloc` and `cuMemHostAlloc`, in the device's primary context.
Signatures and the `_v2` names are those of cuda.h (CUDA driver API).
"""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

LIBRARY_PATHS = (
    "libcuda.so.1",
    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
    "/usr/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/usr/local/nvidia/lib/libcuda.so.1",
)


class CudaError(Exception):
    """A driver call said no: `call` and CUDA's own name of the error."""


class IpcHandle(ctypes.Structure):
    """`CUipcMemHandle`, passed by value."""

    _fields_ = [("reserved", c_ubyte * 64)]


class Uuid(ctypes.Structure):
    """`CUuuid`."""

    _fields_ = [("bytes", c_ubyte * 16)]


@dataclass(frozen=True)
class Device:
    """One GPU as CUDA counts them in this process; `uuid` is spelled as NVML spells it."""

    ordinal: int
    uuid: str
    name: str
    total_mib: int


def load_library() -> ctypes.CDLL:
    """Open libcuda without calling into it. Raises CudaError naming every place tried."""
    said = []
    for path in LIBRARY_PATHS:
        try:
            return ctypes.CDLL(path)
        except OSError as exc:
            said.append(str(exc))
    raise CudaError("cannot load libcuda: " + "; ".join(said))


class Cuda:
    """libcuda after `cuInit`. Contexts are per thread: call `use` in each thread that allocates or copies."""

    def __init__(self, library: ctypes.CDLL | None = None) -> None:
        self.lib = library or load_library()
        self._contexts: dict[int, c_void_p] = {}
        self._call("cuInit", c_uint(0))

    def _function(self, *names: str) -> Any:
        for name in names:
            function = getattr(self.lib, name, None)
            if function is not None:
                function.restype = c_int
                return function
        raise CudaError(f"libcuda has none of {names}")

    def _call(self, names: str | tuple[str, ...], *args: object) -> None:
        names = (names,) if isinstance(names, str) else names
        status = self._function(*names)(*args)
        if status != 0:
            text = c_char_p()
            self._function("cuGetErrorName")(c_int(status), byref(text))
            raise CudaError(f"{names[0]}: {(text.value or b'?').decode()} ({status})")

    def devices(self) -> list[Device]:
        """Every GPU this process may use, in CUDA's order."""
        count = c_int()
        self._call("cuDeviceGetCount", byref(count))
        found = []
        for ordinal in range(count.value):
            device, raw, total = c_int(), Uuid(), c_size_t()
            name = ctypes.create_string_buffer(128)
            self._call("cuDeviceGet", byref(device), c_int(ordinal))
            self._call(("cuDeviceGetUuid_v2", "cuDeviceGetUuid"), byref(raw), device)
            self._call("cuDeviceGetName", name, c_int(128), device)
            self._call("cuDeviceTotalMem_v2", byref(total), device)
            digits = bytes(raw.bytes).hex()
            parts = (digits[0:8], digits[8:12], digits[12:16], digits[16:20], digits[20:32])
            found.append(Device(ordinal, "GPU-" + "-".join(parts), name.value.decode(), total.value >> 20))
        return found

    def use(self, ordinal: int) -> None:
        """Make the primary context of this device current in the calling thread; creates it when it is the first."""
        context = self._contexts.get(ordinal)
        if context is None:
            device, context = c_int(), c_void_p()
            self._call("cuDeviceGet", byref(device), c_int(ordinal))
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._contexts[ordinal] = context
        self._call("cuCtxSetCurrent", context)

    def allocate(self, size: int) -> int:
        """`size` bytes of device memory in the current context -> device pointer."""
        pointer = c_uint64()
        self._call("cuMemAlloc_v2", byref(pointer), c_size_t(size))
        return pointer.value

    def allocate_pinned(self, size: int) -> int:
        """`size` bytes of pinned host memory -> address."""
        pointer = c_void_p()
        self._call("cuMemHostAlloc", byref(pointer), c_size_t(size), c_uint(0))
        return pointer.value or 0

    def fill(self, pointer: int, value: int, size: int) -> None:
        """Write `value` into every byte and wait until it is done."""
        self._call("cuMemsetD8_v2", c_uint64(pointer), c_ubyte(value), c_size_t(size))
        self._call("cuCtxSynchronize")

    def read(self, pointer: int, size: int) -> bytes:
        """Copy device memory back."""
        buffer = (c_ubyte * size)()
        self._call("cuMemcpyDtoH_v2", byref(buffer), c_uint64(pointer), c_size_t(size))
        return bytes(buffer)

    def memory_info_mib(self) -> tuple[int, int]:
        """(free, total) of the current device, as the driver tells this process."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value >> 20, total.value >> 20

    def ipc_export(self, pointer: int) -> bytes:
        """A handle with which another process can map this allocation."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(pointer))
        return bytes(handle.reserved)

    def ipc_import(self, raw: bytes) -> int:
        """Map another process's allocation into the current context -> device pointer."""
        handle = IpcHandle((c_ubyte * 64)(*raw))
        pointer = c_uint64()
        open_handle = self._function("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle")
        open_handle.argtypes = [POINTER(c_uint64), IpcHandle, c_uint]
        self._call(("cuIpcOpenMemHandle_v2", "cuIpcOpenMemHandle"), byref(pointer), handle, c_uint(1))
        return pointer.value


def environment() -> dict[str, str]:
    """The caller's environment for a CUDA process: every GPU visible, in PCI order, no compute cache on disk."""
    kept = {k: v for k, v in os.environ.items() if k not in ("CUDA_VISIBLE_DEVICES", "PYTHONPATH", "PYTHONHOME")}
    return kept | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_CACHE_DISABLE": "1"}
