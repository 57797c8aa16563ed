"""What is said at the end of a hand-over, and that nobody is surprised by it."""

from __future__ import annotations

from typing import Any

import pytest

from hostd.cli.handover import conclusion, confirm
from hostd.errors import RefusedError
from hostd.handover import OpenGpu, people
from hostd.model import BlindSpot, Evidence, GpuInfo, Holder, Process

INFO = GpuInfo(0, "GPU-0", "0000:3b:00.0", "H200", 0)


def holder(pid: int, memory_mib: int | None = None, comm: str = "python3") -> Holder:
    return Holder(
        Process(pid, 1, (), comm, "S", 0, 1, 1, "/x", 1), 129, frozenset({Evidence.FD}), (0,), memory_mib=memory_mib
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, "gpu-idle"),
        ({"info": None, "driver": "vfio-pci"}, "gpu-not-ours"),
        ({"containers": {129: [holder(5)]}, "host": [holder(6)]}, "gpu-in-containers"),
        ({"host": [holder(6)]}, "gpu-host-holds"),
        ({"blind_spots": (BlindSpot("procfs", "pid 7", "EPERM"),)}, "cannot-look"),
    ],
)
def test_the_last_word(options: dict[str, Any], reason: str) -> None:
    said = conclusion(OpenGpu(**{"name": "GPU 0", "info": INFO, **options}), verify_memory=True)
    assert said["reason"] == reason and "<" not in said["message"] + said["next_step"], said


def test_people_are_named_a_few_at_a_time() -> None:
    text = people([holder(i, 2048 if i == 1 else None) for i in range(1, 9)])
    assert text.startswith("pid 1 (python3, 2,048 MiB), pid 2 (python3), ") and text.endswith(" and 2 more")


def test_without_anybody_to_ask_it_is_refused() -> None:
    there = OpenGpu("GPU 0", INFO, containers={129: [holder(5)], 130: [holder(6)]})
    confirm(there, yes=True)
    with pytest.raises(RefusedError, match="129, 130"):
        confirm(there, yes=False)
