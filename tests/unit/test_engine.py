"""One release from lock to journal, on a machine without a driver."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hostd import audit
from hostd.cancel import Cancel
from hostd.config import Config, LadderSettings, ResetPolicy
from hostd.engine import Surroundings, perform
from hostd.ladder import Limits, Options
from hostd.lifecycle.event import Event, Phase
from hostd.lifecycle.handling import Around
from hostd.lifecycle.phases import Lifecycle
from hostd.lifecycle.side import SideRelease
from hostd.sources import Sources
from hostd.system.nvml import Nvml
from hostd.system.procfs import Procfs
from hostd.system.pve import ContainerConfig, DevEntry
from hostd.system.scan import Scanner

QUICK = Options(limits=Limits(timeout_s=2.0, settle_s=0.0))


class NoCgroups:
    def open(self, vmid: int, kind: str = "lxc") -> None:
        return None


class Conf:
    """Container 129 is configured, with a GPU."""

    def read_container(self, vmid: int) -> ContainerConfig:
        return ContainerConfig(dev_entries=(DevEntry("dev0", "/dev/nvidia0", {}),))


class Sent:
    def __init__(self) -> None:
        self.entries: list[dict[str, str]] = []

    def send(self, entry: audit.Entry) -> None:
        self.entries.append(dict(entry))

    def of(self, kind: audit.Kind) -> list[dict[str, str]]:
        return [entry for entry in self.entries if entry["MESSAGE_ID"] == kind.message_id]


@pytest.fixture
def sources(tmp_path: Path) -> Iterator[Sources]:
    made = Sources(Procfs(), NoCgroups(), Scanner(), Nvml(1.0, str(tmp_path / "nvml.lock")), 1)  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[int]:
    """A process that has been in a driver call for a minute."""
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            fd = os.open(tmp_path / "nvml.lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(fd, fcntl.LOCK_EX)
            boot = time.clock_gettime(time.CLOCK_BOOTTIME) - 60
            os.write(fd, f'{{"pid": {os.getpid()}, "since": 0, "boot": {boot}, "call": "nvmlInit"}}\n'.encode())
            os.write(tell, b"+")
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(tell)
    assert os.read(ready, 1) == b"+"
    os.close(ready)
    yield pid
    os.kill(pid, 9)
    os.waitpid(pid, 0)


def release(sources: Sources, tmp_path: Path, owner: str) -> tuple[Any, Sent]:
    journal, cancel = Sent(), Cancel()
    around = Surroundings(owner, pve=Conf(), run_dir=str(tmp_path / "run"), journal=journal)  # type: ignore[arg-type]
    try:
        return perform(sources, 129, QUICK, around, cancel), journal
    finally:
        cancel.close()


def test_without_a_daemon_a_release_says_itself_that_the_driver_hangs(
    sources: Sources, tmp_path: Path, hanging: int
) -> None:
    report, journal = release(sources, tmp_path, "cli")
    (entry,) = journal.of(audit.NVML_WEDGED)
    assert (entry["NVML_PID"], entry["NVML_CALL"]) == (str(hanging), "nvmlInit")
    assert (entry["PVE_GPU_RELEASE_ID"], entry["PVE_VMID"]) == (report["release_id"], "129")


def test_the_daemon_s_own_watch_says_it_once_and_its_workers_do_not(
    sources: Sources, tmp_path: Path, hanging: int
) -> None:
    assert release(sources, tmp_path, "daemon")[1].of(audit.NVML_WEDGED) == []


def test_a_driver_that_answers_is_not_mentioned(sources: Sources, tmp_path: Path) -> None:
    _, journal = release(sources, tmp_path, "cli")
    assert journal.of(audit.FINISHED) and not journal.of(audit.NVML_WEDGED)


@pytest.mark.parametrize(("owner", "times"), [("hook", 1), ("daemon", 0)])
def test_a_hook_that_does_the_work_itself_says_it_too(
    sources: Sources, tmp_path: Path, hanging: int, owner: str, times: int
) -> None:
    journal = Sent()
    around = Around(owner, journal, Conf(), str(tmp_path / "run"))  # type: ignore[arg-type]
    try:
        Lifecycle(sources, Event(129, Phase.POST_STOP, "hookscript"), Config(), around).handle()
    finally:
        around.cancel.close()
    assert len(journal.of(audit.NVML_WEDGED)) == times and len(journal.of(audit.PHASE_DONE)) == 1


@pytest.mark.parametrize("phase", [Phase.POST_STOP, Phase.EXEC_STOP_POST, Phase.PRE_START, Phase.EXEC_START_PRE])
def test_a_stop_or_start_neither_asks_units_nor_resets_whatever_is_configured(
    sources: Sources, tmp_path: Path, phase: Phase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left to ask; and the container may be started while a reset is under way."""
    climbed: list[SideRelease] = []

    class Noted(SideRelease):
        def _run(self) -> None:
            climbed.append(self)
            super()._run()

    monkeypatch.setattr("hostd.lifecycle.releasing.SideRelease", Noted)
    config = Config(LadderSettings(QUICK.limits, stop_units=True, reset=ResetPolicy.AUTO))
    around = Around("hook", Sent(), Conf(), str(tmp_path / "run"))  # type: ignore[arg-type]
    try:
        Lifecycle(sources, Event(129, phase, "hookscript"), config, around).handle()
    finally:
        around.cancel.close()
    (release,) = climbed
    options = release.climb.options
    assert (options.stop_units, options.auto_reset, options.reset) == (False, False, False)
