"""Errors that reach a person. Each carries a `reason` of `hostd/verdicts.py`, which knows its exit status."""

from __future__ import annotations


class PgrError(Exception):
    """Cannot do what was asked. `reason` is a stable code of the verdict table; `message` starts with "cannot"."""

    reason = "internal-error"

    def __init__(self, message: str, *, next_step: str = "", reason: str = "", vmid: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.vmid = vmid
        if reason:
            self.reason = reason


class UsageError(PgrError):
    """The command line asks for something that makes no sense or matches nothing."""

    reason = "usage"


class ConfigError(PgrError):
    """The configuration file is wrong; the message names file, line and key path."""

    reason = "config-error"


class RefusedError(PgrError):
    """Possible, but policy says no."""

    reason = "refused"


class NoSuchContainerError(PgrError):
    """Neither configuration nor cgroup on this node."""

    reason = "no-such-container"


class NotPermittedError(PgrError):
    """Not root."""

    reason = "not-root"


class BusyError(PgrError):
    """Another release of this container is in flight."""

    reason = "busy"


class UnreadableError(PgrError):
    """A source that decides could not be read (hung /etc/pve, no cgroup v2)."""

    reason = "cannot-look"


class InterruptedRelease(PgrError):  # noqa: N818 - not a fault: the caller asked for it
    """Ctrl-C or a cancelled request."""

    reason = "interrupted"


def is_exhausted(exc: BaseException) -> bool:
    """True when no descriptor, process or memory is left to whoever runs us: nothing was found out, and it is no bug."""
    import errno

    if isinstance(exc, OSError):
        return exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN)
    return isinstance(exc, MemoryError)


def is_gone(exc: OSError) -> bool:
    """True when an entry below /proc or cgroupfs vanished while it was read: ENOENT, ESRCH, ENODEV (STYLE 1).

    Anything else is a blind spot. The root of a tree is never "gone": its absence is a blind spot too.
    """
    import errno

    return exc.errno in (errno.ENOENT, errno.ESRCH, errno.ENODEV)
