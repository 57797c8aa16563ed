"""pytest fixtures on the embedded node. In a conftest.py: `from .embedded.fixtures import *` (or name them)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from .node import Container, Node, cgroup2_mount

__all__ = ["container", "make_node", "node", "nothing_left_behind", "require_node"]

PROMISED = "PGR_REQUIRE_EMBEDDED"


def why_no_node() -> str | None:
    """What this machine lacks for an embedded node; None when nothing."""
    if os.geteuid():
        return "the embedded node needs root"
    if not Path("/dev/loop-control").exists():
        return "the embedded node needs loop devices"
    return None


@pytest.fixture(scope="session")
def require_node() -> None:
    """Skips where a node cannot be built; fails there when PGR_REQUIRE_EMBEDDED=1 promised one."""
    reason = why_no_node()
    if reason and os.environ.get(PROMISED) == "1":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@pytest.fixture
def make_node(require_node: None) -> Iterator[Callable[..., Node]]:
    """`make_node(driver="none", …)`: nodes that are closed when the test ends."""
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(Node(*arguments, **options))


@pytest.fixture
def node(make_node: Callable[..., Node]) -> Node:
    """A fresh node with two GPUs."""
    return make_node()


@pytest.fixture
def container(node: Node) -> Container:
    """Container 129 on that node, with both GPUs as nodes of its own (mknod)."""
    return node.container(129)


def leftovers() -> dict[str, Any]:
    """What a node may not leave on this machine: its cgroups, mounts, loop devices, child processes, descriptors."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "cgroups": sorted(path.name for path in cgroup2_mount().glob(f"pve-gpu-node-{os.getpid()}-*")),
        "mounts": Path("/proc/self/mountinfo").read_text().splitlines(),
        "loops": sorted(filter(lambda name: f"embedded-node-{os.getpid()}-" in name, loop_files())),
        "children": sorted(children),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def loop_files() -> Iterator[str]:
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            yield path.read_text()
        except OSError:  # detached while we looked
            continue


@pytest.fixture
def nothing_left_behind() -> Iterator[None]:
    """Request it before `node`: fails a test that leaves something behind."""
    before = leftovers()
    yield
    after = leftovers()
    assert {key: after[key] for key in after if after[key] != before[key]} == {}, f"before: {before}"
