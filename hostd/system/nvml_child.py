"""The process that talks to the driver's library, so that nobody else has to (DESIGN 4, 6).

An NVML call can hang in D state for ever, and an open NVML handle is itself a GPU client. So the library lives in a
child, forked without exec by `hostd/system/nvml.py`, which answers one request after the other and may be killed or
abandoned at any moment. It never returns to the code it was forked from.

Every request, `nvmlInit` included, runs under an exclusive flock on `nvml.lock`, into which the owner writes who it is:
one call at a time on the node, and a wedged driver shows as a lock that is not given back (docs/architecture.md).

MiB here is bytes >> 20, rounded down as nvidia-smi does.
"""

from __future__ import annotations

import fcntl
import marshal
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from hostd import syscalls

LOCK_PATH = "/run/pve-gpu-release/nvml.lock"
LIBRARY = "libnvidia-ml.so.1"

FIELD_RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION: the constant is missing in pynvml before 12.560."""
HIGHEST_PID = (1 << 22) - 1
"""PID_MAX_LIMIT - 1 of 64-bit Linux (include/linux/threads.h): no process has a larger number."""

# nvmlReturn_t (nvml.h). Numbers, because classes for the newer ones are missing in older pynvml.
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, INSUFFICIENT_SIZE = 1, 3, 4, 7
DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND = 9, 12, 13
GPU_IS_LOST, RESET_REQUIRED, VERSION_MISMATCH, ARGUMENT_VERSION = 15, 16, 18, 25

DRIVER_WIDE = {
    UNINITIALIZED: "driver-silent",
    DRIVER_NOT_LOADED: "driver-not-loaded",
    LIBRARY_NOT_FOUND: "nvml-missing",
    VERSION_MISMATCH: "driver-mismatch",
}
"""Errors that say something about all GPUs at once -> code of the blind spot."""

LIST_VERSIONS = (("_v3", True), ("_v2", True), ("", False))
"""Symbol suffix, and whether its entries have the instance ids: 24 bytes since the 470 driver, 16 before."""
LISTS = (
    ("compute", "nvmlDeviceGetComputeRunningProcesses"),
    ("graphics", "nvmlDeviceGetGraphicsRunningProcesses"),
    ("mps", "nvmlDeviceGetMPSComputeRunningProcesses"),
)
LIST_TRIES = 5


class DriverLock:
    """`nvml.lock`, held for one request. Without its directory, or on a full /run, work goes on without lock or
    record.
    """

    def __init__(self, path: str, call: str) -> None:
        self._path = path
        self._call = call
        self._fd = -1

    def __enter__(self) -> DriverLock:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return self
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        record = f'{{"pid": {os.getpid()}, "since": {time.time():.3f}, "boot": {boot:.3f}, "call": "{self._call}"}}\n'
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, record.encode(), 0)
        except OSError:
            pass
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._fd < 0:
            return
        try:
            os.ftruncate(self._fd, 0)
        except OSError:
            pass
        os.close(self._fd)
        self._fd = -1


class DriverError(Exception):
    """The library cannot be asked at all. `code` is that of a blind spot."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class Device:
    """One GPU by NVML index: its handle and what does not change, or why there is no handle."""

    index: int
    handle: Any = None
    minor: int = -1
    uuid: str = ""
    pci: str = ""
    name: str = ""
    failure: int = 0


class Library:
    """pynvml with the library loaded and initialised, or the reason why not. Every method may block for ever."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._ready = False
        self._first_failure: DriverError | None = None
        self._devices: list[Device] = []
        self._driver_version = ""
        self._only_v1_memory = False
        self._list_calls: dict[str, tuple[Any, Any] | None] = {}

    def start(self) -> None:
        """Imports and initialises. A failure is kept for the first request, later requests try again."""
        try:
            self._init()
        except DriverError as exc:
            self._first_failure = exc

    def answer(self, request: tuple[Any, ...]) -> dict[str, Any]:
        """The reply to one request, built of what marshal knows; `failed` = (code, text) when nothing could be
        asked.
        """
        operation, *arguments = request
        try:
            if self._first_failure is not None:
                failure, self._first_failure = self._first_failure, None
                raise failure
            self._init()
            try:
                reply: dict[str, Any] = getattr(self, f"op_{operation}")(*arguments)
            except self._nvml.NVMLError as exc:
                raise DriverError(DRIVER_WIDE.get(exc.value, "driver-silent"), str(exc)) from exc
        except DriverError as exc:
            return {"failed": (exc.code, str(exc))}
        except Exception as exc:  # noqa: BLE001 - whatever a strange pynvml raises is better said than died of
            return {"failed": ("driver-silent", f"{operation}: {exc!r}")}
        return reply

    def shutdown(self) -> None:
        """Closes every handle, `nvmlShutdown`."""
        if self._ready:
            self._ready = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError:
                pass

    # --- requests ---

    def op_snapshot(self, uuids: list[str] | None, nvlink: bool) -> dict[str, Any]:
        spots: list[tuple[str, str, str]] = []
        devices = self._find_devices()
        peers = self._nvlink_peers(devices) if nvlink else {}
        return {
            "driver": self._version(),
            "gpus": [
                self._look(device, peers.get(device.index, []), spots)
                for device in devices
                if uuids is None or device.uuid in uuids
            ],
            "spots": spots,
        }

    def op_memory(self, uuids: list[str]) -> dict[str, Any]:
        known = {d.uuid: d for d in self._devices if d.handle is not None} or {d.uuid: d for d in self._find_devices()}
        used: dict[str, int | None] = {}
        spots: list[tuple[str, str, str]] = []
        for uuid in uuids:
            used[uuid] = None
            try:
                if uuid in known:
                    used[uuid] = self._memory(self._handle(known[uuid]))[1]
            except self._nvml.NVMLError as exc:
                code, text = self._gpu_error(exc)
                spots.append((f"GPU {uuid}", text, code))
        return {"used": used, "spots": spots}

    def op_recovery(self) -> dict[str, Any]:
        return {"actions": {d.uuid: self._recovery(d) for d in self._find_devices() if d.handle is not None}}

    def op_persistence(self, uuid: str, enabled: bool) -> dict[str, Any]:
        for device in self._find_devices():
            if device.uuid == uuid and device.handle is not None:
                try:
                    self._nvml.nvmlDeviceSetPersistenceMode(device.handle, int(enabled))
                except self._nvml.NVMLError as exc:
                    code, text = self._gpu_error(exc)
                    return {"error": (code, text)}
                return {}
        return {"error": ("gpu-lost", "the driver does not know this GPU")}

    # --- one GPU ---

    def _look(self, device: Device, peers: list[str], spots: list[tuple[str, str, str]]) -> dict[str, Any]:
        gpu: dict[str, Any] = {
            "index": device.index,
            "minor": device.minor,
            "uuid": device.uuid,
            "pci": device.pci,
            "name": device.name,
            "peers": peers,
        }
        try:
            self._fill(gpu, self._handle(device), device, spots)
        except self._nvml.NVMLError as exc:
            gpu["code"], gpu["error"] = self._gpu_error(exc)
            gpu["used"] = gpu["reserved"] = gpu["bar1"] = None
        return gpu

    def _fill(self, gpu: dict[str, Any], handle: Any, device: Device, spots: list[tuple[str, str, str]]) -> None:
        mig = self._optional(self._nvml.nvmlDeviceGetMigMode, handle)
        gpu["mig"] = None if mig is None else bool(mig[0])
        before = self._memory(handle) if not gpu["mig"] else (None, None, None)
        gpu["clients"], gpu["odd"] = self._clients(handle, device, spots)
        # Asked twice, and the larger counts: a client that comes or goes while the lists are read can then make ghost
        # memory look larger for a moment, but never hide it.
        after = self._memory(handle) if not gpu["mig"] else (None, None, None)
        gpu["total"], gpu["reserved"] = after[0], after[2]
        gpu["used"] = None if before[1] is None or after[1] is None else max(before[1], after[1])
        bar1 = self._optional(self._nvml.nvmlDeviceGetBAR1MemoryInfo, handle)
        gpu["bar1"] = None if bar1 is None else bar1.bar1Used >> 20
        persistence = self._optional(self._nvml.nvmlDeviceGetPersistenceMode, handle)
        gpu["persistence"] = None if persistence is None else bool(persistence)
        gpu["recovery"] = self._recovery(device)
        total = gpu["total"]
        gpu["clients"] = [
            (pid, None if used and total and used > total else used, lists) for pid, used, lists in gpu["clients"]
        ]  # more than there is cannot be true, and would hide any amount of ghost memory
        if gpu["mig"]:
            gpu["code"], gpu["error"] = "figures-unavailable", "MIG mode: no memory figures per GPU"
        elif any(used is None for _, used, _ in gpu["clients"]):
            gpu["code"] = "figures-unavailable"
        elif self._only_v1_memory:
            gpu["code"] = "memory-v1"

    def _memory(self, handle: Any) -> tuple[int | None, int | None, int | None]:
        """(total, used, reserved) in MiB; reserved is None on a driver (before 510) that counts it as used."""
        version = getattr(self._nvml, "nvmlMemory_v2", None)
        if version is not None and not self._only_v1_memory:
            try:
                memory = self._nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
            except self._nvml.NVMLError as exc:
                if exc.value not in (FUNCTION_NOT_FOUND, ARGUMENT_VERSION):
                    raise
            else:
                return memory.total >> 20, memory.used >> 20, memory.reserved >> 20
        self._only_v1_memory = True
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        return memory.total >> 20, memory.used >> 20, None

    def _clients(
        self, handle: Any, device: Device, spots: list[tuple[str, str, str]]
    ) -> tuple[list[tuple[int, int | None, list[str]]], list[int]]:
        """Clients of the three lists, each pid once with the largest of its figures; and pids that cannot be."""
        used: dict[int, int | None] = {}
        kinds: dict[int, list[str]] = {}
        odd: set[int] = set()
        for kind, symbol in LISTS:
            entries, whole = self._list(handle, kind, symbol)
            if not whole:
                spots.append((f"{symbol} of GPU {device.index}", "the list grew faster than it could be read", ""))
            for pid, memory in entries:
                if pid <= 1 or pid > HIGHEST_PID:
                    odd.add(pid)
                    continue
                if kind not in kinds.setdefault(pid, []):
                    kinds[pid].append(kind)
                figures = [figure for figure in (used.get(pid), memory) if figure is not None]
                used[pid] = max(figures, default=None)
        return [(pid, used[pid], kinds[pid]) for pid in used], sorted(odd)

    def _list(self, handle: Any, kind: str, symbol: str) -> tuple[list[tuple[int, int | None]], bool]:
        """([(pid, MiB or None)], complete). pynvml asks for the size first, raises when the list has grown by the
        second call, and 11.525 knows only the newest symbol: so this is called directly, with room to spare."""
        import ctypes

        call = self._list_call(kind, symbol)
        if call is None:
            return [], True
        function, entry = call
        room = 64
        for _ in range(LIST_TRIES):
            array, count = (entry * room)(), ctypes.c_uint(room)
            result = function(handle, ctypes.byref(count), array)
            if result != INSUFFICIENT_SIZE:
                break
            room = max(2 * room, 2 * count.value + 5)
        if result == NOT_SUPPORTED and kind != "compute":
            return [], True
        if result not in (0, INSUFFICIENT_SIZE):
            raise self._nvml.NVMLError(result)
        filled = array[: min(count.value, len(array))]
        if result:
            filled = [e for e in filled if e.pid]
        return [(e.pid, None if e.used == (1 << 64) - 1 else e.used >> 20) for e in filled], not result

    def _list_call(self, kind: str, symbol: str) -> tuple[Any, Any] | None:
        """The newest form of a list call that the library has. None: none at all, a driver older than MPS lists."""
        if kind not in self._list_calls:
            import ctypes

            short = [("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong)]
            long = [*short, ("gpu_instance", ctypes.c_uint), ("compute_instance", ctypes.c_uint)]
            library = ctypes.CDLL(LIBRARY)  # loaded already: the same object that pynvml uses
            self._list_calls[kind] = next(
                (
                    (function, type("Entry", (ctypes.Structure,), {"_fields_": long if has_instances else short}))
                    for suffix, has_instances in LIST_VERSIONS
                    if (function := getattr(library, symbol + suffix, None)) is not None
                ),
                None,
            )
            if kind == "compute" and self._list_calls[kind] is None:
                raise DriverError("nvml-missing", f"{LIBRARY} has no {symbol}")
        return self._list_calls[kind]

    def _recovery(self, device: Device) -> int | None:
        values = self._optional(self._nvml.nvmlDeviceGetFieldValues, device.handle, [FIELD_RECOVERY_ACTION])
        if values is None or values[0].nvmlReturn != 0:
            return None
        return int(values[0].value.uiVal)

    def _nvlink_peers(self, devices: list[Device]) -> dict[int, list[str]]:
        """NVML index -> PCI ids of linked GPUs. Behind NVSwitch a GPU is linked with every other one that is."""
        direct: dict[int, set[str]] = {}
        switched: set[int] = set()
        for device in devices:
            direct[device.index] = set()
            for link in range(getattr(self._nvml, "NVML_NVLINK_MAX_LINKS", 18)):
                if device.handle is None or not self._optional(
                    self._nvml.nvmlDeviceGetNvLinkState, device.handle, link
                ):
                    continue
                kind = self._optional(self._nvml.nvmlDeviceGetNvLinkRemoteDeviceType, device.handle, link)
                remote = self._optional(self._nvml.nvmlDeviceGetNvLinkRemotePciInfo, device.handle, link)
                address = _pci(remote) if remote is not None else ""
                if kind == 0 or any(address == d.pci for d in devices):
                    direct[device.index].add(address)
                else:
                    switched.add(device.index)
        for device in devices:
            if device.index in switched:
                direct[device.index] |= {d.pci for d in devices if d.index in switched and d is not device}
        return {index: sorted(peers - {""}) for index, peers in direct.items()}

    # --- the library ---

    def _init(self) -> None:
        if self._ready:
            return
        try:
            import pynvml
        except Exception as exc:
            raise DriverError("nvml-missing", f"cannot import pynvml: {exc}") from exc
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as exc:
            code = "nvml-missing" if exc.value == FUNCTION_NOT_FOUND else DRIVER_WIDE.get(exc.value, "driver-silent")
            raise DriverError(code, f"nvmlInit: {exc}") from exc
        self._ready = True

    def _version(self) -> str:
        self._driver_version = self._driver_version or self._optional(self._nvml.nvmlSystemGetDriverVersion) or ""
        return self._driver_version

    def _find_devices(self) -> list[Device]:
        """Every GPU that NVML counts, those without a handle included; kept while all have one."""
        count = self._nvml.nvmlDeviceGetCount()
        if len(self._devices) != count or any(d.handle is None for d in self._devices):
            self._devices = [self._find_device(index) for index in range(count)]
        return self._devices

    def _find_device(self, index: int) -> Device:
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as exc:
            if exc.value in DRIVER_WIDE:
                raise
            return Device(index, failure=exc.value)
        minor = self._identity(nvml.nvmlDeviceGetMinorNumber, handle)
        pci = self._identity(nvml.nvmlDeviceGetPciInfo, handle)
        return Device(
            index,
            handle,
            -1 if minor is None else minor,
            self._identity(nvml.nvmlDeviceGetUUID, handle) or "",
            "" if pci is None else _pci(pci),
            self._identity(nvml.nvmlDeviceGetName, handle) or "",
        )

    def _handle(self, device: Device) -> Any:
        if device.handle is None:
            raise self._nvml.NVMLError(device.failure)
        return device.handle

    def _identity(self, function: Callable[..., Any], handle: Any) -> Any:
        """What a lost GPU may still say about itself, or None."""
        try:
            return function(handle)
        except (self._nvml.NVMLError, ValueError):
            return None

    def _optional(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The answer, or None where this GPU, driver or pynvml has no such thing. Raises when the GPU is lost."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as exc:
            if exc.value in DRIVER_WIDE or exc.value in (GPU_IS_LOST, RESET_REQUIRED):
                raise
            return None

    def _gpu_error(self, exc: Any) -> tuple[str, str]:
        """(code, text) of an error of one GPU. Raises it again when it is one of the whole driver."""
        if exc.value in DRIVER_WIDE:
            raise exc
        if exc.value in (NOT_SUPPORTED, NO_PERMISSION):
            return "figures-unavailable", str(exc)
        if exc.value == RESET_REQUIRED:
            return "gpu-lost", "the GPU requires a reset"
        return "gpu-lost", str(exc)


def _pci(info: Any) -> str:
    return f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0"


# --- the process -----------------------------------------------------------------------------------------------------


def main(requests: int, replies: int, parent: int, lock_path: str, init: bool) -> None:
    """Serves until the request pipe ends. To be called in a fresh fork with all signals blocked; never to be
    returned from into the caller's code (the caller calls `os._exit`)."""
    requests, replies = _isolate(requests, replies, parent)
    library = Library()
    if init:
        with DriverLock(lock_path, "nvmlInit"):
            library.start()
    while (frame := _read_frame(requests)) is not None:
        request = marshal.loads(frame)
        with DriverLock(lock_path, request[0]):
            reply = library.answer(request)
        write_frame(replies, reply)
    with DriverLock(lock_path, "nvmlShutdown"):
        library.shutdown()


def _isolate(requests: int, replies: int, parent: int) -> tuple[int, int]:
    """Makes the fork a process of its own: no terminal, no handlers, no descriptors but the two pipes, dies with
    `parent`.
    """
    syscalls.set_pdeathsig(signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
    os.chdir("/")  # keep no mount of the caller's busy
    os.setsid()  # Ctrl-C is for the parent: it still wants to look and to report
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    requests, replies = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (requests, replies))
    null = os.open("/dev/null", os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    syscalls.close_other_fds({0, 1, 2, requests, replies})
    try:
        with open("/proc/self/comm", "w", encoding="ascii") as comm:
            comm.write("pgr-nvml")
    except OSError:
        pass
    return requests, replies


def write_frame(fd: int, message: Any) -> None:
    """One message: four bytes of length, then marshal (both ends are one interpreter; JSON would cost its import)."""
    body = marshal.dumps(message)
    data = memoryview(len(body).to_bytes(4, "little") + body)
    while data:
        data = data[os.write(fd, data) :]


def _read_frame(fd: int) -> bytes | None:
    head = _read_exactly(fd, 4)
    return None if head is None else _read_exactly(fd, int.from_bytes(head, "little"))


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(fd, size)
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def as_list(uuids: Iterable[str] | None) -> list[str] | None:
    """What marshal takes, of any iterable."""
    return None if uuids is None else [str(uuid) for uuid in uuids]
