"""Fixtures of the real-GPU suite: who may run it, one world per test, what a failure shows, the figures at the end.

PGR_REQUIRE_GPU=1 turns a missing GPU into a failure, PGR_REQUIRE_GPUS=2 fewer than two as well.
PGR_GPU_OUT=DIR also writes everything there: gpu-failures.log, gpu-figures.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from .world import Figures, Machine, World, describe_machine, reason_for_no_machine

SHOWN_CHARACTERS = 3500
FIGURES: pytest.StashKey[Figures] = pytest.StashKey()
HEADER: pytest.StashKey[str] = pytest.StashKey()


def required_gpus() -> int:
    """How many GPUs this run promised."""
    return max(int(os.environ.get("PGR_REQUIRE_GPUS") or 0), int(os.environ.get("PGR_REQUIRE_GPU") or 0) and 1)


def out_directory() -> Path | None:
    name = os.environ.get("PGR_GPU_OUT")
    return Path(name) if name and Path(name).is_dir() else None


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a real NVIDIA GPU")
    config.addinivalue_line("markers", "gpus(count): needs that many real NVIDIA GPUs")
    config.stash[FIGURES] = Figures()
    config.stash[HEADER] = ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.path.name != "selftest.py":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """The machine with its driver open; skips where there is no GPU and fails where one was promised."""
    driver, why = reason_for_no_machine(tmp_path_factory.mktemp("probe"))
    if driver is None:
        if required_gpus():
            pytest.fail(f"a GPU was promised (PGR_REQUIRE_GPU): {why}", pytrace=False)
        pytest.skip(f"no GPU to test on: {why}")
    header = describe_machine(driver)
    request.config.stash[HEADER] = header
    idle = {gpu.uuid: driver.used_mib(gpu) for gpu in driver.gpus}
    yield Machine(driver, idle, request.config.stash[FIGURES], header)
    driver.close()


@pytest.fixture
def enough_gpus(request: pytest.FixtureRequest, machine: Machine) -> None:
    """Applies `@pytest.mark.gpus(count)`."""
    marker = request.node.get_closest_marker("gpus")
    wanted = marker.args[0] if marker else 1
    have = len(machine.gpus)
    if have >= wanted:
        return
    if required_gpus() >= wanted:
        pytest.fail(f"{wanted} GPUs were promised (PGR_REQUIRE_GPUS), {have} here", pytrace=False)
    pytest.skip(f"needs {wanted} GPUs, {have} here")


@pytest.fixture
def bare_world(machine: Machine, enough_gpus: None, tmp_path: Path) -> Iterator[World]:
    """A world with nothing in it yet."""
    made = World(machine, tmp_path)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def world(bare_world: World) -> World:
    """A world in which a host process and container 130 have the GPU nodes open and must never notice anything."""
    bare_world.add_bystanders()
    return bare_world


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """On failure show the product's words, the driver's lists, the containers' processes."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    if not report.failed:
        return
    found = getattr(item, "funcargs", {}).get("bare_world")
    if not isinstance(found, World):
        return
    sections = found.describe()
    for title, text in sections:
        cut = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "\n[... cut]"
        report.sections.append((title, cut))
    out = out_directory()
    if out is not None:
        with (out / "gpu-failures.log").open("a", encoding="utf-8") as file:
            file.write(f"\n======== {item.nodeid} ({report.when})\n{report.longreprtext}\n")
            for title, text in sections:
                file.write(f"-------- {title}\n{text}\n")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The figures, with -q too."""
    figures = config.stash.get(FIGURES, None)
    if figures is None or not config.stash.get(HEADER, ""):
        return
    terminalreporter.section("real GPU")
    terminalreporter.write_line(config.stash[HEADER])
    for table, rows in figures.rows.items():
        terminalreporter.write_line("")
        terminalreporter.write_line(f"[{table}]")
        for line in aligned([TITLES.get(table, ()), *rows]):
            terminalreporter.write_line(line)
    for note in figures.notes:
        terminalreporter.write_line(f"note: {note}")
    out = out_directory()
    if out is not None:
        body = {"machine": config.stash[HEADER], "tables": figures.rows, "notes": figures.notes, "raw": figures.raw}
        (out / "gpu-figures.json").write_text(json.dumps(body, indent=1), encoding="utf-8")


TITLES: dict[str, tuple[str, ...]] = {
    "releases": ("case", "exit", "reason", "release ms", "process ms", "rung@ms gone/sent"),
    "timing": (
        *("case", "runs", "bare exit ms", "bare free ms", "KILL to verdict ms", "ratio", "1.10 x bare + 5"),
        "process --now ms",
    ),
    "seed recipe": ("what", "ms", "the recipe takes so many times longer"),
    "wait": ("what", "free at ms", "returned at ms", "late ms"),
}


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Columns as wide as their widest cell."""
    filled = [row for row in rows if row]
    count = max((len(row) for row in filled), default=0)
    widths = [max((len(row[n]) for row in filled if n < len(row)), default=0) for n in range(count)]
    return ["  ".join(cell.ljust(widths[n]) for n, cell in enumerate(row)).rstrip() for row in filled]
