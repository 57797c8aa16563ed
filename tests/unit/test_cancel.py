"""Cancelling: what was there before is there again afterwards."""

from __future__ import annotations

import os
import signal

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
