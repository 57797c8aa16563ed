"""Ctrl-C where nothing is in flight: a KeyboardInterrupt, and a mark that it came.

The mark is for code that turns the exception into another one, as class creation does (`RuntimeError: Error calling
__set_name__`, Python 3.11), or that was left before anybody could catch it. While a release is in flight, `Cancel` and
`remote` have handlers of their own, and leave the mark too: it may come too late for this release, and ends the run.
"""

from __future__ import annotations

import _signal as signal  # type: ignore[import-not-found, unused-ignore]  # `signal` brings `enum` with it
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

    from hostd.errors import InterruptedRelease

came = False
held = False
"""A release has begun, and what it has come to is to be told."""


def install(*signals: int) -> None:
    global held
    held = False
    for number in signals or (signal.SIGINT,):
        signal.signal(number, interrupt)
    sys.unraisablehook = _unraisable


def hold(*signals: int) -> None:
    """From here on one is only noted: raised between a report and whoever prints it, it would cost the report. A second
    one is raised."""
    global held
    held = True
    for number in signals:
        signal.signal(number, _note)


def _note(signum: int, frame: FrameType | None) -> None:
    global came
    if came:
        raise KeyboardInterrupt
    came = True


def _unraisable(fault: sys.UnraisableHookArgs) -> None:
    """One that comes in a callback of the interpreter's (a weak reference's, at an import) is raised to nobody: the mark
    says that it came, and there is nothing to be told of it."""
    if not issubclass(fault.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(fault)


def interrupt(signum: int, frame: FrameType | None) -> None:
    global came
    came = True
    raise KeyboardInterrupt


def error(vmid: int, detail: str) -> InterruptedRelease:
    """What an interruption is told as, when there is no report that says it."""
    from hostd.errors import InterruptedRelease
    from hostd.verdicts import say

    message, step = say("interrupted", vmid=vmid, detail=f"container {vmid}: {detail}")
    return InterruptedRelease(message, next_step=step)


def ignore() -> None:
    """What comes after the interruption has been understood is to be said in peace."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
