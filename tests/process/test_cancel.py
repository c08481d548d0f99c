"""Cancelled, abandoned and late requests: nothing runs on, nothing is held, and others are served as before."""

from __future__ import annotations

import asyncio
import collections
import random
import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pdserve.client import AsyncClient, AsyncGenerationStream
from pdserve.errors import CancelledError, CapacityError, DeadlineExceededError, NotFoundError, PdServeError
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, TERMINAL, ProcessCluster
from pdserve.testing.reference import check_greedy
from pdserve.testing.waiting import eventually
from pdserve.types import Role

pytestmark = pytest.mark.timeout(240)

MOMENTS = ("QUEUED", "PREFILLING", "TRANSFERRING", "DECODING", "deadline")
NUM_PER_MOMENT = 40
CONCURRENCY = 10
PROMPT_TOKENS = 700
MAX_TOKENS = 1200
ORDER = ("QUEUED", "PREFILLING", "TRANSFERRING", "DECODING", *TERMINAL)
WAIT_S = 60.0


@pytest.fixture
def canary(one_pair: ProcessCluster, reference_model: Any) -> Iterator[None]:
    """Afterwards the cluster is quiet, and a request is served exactly by the same processes."""
    yield
    one_pair.assert_quiet()
    prompt = list(range(50, 83))
    result = one_pair.client.generate(token_ids=prompt, max_tokens=8, temperature=0.0, ignore_eos=True)
    (check,) = check_greedy(reference_model, [prompt], [result.token_ids])
    assert check.wrong_step is None
    one_pair.assert_alive()


def long_request(client: AsyncClient, request_id: str, **options: Any) -> AsyncGenerationStream:
    """A request that would run for minutes if nobody stopped it."""
    prompt = np.random.default_rng(zlib.crc32(request_id.encode())).integers(3, 300, PROMPT_TOKENS).tolist()
    arguments: dict[str, Any] = {
        "token_ids": prompt,
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "request_id": request_id,
    }
    return client.stream(**arguments | options)


async def state_of(client: AsyncClient, request_id: str) -> str:
    """Empty if the router does not know it yet."""
    try:
        return (await client.get_request(request_id)).state
    except NotFoundError:
        return ""


async def reach(client: AsyncClient, request_id: str, wanted: str) -> str:
    """Wait until the request is in the wanted state, or past it; returns the state it is in."""
    state = ""

    async def reached() -> bool:
        nonlocal state
        state = await state_of(client, request_id)
        return state != "" and ORDER.index(state) >= ORDER.index(wanted)

    await eventually(reached, f"{request_id} is {wanted}", WAIT_S)
    return state


async def end_at(client: AsyncClient, request_id: str, moment: str, drop: bool, pause: random.Random) -> str:
    """Run one request into its end. Returns the state in which the end met it, or the moment's name."""
    if moment == "deadline":
        # Who cannot be in time is told so at once.
        with pytest.raises((DeadlineExceededError, CapacityError)):
            await long_request(client, request_id, timeout_s=pause.uniform(0.02, 0.6)).result()
        return moment
    async with long_request(client, request_id) as stream:
        reading = asyncio.ensure_future(stream.result())
        state = await reach(client, request_id, moment)
        if drop:
            await stream.close()
        else:
            assert await client.cancel(request_id)
            assert not await client.cancel(request_id) or await state_of(client, request_id) in TERMINAL
        begin = time.monotonic()
        # A stream that its reader closed just ends; one that was cancelled says so.
        with pytest.raises(PdServeError) as caught:
            await asyncio.wait_for(reading, WAIT_S)
        assert drop or isinstance(caught.value, CancelledError)
        assert time.monotonic() - begin < 10
    return state


async def test_200_ends_at_any_moment_leave_nothing(one_pair: ProcessCluster, canary: None) -> None:
    """O-ABT-1, O-ABT-4, O-OPS-6: by Cancel, leaving or deadline; while queued, in prefill, in transfer, decoding."""
    seed = 11
    print(f"seed {seed}")
    pause = random.Random(seed)
    jobs = [(m, i) for m in MOMENTS for i in range(NUM_PER_MOMENT)]
    pause.shuffle(jobs)
    free_before = [s.blocks_total - s.blocks_in_use for s in one_pair.stats().values()]
    seen: collections.Counter[str] = collections.Counter()
    limit = asyncio.Semaphore(CONCURRENCY)
    async with AsyncClient(one_pair.address, timeout_s=CALL_TIMEOUT_S) as client, asyncio.TaskGroup() as group:

        async def run(moment: str, index: int) -> None:
            async with limit:
                seen[await end_at(client, f"cancel-{moment}-{index}", moment, index % 2 == 0, pause)] += 1

        for moment, index in jobs:
            group.create_task(run(moment, index))
    print(dict(seen))
    assert seen["deadline"] == NUM_PER_MOMENT
    # Short states may be over by the time that a test has seen them, but not always.
    assert all(seen[state] for state in MOMENTS), dict(seen)
    assert sum(seen.values()) == len(jobs)
    await asyncio.to_thread(one_pair.assert_quiet)
    assert [s.blocks_total - s.blocks_in_use for s in one_pair.stats().values()] == free_before
    states = one_pair.wait_terminal(f"cancel-{moment}-{index}" for moment, index in jobs)
    for moment, index in jobs:
        request_id = f"cancel-{moment}-{index}"
        # One that ends before its prompt is tokenized has never been admitted, so it has no record.
        expected = {"deadline": ("FAILED", None), "QUEUED": ("CANCELLED", None)}.get(moment, ("CANCELLED",))
        assert states.get(request_id) in expected, f"{request_id}: {states.get(request_id)}"
    assert collections.Counter(states.values())["CANCELLED"] >= 3 * NUM_PER_MOMENT


async def test_generation_stops_when_the_client_leaves(one_pair: ProcessCluster, canary: None) -> None:
    """O-ABT-1: after five tokens of 1200."""
    (before,) = one_pair.stats_of(Role.DECODE)
    async with (
        AsyncClient(one_pair.address, timeout_s=CALL_TIMEOUT_S) as client,
        long_request(client, "leaves") as stream,
    ):
        num_tokens = 0
        async for delta in stream:
            num_tokens += len(delta.token_ids)
            if num_tokens >= 5:
                break
    await asyncio.to_thread(one_pair.assert_quiet)
    (after,) = one_pair.stats_of(Role.DECODE)
    assert after.generated_tokens_total - before.generated_tokens_total < MAX_TOKENS - 100
    assert one_pair.wait_terminal(["leaves"]) == {"leaves": "CANCELLED"}


async def test_requests_that_leave_the_queue_are_never_computed(one_pair: ProcessCluster, canary: None) -> None:
    """O-ABT-2: long requests fill the decode worker's batch; ten more wait, and all ten leave."""
    prompt = list(range(3, 19))
    async with AsyncClient(one_pair.address, timeout_s=CALL_TIMEOUT_S) as client:
        running = [
            long_request(client, f"runs-{i}", token_ids=prompt, max_tokens=2000)
            for i in range(one_pair.config.decode.max_batch_size)
        ]
        for i, stream in enumerate(running):
            await anext(stream)
            await reach(client, f"runs-{i}", "DECODING")
        (before,) = one_pair.stats_of(Role.PREFILL)
        waiting = [long_request(client, f"waits-{i}") for i in range(10)]
        for i in range(10):
            assert await reach(client, f"waits-{i}", "QUEUED") == "QUEUED"
        for stream in waiting:
            await stream.close()
        states = await asyncio.to_thread(one_pair.wait_terminal, [f"waits-{i}" for i in range(10)])
        assert set(states.values()) == {"CANCELLED"}
        (decode,) = one_pair.stats_of(Role.DECODE)
        assert decode.num_running == len(running), "nobody has made room meanwhile"
        for stream in running:
            await stream.close()
    await asyncio.to_thread(one_pair.assert_quiet)
    (after,) = one_pair.stats_of(Role.PREFILL)
    assert after.prefill_tokens_total == before.prefill_tokens_total


def test_cancelling_what_does_not_run_is_harmless(one_pair: ProcessCluster, canary: None) -> None:
    """O-ABT-4: finished, and unknown."""
    done = one_pair.client.generate("hello", max_tokens=2, ignore_eos=True, request_id="done")
    assert one_pair.client.cancel(done.request_id) is False
    assert one_pair.client.cancel("never-was") is False
    assert one_pair.wait_terminal(["done"]) == {"done": "FINISHED"}
    with pytest.raises(NotFoundError, match="never-was"):
        one_pair.client.get_request("never-was")
