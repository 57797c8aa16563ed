"""A holder that moves faster than anybody looks (tests/embedded/tools/restless.c)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.embedded.build import artefacts
from tests.embedded.node import Container
from tests.embedded.scope import Running

from .conftest import ONE_GPU

MIB = 40_000


@contextmanager
def restless(container: Container, mode: str) -> Iterator[Running]:
    """With memory on GPU 0 (minor 50), charged to the first process: without it such a descriptor may be missed."""
    running = container.popen(["restless", mode, *ONE_GPU[:1], "50", str(MIB)], exe=artefacts().restless)
    assert running.popen.stdout is not None
    try:
        assert running.popen.stdout.readline() == "ready\n"
        yield running
    finally:
        running.popen.kill()
