"""Cancelling: what was there before is there again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hostd.cancel import Cancel
from hostd.errors import InterruptedRelease


def test_a_request_is_seen_at_the_next_safe_point_and_a_second_one_at_once() -> None:
    cancel = Cancel()
    cancel.check()
    cancel.request()
    with pytest.raises(InterruptedRelease):
        cancel.check()
    with pytest.raises(KeyboardInterrupt):
        cancel.request()
    assert os.read(cancel.fileno(), 10) == b"\0"
    cancel.close()


def test_a_signal_after_the_end_finds_the_handler_of_before() -> None:
    """Else a late Ctrl-C would write into a descriptor that is somebody else's by then."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        cancel = Cancel()
        cancel.install(signal.SIGTERM)
        cancel.install(signal.SIGTERM)
        cancel.close()
        reader, writer = os.pipe2(os.O_NONBLOCK)  # gets the numbers that the closed ones had
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(BlockingIOError):
            os.read(reader, 1)
        assert came == [signal.SIGTERM] and not cancel.requested
        os.close(reader)
        os.close(writer)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_an_interruption_in_a_callback_of_the_interpreter_is_noted_and_prints_nothing() -> None:
    """As one during an import, in the callback of its lock's weak reference: it is raised to nobody."""
    code = (
        "import signal, sys, weakref\n"
        f"sys.path.insert(0, {str(Path(__file__).resolve().parents[2])!r})\n"
        "from hostd.cli import interrupt\n"
        "interrupt.install()\n"
        "class Lock: pass\n"
        "lock = Lock()\n"
        "watch = weakref.ref(lock, lambda _: signal.raise_signal(signal.SIGINT))\n"
        "del lock\n"
        "print(interrupt.came)\n"
        "bad = weakref.ref(Lock(), lambda _: 1 / 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n" and "KeyboardInterrupt" not in done.stderr and "ZeroDivisionError" in done.stderr
