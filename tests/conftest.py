"""What holds for every test: it leaves nothing behind on this machine."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PATIENCE_S = 15.0
"""How long what a test has ended may take to be gone: an exit takes milliseconds, on a busy machine seconds."""
OURS = ("pve-gpu-node-", "pgr-")
"""What cgroups of tests are called (tests/embedded, tests/gpu, tests/node)."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """The limit per test of pyproject.toml is pytest-timeout's; the GPU tests also run where that is not installed."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "limit per test in seconds")
        parser.addini("timeout_method", "how it is kept")


def pytest_configure(config: pytest.Config) -> None:
    os.environ["TMPDIR"] = tempfile.tempdir = temporary_root()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in `make test &`: children that get it would not notice
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "case(key): proves this situation of tests/verdict_cases.py")


def temporary_root() -> str:
    """Where device nodes can be opened and programs run: Debian 13 mounts /tmp with nodev, others with noexec too."""
    usual = tempfile.gettempdir()
    forbidden = os.ST_NODEV | os.ST_NOEXEC
    return next((path for path in (usual, "/var/tmp") if not os.statvfs(path).f_flag & forbidden), usual)


def leftovers(temporary: Path) -> dict[str, list[str]]:
    """Children, cgroups, mounts, threads and descriptors of this process; what a test may not leave behind.

    Others mount and unmount on this machine too: only what lies in `temporary` or names this process is counted.
    """
    mounts = [line.split(" - ")[0].split()[4] for line in _read("/proc/self/mountinfo").splitlines()]
    children = [pid for task in os.listdir("/proc/self/task") for pid in _read(f"/proc/self/task/{task}/children").split()]
    return {
        "child processes": sorted(map(_describe, children)),
        "cgroups": sorted(_cgroups()),
        "mounts": sorted(path for path in mounts if str(temporary) in path or f"-{os.getpid()}" in path),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "descriptors": sorted(_descriptors()),
    }


def _collect_abandoned() -> None:
    """Helpers that were killed and not waited for are collected at the next start of one; a test has no next."""
    disposable = sys.modules.get("hostd.disposable")
    if disposable is not None:
        disposable.reap_abandoned()


def _describe(pid: str) -> str:
    return f"{pid} {_read(f'/proc/{pid}/cmdline').replace(chr(0), ' ').strip() or _read(f'/proc/{pid}/comm').strip()}"


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _descriptors() -> Iterator[str]:
    for entry in os.listdir("/proc/self/fd"):
        try:
            yield f"{entry} {os.readlink(f'/proc/self/fd/{entry}')}"
        except FileNotFoundError:  # the one that listed them
            continue


def _cgroups() -> Iterator[str]:
    """Of this process only: other runs on this machine have theirs."""
    for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
        if os.path.isfile(f"{root}/cgroup.controllers"):
            yield from (n for n in os.listdir(root) if n.startswith(OURS) and f"-{os.getpid()}-" in f"{n}-")


@pytest.fixture(autouse=True)
def nothing_is_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails a test that leaves a process, a cgroup, a mount, a thread or a descriptor behind."""
    temporary = tmp_path_factory.getbasetemp()
    before = leftovers(temporary)
    yield
    end = time.monotonic() + PATIENCE_S
    while (after := leftovers(temporary)) != before and time.monotonic() < end:
        gc.collect()
        _collect_abandoned()
        time.sleep(0.01)
    assert _added(before, after) == {}, "the test left something behind"


def _added(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, list[str]]:
    """What is there now and was not before. (Less than before is no fault: a session's fixture may have ended.)"""
    counts = {what: Counter(after[what]) - Counter(before[what]) for what in after}
    return {what: sorted(more.elements()) for what, more in counts.items() if more}
