"""Helpers: what they hold, how they end, and that we never wait for one that cannot."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time

import pytest

from hostd import disposable
from hostd.disposable import Disposable, Outcome, call_with_deadline


def test_the_bytes_of_the_function_come_back() -> None:
    big = os.urandom(3 << 20)
    assert call_with_deadline(lambda: big, 30).data == big
    assert call_with_deadline(lambda: b"", 30) == (Outcome.ANSWER, b"", 0, "")


def test_an_os_error_comes_back_with_its_number() -> None:
    answer = call_with_deadline(lambda: open("/nowhere/at/all", "rb").read(), 30)
    assert (answer.outcome, answer.errno) == (Outcome.FAILED, 2)
    assert "/nowhere/at/all" in answer.error


def test_silence_is_a_timeout_and_costs_no_more_than_the_deadline() -> None:
    started = time.monotonic()
    answer = call_with_deadline(lambda: signal.pause() or b"", 0.1)  # type: ignore[func-returns-value]
    assert answer.outcome is Outcome.TIMEOUT
    assert time.monotonic() - started < 20
    while disposable.reap_abandoned():
        time.sleep(0.001)


def access_mode(fd: int) -> int | None:
    try:
        return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
    except OSError:
        return None


@pytest.mark.parametrize("way", ["killed", "exits", "bug", "half an answer"])
def test_a_helper_that_dies_is_told_from_one_that_answers(way: str) -> None:
    def fn() -> bytes:
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if way == "exits":
            os._exit(0)
        if way == "half an answer":
            (reply,) = (n for n in range(3, 64) if access_mode(n) == os.O_WRONLY)
            os.write(reply, b"+x")
            os._exit(0)
        raise KeyError(way)

    assert call_with_deadline(fn, 30).outcome is Outcome.DIED


def test_a_helper_has_nothing_of_ours_open_and_no_handler_mask_or_directory() -> None:
    extra = os.open("/etc/passwd", os.O_RDONLY)
    os.set_inheritable(extra, True)
    old = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

    def look() -> bytes:
        links = [os.readlink(f"/proc/self/fd/{n}") for n in range(2000) if access_mode(n) is not None]
        status = open("/proc/self/status").read()
        masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk", "SigCgt"))]
        facts = [
            len(links) == 5 and all(link.startswith(("/dev/null", "pipe:")) for link in links),
            [os.readlink(f"/proc/self/fd/{n}") for n in range(3)] == ["/dev/null"] * 3,
            [mask & ~(3 << 31) for mask in masks] == [0, 0],  # 32 and 33 are the C library's own
            os.getcwd() == "/",
            os.getsid(0) == os.getpid(),
        ]
        return repr(facts).encode()

    try:
        assert call_with_deadline(look, 30).data == b"[True, True, True, True, True]"
    finally:
        os.close(extra)
        signal.signal(signal.SIGUSR1, old)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})


def test_our_exit_handlers_and_buffers_stay_ours() -> None:
    code = (
        "import atexit, sys; sys.path.insert(0, sys.argv[1])\n"
        "from hostd.disposable import call_with_deadline\n"
        "atexit.register(print, 'bye')\n"
        "sys.stdout.write('buffered ')\n"
        "assert call_with_deadline(lambda: b'x', 30).data == b'x'\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    done = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    assert done.stdout == "buffered bye\n"


@pytest.mark.parametrize("closed", ["0<&- 1>&- 2>&-", "0<&-", "1>&-"])
def test_standard_descriptors_that_our_caller_closed_do_no_harm(closed: str) -> None:
    code = (
        "import os, sys; sys.path.insert(0, sys.argv[1])\n"
        "from hostd.disposable import call_with_deadline\n"
        "os._exit(call_with_deadline(lambda: os.readlink('/proc/self/fd/0').encode(), 30).data != b'/dev/null')\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    assert subprocess.run(["sh", "-c", f'exec "$0" -c "$1" "$2" {closed}', sys.executable, code, root]).returncode == 0


@pytest.mark.parametrize("left", [0, 1, 2, 3])
def test_a_helper_that_cannot_be_started_leaves_nothing_open(left: int) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open("/", os.O_RDONLY) for _ in range(64)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[-1] + 1, limits[1]))
    try:
        for _ in range(left):
            os.close(taken.pop())
        with pytest.raises(OSError, match="Too many open files"):
            Disposable(lambda request, reply: None)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_helper_dies_with_us() -> None:
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        helper = Disposable(lambda *_: signal.pause(), keep=(writer,))
        os.write(writer, b"%d\n" % helper.pid)
        os._exit(0)
    os.close(writer)
    os.waitpid(middle, 0)
    data = b""
    while part := os.read(reader, 100):  # ends when the last holder of the pipe, the helper, is gone
        data += part
    os.close(reader)
    assert int(data) > 1


def test_a_served_helper_answers_again_and_again_and_close_ends_it() -> None:
    def echo(request_fd: int, reply_fd: int) -> None:
        while data := os.read(request_fd, 100):
            os.write(reply_fd, data.upper())

    helper = Disposable(echo)
    for word in (b"one", b"two"):
        assert helper.write(word, 10)
        assert helper.read(10) == word.upper()
    assert helper.read(0) is None
    helper.close()
    helper.close()
    with pytest.raises(ProcessLookupError):
        os.kill(helper.pid, 0)


def test_writing_to_a_helper_that_does_not_read_ends_at_the_deadline() -> None:
    helper = Disposable(lambda *_: signal.pause())
    try:
        assert not helper.write(bytes(1 << 20), 0.1)
    finally:
        helper.close()


def test_writing_to_a_dead_helper_says_so() -> None:
    helper = Disposable(lambda *_: None)
    os.waitid(os.P_PID, helper.pid, os.WEXITED | os.WNOWAIT)
    assert helper.read(0) == b""
    assert not helper.write(b"x", 1)
    helper.close()


def test_one_that_does_not_die_is_left_behind_and_collected_later() -> None:
    # A vfork parent waits in the kernel, but a killed one dies; what really stays is in test_scan (FUSE). Here: the
    # bookkeeping, with a child that was never killed.
    child = subprocess.Popen(["sleep", "600"])
    disposable._abandoned.append(child.pid)
    try:
        assert disposable.reap_abandoned() == 1
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert disposable.reap_abandoned() == 0
    finally:
        disposable._abandoned.clear()
        child.returncode = -9
