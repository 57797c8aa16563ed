"""The world around the daemon: clocks that jump, a journal that does not read, a terminal."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.embedded.node import Container, Node, wait_until
from tests.integration.daemon.conftest import Daemon, Job
from tests.integration.product import Product, finish

pytestmark = [pytest.mark.embedded, pytest.mark.root]
JUMPS = r"""
#define _GNU_SOURCE
#include <time.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>
/* CLOCK_REALTIME leaps a day forth and a week back at every other call. */
static long leap(void) { static unsigned calls; calls++; return calls % 2 ? 86400 : -7 * 86400; }
int clock_gettime(clockid_t id, struct timespec *at)
{
	int status = syscall(SYS_clock_gettime, id, at);
	if (id == CLOCK_REALTIME) at->tv_sec += leap();
	return status;
}
int gettimeofday(struct timeval *at, void *zone)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	at->tv_sec = now.tv_sec; at->tv_usec = now.tv_nsec / 1000;
	return 0;
}
time_t time(time_t *at)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	if (at) *at = now.tv_sec;
	return now.tv_sec;
}
"""


@pytest.fixture
def mad_clock(tmp_path: Path, node: Node) -> dict[str, str]:
    """The environment of a program whose wall clock jumps."""
    (tmp_path / "jumps.c").write_text(JUMPS)
    built = tmp_path / "jumps.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", built, tmp_path / "jumps.c"], check=True)
    node.write("/run/jumps.so", built.read_bytes(), 0o755)
    return {"LD_PRELOAD": "/run/jumps.so"}


def test_the_wall_clock_decides_nothing(
    idle_daemon: Daemon, product: Product, container: Container, mad_clock: dict[str, str]
) -> None:
    daemon = idle_daemon.start(env=mad_clock)
    for extra in ((), ("--no-daemon",)):
        job = Job(container, "ignore")
        begun = time.monotonic()
        running = product.start("129", "--grace", "0.7", "--json", *extra, env=mad_clock)
        done = finish(running)
        assert done.status == 0, done.out + done.err
        taken = time.monotonic() - begun
        assert 0.7 <= taken < 30 and job.terms() == 1
        reports = [r["report"] for r in daemon.records()]
        assert all(700 <= r["duration_ms"] < 30_000 for r in reports)
    assert daemon.status()["driver"]["wedged"] is None
    daemon.settle()


def test_a_release_goes_on_over_a_jump_and_a_death(
    idle_daemon: Daemon, product: Product, container: Container, mad_clock: dict[str, str]
) -> None:
    """The age of a record is by the clock since boot: a jump of the wall clock makes none too old to be finished."""
    daemon = idle_daemon.start(env=mad_clock)
    job = Job(container, "ignore")
    running = product.start("129", "--grace", "0.5")
    wait_until(job.has_term, "the SIGTERM")
    daemon.kill()
    running.process.kill()
    running.popen.communicate()
    (record,) = daemon.records()
    if record["owner"] == "daemon":
        daemon.start(env=mad_clock)
        wait_until(lambda: daemon.records()[0]["report"] is not None, "the report")
        assert daemon.records()[0]["report"]["reason"] == "released"
    else:
        job.process.kill()
    assert job.terms() == 1


@pytest.fixture
def deaf_journal(node: Node) -> Iterator[socket.socket]:
    """A journald that has its socket and does not read."""
    path = node.path("/run/systemd/journal/socket")
    path.parent.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        yield sock
    path.unlink()


def test_a_journal_that_does_not_read_is_in_nobodys_way(
    deaf_journal: socket.socket, idle_daemon: Daemon, product: Product, container: Container
) -> None:
    daemon = idle_daemon.start()
    for _ in range(4):
        job = Job(container, "obey")
        begun = time.monotonic()
        product.release("129").must_be("released")
        assert time.monotonic() - begun < 15
        assert job.terms() == 1
    for _ in range(30):
        daemon.signal(1)
        assert daemon.status()["daemon"]["config_error"] == ""
    begun = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - begun < 15
    heard = 0
    deaf_journal.settimeout(10)
    while heard < 11:  # what the kernel took while nobody read
        assert b"PVE_GPU_RELEASE_EVENT" in deaf_journal.recv(1 << 16)
        heard += 1
        if not select.select([deaf_journal], [], [], 0.5)[0]:
            break


class Screen:
    """A pseudo-terminal, and what a program has written on it."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        self.seen = b""

    def shows(self, *words: bytes) -> bool:
        while select.select([self.ours], [], [], 0)[0]:
            try:
                self.seen += os.read(self.ours, 65536)
            except OSError:  # nobody has the other end any more
                break
        return all(word in self.seen for word in words)


@pytest.mark.parametrize("end", ["q", "term"])
def test_the_live_view_leaves_the_terminal_as_it_was(daemon: Daemon, product: Product, node: Node, end: str) -> None:
    screen = Screen()
    words = [*product.command, "status", "--watch", "--interval", "0.2"]
    running = node.popen(words, stdin=screen.theirs, stdout=screen.theirs, stderr=screen.theirs)
    try:
        wait_until(lambda: screen.shows(b"\x1b[?1049h", b"NVML ok"), "the first picture")
        screen.seen = b""
        wait_until(lambda: screen.shows(b"\x1b[H"), "the next one")
        if end == "q":
            os.write(screen.ours, b"q")
        else:
            running.process.kill(15)
        assert running.popen.wait(20) == 0
        assert screen.shows(b"\x1b[?25h", b"\x1b[?1049l")
    finally:
        os.close(screen.ours)
        os.close(screen.theirs)
