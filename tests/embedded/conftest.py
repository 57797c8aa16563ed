"""The node's fixtures for its own tests."""

from .fixtures import *  # noqa: F403
