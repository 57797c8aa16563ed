"""What one test has around it: the GPUs, containers, bystanders that must survive, the product's runs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from . import product
from .channel import ChannelClosedError
from .container import (
    Cgroup,
    Container,
    Process,
    StartFailedError,
    find_cgroup2,
    host_nodes,
    nvidia_majors,
    start_on_host,
    tails,
)
from .driver import Driver, Gpu
from .product import Run

MIB_80_GB = 80 * 1000**3 // (1 << 20)
SLACK_MIB = 16
"""DESIGN 3: tolerance of ghost memory, plus the same again per live client."""
CONTEXT_MIB = 1024
"""More than any context costs on top of what was asked for (about 500 MiB on an H200)."""
QUIET_S = 60.0


@dataclass
class Figures:
    """What the session measured; conftest prints it at the end."""

    rows: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    raw: list[dict[str, object]] = field(default_factory=list)

    def add(self, table: str, *cells: str) -> None:
        self.rows.setdefault(table, []).append(cells)

    def note(self, text: str) -> None:
        self.notes.append(text)


@dataclass
class Machine:
    """This machine: the driver, what its GPUs use when idle, and the figures collected on it."""

    driver: Driver
    idle_mib: dict[str, int]
    figures: Figures
    header: str

    @property
    def gpus(self) -> list[Gpu]:
        return self.driver.gpus

    @property
    def first(self) -> Gpu:
        return self.gpus[0]

    @property
    def last(self) -> Gpu:
        return self.gpus[-1]

    def node(self, gpu: Gpu) -> str:
        """The GPU's device node, by its number: names mean nothing."""
        return next(n.source for n in host_nodes() if n.minor == gpu.minor and re.fullmatch(r"nvidia\d+", n.name))

    def at_most_mib(self, gpu: Gpu, mib: int) -> int:
        """`mib`, or a little more than half of a smaller GPU."""
        return min(mib, gpu.total_mib * 55 // 100)

    def wait_quiet(self) -> None:
        """Every GPU is as idle as at the start. Raises TimeoutError with the driver's lists."""
        for gpu in self.gpus:
            try:
                self.driver.wait_used_at_most(gpu, self.idle_mib[gpu.uuid] + SLACK_MIB, QUIET_S)
            except TimeoutError as exc:
                raise TimeoutError(f"{exc}\n{self.driver.describe()}") from None


def reason_for_no_machine(directory: Path) -> tuple[Driver | None, str]:
    """(driver, "") when the suite can run here, else (None, why not). Loads modules, makes nodes: one CUDA start."""
    if os.geteuid() != 0:
        return None, "needs root"
    try:
        find_cgroup2()
    except LookupError as exc:
        return None, str(exc)
    if not nvidia_majors():
        return None, "no NVIDIA driver in /proc/devices"
    try:
        driver = Driver()
    except ImportError as exc:
        return None, f"no pynvml: {exc}"
    except Exception as exc:  # noqa: BLE001 - NVMLError's class is only known when pynvml is there
        return None, f"NVML does not answer: {exc!r}"
    if not driver.gpus:
        driver.close()
        return None, "NVML knows no GPU"
    try:
        start_on_host(["--probe"], label="probe", directory=directory, event="probe").close()
    except (StartFailedError, ProcessLookupError, FileNotFoundError) as exc:
        driver.close()
        return None, f"CUDA does not start: {exc}"
    return driver, ""


def describe_machine(driver: Driver) -> str:
    """One paragraph for the end of the session."""
    inode = os.stat("/proc/self/ns/pid").st_ino
    nodes = " ".join(node.name for node in host_nodes())
    lines = [
        f"driver {driver.version}, kernel {os.uname().release}, cgroup v2 at {find_cgroup2()}",
        f"PID namespace {inode}" + ("" if inode == 4026531836 else " (NOT the host's first one: lists may be short)"),
        f"nodes: {nodes}",
        *(str(gpu) + f", {gpu.name}, {gpu.total_mib} MiB" for gpu in driver.gpus),
    ]
    return "\n".join(lines)


class World:
    """One test's surroundings. Everything it starts ends with it."""

    def __init__(self, machine: Machine, directory: Path) -> None:
        self.machine = machine
        self.driver = machine.driver
        self.directory = directory
        self.boxes: dict[int, Container] = {}
        self.foreign: list[Process] = []
        self.host: list[Process] = []
        self.runs: list[Run] = []
        self.notes: list[str] = []
        machine.wait_quiet()

    # --- building ---

    def container(self, vmid: int, *, how: str = "bind", init_opens: Sequence[str] = ()) -> Container:
        """A fresh container with every GPU node of the host."""
        self.boxes[vmid] = Container(vmid, self.directory, how=how, init_opens=init_opens)
        return self.boxes[vmid]

    def add_bystanders(self) -> None:
        """A host process and one in container 130 that have every GPU node open (no context) and report signals."""
        opened = [f"--open={node.source}" for node in host_nodes() if re.fullmatch(r"nvidia(\d+|ctl)", node.name)]
        options = ["--no-cuda", "--report-signals", *opened]
        process = start_on_host(options, label="bystander-host", directory=self.directory)
        self.host.append(process)
        self.foreign += [process, self.container(130).spawn(*options, label="bystander")]

    def foreign_holder(self, gpu: Gpu, mib: int) -> Process:
        """A job of container 130 that computes on its memory all the time and reports signals."""
        keeper = self.boxes[130].spawn(f"--gpu={gpu.uuid}={mib}", "--busy", "--report-signals", label="keeper")
        self.foreign.append(keeper)
        return keeper

    def close(self) -> None:
        """End everything; every container is tried, the first failure is raised."""
        failures: list[Exception] = []
        for box in self.boxes.values():
            try:
                box.destroy()
            except (OSError, TimeoutError, RuntimeError) as exc:
                failures.append(exc)
        for process in self.host:
            process.close()
        if failures:
            raise failures[0]

    # --- acting ---

    def run(self, *argv: str, timeout_s: float = 180.0) -> Run:
        """Run the product; kept for the failure report."""
        done = product.run(*argv, timeout_s=timeout_s)
        self.runs.append(done)
        return done

    def release(self, *argv: str, case: str = "") -> Run:
        """`pve-gpu-release 129 --json ...`: afterwards no bystander is hurt, whatever the verdict."""
        done = self.run("129", "--json", *argv)
        self.record(case or " ".join(argv) or "plain", done)
        self.assert_foreign_untouched()
        return done

    def record(self, case: str, done: Run) -> None:
        """A row for the table of releases at the end of the session."""
        rungs = " ".join(
            f"{r.get('step')}@{r.get('at_ms')} {r.get('gone')}/{r.get('sent')}" for r in done.report.get("rungs", [])
        )
        cells = (str(done.status), str(done.report.get("reason")), str(done.report.get("duration_ms")))
        self.machine.figures.add("releases", case, *cells, f"{done.wall_ms:.0f}", rungs)
        self.machine.figures.raw.append({"case": case, "wall_ms": round(done.wall_ms, 1), **done.report})

    # --- checking ---

    def assert_foreign_untouched(self) -> None:
        for process in self.foreign:
            process.assert_untouched()

    def assert_free(self, gpu: Gpu, more_mib: int = 0, clients: int = 0) -> None:
        """The driver itself says *now* that the GPU is back to idle, plus what others are known to hold."""
        used = self.driver.used_mib(gpu)
        limit = self.machine.idle_mib[gpu.uuid] + more_mib + SLACK_MIB * (1 + clients)
        assert used <= limit, f"{gpu} uses {used} MiB, at most {limit} expected\n{self.driver.describe()}"

    def assert_figures(self, done: Run, gpu: Gpu, before_mib: int, *, after_mib: int | None = None) -> None:
        """The GPU's entry in the report agrees with what the test read from the driver before and after."""
        entry = done.gpu(gpu)
        now = self.driver.memory(gpu)
        after = now.used_mib if after_mib is None else after_mib
        assert abs(entry["used_mib_before"] - before_mib) <= 2, (entry, before_mib)
        assert abs(entry["used_mib_after"] - after) <= SLACK_MIB, (entry, after)
        assert abs(entry["reserved_mib"] - now.reserved_mib) <= SLACK_MIB, (entry, now)
        assert (entry["index"], entry["minor"], entry["name"]) == (gpu.index, gpu.minor, gpu.name)
        # NVML spells the PCI domain with eight digits, sysfs with four.
        assert entry["pci_bus_id"].lower()[-10:] == gpu.pci_bus_id.lower()[-10:]
        assert entry["ghost_mib"] is not None
        assert entry["bar1_used_mib_after"] is not None

    def assert_released(
        self, done: Run, holders: Sequence[Process], gpu: Gpu, before_mib: int, *, others_mib: int = 0, clients: int = 0
    ) -> None:
        """The whole promise for one GPU: verdict, figures, fates, dead processes, and the driver's own word."""
        done.must_end(0, "released").must_be_complete()
        assert done.report["was_held"] is True
        assert done.report["dry_run"] is False
        assert done.report["blind_spots"] == []
        for process in holders:
            entry = done.holder(process.pid)
            assert entry["fate"] == "exited", entry
            assert entry["start_time"] == process.start_time
            assert entry["ns_pids"] == process.ns_pids
            assert {"fd", "map"} & set(entry["evidence"]), entry
            assert "/lxc/129" in entry["cgroup"], entry
            assert not process.is_alive(), f"{process} lives"
        assert done.gpu(gpu)["ghost_mib"] <= SLACK_MIB * (1 + clients)
        self.assert_figures(done, gpu, before_mib)
        self.assert_free(gpu, others_mib, clients)
        assert not self.driver.clients(gpu).keys() & {p.pid for p in holders}

    # --- telling ---

    def describe(self) -> list[tuple[str, str]]:
        """(title, text) of everything that helps to understand a failure from far away."""
        sections = [(f"product run {n + 1}", done.describe()) for n, done in enumerate(self.runs)]
        with contextlib.suppress(Exception):
            sections.append(("NVML now", self.driver.describe()))
        for vmid, box in self.boxes.items():
            sections.append((f"container {vmid}", box.describe()))
        for process in self.host:
            sections.append((str(process), f"alive: {process.is_alive()}"))
        sections.append(("logs of the holders", "\n".join(tails(self.directory))))
        sections.append(("kernel log", kernel_log()))
        if self.notes:
            sections.append(("notes", "\n".join(self.notes)))
        return sections


def kernel_log(limit: int = 15) -> str:
    """The driver's last lines in the kernel log."""
    try:
        said = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return str(exc)
    lines = [line for line in said.stdout.splitlines() if "NVRM" in line or "Xid" in line or "nvidia" in line.lower()]
    return "\n".join(lines[-limit:])


def kill_together(processes: Sequence[Process]) -> float:
    """A bare SIGKILL for each, one after the other at once -> CLOCK_MONOTONIC of the first."""
    began = time.monotonic()
    for process in processes:
        process.send_signal(signal.SIGKILL)
    return began


__all__ = [
    "CONTEXT_MIB",
    "MIB_80_GB",
    "SLACK_MIB",
    "Cgroup",
    "ChannelClosedError",
    "Container",
    "Figures",
    "Machine",
    "Process",
    "Run",
    "StartFailedError",
    "World",
    "describe_machine",
    "kill_together",
    "reason_for_no_machine",
]
