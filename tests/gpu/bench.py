"""How long a release takes beside a bare SIGKILL, measured in the same run (DESIGN 11). Ratios count, not milliseconds.

`python3 -m pytest tests/gpu/test_timing.py -q`, or alone, from the repository root: `python3 -m tests.gpu.bench`.
Nothing here asserts a time.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .channel import wait_readable
from .container import Process
from .driver import Gpu
from .product import Run, daemon
from .world import (
    MIB_80_GB,
    SLACK_MIB,
    Figures,
    Machine,
    World,
    describe_machine,
    kill_together,
    reason_for_no_machine,
)

GIVE_UP_S = 90.0


@dataclass(frozen=True)
class Bare:
    """SIGKILL by hand: when the last process was dead, when NVML showed the memory free."""

    exit_ms: float
    free_ms: float


@dataclass
class Series:
    """One case, several times, bare and by the product in turn."""

    name: str
    bare: list[Bare] = field(default_factory=list)
    verdict_ms: list[float] = field(default_factory=list)
    process_ms: list[float] = field(default_factory=list)

    def cells(self) -> tuple[str, ...]:
        """A row for the table `timing`."""
        exit_ms = statistics.median(run.exit_ms for run in self.bare)
        free_ms = statistics.median(run.free_ms for run in self.bare)
        verdict_ms = statistics.median(self.verdict_ms) if self.verdict_ms else float("nan")
        goal = "reached" if verdict_ms <= 1.10 * free_ms + 5 else "missed"
        numbers = (exit_ms, free_ms, verdict_ms)
        return (
            self.name,
            str(len(self.bare)),
            *(f"{value:.1f}" for value in numbers),
            f"{verdict_ms / free_ms:.2f}",
            f"{1.10 * free_ms + 5:.1f} {goal}",
            f"{statistics.median(self.process_ms):.0f}",
        )


Spawn = Callable[[World], list[Process]]


def plain(gpu: Gpu, mib: int, pinned_mib: int = 0) -> Spawn:
    """One holder in container 129."""

    def spawn(world: World) -> list[Process]:
        return [world.boxes[129].spawn(f"--gpu={gpu.uuid}={mib}", f"--pinned={pinned_mib}")]

    return spawn


def several(count: int, mib: int) -> Spawn:
    """`count` holders in container 129, spread over every GPU."""

    def spawn(world: World) -> list[Process]:
        gpus = world.machine.gpus
        return world.boxes[129].spawn_all([[f"--gpu={gpus[n % len(gpus)].uuid}={mib}"] for n in range(count)])

    return spawn


def bare_kill(world: World, holders: Sequence[Process]) -> Bare:
    """SIGKILL -> every pidfd readable -> NVML shows the memory free on every GPU."""
    limits = [(gpu, world.machine.idle_mib[gpu.uuid] + SLACK_MIB) for gpu in world.machine.gpus]
    began = kill_together(holders)
    for process in holders:
        wait_readable(process.pidfd, GIVE_UP_S)
    dead = time.monotonic()
    while any(world.driver.used_mib(gpu) > limit for gpu, limit in limits):
        if time.monotonic() - began > GIVE_UP_S:
            raise TimeoutError(f"memory not free {GIVE_UP_S:g} s after SIGKILL\n{world.driver.describe()}")
    return Bare((dead - began) * 1000, (time.monotonic() - began) * 1000)


def product_kill(world: World, case: str) -> Run:
    """`pve-gpu-release 129 --now --json`; raises AssertionError when it does not release."""
    done = world.run("129", "--now", "--json")
    world.machine.figures.raw.append({"case": f"timing: {case}", "wall_ms": round(done.wall_ms, 1), **done.report})
    return done.must_end(0, "released")


def compare(world: World, name: str, spawn: Spawn, runs: int) -> Series:
    """Bare and product in turn, `runs` times each."""
    series = Series(name)
    for _ in range(runs):
        world.machine.wait_quiet()
        series.bare.append(bare_kill(world, spawn(world)))
        world.machine.wait_quiet()
        spawn(world)
        done = product_kill(world, name)
        took = done.kill_to_verdict_ms()
        if took is not None:
            series.verdict_ms.append(took)
        series.process_ms.append(done.wall_ms)
    world.machine.figures.add("timing", *series.cells())
    world.machine.figures.raw.append(
        {
            "case": f"timing: {name}",
            "bare": [vars(run) for run in series.bare],
            "kill_to_verdict_ms": series.verdict_ms,
            "process_ms": series.process_ms,
        }
    )
    return series


def seed_recipe(world: World, gpu: Gpu) -> float:
    """What people did before: inside the container, fuser -k, five seconds, nvidia-smi -> ms of the whole."""
    box = world.boxes[129]
    holder = box.spawn(f"--gpu={gpu.uuid}=64")
    kill = "fuser -k /dev/nvidia*" if shutil.which("fuser") else f"kill -9 {holder.ns_pid}"
    began = time.monotonic()
    _status, text = box.run(["/bin/sh", "-c", f"{kill}; sleep 5; nvidia-smi"], timeout_s=60)
    took = (time.monotonic() - began) * 1000
    smi = "ran" if "NVIDIA-SMI" in text else f"failed: {text[-80:]!r}"
    world.machine.figures.note(f"seed recipe `{kill}; sleep 5; nvidia-smi`: {took:.0f} ms, nvidia-smi {smi}")
    if not wait_readable(holder.pidfd, 0):
        world.machine.figures.note("seed recipe left the holder alive")
        holder.kill()
    return took


def compare_with_seed(world: World, gpu: Gpu) -> None:
    """The whole `--now` process for the same holder against the recipe, alone and with the daemon."""
    took = seed_recipe(world, gpu)
    world.machine.figures.add("seed recipe", "fuser -k ...; sleep 5; nvidia-smi", f"{took:.0f}", "1")
    beside_the_recipe(world, gpu, took, "pve-gpu-release 129 --now")
    with daemon(world.directory):
        beside_the_recipe(world, gpu, took, "the same, with the daemon")


def beside_the_recipe(world: World, gpu: Gpu, recipe_ms: float, title: str) -> None:
    processes = []
    for _ in range(5):
        world.machine.wait_quiet()
        plain(gpu, 64)(world)
        processes.append(product_kill(world, "64 MiB, beside the seed recipe").wall_ms)
    ours = statistics.median(processes)
    world.machine.figures.add("seed recipe", title, f"{ours:.0f}", f"{recipe_ms / ours:.1f} (goal: 15)")


@dataclass(frozen=True)
class Case:
    """One row of the table `timing`."""

    title: str
    spawn: Spawn
    runs: int


def cases(machine: Machine) -> dict[str, Case]:
    """Every row by its short name."""
    gpu = machine.first
    eight = machine.at_most_mib(gpu, 8 << 10)
    big = machine.at_most_mib(gpu, MIB_80_GB)
    each = machine.at_most_mib(gpu, 64 << 10) // 8
    return {
        "64 MiB": Case("64 MiB", plain(gpu, 64), 6),
        "8 GiB": Case(f"{eight} MiB", plain(gpu, eight), 3),
        "80 GB": Case(f"{big} MiB", plain(gpu, big), 4),
        "8 GiB pinned": Case("8 GiB pinned, 64 MiB", plain(gpu, 64, 8 << 10), 2),
        "8 holders": Case(f"8 holders of {each} MiB on {len(machine.gpus)} GPU(s)", several(8, each), 2),
    }


def main() -> int:
    """Everything, without pytest."""
    from .conftest import TITLES, aligned

    with tempfile.TemporaryDirectory() as name:
        driver, why = reason_for_no_machine(Path(name))
        if driver is None:
            print(f"no GPU to measure on: {why}", file=sys.stderr)
            return 1
        idle = {gpu.uuid: driver.used_mib(gpu) for gpu in driver.gpus}
        machine = Machine(driver, idle, Figures(), describe_machine(driver))
        world = World(machine, Path(name))
        try:
            world.container(129)
            for case in cases(machine).values():
                compare(world, case.title, case.spawn, case.runs)
            compare_with_seed(world, machine.first)
        finally:
            world.close()
            driver.close()
    print(machine.header)
    for table, rows in machine.figures.rows.items():
        print("\n".join(["", f"[{table}]", *aligned([TITLES.get(table, ()), *rows])]))
    print("\n".join(machine.figures.notes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
