"""Compiles the embedded node's C sources into `.build/embedded-HASH/` at the repository root, once per source text."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
CFLAGS = ("-std=gnu11", "-O1", "-g0", "-Wall", "-Wextra", "-Wno-format-truncation")
SHARED = ("-fPIC", "-shared", "-fvisibility=hidden", "-Wl,-soname,libnvidia-ml.so.1")
FROZEN_IMAGE_BYTES = 8 << 20
TOOLS = ("nodetool", "holder", "restless")


@dataclass(frozen=True, slots=True)
class Artefacts:
    """What the build makes; every path is absolute and visible inside the node as well."""

    directory: Path
    nodetool: Path
    holder: Path
    restless: Path
    library: Path
    old_library: Path
    ld_cache: Path
    old_ld_cache: Path
    ext4_image: Path


def artefacts() -> Artefacts:
    """Build what is missing and say where everything is. Raises RuntimeError with the compiler's words."""
    directory = build_directory()
    made = Artefacts(
        directory=directory,
        nodetool=directory / "nodetool",
        holder=directory / "holder",
        restless=directory / "restless",
        library=directory / "nvml" / "libnvidia-ml.so.1",
        old_library=directory / "nvml-old" / "libnvidia-ml.so.1",
        ld_cache=directory / "ld.so.cache",
        old_ld_cache=directory / "ld.so.cache-old",
        ext4_image=directory / "frozen.ext4",
    )
    if not directory.is_dir():
        _build_once(directory)
    return made


@cache
def build_directory() -> Path:
    digest = hashlib.sha256(repr((CFLAGS, SHARED, FROZEN_IMAGE_BYTES)).encode())
    for source in (HERE / "nvml/nvml.c", *(HERE / f"tools/{tool}.c" for tool in TOOLS), HERE / "build.py"):
        digest.update(source.read_bytes())
    digest.update(_ld_cache_identity())
    name = f"embedded-{digest.hexdigest()[:16]}"
    if all(parent.stat().st_mode & 0o001 for parent in REPOSITORY.parents):
        return REPOSITORY / ".build" / name
    # Below /root (0700 on Debian) the users of an unprivileged container could not execute the tools.
    return Path("/var/cache/pve-gpu-release-tests") / name


def _ld_cache_identity() -> bytes:
    """The node's ld.so.cache is the machine's plus one directory: a changed machine needs a new one."""
    try:
        status = os.stat("/etc/ld.so.cache")
    except FileNotFoundError:
        return b""
    return f"{status.st_mtime_ns} {status.st_size}".encode()


def _build_once(directory: Path) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with open(directory.parent / "embedded.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if directory.is_dir():
            return
        staging = Path(tempfile.mkdtemp(prefix="embedded-building", dir=directory.parent))
        try:
            _build(staging, directory)
            staging.chmod(0o755)
            staging.rename(directory)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _build(staging: Path, final: Path) -> None:
    for tool in TOOLS:
        _run("gcc", *CFLAGS, "-static", "-pthread", "-o", staging / tool, HERE / f"tools/{tool}.c")
    for folder, flags in (("nvml", ()), ("nvml-old", ("-DOLD_DRIVER",))):
        (staging / folder).mkdir()
        library = staging / folder / "libnvidia-ml.so.1"
        _run("gcc", *CFLAGS, *SHARED, *flags, "-o", library, HERE / "nvml/nvml.c")
    _make_ld_cache(staging / "nvml", final / "nvml", staging / "ld.so.cache")
    _make_ld_cache(staging / "nvml-old", final / "nvml-old", staging / "ld.so.cache-old")
    image = staging / "frozen.ext4"
    with open(image, "wb") as file:
        file.truncate(FROZEN_IMAGE_BYTES)
    _run("mkfs.ext4", "-q", "-F", image)


def _make_ld_cache(folder: Path, final: Path, cache: Path) -> None:
    """A loader cache that also finds the stand-in library; the path in it is the final one, of the same length."""
    configuration = cache.with_suffix(".conf")
    configuration.write_text(f"{folder}\ninclude /etc/ld.so.conf.d/*.conf\n")
    _run("ldconfig", "-X", "-f", configuration, "-C", cache)
    before, after = os.fsencode(folder.parent), os.fsencode(final.parent)
    if len(before) != len(after):
        raise RuntimeError(f"cannot rename {folder.parent} in {cache}: {final.parent} has another length")
    cache.write_bytes(cache.read_bytes().replace(before, after))


def _run(*command: str | Path) -> None:
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(f"cannot build the embedded node: {error.filename} is missing") from error
    if done.returncode:
        raise RuntimeError(f"cannot build the embedded node: {' '.join(map(str, command))}:\n{done.stderr}")
