"""The packages under test: built once per session, as this checkout and as if it were an older version."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.conftest import require_virtual_node  # noqa: F401 - a fixture
from tests.node.node import VirtualNode
from tests.package.chroot import REPOSITORY, Chroot

BUILD = REPOSITORY / "packaging/build-deb"
OLD_VERSION = "0.0.9"


@pytest.fixture(scope="session")
def suite() -> str:
    return os.environ.get("PGR_SUITE") or "bookworm"


@pytest.fixture(scope="session")
def packages(require_virtual_node: None, suite: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:  # noqa: F811
    """(older, current). PGR_DEB names a package to take for the current one."""
    given = os.environ.get("PGR_DEB")
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    builds = [[str(BUILD), "--version", OLD_VERSION, "--out", str(old), suite]]
    if not given:
        builds.append([str(BUILD), "--out", str(new), suite])
    for build in builds:
        done = subprocess.run(build, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return next(old.glob("*.deb")), Path(given).resolve() if given else next(new.glob("*.deb"))


@pytest.fixture(scope="session")
def old_package(packages: tuple[Path, Path]) -> Path:
    return packages[0]


@pytest.fixture(scope="session")
def package(packages: tuple[Path, Path]) -> Path:
    return packages[1]


@pytest.fixture
def chroot(require_virtual_node: None, suite: str, tmp_path: Path) -> Chroot:  # noqa: F811
    tree = subprocess.run([str(BUILD), "--tree", suite], capture_output=True, text=True, check=True).stdout.strip()
    return Chroot(Path(tree), tmp_path)


@pytest.fixture
def node(require_virtual_node: None, suite: str) -> Iterator[VirtualNode]:  # noqa: F811
    with VirtualNode(suite) as booted:
        yield booted
