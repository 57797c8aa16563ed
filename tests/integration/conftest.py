"""A node with neighbours that must survive whatever is released, and the product in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.embedded.fixtures import container, make_node, node, require_node  # noqa: F401
from tests.embedded.node import Container, HolderHandle, Node

from .product import Product, expected_of, lives

ALL_NODES = ("/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm")
ONE_GPU = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm")


@pytest.fixture
def product(node: Node) -> Product:  # noqa: F811
    return Product(node)


@pytest.fixture
def expected(request: pytest.FixtureRequest) -> str:
    """The reason that the verdict table promises for the case this test is marked with."""
    marker = request.node.get_closest_marker("case")
    assert marker is not None, "the test needs @pytest.mark.case"
    return expected_of(marker.args[0])


@pytest.fixture
def engine(container: Container) -> Callable[..., HolderHandle]:  # noqa: F811
    """`engine(**options)`: a holder in container 129 with 42,759 MiB on GPU 0 (minor 50)."""

    def start(**options: object) -> HolderHandle:
        given: dict[str, object] = {"open": ONE_GPU, "alloc": ("50:42759:compute",), **options}
        return container.spawn_holder(**given)  # type: ignore[arg-type]

    return start


@pytest.fixture
def neighbours(node: Node) -> Iterator[list[HolderHandle]]:  # noqa: F811
    """Others on the same nodes: containers 130 and 1290 and the host. Memory on GPU 1 only, so that GPU 0 is
    129's alone by the driver's lists. Whatever a test does, they must live on."""
    found = [
        node.container(130).spawn_holder(argv=("train",), open=ALL_NODES, alloc=("51:2048:compute",), children=1),
        node.container(1290).spawn_holder(argv=("idle",), open=ALL_NODES),
        node.spawn_holder(argv=("nvtop",), comm="nvtop", open=("/dev/nvidia0", "/dev/nvidiactl")),
    ]
    yield found
    assert lives(*found), "a process of somebody else was ended"
