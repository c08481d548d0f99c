"""Mixed load with a random fault every 20 s: nothing is lost, nothing is wrong, and nothing grows.

Only selected by its mark; PDSERVE_SOAK_MINUTES (30) says for how long.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.client import AsyncClient, RetryPolicy
from pdserve.testing.chaos_cells import FAULTS, PROCESSES, Striker
from pdserve.testing.chaos_cluster import ChaosCluster, Footprint
from pdserve.testing.chaos_load import MODES, Asks, Received, receive
from pdserve.testing.tiny_models import make_tiny_kv

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(14400)]

MINUTES = float(os.environ.get("PDSERVE_SOAK_MINUTES", "30"))
PERIOD_S = 20.0
NUM_PLACES = 12
MAX_MORE_FDS = 24
MAX_MORE_THREADS = 8
MAX_MORE_BYTES = 96 << 20
"""What a process may have more at the end than when it had warmed up: connections that a fault has made twice, arenas
of the allocator."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny-kv")


@pytest.fixture
def cluster(model: Path) -> Iterator[ChaosCluster]:
    with ChaosCluster(model, router__retain_requests=64) as cluster:
        yield cluster


async def load(
    client: AsyncClient, asks: Asks, rng: random.Random, place: int, done: list[Received], stop: asyncio.Event
) -> None:
    """One request after another."""
    number = 0
    while not stop.is_set():
        mode = rng.choice(MODES)
        ask = rng.choice(asks.long(mode) if rng.random() < 0.2 else asks.some(mode))
        received = Received(ask, f"soak-{place}-{number}", time.monotonic())
        await receive(client, received)
        done.append(received)
        number += 1


async def test_nothing_is_lost_or_wrong_and_nothing_grows(cluster: ChaosCluster) -> None:
    seed = int(os.environ.get("PDSERVE_CHAOS_SEED", "31"))
    print(f"seed {seed}, {MINUTES:g} minutes")
    rng = random.Random(seed)
    asks = Asks(cluster.model, seed, num_per_mode=3)
    async with AsyncClient(cluster.addresses, timeout_s=60.0) as client:
        await asks.learn(client)
    striker = Striker(cluster, rng)
    done: list[Received] = []
    first, second = cluster.addresses
    policy = RetryPolicy(max_attempts=12, resume_s=45.0)
    first_seen: dict[int, Footprint] = {}
    faults: dict[str, int] = {}
    stop_at = time.monotonic() + 60.0 * MINUTES
    stop = asyncio.Event()
    async with (
        AsyncClient([first, second], timeout_s=120.0, retry=policy) as one,
        AsyncClient([second, first], timeout_s=120.0, retry=policy) as other,
        asyncio.TaskGroup() as group,
    ):
        for place in range(NUM_PLACES):
            group.create_task(load((one, other)[place % 2], asks, rng, place, done, stop))
        while time.monotonic() < stop_at:
            round_began = time.monotonic()
            process = rng.choice(PROCESSES)
            fault = rng.choice([f for f in FAULTS if (f != "disk full" or process == "redis") and "30" not in f])
            name = f"{process}: {fault}"
            faults[name] = faults.get(name, 0) + 1
            print(f"{name}, {len(done)} done", flush=True)
            await striker.strike(fault, striker.somebody(process))
            cluster.repair()
            await asyncio.to_thread(cluster.wait_ready)
            await asyncio.sleep(max(0.0, round_began + PERIOD_S - time.monotonic()))
            pids = cluster.pids()
            for who, footprint in cluster.footprints().items():
                first_seen.setdefault(pids[who], footprint)
            problems = [f"{r.request_id} ({r.ask.mode}): {r.problem}" for r in done if r.problem]
            assert problems == []
        stop.set()
    assert [f"{r.request_id} ({r.ask.mode}): {r.problem}" for r in done if r.problem] == []
    await asyncio.to_thread(cluster.assert_quiet)
    last, pids = cluster.footprints(), cluster.pids()
    print(f"{len(done)} requests, {sum(r.attempts > 1 for r in done)} of them disturbed; faults: {faults}")
    for who, footprint in last.items():
        before = first_seen[pids[who]]
        print(f"{who}: {before} -> {footprint}")
        assert footprint.num_fds <= before.num_fds + MAX_MORE_FDS, who
        assert footprint.num_threads <= before.num_threads + MAX_MORE_THREADS, who
        assert footprint.rss_bytes <= before.rss_bytes + MAX_MORE_BYTES, who
    assert len(done) > 10 * MINUTES
