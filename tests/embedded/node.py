"""The embedded node: a Proxmox-like machine with stand-in GPUs, in namespaces of its own, built in some 50 ms.

Real processes, namespaces and cgroups; only the driver is a stand-in (`nvml/nvml.c`), found by the real pynvml through
the loader's own path. In short:

    with Node() as node:                                        # two GPUs: minors 50 (index 0) and 51
        ct = node.container(129, devices=GPU_NODES)             # Proxmox's cgroups, own PID and mount namespace
        engine = ct.spawn_holder(                               # returns when the process is ready
            argv=("VLLM::EngineCore",), comm="VLLM::EngineCor", cgroup="system.slice/vllm.service",
            open=("/dev/nvidia0", "/dev/nvidiactl"), alloc=("50:42759:compute",))
        done = node.run([sys.executable, "-I", "-m", "hostd.cli", "129", "--json"])     # CompletedProcess
        node.control(free_delay_ms=300)                         # read at every NVML call
        engine.pid, engine.alive(), engine.kill(), engine.wait_gone()

Node(gpus=DEFAULT_GPUS, driver="nvidia" | "zero" | "none", nvml="current" | "old" | "none", hostname="pve8")
    driver "zero": the mapping-only node (major 1 is the driver's and c 1 5 the only GPU); "none": no NVIDIA driver.
    nvml "old": no _v3 lists and no v2 memory; "none": the library is missing.
Scope (Node, Container): root, path(), write(), read(), mknod(), run(), popen(), spawn_holder(), nvml(), frozen_fs(),
    cgroup(), freeze(), thaw(), populated(), init_process.
    run(argv, env=, cwd=, input=, cgroup=, uid=, check=, timeout=) -> CompletedProcess; popen(…, pid=) -> Running.
    cgroup= is below the scope's own one; "/…" is any of the node's. Reading /proc/PID/cgroup with read() shows this
    machine's paths: `run(["cat", …])` or `Process.cgroup()` show the node's.
    nvml() is what the real pynvml says inside: nvml()["gpus"][0]["compute"] == {"4711": 42759}.
    frozen_fs() -> FrozenFs: freeze(), thaw(), path(name); `with` thaws. Put a holder on it with touch= or fault=,
    then trigger() and main.wait_stuck().
Node: container(), configure(vmid, text, pve_node=), control(**), clear_control(), allocations(), outer_pid(pid)
Container: init_pid, monitor, payload, attach(), nested(), become_holder(), members(), kill_monitor(), stop()
Holder (all the ways of holding), HolderHandle (main, by_role(), next_report(), trigger(), kill(), wait_gone()),
    Process (pid, ns_pid, outer_pid, start_time, alive(), wait_gone(), wait_state(), kill(), cgroup()): see process.py.
    All pids called `pid` are the node's (what the product sees).
pytest: `from tests.embedded.fixtures import node, container, make_node, nothing_left_behind, require_node`.

control(): KEY=VALUE for all GPUs, KEY={MINOR: VALUE} for one; None removes. Several words are joined by spaces.
    functions are named as in NVML, with or without _vN ("nvmlInit" covers all), or "*".
    hang="nvmlInit"               sleeps (killable) until the control says otherwise
    hang_d="nvmlDeviceGetMemoryInfo", hang_d_path=fs.path("x")     touches a file on a frozen file system: D state
    delay="…", delay_ms=N         that call takes longer            init_delay_ms=N     every nvmlInit takes longer
    crash="…"   exit="…"          SIGSEGV, or exit status 3, in mid-call
    error="nvmlInit=18 …"         returns that NVML error           lost={51: 1}        GPU_IS_LOST, the count keeps it
    extra_clients={50: "4711:100:compute 0:1:mps"}   PID:MIB:KINDS, listed whatever they are; not in `used`
    hide_clients="PID … | *"      not listed, memory stays used     memory_na="PID … | *"   per-process figure missing
    grow=N, grow_times=K          fetches find N clients more than the size call said
    ghost_mib={50: N}             used by nobody                    leak_mib=N          never freed of each allocation
    free_delay_ms=N               held so long after the last holder is gone, then
    fall_mib_per_ms=R, fall_step_mib=N    falls at that rate in such steps; list_draining=1 lists it meanwhile.
                                  The clock of an allocation starts when its last holder goes.
    reserve_mib=615  context_mib=0  bar1_used_mib=1  mig=0|1|-1  persistence=0|1  recovery_action=0..  (-1: unsupported)
    compute_mode=0  nvlink="50:51"  driver_version="580.159"
Shorthands: MISMATCH, NOT_LOADED, NO_V2_MEMORY are dicts for control(**…).

Everything goes when the node is closed, and when the test process dies: a guard outside the namespaces thaws frozen
file systems, ends the PID namespace (all members with it) and removes the cgroups.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType

from .build import artefacts
from .container import Container, build
from .frozen import FrozenFs
from .process import Holder, HolderHandle, Process, wait_until
from .scope import MS_BIND, MS_MOVE, MS_NOSUID, STANDIN, Family, Running, Scope
from .wire import Init, NodeError, report_socket

__all__ = [
    "DEFAULT_GPUS", "GPU_NODES", "MISMATCH", "NOT_LOADED", "NO_V2_MEMORY", "STANDIN", "Container", "FrozenFs", "Gpu",
    "Holder", "HolderHandle", "Node", "NodeError", "Process", "Running", "Scope", "wait_until",
]  # fmt: skip

MISMATCH = {"error": "nvmlInit=18"}
NOT_LOADED = {"error": "nvmlInit=9"}
NO_V2_MEMORY = {"error": "nvmlDeviceGetMemoryInfo_v2=13"}
GPU_NODES = ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm")
WORK = "/run/.embedded-node"
DRIVER_VERSION = "580.159"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A stand-in GPU; their order is NVML's index order."""

    minor: int
    uuid: str
    pci: str
    node: str
    total_mib: int = 143771
    name: str = "NVIDIA H200"


DEFAULT_GPUS = (
    Gpu(50, "GPU-6a1f0e52-93c4-4d0b-8f2e-0d5c7b1a2e50", "00000000:18:00.0", "/dev/nvidia0"),
    Gpu(51, "GPU-c07d94b1-2e8a-47f6-b3d9-51f0a6e83c51", "00000000:3B:00.0", "/dev/nvidia1"),
)
ZERO_GPU = Gpu(5, "GPU-00000000-0000-4000-8000-000000000005", "00000000:18:00.0", "/dev/nvidia0")


class Node(Scope):
    """The node; use as a context manager, or call close()."""

    def __init__(
        self,
        gpus: Sequence[Gpu] = DEFAULT_GPUS,
        *,
        driver: str = "nvidia",
        nvml: str = "current",
        hostname: str = "pve8",
    ) -> None:
        self.gpus = (ZERO_GPU,) if driver == "zero" else () if driver == "none" else tuple(gpus)
        self.driver = driver
        self.hostname = hostname
        self._nvml = "none" if driver == "none" else nvml
        self._control: dict[str, str] = {}
        built = artefacts()
        self._directory = cgroup2_mount() / f"pve-gpu-node-{os.getpid()}-{secrets.token_hex(4)}"
        self._directory.mkdir()
        self._log = os.memfd_create("guard-log")
        ours, theirs = report_socket()
        self._life, guard_life = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._guard = self._start_guard(built.nodetool, theirs, guard_life)
        theirs.close()
        guard_life.close()
        try:
            init = Init.greet(ours)
            super().__init__(init, built, Family(guard=self._life), self._directory, "", "system.slice/node.service")
            self._furnish()
        except BaseException as error:
            self._end_guard()
            ours.close()
            raise NodeError(f"cannot build the embedded node: {error}") from error

    def _start_guard(self, nodetool: Path, control: socket.socket, life: socket.socket) -> subprocess.Popen[bytes]:
        empty = os.memfd_create("empty")
        try:
            return subprocess.Popen(
                [nodetool, "guard", str(control.fileno()), str(life.fileno()), str(self._directory)],
                stdin=empty,
                stdout=self._log,
                stderr=self._log,
                cwd="/",
                env={},
                pass_fds=(control.fileno(), life.fileno()),
            )
        finally:
            os.close(empty)

    # -- end -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Node:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Thaw, kill every process of the node, remove cgroups and mounts. Raises NodeError when something stays."""
        if self._life.fileno() < 0:
            return
        for frozen in self._family.frozen:
            frozen.close()
        self._end_guard()
        self._family.close()
        if self._directory.exists():
            raise NodeError(f"{self._directory} is still there")

    def _end_guard(self) -> None:
        self._life.close()
        try:
            self._guard.wait(timeout=60)
        finally:
            log = os.pread(self._log, 65536, 0).decode(errors="replace")
            os.close(self._log)
        if self._guard.returncode:
            raise NodeError(f"the node's guard failed ({self._guard.returncode}): {log}")

    # -- set-up --------------------------------------------------------------------------------------------------

    def _furnish(self) -> None:
        init = self.init
        init.mount("proc", "/proc", "proc")
        init.ask("umount", "/sys/fs/cgroup")
        init.mount("cgroup2", "/sys/fs/cgroup", "cgroup2")
        init.mount("run", "/run", "tmpfs", MS_NOSUID, "mode=755")
        for directory in ("upper", "work", "dev"):
            self.path(f"{WORK}/{directory}").mkdir(parents=True)
        overlay = f"lowerdir=/etc,upperdir={WORK}/upper,workdir={WORK}/work"
        init.mount("etc", "/etc", "overlay", 0, overlay)
        self._make_dev(f"{WORK}/dev", init)
        self._make_gpu_nodes(f"{WORK}/dev")
        init.mount(f"{WORK}/dev", "/dev", "", MS_MOVE)
        self._write_driver_state()
        self._mount_proc_files()
        self._write_etc()
        init.ask("hostname", self.hostname)
        (self._directory / "init.scope").mkdir()
        (self._directory / "init.scope/cgroup.procs").write_text(str(init.outer_pid))

    def _make_gpu_nodes(self, dev: str) -> None:
        if self.driver == "zero":
            self.mknod(f"{dev}/nvidia0", 1, 5)
            self.mknod(f"{dev}/nvidiactl", 1, 3)
            return
        self.mknod(f"{dev}/kmsg", 1, 11, 0o644)
        if self.driver == "none":
            return
        for gpu in self.gpus:
            self.mknod(f"{dev}/{Path(gpu.node).name}", 4, gpu.minor)
            # A virtual console exists from its first opening on; nvidia-uvm (vcs50) cannot be opened before that.
            os.close(os.open(self.path(f"{dev}/{Path(gpu.node).name}"), os.O_RDWR | os.O_NOCTTY))
        self.mknod(f"{dev}/nvidiactl", 4, 55)
        self.mknod(f"{dev}/nvidia-uvm", 7, 50)

    def _write_driver_state(self) -> None:
        for directory in ("proc", "state", "alloc"):
            self.path(f"{STANDIN}/{directory}").mkdir(parents=True, exist_ok=True)
        self.path(f"{STANDIN}/alloc").chmod(0o1777)
        self.path(f"{STANDIN}/state").chmod(0o1777)
        self._watch_allocations()
        self.init.mount("proc", f"{STANDIN}/proc", "proc")
        self.write(f"{STANDIN}/pidns", f"{os.stat(self.init_process.proc / 'ns/pid').st_ino}\n")
        self.write(f"{STANDIN}/control", "")
        if self.driver != "none":
            lines = [f"{g.minor} {g.uuid} {g.pci} {g.total_mib} {g.node} {g.name}\n" for g in self.gpus]
            self.write(f"{STANDIN}/gpus", "".join(lines))

    def _watch_allocations(self) -> None:
        """The guard notes the moment at which an allocation lost its last holder."""
        descriptor = os.open(self.path(f"{STANDIN}/alloc"), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        socket.send_fds(self._life, [b"alloc"], [descriptor])
        os.close(descriptor)

    def _mount_proc_files(self) -> None:
        self.write(f"{STANDIN}/devices", proc_devices(Path("/proc/devices").read_text(), self.driver))
        self.init.mount(f"{STANDIN}/devices", "/proc/devices", "", MS_BIND)
        if self.driver == "none":
            return
        self.init.mount("driver", "/proc/driver", "tmpfs", MS_NOSUID, "mode=555")
        version = f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build\n"
        self.write("/proc/driver/nvidia/version", version, 0o444)
        for gpu in self.gpus:
            bus = gpu.pci.lower().removeprefix("0000")
            self.write(f"/proc/driver/nvidia/gpus/{bus}/information", gpu_information(gpu, bus), 0o444)

    def _write_etc(self) -> None:
        if self._nvml != "none":
            cache_file = self._built.ld_cache if self._nvml == "current" else self._built.old_ld_cache
            target = self.path("/etc/ld.so.cache")
            target.unlink(missing_ok=True)
            target.write_bytes(cache_file.read_bytes())
        self.path(f"/etc/pve/nodes/{self.hostname}/lxc").mkdir(parents=True)
        self.path("/etc/pve/local").symlink_to(f"nodes/{self.hostname}")
        self.path("/etc/pve/lxc").symlink_to(f"nodes/{self.hostname}/lxc")

    # -- the stand-in driver -------------------------------------------------------------------------------------

    def control(self, **settings: object) -> None:
        """Set misbehaviours (see the top of this module); what is not named stays as it is."""
        for key, value in settings.items():
            per_gpu = value if isinstance(value, Mapping) else {None: value}
            for minor, one in per_gpu.items():
                name = key if minor is None else f"{key}.{minor}"
                if one is None:
                    self._control.pop(name, None)
                else:
                    self._control[name] = one if isinstance(one, str) else _words(one)
        text = "".join(f"{key} {value}\n" for key, value in self._control.items())
        self.write(f"{STANDIN}/control.new", text)
        self.path(f"{STANDIN}/control.new").rename(self.path(f"{STANDIN}/control"))

    def clear_control(self) -> None:
        self._control.clear()
        self.control()

    # -- containers ----------------------------------------------------------------------------------------------

    def container(
        self,
        vmid: int,
        devices: Sequence[str] = GPU_NODES,
        *,
        nodes: str = "mknod",
        name: str | None = None,
        unprivileged: bool = False,
        config: str | bool = True,
    ) -> Container:
        """Start container `vmid`. nodes "mknod": Proxmox's devN; "bind": lxc.mount.entry.

        Unprivileged: in a user namespace, its root is uid 100000 here (Proxmox's default kind of container).

        config True writes /etc/pve/lxc/VMID.conf to match, text writes that text, False none.
        """
        devices = tuple(device for device in devices if self.path(f"/dev/{device}").exists())
        if config is True:
            config = container_config(name or f"ct{vmid}", devices, nodes, unprivileged)
        if config:
            self.configure(vmid, config)
        title = f"[lxc monitor] /var/lib/lxc {vmid}"
        return build(self, vmid, f"lxc/{vmid}/ns", f"lxc.monitor/{vmid}", devices, nodes, title, unprivileged)

    def configure(self, vmid: int, text: str, pve_node: str | None = None) -> None:
        """Write a container's configuration, of this Proxmox node or of another one of the cluster."""
        self.write(f"/etc/pve/nodes/{pve_node or self.hostname}/lxc/{vmid}.conf", text, 0o640)

    # -- more ----------------------------------------------------------------------------------------------------

    def allocations(self) -> list[str]:
        """Names of all allocation records, held or not."""
        return sorted(e.name for e in self.path(f"{STANDIN}/alloc").iterdir() if "." not in e.name)

    def outer_pid(self, pid: int) -> int:
        """The pid on this machine of the process that the node knows as `pid`. Raises NodeError when there is none."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and pid in _node_pids(entry) and self._is_ours(entry):
                return int(entry.name)
        raise NodeError(f"no process {pid} in the node")

    def _is_ours(self, entry: Path) -> bool:
        try:
            return f"/{self._directory.name}/" in (entry / "cgroup").read_text(errors="replace")
        except OSError:
            return False


def _node_pids(entry: Path) -> list[int]:
    """The second number of NSpid, if there is one."""
    try:
        lines = (entry / "status").read_text(errors="replace").splitlines()
    except OSError:
        return []
    return next(([int(word) for word in line.split()[2:3]] for line in lines if line.startswith("NSpid:")), [])


def _words(value: object) -> str:
    if isinstance(value, bool):
        return str(int(value))
    return " ".join(map(str, value)) if isinstance(value, (list, tuple, set, frozenset)) else str(value)


@cache
def cgroup2_mount() -> Path:
    """Where this machine has cgroup v2 (hybrid machines: /sys/fs/cgroup/unified)."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] == "cgroup2":
            return Path(before.split()[4])
    raise NodeError("no cgroup v2 mount on this machine")


def proc_devices(machine: str, driver: str) -> str:
    """The node's /proc/devices: this machine's, in which the stand-in majors belong to the driver.

    (A real NVIDIA driver of this machine is not the node's.)
    """
    ours = {"nvidia": {4: "nvidia", 7: "nvidia-uvm"}, "zero": {1: "nvidia"}, "none": {}}[driver]
    characters, _, blocks = machine.partition("\nBlock devices:")
    lines = []
    for line in characters.splitlines()[1:]:
        number, _, name = line.strip().partition(" ")
        if number and int(number) not in ours and not name.startswith("nvidia"):
            lines.append((int(number), name))
    lines += ours.items()
    text = "".join(f"{number:3d} {name}\n" for number, name in sorted(lines))
    return f"Character devices:\n{text}\nBlock devices:{blocks}"


def gpu_information(gpu: Gpu, bus: str) -> str:
    """/proc/driver/nvidia/gpus/BUS/information, as driver 580 writes it."""
    fields = {
        "Model": gpu.name,
        "IRQ": "120",
        "GPU UUID": gpu.uuid,
        "Video BIOS": "96.00.a5.00.01",
        "Bus Type": "PCIe",
        "DMA Size": "52 bits",
        "DMA Mask": "0xfffffffffffff",
        "Bus Location": bus,
        "Device Minor": str(gpu.minor),
        "GPU Firmware": DRIVER_VERSION,
        "GPU Excluded": "No",
    }
    return "".join(f"{key}:{' ' if len(key) > 14 else chr(9) + ' '}{value}\n" for key, value in fields.items())


def container_config(name: str, devices: Sequence[str], nodes: str, unprivileged: bool = False) -> str:
    """A plausible /etc/pve/lxc/VMID.conf with those devices."""
    head = ["arch: amd64", "cores: 8", f"hostname: {name}", "memory: 65536", "ostype: debian"]
    head += ["unprivileged: 1"] if unprivileged else []
    if nodes == "mknod":
        return "\n".join([*(f"dev{i}: /dev/{device}" for i, device in enumerate(devices)), *head]) + "\n"
    entries = [f"lxc.mount.entry: /dev/{d} dev/{d} none bind,optional,create=file" for d in devices]
    return "\n".join([*head, "lxc.cgroup2.devices.allow: c 4:* rwm", *entries]) + "\n"
