"""What a caller may leave to the program that it starts and none of ours can work with. First thing in every entry.

Signal dispositions, the signal mask and descriptors survive execve(2). With SIGCHLD ignored, the kernel reaps children
itself: waitpid(2) finds none, and `subprocess` takes every exit status for 0. With signals blocked, SIGTERM ends nothing.
With descriptors 0 to 2 closed, the next file or socket takes their number and is written to as if it were the terminal.
Quick to import: `signal` would bring `enum` with it, on the way of every start and stop of a container.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found, unused-ignore]
import os


def set_right() -> None:
    """SIGCHLD as it is by default, no signal blocked, something behind 0, 1 and 2. Never fails."""
    try:
        for fd in (0, 1, 2):
            _fill(fd)
    except OSError:
        pass  # no /dev/null, or no descriptor left: the rest is told by whoever needs one
    _signal.signal(_signal.SIGCHLD, _signal.SIG_DFL)
    _signal.pthread_sigmask(_signal.SIG_SETMASK, ())


def _fill(fd: int) -> None:
    try:
        os.fstat(fd)
    except OSError:
        opened = os.open(os.devnull, os.O_RDWR)
        if opened != fd:
            os.dup2(opened, fd)
            os.close(opened)
