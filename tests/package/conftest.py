"""The packages under test: built once per content of the checkout, as it is and as if it were an older version."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.conftest import require_virtual_node  # noqa: F401 - a fixture
from tests.node.node import VirtualNode
from tests.package import built
from tests.package.chroot import Chroot

OLD_VERSION = "0.0.9"


@pytest.fixture(scope="session")
def suite() -> str:
    return os.environ.get("PGR_SUITE") or "bookworm"


@pytest.fixture(scope="session")
def old_package(require_virtual_node: None, suite: str) -> Path:  # noqa: F811
    return built.package(suite, OLD_VERSION)


@pytest.fixture(scope="session")
def package(require_virtual_node: None, suite: str) -> Path:  # noqa: F811
    return built.package(suite)


@pytest.fixture
def chroot(require_virtual_node: None, suite: str, tmp_path: Path) -> Chroot:  # noqa: F811
    words = [str(built.BUILD), "--tree", suite]
    tree = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    return Chroot(Path(tree), tmp_path)


@pytest.fixture
def node(require_virtual_node: None, suite: str) -> Iterator[VirtualNode]:  # noqa: F811
    with VirtualNode(suite) as booted:
        yield booted
