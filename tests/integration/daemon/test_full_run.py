"""/run is full, read-only or full of rubbish: a release goes on, and the journal says what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.embedded.node import Container, HolderHandle, Node, wait_until
from tests.integration.daemon.conftest import RELEASES, Daemon, Job
from tests.integration.product import Product, finish

pytestmark = [pytest.mark.embedded, pytest.mark.root]
RUN = "/run/pve-gpu-release"


@pytest.fixture
def tiny_run(node: Node) -> Iterator[Path]:
    """The product's directory on a file system of its own, 64 KiB."""
    node.path(RUN).mkdir(mode=0o700)
    node.init.mount("tiny", RUN, "tmpfs", 0, "size=64k,mode=700")
    yield node.path(RUN)


def fill(directory: Path) -> None:
    """Until not a byte more fits."""
    with open(directory / "filler", "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)


def test_a_full_run_stops_no_release(
    tiny_run: Path, idle_daemon: Daemon, product: Product, engine: Callable[..., HolderHandle]
) -> None:
    daemon = idle_daemon.start()
    fill(tiny_run)
    for where in ((), ("--no-daemon",)):
        holder = engine()
        product.release("129", "--now", *where).must_be("released")
        holder.wait_gone()
    wait_until(lambda: "record-missing" in daemon.stderr(), "the entry")
    assert daemon.records() == [] and not list((tiny_run / "releases").glob("*.new"))


def test_it_gets_full_in_the_middle_and_the_daemon_dies(
    tiny_run: Path, idle_daemon: Daemon, product: Product, container: Container
) -> None:
    """What could be written before is still good for the one who goes on."""
    daemon = idle_daemon.start()
    job = Job(container, "ignore")
    running = product.start("129", "--grace", "0.5", "--json")
    wait_until(job.has_term, "the SIGTERM")
    fill(tiny_run)
    daemon.kill()
    assert finish(running).status == 0 and job.terms() == 1


def test_an_abandoned_release_is_said_once_though_nothing_can_be_written(
    tiny_run: Path, idle_daemon: Daemon, product: Product, container: Container
) -> None:
    job = Job(container, "ignore")
    running = product.start("129", "--grace", "30", "--no-daemon")
    wait_until(job.has_term, "the SIGTERM")
    running.process.kill()
    running.popen.communicate()
    fill(tiny_run)
    idle_daemon.start()
    wait_until(lambda: "release-abandoned" in idle_daemon.stderr(), "the entry")
    idle_daemon.kill()
    idle_daemon.start().settle()
    assert idle_daemon.stderr().count("release-abandoned") == 1
    job.process.kill()


def test_rubbish_among_the_records_is_removed_and_stops_nothing(
    idle_daemon: Daemon, node: Node, product: Product, engine: Callable[..., HolderHandle]
) -> None:
    directory = node.path(RELEASES)
    directory.mkdir(parents=True)
    node.path(RUN).chmod(0o700)
    for number in range(200):
        (directory / f"{number:08x}.json").write_bytes(os.urandom(64))
    os.mkfifo(directory / "abc.json")
    (directory / "def.json").symlink_to("/dev/zero")
    hostile = '{"release_id": "beef", "vmid": -5, "rungs": [{}], "sent": [["term", 1, 1]], "report": null}'
    (directory / "beef.json").write_text(hostile)
    daemon = idle_daemon.start()
    assert os.listdir(directory) == []
    holder = engine()
    product.release("129", "--now").must_be("released")
    holder.wait_gone()
    assert len(daemon.records()) == 1


def test_records_are_bounded(daemon: Daemon, product: Product, container: Container, node: Node) -> None:
    client = daemon.client()
    for _ in range(60):
        reply = client.ask("Release", {"vmid": 129})
        assert reply is not None and "error" not in reply
    client.close()
    assert len(os.listdir(node.path(RELEASES))) <= 40
    assert len(daemon.status()["releases"]) == 10
