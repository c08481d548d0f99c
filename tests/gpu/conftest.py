"""A redis for tests that start whole workers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from pdserve.store.embedded import EmbeddedRedis


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a server that all tests of the session share."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def cluster_name() -> str:
    """Deployment name that no other test uses."""
    return f"test-{secrets.token_hex(6)}"
