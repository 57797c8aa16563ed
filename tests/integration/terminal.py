"""A pseudo-terminal on which a command of the node runs: what a person at the console sees, and closing it."""

from __future__ import annotations

import os
import pty
import select
import time
from collections.abc import Sequence
from types import TracebackType

from tests.embedded.node import Node
from tests.embedded.process import Process

DEADLINE_S = 60.0


class Terminal:
    """Context manager. The command has the terminal as its controlling one, so that closing it is a SIGHUP."""

    def __init__(self, node: Node, command: Sequence[str]) -> None:
        self.master, slave = pty.openpty()
        try:
            # setsid makes a session whose controlling terminal is its standard input.
            words = ["setsid", "--ctty", "--wait", *command]
            env = {"TERM": "xterm", "COLUMNS": "100"}
            self._running = node.popen(words, stdin=slave, stdout=slave, stderr=slave, env=env)
        finally:
            os.close(slave)
        self.text = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()
        self._running.popen.wait(timeout=DEADLINE_S)

    @property
    def process(self) -> Process:
        """setsid(1), which ends with the command's exit status."""
        return self._running.process

    def read_until(self, words: str) -> str:
        """Reads what is shown until `words` are among it. AssertionError when they do not come."""
        end = time.monotonic() + DEADLINE_S
        while words not in self.text:
            assert time.monotonic() < end and self._read(end - time.monotonic()), f"{words!r} not in {self.text!r}"
        return self.text

    def type(self, keys: bytes) -> None:
        os.write(self.master, keys)

    def finish(self) -> tuple[str, int]:
        """(everything that was shown, exit status)."""
        end = time.monotonic() + DEADLINE_S
        while self._read(max(0.0, end - time.monotonic())):
            continue
        return self.text, self._running.popen.wait(timeout=DEADLINE_S)

    def hang_up(self) -> None:
        if self.master >= 0:
            os.close(self.master)
            self.master = -1

    def wait(self) -> int:
        return self._running.popen.wait(timeout=DEADLINE_S)

    def _read(self, timeout_s: float) -> bool:
        poll = select.poll()
        poll.register(self.master, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:  # EIO: nobody has the other side open any more
            return False
        self.text += data.decode(errors="replace")
        return bool(data)
