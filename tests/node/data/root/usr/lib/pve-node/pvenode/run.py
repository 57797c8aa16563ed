"""Running a command as Proxmox does: standard input closed at once, both outputs copied until everyone closed them."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import BinaryIO


class PveError(Exception):
    """The text that Proxmox would print."""


class InterruptError(PveError):
    pass


def quoted(argv: list[str]) -> str:
    return " ".join(
        arg
        if arg.replace("-", "").replace("/", "").replace(".", "").replace("@", "").replace("_", "").isalnum()
        else "'" + arg.replace("'", "'\\''") + "'"
        for arg in argv
    )


@contextmanager
def interruptible() -> Iterator[None]:
    """TERM, INT and HUP end what is being waited for with "received interrupt"."""

    def raise_it(_signum: int, _frame: FrameType | None) -> None:
        raise InterruptError("received interrupt")

    signals = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.signal(number, raise_it) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C", "LVM_SUPPRESS_FD_WARNINGS": "1"}


def spawn(argv: list[str], stdin: int = subprocess.PIPE) -> subprocess.Popen[bytes]:
    def child_signals() -> None:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)

    options = {
        "stdin": stdin,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "env": environment(),
        "preexec_fn": child_signals,
        "restore_signals": False,
    }
    try:
        return subprocess.Popen(argv, **options)  # type: ignore[call-overload,no-any-return]
    except OSError as error:
        if error.errno == errno.ENOEXEC:  # no #!: execvp falls back to the shell
            return subprocess.Popen(["/bin/sh", *argv], **options)  # type: ignore[call-overload,no-any-return]
        raise PveError(
            f"open3: exec of {' '.join(argv)} failed: {os.strerror(error.errno or 0)} at "
            "/usr/share/perl5/PVE/Cmd.pm line 174."
        ) from error


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def copy_outputs(process: subprocess.Popen[bytes], deadline: float | None, keep: bool) -> bytes:
    """Copy until both pipes are closed by everyone who holds them, children of the command included."""
    assert process.stdout and process.stderr
    kept = b""
    with selectors.DefaultSelector() as selector:
        pipes: list[tuple[BinaryIO, int]] = [(process.stdout, 1), (process.stderr, 2)]  # type: ignore[list-item]
        for pipe, target in pipes:
            selector.register(pipe, selectors.EVENT_READ, target)
        while selector.get_map():
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = selector.select(left)
            if not ready and left is not None:
                raise PveError("got timeout")
            for key, _ in ready:
                data = os.read(key.fd, 65536)
                if not data:
                    selector.unregister(key.fileobj)
                elif keep and key.data == 1:
                    kept += data
                else:
                    write_all(key.data, data)
    return kept


def run_command(argv: list[str], timeout: float | None = None, keep_stdout: bool = False) -> bytes:
    """Run to the end. Raises PveError with Proxmox's wording when it fails, or after `timeout` seconds."""
    sys.stdout.flush()
    sys.stderr.flush()
    with interruptible():
        try:
            process = spawn(argv)
            assert process.stdin
            process.stdin.close()
            try:
                kept = copy_outputs(process, None if timeout is None else time.monotonic() + timeout, keep_stdout)
                status = process.wait()
            except BaseException:
                process.kill()
                process.wait()
                raise
        except PveError as error:
            raise PveError(f"command '{quoted(argv)}' failed: {error}") from error
    if status > 0:
        raise PveError(f"command '{quoted(argv)}' failed: exit code {status}")
    if status < 0:
        raise PveError(f"command '{quoted(argv)}' failed: got signal {-status}")
    return kept
