"""Ten thousand connections of the HTTP API that send a byte a second, and what others notice of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pdserve.store.client import Store
from pdserve.store.embedded import EmbeddedRedis
from pdserve.testing.http_rig import http_client, make_chat_model
from pdserve.testing.router_rig import PROMPT, RouterRig, RouterRigs, expected
from pdserve.testing.trickle import TricklingClients

NUM_CONNECTIONS = 10_000
NUM_REQUESTS = 40
SLOWEST_FACTOR, SLOWEST_S = 3.0, 0.1
"""A request may take so many times as long as on an idle router, and so much longer. The clients are on this machine,
too, and take more time of it than the router does for them."""

pytestmark = [pytest.mark.alone, pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture
async def rigs(tmp_path: Path) -> AsyncIterator[RouterRigs]:
    with EmbeddedRedis() as server:
        store = await Store.connect(server.url, "many-connections")
        yield RouterRigs(store, server.url, make_chat_model(tmp_path))
        await store.aclose()


async def median_s(rig: RouterRig) -> float:
    """Of short requests, one after the other, whose answers are right."""
    body = {"prompt": list(PROMPT), "temperature": 0, "max_tokens": 20, "return_token_ids": True}
    seconds = []
    async with http_client(rig.router.http_address) as client:
        for _ in range(NUM_REQUESTS):
            began = time.monotonic()
            answer = await client.post("/v1/completions", json=body)
            seconds.append(time.monotonic() - began)
            assert answer.json()["choices"][0]["token_ids"] == expected(20)
    return statistics.median(seconds)


async def test_ten_thousand_trickling_connections_disturb_nobody(rigs: RouterRigs) -> None:
    async with rigs.start(http_head_timeout_s=200.0) as rig:
        undisturbed_s = await median_s(rig)
        async with TricklingClients.start(rig.router.http_address, NUM_CONNECTIONS, pause_s=1.0) as clients:
            disturbed_s = await median_s(rig)
            counts = await clients.counts()
            assert counts["open"] == NUM_CONNECTIONS
            assert counts["bytes"] >= NUM_CONNECTIONS
            assert disturbed_s <= SLOWEST_FACTOR * undisturbed_s + SLOWEST_S
        print(f"median request: {1e3 * undisturbed_s:.1f} ms alone, {1e3 * disturbed_s:.1f} ms among them")


async def test_ten_thousand_connections_with_room_for_a_tenth_shut_nobody_out(rigs: RouterRigs) -> None:
    """They push out each other, and whoever sends a request is served meanwhile."""
    async with (
        rigs.start(http_head_timeout_s=200.0, http_max_connections=NUM_CONNECTIONS // 10) as rig,
        TricklingClients.start(rig.router.http_address, NUM_CONNECTIONS, pause_s=1.0) as clients,
    ):
        await median_s(rig)
        counts = await clients.counts()
        assert NUM_CONNECTIONS // 10 - 5 <= counts["open"] <= NUM_CONNECTIONS // 10
