"""What `ps -v` adds about a holder, by psutil, on real processes."""

from __future__ import annotations

import os
import time

import pytest

from hostd import describe
from hostd.system.procfs import Procfs


def own() -> tuple[int, int]:
    ref = Procfs().read_ref(os.getpid())
    assert ref is not None
    return ref.pid, ref.start_time


def test_a_living_process_is_described() -> None:
    found = describe.describe(*own())
    assert found["rss_mib"] > 1 and found["cpu_s"] >= 0 and found["parent"].startswith(f"{os.getppid()} (")


def test_another_process_of_the_same_number_is_not() -> None:
    pid, start_time = own()
    assert describe.describe(pid, start_time - 100_000) == {}


def test_a_process_that_is_gone_is_not() -> None:
    assert describe.describe((1 << 22) - 1, 1) == {}


@pytest.mark.parametrize(
    ("seconds", "text"), [(5, "5 s"), (65, "1 min"), (3700, "1 h 1 min"), (200_000, "2 d 7 h"), (-50, "0 s")]
)
def test_ages(seconds: int, text: str) -> None:
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - seconds))
    assert describe.age(started) in (text, text.replace("5 s", "6 s"))
