"""Fixtures of the virtual node. PGR_SUITE chooses Debian 12 (bookworm, the default) or 13 (trixie)."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node import build, keeper
from tests.node.node import VirtualNode, requirement


@pytest.fixture(scope="session")
def require_virtual_node() -> None:
    """Skips where a node cannot boot; fails there when PGR_REQUIRE_NODE=1 promised one."""
    reason = requirement()
    if reason and os.environ.get("PGR_REQUIRE_NODE") == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def node(require_virtual_node: None) -> Iterator[VirtualNode]:
    """A fresh node of its own for the test: it boots in a second, and nothing of another test is in it."""
    with VirtualNode() as booted:
        yield booted
    assert not traces(booted.name), f"the node left {traces(booted.name)}"


def traces(name: str) -> list[str]:
    """What is left of a node on this machine."""
    mark = f"pgr-node-{name}"
    found = [str(path) for path in (keeper.cgroup2_root() / mark, build.cache_root() / "run" / name) if path.exists()]
    found += keeper.loops_of(mark)
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if mark in line]
    return found
