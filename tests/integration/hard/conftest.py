"""The same node, product and neighbours as the other integration tests, and jobs that come back."""

from tests.integration.conftest import (  # noqa: F401
    container,
    engine,
    expected,
    make_node,
    neighbours,
    node,
    product,
    require_node,
)
