"""Runs the measurements of `bench.py`; the figures are printed at the end of the session. No time is asserted."""

from __future__ import annotations

import pytest

from . import bench, product
from .world import World

NAMES = ("64 MiB", "8 GiB", "80 GB", "8 GiB pinned", "8 holders")


@pytest.mark.parametrize("name", NAMES)
def test_kill_to_verdict_beside_a_bare_sigkill(bare_world: World, name: str) -> None:
    bare_world.container(129)
    case = bench.cases(bare_world.machine)[name]
    bench.compare(bare_world, case.title, case.spawn, case.runs)


@pytest.mark.parametrize("name", ("64 MiB", "80 GB"))
def test_kill_to_verdict_in_the_daemon(bare_world: World, name: str) -> None:
    bare_world.container(129)
    case = bench.cases(bare_world.machine)[name]
    with product.daemon(bare_world.directory):
        bench.compare(bare_world, f"{case.title}, daemon", case.spawn, case.runs)


def test_the_whole_process_beside_the_seed_recipe(bare_world: World) -> None:
    bare_world.container(129)
    bench.compare_with_seed(bare_world, bare_world.machine.first)
