"""The loop of `wait`, and its arguments."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from hostd.cancel import Cancel
from hostd.cli.wait import mib
from hostd.errors import InterruptedRelease
from hostd.model import ProcessRef
from hostd.wait import Look, result, wait

BUSY = {"gpus": "GPU 0", "free": "1 MiB", "wanted": "2 MiB", "holders": "pid 7 (x)"}


class Target:
    """Answers in turn, the last one for ever."""

    def __init__(self, *looks: Look) -> None:
        self.looks = list(looks)
        self.asked = 0
        self.limits: list[float | None] = []

    def look(self, limit_s: float | None = None) -> Look:
        self.limits.append(limit_s)
        self.asked += 1
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]


@pytest.mark.parametrize(("text", "amount"), [("40960", 40960), ("40G", 40960), ("512M", 512), ("0", 0)])
def test_amounts(text: str, amount: int) -> None:
    assert mib(text) == amount


@pytest.mark.parametrize("text", ["", "G", "-1", "1.5G", "1T", "９", "1" * 12])
def test_what_is_no_amount(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        mib(text)


def test_it_ends_with_the_first_free_look() -> None:
    target, told = Target(Look("gpu-in-use", BUSY), Look("gpu-free", BUSY)), []
    cancel = Cancel()
    found, waited_s = wait(target, 10, cancel, lambda what, _: told.append(what), 5.0)  # type: ignore[arg-type]
    cancel.close()
    assert found.free and target.asked == 2 and waited_s < 5
    assert told == ["GPU 0 has 1 MiB of free memory, 2 MiB wanted; in use by pid 7 (x)"]
    assert result(found, 0.5, None, "0")["verdict"] == "released"


@pytest.mark.parametrize(("timeout_s", "limit"), [(0.2, 2.0), (3.0, 3.0), (60.0, None)])
def test_a_look_waits_for_the_driver_not_much_longer_than_the_time_that_is_left(timeout_s: float, limit: float | None) -> None:
    target, cancel = Target(Look("gpu-free", BUSY)), Cancel()
    wait(target, timeout_s, cancel, lambda *_: None, 5.0)  # type: ignore[arg-type]
    cancel.close()
    (given,) = target.limits
    assert given == limit if limit is None else given == pytest.approx(limit, abs=0.5)


def test_at_the_time_limit_the_last_look_counts_and_it_was_not_looked_at_all_the_time() -> None:
    target, cancel = Target(Look("gpu-in-use", BUSY)), Cancel()
    found, waited_s = wait(target, 1.0, cancel, lambda *_: None, 5.0)  # type: ignore[arg-type]
    cancel.close()
    assert found.reason == "gpu-in-use" and 1.0 <= waited_s < 10 and target.asked < 20
    assert result(found, waited_s, None, "0")["reason"] == "gpu-in-use"


def test_the_end_of_whoever_is_waited_for_wakes_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with open(f"/proc/{child.pid}/stat", "rb") as file:
        start = int(file.read().rpartition(b")")[2].split()[19])

    class Ends(Target):
        def look(self, limit_s: float | None = None) -> Look:
            super().look(limit_s)
            if self.asked == 8 and child.stdin is not None:
                child.stdin.close()  # the pauses are long by now
            return Look(
                "gpu-free" if child.poll() is not None else "gpu-stale",
                BUSY | {"ghost": "1"},
                [ProcessRef(child.pid, start)],
            )

    target, cancel = Ends(Look("gpu-stale", BUSY)), Cancel()
    found, _ = wait(target, 30, cancel, lambda *_: None, 5.0)  # type: ignore[arg-type]
    cancel.close()
    child.wait()
    assert found.free


def test_a_cancelled_wait_ends_at_once() -> None:
    cancel = Cancel()
    cancel.request()
    with pytest.raises(InterruptedRelease):
        wait(Target(Look("gpu-in-use", BUSY)), 10, cancel, lambda *_: None, 5.0)  # type: ignore[arg-type]
    cancel.close()
