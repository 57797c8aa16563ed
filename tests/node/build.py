#!/usr/bin/env python3
"""Build the trees a virtual node runs on, once per suite and recipe, and keep them outside git.

    python3 tests/node/build.py [bookworm|trixie ...]        prints the path of each tree

A finished tree is `$PGR_NODE_CACHE/<suite>-<hash>/` with

    node/        the node: systemd, LXC, Python and the product's dependencies, all from Debian
    ct/          root file system shared by every container
    ct-unpriv/   the same with owners shifted by 100000, for unprivileged containers

The hash covers this file, so an edited recipe builds anew. A build happens in a directory that gets its final name only
when it is complete; a lock per suite serialises concurrent callers, and what an interrupted build left is removed.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUITES = ("bookworm", "trixie")
MIRROR = "http://deb.debian.org/debian"
SHIFT = 100000
HOST_PACKAGES = {
    "mmdebstrap": "mmdebstrap",
    "systemd-nspawn": "systemd-container",
    "dpkg-deb": "dpkg",
    "cc": "gcc libc6-dev",
}
NODE_PACKAGES = [
    "systemd", "systemd-sysv", "dbus", "lxc", "python3", "python3-psutil", "python3-yaml", "python3-systemd",
    "python3-proxmoxer", "python3-pynvml", "kmod", "procps", "psmisc", "lsof", "util-linux", "mount", "e2fsprogs",
    "iproute2", "less", "man-db", "bash-completion", "zsh",
]  # fmt: skip
CT_PACKAGES = ["systemd", "systemd-sysv", "dbus", "procps", "psmisc"]
# Units that only cost boot time here, or that cannot work in a node without a network.
MASKED_IN_NODE = [
    "lxc.service", "lxc-net.service", "lxc-monitord.service", "systemd-networkd-wait-online.service",
    "systemd-resolved.service", "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer",
    "e2scrub_all.timer", "e2scrub_reap.service", "fstrim.timer", "man-db.timer", "systemd-tmpfiles-clean.timer",
    "console-getty.service", "getty.target", "getty-static.service", "systemd-update-utmp.service",
    "systemd-pstore.service", "systemd-timesyncd.service", "systemd-firstboot.service", "systemd-networkd.service",
    "systemd-networkd.socket", "nftables.service", "dev-hugepages.mount", "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount", "sys-kernel-config.mount",
]  # fmt: skip
MASKED_IN_CT = [
    "apt-daily.timer", "apt-daily-upgrade.timer", "dpkg-db-backup.timer", "e2scrub_all.timer", "e2scrub_reap.service",
    "fstrim.timer", "systemd-tmpfiles-clean.timer", "console-getty.service", "getty.target", "getty-static.service",
    "systemd-udevd.service", "systemd-udev-trigger.service", "systemd-update-utmp.service", "systemd-pstore.service",
    "systemd-timesyncd.service", "systemd-logind.service", "systemd-firstboot.service",
    "systemd-journal-flush.service", "sys-kernel-debug.mount", "sys-kernel-tracing.mount", "sys-kernel-config.mount",
    "dev-hugepages.mount", "dev-mqueue.mount", "systemd-sysctl.service",
]  # fmt: skip
DROPPED = ("/usr/share/doc/*", "/usr/share/locale/*", "/usr/share/man/*", "/usr/share/info/*")


class BuildError(Exception):
    """The trees cannot be built here; the text says why."""


def cache_root() -> Path:
    return Path(os.environ.get("PGR_NODE_CACHE") or "/var/cache/pve-gpu-release-nodes")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def recipe_hash() -> str:
    """Of what this file does, not of its comments and its layout."""
    program = ast.dump(ast.parse(Path(__file__).read_text()))
    return hashlib.sha256(program.encode()).hexdigest()[:12]


def tree_path(suite: str) -> Path:
    return cache_root() / f"{suite}-{recipe_hash()}"


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    with open(path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure_host_tools() -> None:
    """Install what the build and the boot need and this machine lacks (Debian; root)."""
    missing = [package for tool, package in HOST_PACKAGES.items() if shutil.which(tool) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise BuildError(f"cannot build a node: {', '.join(missing)} missing, and this is not Debian's root")
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    packages = " ".join(missing).split()
    for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *packages]):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"cannot install {packages}: {done.stdout[-800:]}{done.stderr[-800:]}")


def sources(suite: str) -> str:
    """apt sources with contrib, as a Proxmox node has it: Debian, updates and security."""
    return "\n".join(
        [
            f"deb {MIRROR} {suite} main contrib",
            f"deb {MIRROR} {suite}-updates main contrib",
            f"deb {MIRROR}-security {suite}-security main contrib",
            "",
        ]
    )


def driver_placeholder(directory: Path) -> Path:
    """An empty package in place of NVIDIA's driver, which python3-pynvml depends on; the stand-in library comes later."""
    root = directory / "placeholder"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN/control").write_text(
        "Package: nvidia-driver-placeholder\nVersion: 1\nArchitecture: amd64\n"
        "Maintainer: pve-gpu-release tests <root@localhost>\nProvides: libnvidia-ml1, libnvidia-ml.so.1\n"
        "Description: stands in for the NVIDIA driver's library in a test node\n"
    )
    package = directory / "driver-placeholder.deb"
    subprocess.run(
        ["dpkg-deb", "--build", "--root-owner-group", str(root), str(package)], check=True, capture_output=True
    )
    return package


def bootstrap(suite: str, target: Path, packages: list[str], extra: list[str], log: Path) -> subprocess.Popen[bytes]:
    listing = target.parent / f"{target.name}.list"
    listing.write_text(sources(suite))
    command = ["mmdebstrap", "--mode=root", "--variant=minbase", "--quiet", f"--include={','.join(packages)}"]
    command += [f'--dpkgopt=path-exclude="{pattern}"' for pattern in DROPPED]
    command += ['--aptopt=Acquire::Languages "none"', '--aptopt=Acquire::Retries "3"', "--skip=check/empty", *extra, suite, str(target), str(listing)]
    with open(log, "wb") as out:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)


def mask(tree: Path, units: tuple[str, ...] | list[str]) -> None:
    directory = tree / "etc/systemd/system"
    directory.mkdir(parents=True, exist_ok=True)
    for unit in units:
        link = directory / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")


def finish_node(tree: Path, suite: str) -> None:
    mask(tree, MASKED_IN_NODE)
    (tree / "etc/hostname").write_text("pve-test\n")
    (tree / "etc/hosts").write_text("127.0.0.1 localhost\n127.0.1.1 pve-test\n")
    (tree / "etc/locale.conf").write_text("LANG=C.UTF-8\n")
    (tree / "etc/apt/sources.list").write_text(sources(suite))
    (tree / "etc/machine-id").write_text("")  # a new one at boot, yet no "first boot" that enables every unit
    (tree / "var/log/journal").mkdir(exist_ok=True)
    for directory in ("var/log/pve/tasks", "var/lib/vz/snippets"):
        (tree / directory).mkdir(parents=True, exist_ok=True)
    for config in tree.glob("etc/dpkg/dpkg.cfg.d/*mmdebstrap*"):
        config.unlink()  # or the man pages and documents of the product's own package would be left out


def finish_container(tree: Path) -> None:
    mask(tree, MASKED_IN_CT)
    (tree / "etc/hostname").write_text("ct\n")
    (tree / "etc/machine-id").write_text("")
    settings = {
        "journald.conf.d/volatile.conf": "[Journal]\nStorage=volatile\nRuntimeMaxUse=4M\n",
        "system.conf.d/impatient.conf": "[Manager]\nDefaultTimeoutStopSec=3s\n",  # also its last SIGTERM before SIGKILL
    }
    for name, text in settings.items():
        (tree / "etc/systemd" / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / "etc/systemd" / name).write_text(text)
    for junk in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(tree / junk, ignore_errors=True)
        (tree / junk).mkdir()


def shift_owners(tree: Path) -> None:
    """Owners +100000, as the root file system of an unprivileged container has them; mode bits survive the chown."""
    for directory, names, files in os.walk(tree):
        for entry in [directory, *(os.path.join(directory, name) for name in (*files, *names))]:
            info = os.lstat(entry)
            if info.st_uid >= SHIFT:
                continue
            os.lchown(entry, info.st_uid + SHIFT, info.st_gid + SHIFT)
            if not os.path.islink(entry):
                os.chmod(entry, info.st_mode & 0o7777)


def build_into(suite: str, target: Path) -> None:
    """Both trees at once: the downloads of one overlap with the unpacking of the other."""
    package = driver_placeholder(target)
    hooks = [
        f"--essential-hook=copy-in {package} /tmp",
        '--essential-hook=chroot "$1" dpkg -i /tmp/driver-placeholder.deb',
    ]
    jobs = {
        "node": bootstrap(suite, target / "node", NODE_PACKAGES, hooks, target / "node.log"),
        "ct": bootstrap(suite, target / "ct", CT_PACKAGES, [], target / "ct.log"),
    }
    failed = [name for name, job in jobs.items() if job.wait()]
    if failed:
        tails = "\n".join((target / f"{name}.log").read_text(errors="replace")[-1500:] for name in failed)
        raise BuildError(f"cannot build the {suite} tree ({', '.join(failed)}):\n{tails}")
    finish_node(target / "node", suite)
    finish_container(target / "ct")
    subprocess.run(["cp", "-a", "--reflink=auto", str(target / "ct"), str(target / "ct-unpriv")], check=True)
    shift_owners(target / "ct-unpriv")


def remove_leftovers(suite: str) -> None:
    """What interrupted builds left, and trees of older recipes that no running node uses. Call with the lock held."""
    for stale in cache_root().glob(f".build-{suite}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    for old in cache_root().glob(f"{suite}-*"):
        if old == tree_path(suite) or not old.is_dir() or time.time() - old.stat().st_mtime < 3600:
            continue
        with open(old / "in-use", "a") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(old, ignore_errors=True)


def ensure_tree(suite: str) -> Path:
    """Path of a complete tree of this recipe, built if need be. Safe to call from several processes at once."""
    if suite not in SUITES:
        raise BuildError(f"cannot build suite {suite!r}: known are {', '.join(SUITES)}")
    final = tree_path(suite)
    if final.is_dir():
        return final
    ensure_host_tools()
    cache_root().mkdir(parents=True, exist_ok=True)
    with exclusive(cache_root() / f".lock-{suite}"):
        if final.is_dir():
            return final
        remove_leftovers(suite)
        work = Path(tempfile.mkdtemp(prefix=f".build-{suite}-", dir=cache_root()))
        os.chmod(work, 0o755)
        try:
            build_into(suite, work)
            (work / "in-use").touch()
            os.rename(work, final)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return final


def main(arguments: list[str]) -> int:
    try:
        for suite in arguments or [os.environ.get("SUITE", "bookworm")]:
            started = time.monotonic()
            print(f"{ensure_tree(suite)} ({time.monotonic() - started:.1f} s)", flush=True)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
