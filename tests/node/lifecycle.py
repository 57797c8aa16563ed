"""The product in a virtual node: container 129 with two GPUs, 130 beside it on the same ones, and what must hold after
whatever happens to 129.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.embedded.process import Holder, Process
from tests.node import build
from tests.node.node import Container, FrozenFileSystem, NodeError, NodeProcess, VirtualNode
from tests.node.standin import GpuHolder

SNIPPET = "local:snippets/pve-gpu-release"
NODES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
CONFIG = """\
ladder: {grace: 2, kill_grace: 2, drain_grace: 3, timeout: 40}
hook: {budget: 10, pre_start_budget: 10, watchdog_delay: 1, watchdog_interval: 1}
nvml: {deadline: 4}
"""
CONFIG_PATH = "/etc/pve-gpu-release/config.yaml"
Records = list[tuple[str, str]]


@dataclass
class Row:
    """One path, for the table of the closing note."""

    path: str
    phases: list[str]
    records: Records
    added_ms: float

    def __str__(self) -> str:
        records = ", ".join(f"{trigger} {verdict}" for trigger, verdict in self.records) or "none"
        return f"| {self.path} | {', '.join(self.phases) or 'none'} | {records} | {self.added_ms:.0f} ms |"


TABLE: list[Row] = []


def print_table(name: str, note: str = "") -> None:
    """For the closing note: on the terminal with `pytest -s`, and as a file beside the node cache."""
    lines = ["| path | phases seen | records | time added |", "| --- | --- | --- | --- |", *map(str, TABLE), note]
    TABLE.clear()
    text = "\n".join(lines) + "\n"
    target = build.cache_root() / f"{name}-{os.environ.get('PGR_SUITE', 'bookworm')}.md"
    target.write_text(text)
    print(f"\n{text}({target})")


@dataclass
class World:
    node: VirtualNode
    ct: Container
    other: Container
    call_ms: float = 0.0
    """What one call of the hook costs by itself: shell, Python, the daemon's answer for a container without GPU."""
    cursor: str = ""
    holders: list[GpuHolder] = field(default_factory=list)
    neighbours: list[GpuHolder] = field(default_factory=list)

    @classmethod
    def make(cls, node: VirtualNode, init: str = "tiny") -> World:
        node.install_product()
        node.write(CONFIG_PATH, CONFIG)
        other = node.add_container(130, gpus=(0, 1), init="tiny")
        ct = node.add_container(129, gpus=(0, 1), init=init)
        node.run(["pve-gpu-release", "hook", "enable", "129"])
        assert f"hookscript: {SNIPPET}\n" in ct.config
        world = cls(node, ct, other)
        world.neighbour_comes()
        world.call_ms = world.time_of_a_call()
        return world

    def neighbour_comes(self) -> None:
        """A job in 130 on both GPUs, which must live on whatever happens to 129."""
        self.other.start()
        job = self.other.hold(argv=("train",), open=NODES, alloc=("50:2048:compute", "51:1024:compute"), ignore_term=True)
        self.neighbours.append(job)

    def neighbour_leaves(self) -> None:
        for job in self.neighbours:
            job.end()
            self.node.standin.holders.remove(job)
        self.neighbours.clear()
        self.other.stop()
        self.other.wait_stopped()

    def time_of_a_call(self) -> float:
        self.node.add_container(131, init="tiny")
        times = []
        for _ in range(5):
            begun = time.monotonic()
            self.node.run(["/var/lib/vz/snippets/pve-gpu-release", "131", "pre-start"])
            times.append(time.monotonic() - begun)
        bare = []
        for _ in range(5):
            begun = time.monotonic()
            self.node.run(["/bin/true"])
            bare.append(time.monotonic() - begun)
        return 1000 * max(0.0, statistics.median(times) - statistics.median(bare))

    # ---- before ------------------------------------------------------------------------------------------------------

    def begin(self, *, running: bool = True, holding: bool = True) -> None:
        """129 as a row wants it, its past forgotten."""
        if running and not self.ct.running:
            self.ct.start()
        if not running and self.ct.running:
            self.ct.stop()
            self.ct.wait_stopped()
        if running and holding:
            self.hold()
        self.cursor = self.node.cursor()

    def hold(self, **options: Any) -> GpuHolder:
        """A job in 129 on both GPUs that ignores SIGTERM, with a worker that inherited everything."""
        given: dict[str, Any] = {
            "argv": ("VLLM::EngineCore",), "comm": "VLLM::EngineCor", "open": NODES, "children": 1,
            "alloc": ("50:40960:compute", "51:20480:compute"), "ignore_term": True, "child_ignore_term": True, **options,
        }
        holder = self.ct.hold(**given)
        self.holders.append(holder)
        return holder

    def squat(self, cgroup: str, mib: int = 512) -> GpuHolder:
        """A process of the host that somebody put into a cgroup of 129, and that holds both GPUs."""
        alloc = (f"50:{mib}:compute", "51:256:compute")
        holder = self.node.hold(
            Holder(argv=("agent",), comm="agent", open=NODES, alloc=alloc, ignore_term=True), cgroup=cgroup
        )
        self.holders.append(holder)
        return holder

    def init(self, word: str, ct: Container | None = None) -> None:
        """`reboot` or `poweroff` from inside."""
        (ct or self.ct).attach(["/opt/standin/tiny-init", word], check=False)

    # ---- after -------------------------------------------------------------------------------------------------------

    def entries(self, event: str, vmid: int = 129) -> list[dict[str, Any]]:
        return self.node.journal(self.cursor, PVE_VMID=vmid, PVE_GPU_RELEASE_EVENT=event)

    def records(self, vmid: int = 129) -> Records:
        return [(e["TRIGGER"], e.get("VERDICT", e.get("REASON", ""))) for e in self.entries("release-finished", vmid)]

    def phases(self, vmid: int = 129) -> list[str]:
        return [e["PVE_PHASE"] for e in self.entries("phase-done", vmid)]

    def wait_records(self, expected: Records, timeout: float = 60) -> None:
        try:
            self.node.wait_until(lambda: len(self.records()) >= len(expected), f"{expected}", timeout)
        except NodeError as error:
            raise NodeError(f"{error}; there are {self.records()}\n{self.story()}") from error

    def story(self) -> str:
        """The journal since the beginning of the row, and what LXC said."""
        lines = [f"{e.get('SYSLOG_IDENTIFIER')}: {e['MESSAGE']}" for e in self.node.journal(self.cursor)]
        return "\n".join([*lines, self.node.read("/run/pve/ct-129.stderr")])

    def check(self, path: str, expected: Records, *, running: bool = False, phases: Sequence[str] | None = None) -> None:
        """What must hold after each row; leaves 129 running without holders."""
        self.wait_records(expected)
        if running:
            self.node.wait_until(lambda: self.ct.running and self.ct.init_pid, "129 to run", 60)
        else:
            self.ct.wait_stopped()
        if phases is not None:
            self.node.wait_until(lambda: len(self.phases()) >= len(phases), f"the phases {phases}", 60)
        assert self.records() == expected
        if phases is not None:
            assert sorted(self.phases()) == sorted(phases)
        assert not [process for holder in self.holders for process in holder.alive()], "a holder of 129 lives"
        if not running:
            assert not self.node.populated("lxc/129")
        self.must_be_free()
        assert all(process.alive() for job in self.neighbours for process in job.processes), "container 130 was touched"
        self.note(path)
        self.forget_holders()
        if not running:
            self.ct.start()
        assert self.ct.running

    def must_be_free(self) -> None:
        """By a fresh look in a process of its own."""
        done = self.node.run(["pve-gpu-release", "verify", "129", "--json", "--no-daemon"], check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        status = json.loads(self.node.run(["pve-gpu-release", "ps", "--json", "--no-daemon"]).stdout)
        assert {holder["vmid"] for holder in status["holders"]} <= {130, None}, status["holders"]
        used = {gpu["minor"]: gpu["used_mib"] for gpu in status["gpus"]}
        assert used == {50: 2048, 51: 1024}

    def note(self, path: str) -> None:
        done = self.entries("phase-done")
        spent = sum(int(entry["DURATION_USEC"]) for entry in done) / 1000 + self.call_ms * len(done)
        TABLE.append(Row(path, self.phases(), self.records(), spent))

    def forget_holders(self) -> None:
        for holder in self.holders:
            holder.end()
            self.node.standin.holders.remove(holder)
        self.holders.clear()

    # ---- more ----------------------------------------------------------------------------------------------------------

    def configure(self, text: str) -> None:
        self.node.write(CONFIG_PATH, text)
        if self.node.unit("pve-gpu-hostd.service", "ActiveState")["ActiveState"] == "active":
            self.node.systemctl("reload", "pve-gpu-hostd.service", check=False)

    @contextmanager
    def without_daemon(self) -> Iterator[None]:
        self.node.systemctl("stop", "pve-gpu-hostd.socket", "pve-gpu-hostd.service")
        self.node.remove("/run/pve-gpu-release/io.pve.GpuRelease")
        try:
            yield
        finally:
            self.node.systemctl("start", "pve-gpu-hostd.socket")

    def daemon_pid(self) -> int:
        return int(self.node.unit("pve-gpu-hostd.service", "MainPID")["MainPID"])

    def kill(self, pid: int) -> None:
        """SIGKILL by the node's own kill."""
        self.node.run(["kill", "-9", pid])


@contextmanager
def stuck_holder(world: World) -> Iterator[tuple[FrozenFileSystem, GpuHolder]]:
    """A job of 129 on both GPUs that waits in D state for a frozen file system, until that is thawed."""
    with world.node.frozen() as frozen:
        extra = "lxc.mount.entry: /frozen frozen none bind,create=dir\n"
        world.node.write(world.ct.config_path, world.ct.config + extra, 0o640)
        world.begin(holding=False)
        holder = world.hold(children=0, touch="/frozen/x")
        frozen.freeze()
        holder.trigger()
        holder.main.wait_stuck()
        world.cursor = world.node.cursor()
        yield frozen, holder


def waits_in(process: Process) -> str:
    """Where a process in D state sleeps, by this machine's own look."""
    return next(
        (task / "wchan").read_text()
        for task in (process.proc / "task").iterdir()
        if (task / "stat").read_text().rpartition(")")[2].split()[0] == "D"
    )


def busy(container: Container) -> NodeProcess:
    """A process in the monitor's mount namespace with its working directory on the root file system."""
    rootfs = f"/var/lib/lxc/{container.vmid}/rootfs"
    command = ["nsenter", "-t", container.monitor_pid, "-m", "sh", "-c", f"cd {rootfs} && exec sleep infinity"]
    process = container.node.popen(command)
    container.node.wait_until(lambda: "sleep" in container.node.read(f"/proc/{process.pid}/comm"), "the busy sleep")
    return process


def kill_init(container: Container) -> None:
    os.kill(container.host_init_pid, 9)
