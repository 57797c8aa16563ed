"""Many at once: releases, clients, questions; and clients that misbehave while others work."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.embedded.node import Container, Node, wait_until
from tests.integration.daemon.conftest import SOCKET, Daemon, Job
from tests.integration.product import Product, finish
from tests.unit.varlink_harness import Client

pytestmark = [pytest.mark.embedded, pytest.mark.root]
IFACE = "io.pve.GpuRelease"


def rss_kib(pid: int) -> int:
    """Private memory: what forked workers share with it changes nothing."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Private_Clean:")))


def test_a_hundred_releases_of_a_hundred_containers_at_once(daemon: Daemon, node: Node) -> None:
    node.write("/etc/pve-gpu-release/config.yaml", "ladder: {grace: 20, timeout: 300}\nnvml: {deadline: 120}\n")
    daemon.signal(1)
    vmids = range(1000, 1100)
    holders = {
        vmid: node.container(vmid).spawn_holder(open=("/dev/nvidia0", "/dev/nvidiactl"), alloc=("50:100:compute",))
        for vmid in vmids
    }
    clients = {vmid: daemon.client() for vmid in vmids}
    for client in clients.values():
        client.sock.settimeout(200)
    begun = time.monotonic()
    for vmid, client in clients.items():
        client.say("Release", {"vmid": vmid})
    for vmid, client in clients.items():
        reply = client.hear()
        assert reply is not None and "error" not in reply, reply
        report = reply["parameters"]["report"]
        assert (report["vmid"], report["reason"]) == (vmid, "released"), report
        assert [h["pid"] for h in report["holders"]] == [holders[vmid].pid]
        assert [r["sent"] for r in report["rungs"]] == [1]
        client.close()
    print(f"100 releases of 100 containers: {time.monotonic() - begun:.2f} s")
    assert sorted(int(p.stem) for p in node.path("/run/pve-gpu-release/locks").iterdir()) == list(vmids)
    daemon.settle()


def test_two_releases_of_one_container_give_one_verdict_each_and_one_signal(
    daemon: Daemon, container: Container, product: Product
) -> None:
    job = Job(container, "ignore")
    running = [product.start("129", "--grace", "0.5", "--json") for _ in range(6)]
    answers = [finish(one) for one in running]
    assert [a.status for a in answers] == [0] * 6
    reports = [json.loads(a.out) for a in answers]
    assert sum(r["was_held"] for r in reports) == 1
    assert job.terms() == 1


def test_five_hundred_questions_leak_nothing(daemon: Daemon) -> None:
    def ask(times: int) -> None:
        for _ in range(times):
            client = daemon.client()
            reply = client.ask("Status")
            assert reply is not None and "error" not in reply
            client.close()

    ask(40)
    daemon.settle()
    daemon.settle_connections()
    descriptors, memory = daemon.descriptors(), rss_kib(daemon.pid)
    ask(500)
    daemon.settle()
    daemon.settle_connections()
    # The last connection may be closed a moment after the others, at either time.
    wait_until(lambda: not Counter(daemon.descriptors()) - Counter(descriptors), "no more is open than before")
    assert rss_kib(daemon.pid) - memory < 1024


def test_two_hundred_clients_at_once_are_all_answered(daemon: Daemon) -> None:
    clients = [daemon.client() for _ in range(200)]
    for client in clients:
        client.sock.settimeout(120)
        client.say("Observe")
    for client in clients:
        reply = client.hear()
        assert reply is not None and "error" not in reply
        client.close()
    daemon.settle()


def test_misbehaving_clients_cost_a_release_nothing(
    daemon: Daemon, product: Product, container: Container
) -> None:
    """Half calls, floods, garbage, readers that never read, connections opened and closed: a release beside them."""
    job = Job(container, "ignore")
    running = product.start("129", "--grace", "1", "--json")
    wait_until(job.has_term, "the SIGTERM")
    path = str(daemon.node.path(SOCKET))
    idlers = [Client(path) for _ in range(100)]
    half = [Client(path) for _ in range(100)]
    for client in half:
        client.send(b'{"method": "io.pve')
    deaf = [Client(path) for _ in range(20)]
    for client in deaf:
        client.say("Observe", {}, more=True)
        client.say("org.varlink.service.GetInterfaceDescription", {"interface": IFACE})
    for number in range(300):
        with socket.socket(socket.AF_UNIX) as hasty:
            hasty.connect(path)
            if number % 3 == 0:
                hasty.sendall(b"\xff\x00garbage\x00" * 50)
            elif number % 3 == 1:
                hasty.sendall(b"x" * 70_000)
    done = finish(running)
    assert done.status == 0, done.out + done.err
    assert json.loads(done.out)["reason"] == "released" and job.terms() == 1
    for client in [*idlers, *half, *deaf]:
        client.close()
    daemon.settle()
    daemon.settle_connections()


def test_a_flood_of_connections_keeps_nobody_out_for_long(daemon: Daemon, product: Product) -> None:
    path = str(daemon.node.path(SOCKET))
    flood = []
    for _ in range(700):
        client = Client(path)
        flood.append(client)
    begun = time.monotonic()
    assert product.run("status").status == 0
    assert time.monotonic() - begun < 15
    for client in flood:
        client.close()
