"""Ten thousand requests that are ended at random moments leave nothing behind, and others are served as before.

Only selected by its mark; the plain run has 200 of them in `tests/process/test_cancel.py`.
"""

from __future__ import annotations

import asyncio
import collections
import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pdserve.client import NO_RETRIES, AsyncClient
from pdserve.errors import CancelledError, CapacityError, DeadlineExceededError
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster
from pdserve.testing.reference import MIN_GAP, greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(7200)]

NUM_ABORTS = int(os.environ.get("PDSERVE_ABORTS", "10000"))
CONCURRENCY = 24
CANARY_TOKENS = 32
MAX_WAIT_S = 0.5
"""Enough to meet any moment of a request, from before it is tokenized to late in its decoding."""
WAYS = ("close", "cancel", "deadline", "finish")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv")


@pytest.fixture
def cluster(model: Path) -> Iterator[ProcessCluster]:
    with ProcessCluster(model, kv__num_blocks=1024, decode__max_batch_size=32) as cluster:
        yield cluster


async def end_one(client: AsyncClient, number: int, rng: random.Random, ends: collections.Counter[str]) -> None:
    """One request, one end."""
    way, wait_s = rng.choice(WAYS), rng.uniform(0.0, MAX_WAIT_S)
    prompt = [rng.randrange(3, 300) for _ in range(rng.choice((5, 60, 400)))]
    request_id = f"abort-{number}"
    async with client.stream(
        token_ids=prompt,
        max_tokens=2 if way == "finish" else 1000,
        n=rng.choice((1, 1, 3)),
        ignore_eos=True,
        request_id=request_id,
        timeout_s=max(0.01, wait_s) if way == "deadline" else CALL_TIMEOUT_S,
    ) as stream:
        reading = asyncio.ensure_future(stream.result())
        if way in ("close", "cancel"):
            await asyncio.sleep(wait_s)
            if way == "close":
                await stream.close()
            else:

                async def is_known() -> bool:
                    return await client.cancel(request_id) or reading.done()

                await eventually(is_known, "it has arrived", CALL_TIMEOUT_S)
        try:
            await reading
            ends["finished"] += 1
        except (CancelledError, DeadlineExceededError, CapacityError) as error:
            ends[error.code] += 1


async def test_blocks_come_back_after_ten_thousand_ends(cluster: ProcessCluster, model: Path) -> None:
    """O-ABT-1, O-ABT-4, O-OPS-6."""
    seed = 29
    print(f"seed {seed}, {NUM_ABORTS} requests")
    rng = random.Random(seed)
    prompts = np.random.default_rng(seed).integers(3, 300, (12, 40)).tolist()
    outputs = greedy_reference(model, prompts, CANARY_TOKENS)
    canary, answer = next((p, o.ids) for p, o in zip(prompts, outputs, strict=True) if o.min_gap >= MIN_GAP)
    free_before = {name: s.blocks_total - s.blocks_in_use for name, s in cluster.stats().items()}
    ends: collections.Counter[str] = collections.Counter()
    numbers = iter(range(NUM_ABORTS))
    async with (
        AsyncClient(cluster.address, timeout_s=CALL_TIMEOUT_S, retry=NO_RETRIES) as client,
        asyncio.TaskGroup() as group,
    ):

        async def keep_on() -> None:
            for number in numbers:
                await end_one(client, number, rng, ends)
                if number % 500 == 0:
                    result = await client.generate(token_ids=canary, max_tokens=CANARY_TOKENS, temperature=0.0)
                    assert result.token_ids == answer[: len(result.token_ids)]

        for _ in range(CONCURRENCY):
            group.create_task(keep_on())
    print(dict(ends))
    assert ends.total() == NUM_ABORTS
    assert ends["cancelled"] >= NUM_ABORTS / 4
    await asyncio.to_thread(cluster.assert_quiet)
    assert {name: s.blocks_total - s.blocks_in_use for name, s in cluster.stats().items()} == free_before
    result = await asyncio.to_thread(
        lambda: cluster.client.generate(token_ids=canary, max_tokens=CANARY_TOKENS, temperature=0.0, ignore_eos=True)
    )
    assert result.token_ids == answer
    cluster.assert_alive()
