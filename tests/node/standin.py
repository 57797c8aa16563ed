"""GPU stand-ins in the node."""
from __future__ import annotations
from tests.node.node import VirtualNode

def install(node: VirtualNode) -> None:
    pass
