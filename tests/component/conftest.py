"""A redis of our own for the component tests: one server per session, one deployment name per test."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator

import pytest

from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.leaks import redis_keys_without_ttl


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """URL of a server that all tests of the session share. Do not stop it."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture
def own_redis() -> Iterator[EmbeddedRedis]:
    """A server that the test may stop, freeze and start again."""
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
def cluster_name() -> str:
    """Deployment name that no other test uses."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
async def store(redis_url: str, cluster_name: str) -> AsyncIterator[Store]:
    """A connected store. Afterwards none of its deployment's keys may be without TTL."""
    store = await Store.connect(redis_url, cluster_name)
    yield store
    await store.aclose()
    assert await redis_keys_without_ttl(redis_url, store.keys.prefix) == []
