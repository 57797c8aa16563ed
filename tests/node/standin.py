"""The GPUs of a virtual node: device nodes, /proc, the stand-in driver library and holders, all from tests/embedded."""

from __future__ import annotations

import os
import shutil
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
# systemd gives a unit with ProtectKernelTunables= a /proc of its own, in which a real driver's files are and ours are not.
# The library keeps its state in files, the real one in the kernel.
SANDBOX_DROP_IN = "etc/systemd/system/pve-gpu-hostd.service.d/90-standin.conf"
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


def write_layer(layer: Path, driver: bool, nvml: str, nodes: bool) -> None:
    """The files that a node boots with: what /usr/lib/pve-node/gpu-standin and the containers need."""
    built = embedded_build.artefacts()
    layer.chmod(0o755)  # it becomes the node's /
    tools = layer / TOOLS.lstrip("/") / "opt/standin"
    tools.mkdir(parents=True)
    shutil.copy2(built.holder, tools / "holder")
    shutil.copy2(tiny_init(), tools / "tiny-init")
    if not driver:
        return
    write_driver_files(layer / "usr/share/pve-node/gpu")
    (layer / SANDBOX_DROP_IN).parent.mkdir(parents=True)
    (layer / SANDBOX_DROP_IN).write_text(SANDBOX)
    if nodes:
        (layer / "usr/share/pve-node/gpu/nodes").touch()
    if nvml != "none":
        (layer / LIBRARY.lstrip("/")).parent.mkdir(parents=True)
        shutil.copy2(built.library if nvml == "current" else built.old_library, layer / LIBRARY.lstrip("/"))


def write_driver_files(share: Path) -> None:
    (share / "driver/nvidia/gpus").mkdir(parents=True)
    (share / "devices").write_text(proc_devices(Path("/proc/devices").read_text(), "nvidia"))
    (share / "gpus").write_text(
        "".join(f"{g.minor} {g.uuid} {g.pci} {g.total_mib} {g.node} {g.name}\n" for g in DEFAULT_GPUS)
    )
    version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build\n"
    (share / "driver/nvidia/version").write_text(version)
    for gpu in DEFAULT_GPUS:
        bus = gpu.pci.lower().removeprefix("0000")
        (share / "driver/nvidia/gpus" / bus).mkdir()
        (share / "driver/nvidia/gpus" / bus / "information").write_text(gpu_information(gpu, bus))


def create_consoles() -> None:
    """A console exists from its first opening on; nvidia-uvm (vcs50) cannot be opened before that."""
    for minor in (50, 51, 55):
        os.close(os.open(f"/dev/tty{minor}", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))


class GpuStandin:
    """Steers the stand-ins of one node."""

    def __init__(self, node: VirtualNode, driver: bool) -> None:
        self.node = node
        self.gpus: tuple[Gpu, ...] = DEFAULT_GPUS if driver else ()
        self.holders: list[GpuHolder] = []
        self._control: dict[str, str] = {}

    def close(self) -> None:
        for holder in self.holders:
            holder.end()
        self.holders.clear()

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
        outer = self.node.popen(
            [*prefix, *rename],
            env=environment,
            cgroup=cgroup,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(),),
        )
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
