"""The daemon's own life: configuration, stop, idleness, what it does without a dependency."""

from __future__ import annotations

import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.embedded.node import Container, HolderHandle, Node, wait_until
from tests.integration.daemon.conftest import SOCKET, Daemon, Job
from tests.integration.product import QUICK, Product, finish
from tests.product_command import ROOT, command

pytestmark = [pytest.mark.embedded, pytest.mark.root]
CONFIG = "/etc/pve-gpu-release/config.yaml"


def switches(pid: int) -> int:
    """How often it has slept and been interrupted, since it began."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)


def pss_kib(pid: int) -> int:
    return next(
        int(line.split()[1])
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )


def test_idle_it_has_no_child_no_gpu_and_does_not_wake_up(
    daemon: Daemon, product: Product, engine: Callable[..., HolderHandle]
) -> None:
    engine()
    product.release("129", "--now").must_be("released")
    wait_until(lambda: daemon.status()["daemon"]["workers"] == 0, "the end of the worker that has answered")
    daemon.settle()
    daemon.settle_connections()
    assert not [link for link in daemon.descriptors() if "nvidia" in link]
    before = switches(daemon.pid)
    time.sleep(3)  # nothing to wait for: that nothing happens is the point
    assert switches(daemon.pid) == before
    assert pss_kib(daemon.pid) < 25 << 10


def test_a_broken_configuration_keeps_a_fresh_start_from_happening(node: Node, product: Product) -> None:
    product.configure("ladder: {grace: ten}\n")
    done = node.run(command("hostd.daemon"))
    assert done.returncode == 2
    assert "ladder.grace" in done.stderr and "check-config" in done.stderr and "Traceback" not in done.stderr
    assert not node.path(SOCKET).exists()


def test_a_reload_keeps_the_last_good_configuration(daemon: Daemon, product: Product, container: Container) -> None:
    product.configure("ladder: {grace: ten}\n")
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: bool(daemon.status()["daemon"]["config_error"]), "the error")
    assert "config-failed" in daemon.stderr()
    product.configure(QUICK.replace("grace: 5", "grace: 0.3"))
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: not daemon.status()["daemon"]["config_error"], "the good one")
    job = Job(container, "ignore")
    answer = product.release("129").must_be("released")
    assert answer.json["rungs"][0]["waited_ms"] < 4000, "the new grace is in force"
    assert job.terms() == 1


def test_an_unreadable_configuration_is_a_broken_one(daemon: Daemon, node: Node) -> None:
    path = node.path(CONFIG)
    path.unlink()
    path.mkdir()
    daemon.signal(signal.SIGHUP)
    wait_until(lambda: bool(daemon.status()["daemon"]["config_error"]), "the error")


def test_a_storm_of_reloads_in_the_middle_of_a_release(daemon: Daemon, product: Product, container: Container) -> None:
    job = Job(container, "ignore")
    running = product.start("129", "--grace", "0.5")
    wait_until(job.has_term, "the SIGTERM")
    for number in range(500):
        product.configure(QUICK if number % 2 else "nonsense")
        daemon.signal(signal.SIGHUP)
    product.configure(QUICK)
    daemon.signal(signal.SIGHUP)
    assert finish(running).status == 0 and job.terms() == 1
    wait_until(lambda: not daemon.status()["daemon"]["config_error"], "the last one is in force")
    daemon.settle()


def test_a_stop_in_the_middle_is_quick_and_said(daemon: Daemon, product: Product, container: Container) -> None:
    job = Job(container, "ignore")
    running = product.start("129", "--grace", "1", "--json")
    wait_until(job.has_term, "the SIGTERM")
    begun = time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - begun < 15
    (record,) = daemon.records()
    assert record["handed_over"] is True or record["owner"] == "cli"
    assert finish(running).status == 0 and job.terms() == 1
    assert "REASON=interrupted" in daemon.stderr() and "daemon-stopped" in daemon.stderr()


def test_status_says_who_looked_and_from_where(idle_daemon: Daemon, product: Product) -> None:
    """The node of the tests is a PID namespace of its own, with a daemon and without it."""
    namespace = "not the machine's first PID namespace"
    alone = product.run("status").out
    assert "daemon   not running" in alone and namespace in alone
    assert product.ask("status").json["first_pid_namespace"] is False
    daemon = idle_daemon.start()
    beside = product.run("status", "--no-daemon").out
    assert "daemon   not asked (--no-daemon)" in beside and "not running" not in beside and namespace in beside
    asked = product.run("status").out
    assert f"pid {daemon.status()['daemon']['pid']}" in asked and asked.count(namespace) == 1
    assert product.ask("status").json["first_pid_namespace"] is False


def test_what_it_has_no_process_for_is_done_without_it(daemon: Daemon, product: Product, container: Container) -> None:
    """Descriptors stand for all that a fork needs: one is left, for the connection."""
    daemon.settle()
    room = max(map(int, os.listdir(f"/proc/{daemon.pid}/fd"))) + 2
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (room, room))
    job = Job(container, "obey")
    assert product.ask("verify", "129").reason == "holders-present"
    assert product.ask("ps", "129").json["holders"]
    assert "cannot start a worker" in product.run("129").out
    assert job.terms() == 1
    product.release("129").must_be("nothing-held")


@pytest.mark.parametrize("missing", ["systemd", "pynvml", "yaml", "psutil", "proxmoxer"])
def test_without_a_dependency_it_still_serves(
    idle_daemon: Daemon, product: Product, container: Container, node: Node, missing: str
) -> None:
    """A package that is broken at import, as after a half-done upgrade."""
    node.write("/run/broken/run.py", BROKEN.format(missing=missing, root=str(ROOT)))
    node.path(CONFIG).unlink()  # without PyYAML only the built-in defaults can be had
    job = Job(container, "obey")
    idle_daemon.start(python_file="/run/broken/run.py")
    answer = product.ask("129")
    assert answer.status == (4 if missing == "pynvml" else 0), answer.out
    assert job.terms() == 1
    assert idle_daemon.status()["daemon"]["pid"]


def test_a_configuration_that_cannot_be_read_for_want_of_yaml_is_said(
    idle_daemon: Daemon, product: Product, node: Node
) -> None:
    product.configure("hook: {on_dirty: block}\n")
    node.write("/run/broken/run.py", BROKEN.format(missing="yaml", root=str(ROOT)))
    idle_daemon.start(python_file="/run/broken/run.py")
    said = idle_daemon.status()["daemon"]["config_error"]
    assert "python3-yaml is not installed" in said and "built-in defaults" in said
    assert "config-failed" in idle_daemon.stderr()
    text = product.run("status").out
    assert "python3-yaml is not installed" in text and "last good one" not in text


BROKEN = """
import sys
sys.path.insert(0, {root!r})
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {missing!r}:
            raise ImportError("broken on purpose: " + name)
sys.meta_path.insert(0, Broken())
from hostd.daemon import entry
entry()
"""


def test_it_tells_systemd_what_it_does(idle_daemon: Daemon, product: Product, container: Container, node: Node) -> None:
    """READY, STATUS, WATCHDOG, RELOADING, STOPPING on a socket that the test plays systemd with."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(20)
        systemd.bind(str(node.path("/run/notify")))
        heard: list[str] = []

        def hear(word: str) -> str:
            while not any(word in text for text in heard):
                heard.append(systemd.recv(4096).decode())
            found = next(text for text in heard if word in text)
            heard.clear()
            return found

        job = Job(container, "ignore")
        idle_daemon.start(env={"NOTIFY_SOCKET": "/run/notify", "WATCHDOG_USEC": "400000"})
        hear("WATCHDOG=1")
        assert "STATUS=idle" in hear("READY=1")
        running = product.start("129", "--grace", "0.5")
        assert hear("at work") == "STATUS=at work: Release 129"
        hear("WATCHDOG=1")
        assert finish(running).status == 0 and job.terms() == 1
        hear("STATUS=idle")
        idle_daemon.signal(signal.SIGHUP)
        assert "MONOTONIC_USEC=" in hear("RELOADING=1")
        hear("READY=1")
        assert idle_daemon.stop() == 0
        hear("STOPPING=1")
    node.path("/run/notify").unlink()


def test_it_takes_the_socket_that_systemd_passes(idle_daemon: Daemon, product: Product, node: Node) -> None:
    """LISTEN_FDS; and the socket stays when it stops."""
    node.path("/run/pve-gpu-release").mkdir(mode=0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(node.path(SOCKET)))
        listening.listen(128)
        idle_daemon.start_activated(listening)
        assert idle_daemon.status()["daemon"]["version"]
        assert idle_daemon.stop() == 0
        assert node.path(SOCKET).exists()
        idle_daemon.start_activated(listening)
        assert product.run("status").status == 0
