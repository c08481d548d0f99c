"""All workers of a cluster are restarted one by one under load, as an operator does it, and no client notices."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from pdserve.cli.drain import drain, restart
from pdserve.client import AsyncClient
from pdserve.errors import PdServeError
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, READY_TIMEOUT_S, ProcessCluster, wait_until
from pdserve.testing.reference import greedy_reference
from pdserve.types import Role

pytestmark = [pytest.mark.quiet, pytest.mark.timeout(240)]

NUM_STREAMS = 16
NUM_TOKENS = 150
MIN_GAP = 1e-3
"""Between the two best logits of the reference, as in tests/chaos: long outputs without a larger near tie are rare."""
DRAIN_S = 0.2
"""Less than a stream takes, so that decode workers cannot finish all they have."""


@dataclass(frozen=True)
class Case:
    """A prompt and what follows it."""

    prompt: list[int]
    output: tuple[int, ...]


@dataclass
class Load:
    """What has come of the streams so far."""

    num_done: int = 0
    num_moved: int = 0
    """Streams that went on at another decode worker, with their KV."""
    num_given_back: int = 0
    """Streams that needed more than one attempt."""
    failures: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def cases(tiny_model: Path) -> list[Case]:
    rng = np.random.default_rng(29)
    prompts = [rng.integers(3, 300, int(n)).tolist() for n in rng.integers(20, 120, 32)]
    outputs = greedy_reference(tiny_model, prompts, NUM_TOKENS)
    found = [Case(p, o.ids) for p, o in zip(prompts, outputs, strict=True) if o.min_gap >= MIN_GAP]
    assert len(found) >= 4
    return found


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[ProcessCluster]:
    """2P+2D that `supervise` watches, as in `pdserve up`. One attempt is all that a request has."""
    stopping, supervised, released = threading.Event(), threading.Event(), threading.Event()
    failures: list[PdServeError] = []
    cluster = ProcessCluster(
        tiny_model, local__prefill_workers=2, local__decode_workers=2, router__max_attempts=1, health__heartbeat_s=1.0
    )

    def supervise() -> None:
        try:
            cluster.local.supervise(stopping)
        except PdServeError as error:
            failures.append(error)
        supervised.set()
        # A worker that this thread has started again would be killed with it.
        released.wait()

    thread = threading.Thread(target=supervise, name="supervisor")
    try:
        with cluster:
            for process in cluster.local.processes:
                # Who starts goes before who serves, or two cores would take minutes for it.
                psutil.Process(process.pid).nice(5)
            thread.start()
            yield cluster
            stopping.set()
            supervised.wait()
            assert failures == []
    finally:
        stopping.set()
        released.set()
        thread.join()


async def keep_streaming(client: AsyncClient, cases: list[Case], first: int, load: Load, over: asyncio.Event) -> None:
    """One stream after the other until `over`."""
    number = first
    while not over.is_set():
        case = cases[number % len(cases)]
        number += 1
        try:
            result = await client.generate(
                token_ids=case.prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
        except PdServeError as error:
            load.failures.append(f"{error.code}: {error.message}")
            continue
        load.num_done += 1
        place = result.placement
        load.num_moved += place.migrations > 0
        load.num_given_back += place.attempts > 1
        if result.token_ids != case.output:
            load.failures.append(f"wrong tokens after {place.attempts} attempts and {place.migrations} migrations")


async def test_a_rolling_restart_under_load_fails_no_request_and_changes_no_token(
    cluster: ProcessCluster, cases: list[Case]
) -> None:
    """O-OPS-3, with requests that have no attempt to spare: a planned end is not held against them."""
    before = {name: info.incarnation for name, info in cluster.infos().items()}
    old = [cluster.local.process(name) for name in before]
    load, over = Load(), asyncio.Event()
    arguments = ["--router", cluster.address, "--timeout", str(DRAIN_S)]
    async with AsyncClient(cluster.address, timeout_s=CALL_TIMEOUT_S) as client, asyncio.TaskGroup() as group:
        for first in range(NUM_STREAMS):
            group.create_task(keep_streaming(client, cases, first, load, over))
        outcome = await asyncio.to_thread(CliRunner().invoke, restart, arguments)
        over.set()
    print(outcome.output, load)
    assert outcome.exception is None, outcome.output
    after = {name: info.incarnation for name, info in cluster.infos().items()}
    assert after.keys() == before.keys()
    assert all(after[name] != before[name] for name in before)
    assert load.failures == []
    assert load.num_done >= NUM_STREAMS
    assert load.num_moved > 0, "every stream was over in time"
    assert [process.exit_code for process in old] == [0] * len(before)
    await asyncio.to_thread(cluster.assert_quiet)


def prefilled(cluster: ProcessCluster) -> dict[str, int]:
    """Tokens that each prefill worker has computed."""
    infos = [info for info in cluster.infos().values() if info.role is Role.PREFILL]
    return {info.worker_id: cluster._stats_of(info).prefill_tokens_total for info in infos}


async def test_streams_of_a_decode_worker_that_drains_move_and_are_not_computed_again(
    cluster: ProcessCluster, cases: list[Case]
) -> None:
    """All that a stream needs at the other one is its KV: no prefill worker sees it twice."""
    async with AsyncClient(cluster.address, timeout_s=CALL_TIMEOUT_S) as client:
        streams = [
            client.stream(
                token_ids=cases[number % len(cases)].prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
            for number in range(8)
        ]
        async with contextlib.AsyncExitStack() as stack:
            opened = [await stack.enter_async_context(stream) for stream in streams]
            for stream in opened:
                await anext(stream)
            before = prefilled(cluster)
            running = {name: stats.num_running for name, stats in cluster.stats().items()}
            busiest = max((n for n, i in cluster.infos().items() if i.role is Role.DECODE), key=running.__getitem__)
            arguments = [busiest, "--router", cluster.address, "--timeout", "0.01"]
            draining = asyncio.create_task(asyncio.to_thread(CliRunner().invoke, drain, arguments))
            results = [await stream.result() for stream in opened]
            outcome = await draining
            after = prefilled(cluster)
    print(outcome.output, busiest, [(r.placement.migrations, r.placement.attempts) for r in results])
    assert outcome.exception is None, outcome.output
    for number, result in enumerate(results):
        assert result.token_ids == cases[number % len(cases)].output
    assert sum(result.placement.migrations for result in results) > 0
    assert [result.placement.attempts for result in results] == [1] * len(results)
    assert {result.placement.decode_local_prefill_tokens for result in results} == {0}
    assert after == before
    await asyncio.to_thread(wait_until, lambda: len(cluster.infos()) == 4, "it is back", READY_TIMEOUT_S)
    await asyncio.to_thread(cluster.assert_quiet)
