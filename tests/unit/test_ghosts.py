"""Since when memory has had no live client, and what the kernel modules' use counts add to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hostd.ghosts import FirstSeen, _module_lines, haunted
from hostd.model import BlindSpot, GpuInfo, GpuState, Observation


def state(ghost_mib: int | None, uuid: str = "GPU-0", minor: int = 0) -> GpuState:
    return GpuState(GpuInfo(minor, uuid, "0000:3b:00.0", "H200", 0), ghost_mib, 0, 0)


def test_the_first_sight_is_kept_until_it_is_gone(tmp_path: Path) -> None:
    seen = FirstSeen(str(tmp_path))
    assert seen.update([state(3)]) == {} and not (tmp_path / "ghosts.json").exists(), "within the tolerance"
    since = seen.update([state(700), state(0, "GPU-1", 1)])
    assert set(since) == {"GPU-0"} and since["GPU-0"].endswith("Z")
    (tmp_path / "ghosts.json").write_text('{"GPU-0": "2026-01-01T00:00:00Z"}')
    assert seen.update([state(900)]) == {"GPU-0": "2026-01-01T00:00:00Z"}
    assert seen.update([state(None)]) == {"GPU-0": "2026-01-01T00:00:00Z"}, "no figure says nothing"
    assert seen.update([state(0)]) == {} and FirstSeen(str(tmp_path)).update([]) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_broken_file_is_no_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "ghosts.json").write_text(text)
    assert set(FirstSeen(str(tmp_path)).update([state(700)])) == {"GPU-0"}


def test_a_silent_driver_haunts_nobody() -> None:
    seen = Observation(129, 0.0, (), gpus=(state(700),))
    assert haunted(seen, [0]) == [seen.gpus[0]] and haunted(seen, [1]) == []
    silent = Observation(129, 0.0, (), gpus=(state(700),), blind_spots=(BlindSpot("nvml", "x", "y", "driver-silent"),))
    assert haunted(silent, [0]) == []


def module(root: Path, name: str, count: int, *users: str) -> None:
    for user in users:
        (root / name / "holders" / user).mkdir(parents=True)
    (root / name / "holders").mkdir(parents=True, exist_ok=True)
    (root / name / "refcnt").write_text(f"{count}\n")


def test_a_kernel_client_shows_in_the_use_counts(tmp_path: Path) -> None:
    module(tmp_path, "nvidia", 3, "nvidia_uvm", "gdrdrv")
    assert _module_lines(0, str(tmp_path)) == [
        "module nvidia is in use 3 times, 2 by other modules (gdrdrv, nvidia_uvm), and no process has a node open: "
        "a kernel client holds it"
    ]
    assert _module_lines(1, str(tmp_path)) == [
        "module nvidia is in use 3 times, 2 by other modules; 1 process has nodes of the driver open"
    ]
    assert _module_lines(0, str(tmp_path / "none")) == []
