"""The entries that are not about one container: the daemon, the configuration, the driver, this trail itself."""

from __future__ import annotations

from collections.abc import Sequence

from hostd.audit.entry import MAX_TEXT, NOWHERE, Context, Entry, count_words, entry_of
from hostd.audit.kinds import (
    CONFIG_FAILED,
    CONFIG_LOADED,
    DAEMON_STARTED,
    DAEMON_STOPPED,
    ENTRIES_DROPPED,
    INTERNAL_ERROR,
    NVML_RECOVERED,
    NVML_WEDGED,
    RESET_RECOVERED,
)


def daemon_started(version: str, notes: Sequence[str] = ()) -> Entry:
    message = f"pve-gpu-hostd {version} is ready" + "".join(f"; {note}" for note in notes)
    return entry_of(DAEMON_STARTED, NOWHERE, message, ("VERSION", version), ("NOTE", list(notes)))


def reset_recovered(text: str) -> Entry:
    """A reset that was killed: what was put back."""
    return entry_of(RESET_RECOVERED, NOWHERE, text)


def daemon_stopped(why: str) -> Entry:
    return entry_of(DAEMON_STOPPED, NOWHERE, f"pve-gpu-hostd stops: {why}", ("REASON", why))


def config_loaded(path: str) -> Entry:
    return entry_of(CONFIG_LOADED, NOWHERE, f"configuration {path} is in force", ("CONFIG_FILE", path))


def config_failed(path: str, problems: Sequence[str], *, instead: str, ctx: Context = NOWHERE) -> Entry:
    """`instead` = what is in force now: `the last good configuration`, `the built-in defaults`."""
    message = f"cannot use configuration {path}: {problems[0] if problems else 'unknown'}"
    if len(problems) > 1:
        message += f" (and {len(problems) - 1} more)"
    message += f"; {instead} stays in force"
    return entry_of(
        CONFIG_FAILED,
        ctx,
        message,
        ("CONFIG_FILE", path),
        ("ERROR", list(problems)),
        ("NEXT_STEP", "pve-gpu-release check-config"),
    )


def nvml_wedged(pid: int, call: str, since_s: float, ctx: Context = NOWHERE) -> Entry:
    message = (
        f"the NVIDIA driver does not answer: {call} in process {pid} hangs since {since_s:.0f} s; not asking again"
    )
    return entry_of(
        NVML_WEDGED, ctx, message, ("NVML_PID", pid), ("NVML_CALL", call), ("WAITED_MS", round(since_s * 1000))
    )


def nvml_recovered(pid: int, ctx: Context = NOWHERE) -> Entry:
    return entry_of(
        NVML_RECOVERED, ctx, f"the NVIDIA driver answers again (process {pid} has ended)", ("NVML_PID", pid)
    )


def internal_error(where: str, traceback: str, ctx: Context = NOWHERE) -> Entry:
    """A bug. The traceback is one escaped line."""
    last = traceback.strip().rpartition("\n")[2]
    return entry_of(
        INTERNAL_ERROR,
        ctx,
        f"internal error in {where}: {last}",
        ("ERROR", last),
        ("TRACEBACK", traceback[-MAX_TEXT + 200 :]),
    )


def entries_dropped(count: int) -> Entry:
    """Given to `Journal(on_drop=...)`."""
    message = f"{count_words(count, 'entry', 'entries')} of this trail could not be written: the journal did not read"
    return entry_of(ENTRIES_DROPPED, NOWHERE, message, ("DROPPED", count))
