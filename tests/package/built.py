"""The Debian package of this checkout as it lies here, built in a clean tree of a suite and kept by its content.

What is kept lies beside the trees of the virtual node, outside git: `$PGR_NODE_CACHE/packages/SUITE-KEY/*.deb`. A process
gets one answer for all its tests, also when somebody edits the checkout meanwhile.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from tests.node.build import BuildError, cache_root, exclusive
from tests.product_command import ROOT

BUILD = ROOT / "packaging/build-deb"
KEPT_S = 24 * 3600
"""How long a package that nobody asks for stays."""


@cache
def package(suite: str, version: str = "") -> Path:
    """The package for `suite`, as if it were `version` (empty: its own). PGR_DEB names a file to take for the current one."""
    given = os.environ.get("PGR_DEB")
    if given and not version:
        return Path(given).resolve()
    root = cache_root() / "packages"
    root.mkdir(parents=True, exist_ok=True)
    with exclusive(root / f".lock-{suite}"):
        return _kept(root, suite, version) or _build(root, suite, version)


def key(suite: str, version: str) -> str:
    """Of everything that goes into the package: names, modes and contents; the recipe is among it."""
    names = subprocess.run([BUILD, "--sources"], capture_output=True, check=True).stdout.split(b"\0")
    digest = hashlib.sha256(f"{suite} {version}".encode())
    for name in sorted(filter(None, names)):
        path = ROOT / os.fsdecode(name)
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        digest.update(b"%s\0%o\0%d\0" % (name, path.lstat().st_mode, len(content)) + content)
    return digest.hexdigest()[:12]


def _kept(root: Path, suite: str, version: str) -> Path | None:
    directory = root / f"{suite}-{key(suite, version)}"
    found = next(directory.glob("*.deb"), None)
    if found:
        os.utime(directory)
    return found


def _build(root: Path, suite: str, version: str) -> Path:
    """Built again when the checkout changed meanwhile, so that what is kept is what its key says."""
    _forget(root, suite)
    for _ in range(5):
        before = key(suite, version)
        with tempfile.TemporaryDirectory(prefix=f".build-{suite}-", dir=root) as name:
            words = [str(BUILD), "--out", name, *(["--version", version] if version else []), suite]
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            if key(suite, version) != before:
                continue
            if done.returncode:
                raise BuildError(f"cannot build the package for {suite}:\n{done.stdout}{done.stderr}")
            target = root / f"{suite}-{before}"
            os.rename(Path(name) / suite, target)
        return next(target.glob("*.deb"))
    raise BuildError("cannot build the package: the checkout changes faster than it is built")


def _forget(root: Path, suite: str) -> None:
    """What interrupted builds left, and what nobody asked for in a day. Call with the lock held."""
    for path in root.glob(f".build-{suite}-*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in root.glob(f"{suite}-*"):
        if time.time() - path.stat().st_mtime > KEPT_S:
            shutil.rmtree(path, ignore_errors=True)
