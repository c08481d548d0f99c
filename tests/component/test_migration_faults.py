"""Streams that are moving when a worker or the link between the two fails: the client gets the tokens of an undisturbed
run whatever happens when, and nothing is left anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from decode_worker.sequences import CommitMigration, MigrationOrder, SequenceState, StartMigration
from decode_worker.service import DecodeService
from kv_transfer.messages import CommitAck, ProbeAck, ToPrefill
from pdserve.client import AsyncClient, Generation
from pdserve.config import Config
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.faults_wire import Forwarder, WireFault, WireFaults, forwarder
from pdserve.testing.reference import greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.waiting import eventually
from pdserve.worker.events import MigrationCause

PROMPT = [int(i * i * 7 + 3) % 251 + 3 for i in range(75)]
NUM_TOKENS = 160
NUM_FIRST = 8

Hook = Callable[[DecodeService, MigrationOrder], MigrationOrder]
"""Sees what a worker is about to do of a migration, and may change it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> tuple[int, ...]:
    return tuple(greedy_reference(model, [PROMPT], NUM_TOKENS)[0].ids)


@pytest.fixture
def config(redis_url: str, cluster_name: str, model: Path) -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": "torch", "threads": 1},
        router={"listen": "127.0.0.1:0"},
        kv={"num_blocks": 200},
        health={"heartbeat_s": 0.2, "peer_timeout_s": 2.0},
        transfer={"transports": ["grpc"], "stall_timeout_s": 0.6, "lease_s": 1.0, "chunk_bytes": 8192},
    )


def intercept(cluster: InProcessCluster, hook: Hook) -> None:
    for worker in cluster.decode:
        carry_out = worker._migrations.carry_out

        def wrapped(
            order: MigrationOrder,
            worker: DecodeService = worker,
            carry_out: Callable[[MigrationOrder], None] = carry_out,
        ) -> None:
            carry_out(hook(worker, order))

        worker._migrations.carry_out = wrapped  # type: ignore[method-assign]


def ask_to_move(worker: DecodeService) -> None:
    """As if its blocks ran out."""
    scheduler, now = worker._scheduler, time.monotonic()
    for sequence in list(scheduler._residents.sequences.values()):
        if sequence.state is SequenceState.RUNNING:
            scheduler.migrations._want(sequence, MigrationCause.DRAIN, now)
    worker._changed()


async def moving(cluster: InProcessCluster) -> Generation:
    """A request whose stream is to move in its middle."""
    assert cluster.router is not None
    async with (
        AsyncClient(cluster.router.address, timeout_s=60.0) as client,
        client.stream(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True) as stream,
    ):
        asked = False
        num_seen = 0
        async for delta in stream:
            num_seen += len(delta.token_ids)
            if not asked and num_seen >= NUM_FIRST:
                asked = True
                for worker in cluster.decode:
                    if worker.stats().num_running:
                        ask_to_move(worker)
        return await stream.result()


@contextlib.asynccontextmanager
async def wired(cluster: InProcessCluster, faults: WireFaults) -> AsyncIterator[Forwarder]:
    """What decode workers say to each other goes through a wire."""
    async with forwarder(faults) as wire:

        def reroute(worker: DecodeService, order: MigrationOrder) -> MigrationOrder:
            if not isinstance(order, StartMigration):
                return order
            wire.upstream = order.target.address
            return replace(order, target=replace(order.target, address=wire.address))

        intercept(cluster, reroute)
        yield wire


@pytest.mark.parametrize(
    ("then", "places"),
    [
        ("the link comes back", (20, 400, 900, 1500, 20_000, 60_000, 100_000)),
        ("the link stays down", (20, 900, 60_000)),
    ],
)
async def test_the_link_breaks_anywhere(
    config: Config, expected: tuple[int, ...], then: str, places: tuple[int, ...]
) -> None:
    """Between the first byte and the last: in the hello, the reservation, the chunks, around the commit."""
    async with InProcessCluster(config, decode=2, router=True) as cluster:
        faults = WireFaults(WireFault.NONE)
        async with wired(cluster, faults):
            undisturbed = await moving(cluster)
            assert undisturbed.placement.migrations == 1 and undisturbed.token_ids == expected
            for after_nbytes in places:
                for worker in cluster.decode:
                    # A link of its own for each, whose bytes are counted from the beginning.
                    assert worker._sender is not None
                    for link, _ in worker._sender._links.values():
                        link.close()
                await eventually(lambda: not any(w._sender._links for w in cluster.decode if w._sender), "no links")
                faults.fault, faults.after_nbytes, faults.num_injected = WireFault.CUT, after_nbytes, 0
                faults.refuses_later = then == "the link stays down"
                result = await moving(cluster)
                assert result.token_ids == expected, f"cut after {after_nbytes} bytes"
                await cluster.quiet(20.0)
                faults.fault = WireFault.NONE


async def test_the_answer_to_the_commit_is_lost(config: Config, expected: tuple[int, ...]) -> None:
    """The worker that gives the stream away cannot know who has it, and goes on with nothing. What the router knows
    counts: it has heard tokens of the other one."""
    async with InProcessCluster(config, decode=2, router=True) as cluster:
        faults = WireFaults(WireFault.NONE)
        async with wired(cluster, faults) as wire:
            num_lost = 0
            for worker in cluster.decode:
                assert worker._receiver is not None
                reservations = worker._receiver._reservations
                send = reservations._send

                def lossy(
                    incarnation: str,
                    message: ToPrefill | ProbeAck,
                    send: Callable[[str, ToPrefill | ProbeAck], None] = send,
                ) -> None:
                    nonlocal num_lost
                    if isinstance(message, CommitAck) and message.id.attempt > 1:
                        num_lost += 1
                        faults.fault = WireFault.REFUSE
                        for task in wire._tasks:
                            task.cancel()
                        return
                    send(incarnation, message)

                reservations._send = lossy
            result = await moving(cluster)
            assert num_lost > 0
            assert result.token_ids == expected
            assert result.placement.migrations == 1 and result.placement.attempts == 1
            await cluster.quiet(20.0)


@pytest.mark.parametrize("who", ["source", "target"])
@pytest.mark.parametrize("when", [StartMigration, CommitMigration])
async def test_a_worker_dies_in_the_middle(
    config: Config, expected: tuple[int, ...], who: str, when: type[StartMigration | CommitMigration]
) -> None:
    killing: list[asyncio.Task[None]] = []

    for _ in range(5):
        async with InProcessCluster(config, decode=2, router=True) as cluster:

            def kill(
                worker: DecodeService, order: MigrationOrder, cluster: InProcessCluster = cluster
            ) -> MigrationOrder:
                if isinstance(order, when) and not killing:
                    victim = worker if who == "source" else next(w for w in cluster.decode if w is not worker)
                    killing.append(asyncio.create_task(cluster.kill(victim)))
                return order

            intercept(cluster, kill)
            result = await moving(cluster)
            assert result.token_ids == expected
            if killing:
                await asyncio.gather(*killing)
                await cluster.quiet(20.0)
                return
            # The stream had ended before it was to be moved.
    raise AssertionError("it was never moved")


async def test_a_target_that_is_full_or_drains_refuses_and_the_stream_stays(
    config: Config, expected: tuple[int, ...]
) -> None:
    async with InProcessCluster(config, decode=2, router=True) as cluster:

        def refuse(worker: DecodeService, order: MigrationOrder) -> MigrationOrder:
            if isinstance(order, StartMigration):
                other = next(w for w in cluster.decode if w is not worker)
                assert other._receiver is not None
                other._receiver.set_draining(True)
            return order

        intercept(cluster, refuse)
        result = await moving(cluster)
        assert result.token_ids == expected
        assert (result.placement.migrations, result.placement.attempts) == (0, 1)
        await cluster.quiet(20.0)


async def test_a_request_is_cancelled_while_its_stream_moves(config: Config) -> None:
    async with InProcessCluster(config, decode=2, router=True) as cluster:
        assert cluster.router is not None
        orders: list[MigrationOrder] = []

        def note(worker: DecodeService, order: MigrationOrder) -> MigrationOrder:
            orders.append(order)
            return order

        intercept(cluster, note)
        for number in range(6):
            orders.clear()
            name = f"cancelled-{number}"
            async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
                options = {"token_ids": PROMPT, "max_tokens": 1800, "temperature": 0.0, "ignore_eos": True}
                async with client.stream(request_id=name, **options) as stream:  # type: ignore[arg-type]
                    for _ in range(4):
                        await anext(stream)
                    for worker in cluster.decode:
                        if worker.stats().num_running:
                            ask_to_move(worker)
                    await eventually(lambda n=number: len(orders) > n, "it moves")  # type: ignore[misc]
                    await client.cancel(name)
            await cluster.quiet(20.0)
