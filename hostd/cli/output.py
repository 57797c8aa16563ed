"""What the process writes: standard output and error as streams that never fail.

One rule for every verb: **output that cannot be written ends nothing and changes no verdict.** What is being done goes on
to its end (DESIGN 5: a release in flight), the rest of the text goes nowhere, and the exit status says what was done.

* A closed pipe (`| head`) is the reader's own wish: not a word, no other status.
* Anything else (a full disk) is one line on the error stream. A verb that does nothing but show (`ps`, `log`, `--help`)
  has then failed: 1 instead of 0 (`main._only_shows`).
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO

ENOUGH = 16384
"""Characters kept back before they are written, for a pipe or a file; a terminal gets each line at once."""


class Output:
    """Text to a descriptor, enough like a TextIO for `print`, argparse and the terminal helpers.

    `lost` is the first error; from then on everything is dropped. What the encoding lacks is written as an escape.
    """

    errors = "backslashreplace"

    def __init__(self, fd: int, encoding: str = "utf-8", *, by_line: bool = False) -> None:
        self.encoding = encoding
        self.lost: OSError | None = None
        self.wrote = False
        self._fd = fd
        self._kept: list[str] = []
        self._length = 0
        self._by_line = by_line or self.isatty()

    def write(self, text: str) -> int:
        self._kept.append(text)
        self._length += len(text)
        self.wrote = True
        if self._length >= ENOUGH or (self._by_line and "\n" in text):
            self.flush()
        return len(text)

    def flush(self) -> None:
        text, self._kept, self._length = "".join(self._kept), [], 0
        data = memoryview(text.encode(self.encoding, self.errors))
        while data and self.lost is None:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # somebody made our end of the pipe non-blocking
                import select

                select.select([], [self._fd], [])
            except OSError as exc:
                self.lost = exc

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True


def take_over() -> None:
    """Puts them in the place of the interpreter's own streams, the missing ones too (`>&-`; `inherited` has put something
    behind their numbers)."""
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)
    for fd, name in ((1, "stdout"), (2, "stderr")):
        encoding = getattr(getattr(sys, name), "encoding", None) or "utf-8"
        setattr(sys, name, Output(fd, encoding, by_line=fd == 2))


def lost(stream: TextIO | None = None) -> OSError | None:
    """Why standard output (or another stream) cannot be written any more; None while it can."""
    found = getattr(sys.stdout if stream is None else stream, "lost", None)
    return found if isinstance(found, OSError) else None
