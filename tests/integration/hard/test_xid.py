"""An Xid in the kernel log in the middle of a release: the climb stops, and it is said what it means."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.embedded.node import Container, HolderHandle, Node, wait_until
from tests.integration.product import Answer, Product, finish, parsed

Engine = Callable[..., HolderHandle]
OLD = "6,100,1000,-;NVRM: Xid (PCI:0000:18:00): 119, pid=1, name=python3, Timeout waiting for RPC from GSP0!\n"
GSP = "3,101,2000,-;NVRM: Xid (PCI:0000:18:00): 119, pid=7, name=python3, Timeout waiting for RPC from GSP0!\n"
LOST = "3,101,2000,-;NVRM: GPU at PCI:0000:18:00.0 has fallen off the bus.\n"
OTHER_GPU = "3,101,2000,-;NVRM: Xid (PCI:0000:3b:00): 119, pid=7, Timeout waiting for RPC from GSP0!\n"
HARMLESS = "3,101,2000,-;NVRM: Xid (PCI:0000:18:00): 45, pid=7, name=python3, Ch 00000010\n"
FORGED = "12,101,2000,-;NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus.\n"


@pytest.fixture
def kmsg(node: Node) -> Callable[[str], None]:
    """The node's kernel log: a file, with an Xid from long ago in it. Returns what appends to it."""
    path = node.path("/dev/kmsg")
    path.unlink()
    path.write_text(OLD)

    def append(text: str) -> None:
        with path.open("a") as file:
            file.write(text)

    return append


def release_while(product: Product, kmsg: Callable[[str], None], text: str, *words: str) -> Answer:
    """A release in whose first rung the driver reports `text`."""
    running = product.start(129, "--grace", "1", "--json", *words)
    wait_for_rung(product)
    kmsg(text)
    done = finish(running)
    return parsed(done.status, done.out, done.err)


def wait_for_rung(product: Product) -> None:
    directory = product.node.path("/run/pve-gpu-release/releases")
    wait_until(
        lambda: directory.is_dir() and any('"term"' in p.read_text() for p in directory.glob("*.json")),
        "the first rung",
    )


@pytest.mark.case("xid")
@pytest.mark.parametrize(("text", "number"), [(GSP, "Xid 119"), (LOST, "Xid without a number")], ids=["gsp", "lost"])
def test_a_new_xid_stops_the_escalation(
    product: Product,
    container: Container,
    engine: Engine,
    kmsg: Callable[[str], None],
    expected: str,
    text: str,
    number: str,
) -> None:
    holder = engine(ignore_term=True)
    answer = release_while(product, kmsg, text).must_be(expected)
    assert answer.steps() == ["term"] and holder.alive(), "no SIGKILL after it"
    assert f"{number} on 0000:18:00.0" in answer.message
    assert "reset" in answer.json["next_step"] or "reboot" in answer.json["next_step"]
    assert any(detail.startswith(f"kernel log: {number}") for detail in answer.json["details"])


@pytest.mark.parametrize("text", [OTHER_GPU, HARMLESS, FORGED], ids=["other-gpu", "harmless", "forged"])
def test_what_does_not_concern_the_gpu_does_not_stop_it(
    product: Product, container: Container, engine: Engine, kmsg: Callable[[str], None], text: str
) -> None:
    holder = engine(ignore_term=True)
    answer = release_while(product, kmsg, text).must_be("released")
    assert answer.steps() == ["term", "kill"] and not holder.alive()


def test_an_xid_goes_into_the_story_of_ghost_memory(
    node: Node, product: Product, container: Container, engine: Engine, kmsg: Callable[[str], None]
) -> None:
    node.control(leak_mib=900, recovery_action={50: 1})
    engine(term_ms=300)
    answer = release_while(product, kmsg, GSP).must_be("ghost-memory")
    story = " / ".join(answer.json["details"])
    assert "Xid 119 on 0000:18:00.0" in story and "the driver recommends a reset of the GPU" in story


def test_an_unreadable_log_takes_nothing_away(
    node: Node, product: Product, container: Container, engine: Engine
) -> None:
    node.path("/dev/kmsg").unlink()
    engine()
    answer = product.release(129).must_be("released")
    assert answer.json["blind_spots"] == []
    assert answer.json["details"] == ["the kernel log was not read: cannot read /dev/kmsg: No such file or directory"]
