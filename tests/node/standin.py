"""The GPUs of a virtual node: device nodes, /proc, the stand-in driver library and holders, all from tests/embedded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.embedded import build as embedded_build
from tests.embedded.node import DEFAULT_GPUS, Gpu, gpu_information, proc_devices
from tests.embedded.process import Holder, HolderHandle
from tests.embedded.wire import report_socket
from tests.node import build

if TYPE_CHECKING:
    from tests.node.node import NodeProcess, VirtualNode

STATE = "/run/nvidia-standin"
TOOLS = "/usr/share/pve-node/ct-tools"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
DRIVER_VERSION = "580.159"
# systemd gives a unit with ProtectKernelTunables= a /proc of its own, in which a real driver's files are and ours are not.
# The library keeps its state in files, the real one in the kernel.
SANDBOX_DROP_IN = "/etc/systemd/system/pve-gpu-hostd.service.d/90-standin.conf"
SANDBOX = f"""[Service]
BindPaths={STATE}/devices:/proc/devices {STATE}/driver:/proc/driver
ReadWritePaths={STATE}
"""
# Virtual consoles and their text device, which nobody else uses (NODE.md 1).
GPU_NODES = {"nvidia0": (4, 50), "nvidia1": (4, 51), "nvidiactl": (4, 55), "nvidia-uvm": (7, 50)}


class GpuHolder(HolderHandle):
    """A running holder and its family (tests/embedded/process.py), started through nsenter or lxc-attach."""

    outer: NodeProcess

    @property
    def live_outer_pids(self) -> list[int]:
        return [process.outer_pid for process in self.alive()]

    def end(self) -> None:
        """Kill what lives, collect lxc-attach or nsenter, close the descriptors."""
        self.kill()
        self.outer.kill()
        self.close()


class GpuStandin:
    """Installs the stand-ins into one node and steers them."""

    def __init__(self, node: VirtualNode, nvml: str, driver: bool) -> None:
        self.node = node
        self.gpus: tuple[Gpu, ...] = DEFAULT_GPUS if driver else ()
        self.holders: list[GpuHolder] = []
        self._control: dict[str, str] = {}
        self._built = embedded_build.artefacts()
        self._write_state()
        self._install_tools()
        if driver:
            self._make_nodes()
            self._mount_proc_files()
            self._install_library(nvml)

    def close(self) -> None:
        for holder in self.holders:
            holder.end()
        self.holders.clear()

    # ---- installation ----------------------------------------------------------------------------------------------

    def _write_state(self) -> None:
        for name in ("alloc", "state", "proc"):
            self.node.host_path(f"{STATE}/{name}").mkdir(parents=True, exist_ok=True)
        self.node.host_path(f"{STATE}/alloc").chmod(0o1777)
        self.node.run(["mount", "-t", "proc", "proc", f"{STATE}/proc"])
        self.node.write(f"{STATE}/pidns", f"{os.stat(f'/proc/{self.node.leader}/ns/pid').st_ino}\n")
        self.node.write(f"{STATE}/control", "")
        lines = [f"{gpu.minor} {gpu.uuid} {gpu.pci} {gpu.total_mib} {gpu.node} {gpu.name}\n" for gpu in self.gpus]
        self.node.write(f"{STATE}/gpus", "".join(lines))

    def _install_tools(self) -> None:
        self.node.copy_in(self._built.holder, f"{TOOLS}/opt/standin/holder")
        self.node.copy_in(tiny_init(), f"{TOOLS}/opt/standin/tiny-init")

    def _make_nodes(self) -> None:
        """A console exists from its first opening on; nvidia-uvm (vcs50) cannot be opened before that."""
        script = [f"mknod -m 666 /dev/{name} c {major} {minor}" for name, (major, minor) in GPU_NODES.items()]
        self.node.run(["sh", "-ec", "; ".join(script)])
        for minor in (50, 51):
            os.close(os.open(self.node.host_path(f"/dev/nvidia{minor - 50}"), os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))

    def _mount_proc_files(self) -> None:
        self.node.write(f"{STATE}/devices", proc_devices(Path("/proc/devices").read_text(), "nvidia"))
        script = f"mkdir {STATE}/driver; mount --bind {STATE}/devices /proc/devices; mount --bind {STATE}/driver /proc/driver"
        self.node.run(["sh", "-ec", script])
        self.node.write(SANDBOX_DROP_IN, SANDBOX)
        version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build\n"
        self.node.write("/proc/driver/nvidia/version", version, 0o444)
        for gpu in self.gpus:
            bus = gpu.pci.lower().removeprefix("0000")
            self.node.write(f"/proc/driver/nvidia/gpus/{bus}/information", gpu_information(gpu, bus), 0o444)

    def _install_library(self, nvml: str) -> None:
        if nvml == "none":
            return
        self.node.copy_in(self._built.library if nvml == "current" else self._built.old_library, LIBRARY)
        self.node.run(["ldconfig"])

    # ---- the driver's moods ----------------------------------------------------------------------------------------

    def control(self, **settings: object) -> None:
        for key, value in settings.items():
            per_gpu: Mapping[Any, object] = value if isinstance(value, Mapping) else {None: value}
            for minor, one in per_gpu.items():
                name = key if minor is None else f"{key}.{minor}"
                if one is None:
                    self._control.pop(name, None)
                else:
                    self._control[name] = words(one)
        text = "".join(f"{key} {value}\n" for key, value in self._control.items())
        self.node.write(f"{STATE}/control.new", text)
        self.node.host_path(f"{STATE}/control.new").rename(self.node.host_path(f"{STATE}/control"))

    def clear_control(self) -> None:
        self._control.clear()
        self.control()

    # ---- holders ---------------------------------------------------------------------------------------------------

    def hold(self, holder: Holder, prefix: Sequence[str], cgroup: str) -> GpuHolder:
        """Start it behind `prefix` (nothing: a host process) and wait until every process of it is ready."""
        program = "/opt/standin/holder" if prefix else f"{TOOLS}/opt/standin/holder"
        rename = ["bash", "-c", f'exec -a "$0" {program} "$@"', *holder.argv]
        ours, theirs = report_socket()
        log = os.memfd_create("holder-log")
        environment = {"HOLDER_SPEC": holder.spec(), "HOLDER_READY_FD": str(theirs.fileno())}
        outer = self.node.popen([*prefix, *rename], env=environment, cgroup=cgroup, stdin=subprocess.DEVNULL, stdout=log,
                                stderr=log, pass_fds=(theirs.fileno(),))
        theirs.close()
        handle = GpuHolder(outer.popen, ours, log, self.node.host_path(f"{STATE}/alloc"))
        handle.outer = outer
        self.holders.append(handle)
        for _ in range(holder.expected_reports()):
            handle.next_report()
        return handle


def words(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return " ".join(map(str, value)) if isinstance(value, (list, tuple, set, frozenset)) else str(value)


def tiny_init() -> Path:
    """tiny-init.c, compiled once per source text into the cache."""
    source = Path(__file__).with_name("tiny-init.c")
    target = build.cache_root() / f"tiny-init-{build.digest(source)}"
    if not target.exists():
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        subprocess.run(["cc", "-O1", "-Wall", "-static", "-o", temporary, source], check=True)
        temporary.rename(target)
    return target
