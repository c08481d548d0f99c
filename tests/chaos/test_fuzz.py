"""Calls, chunks, bodies and stored values that nobody of sound mind would send: no crash, no hang, no internal error,
no growth, nothing left, and the next request is answered as ever.

The plain run has a few hundred cases with a seed of its own. Selected by its mark (`pytest -m chaos`) it has
PDSERVE_FUZZ_CASES (100,000) from PDSERVE_FUZZ_SEED on.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from random import Random
from typing import Any

import grpc
import httpx2
import pytest
import torch
from redis.asyncio import Redis

from kv_transfer.transports.grpc_raw import PUSH
from pdserve.client import AsyncClient
from pdserve.rpc.v1 import handoff_pb2, inference_pb2, prefix_pb2, worker_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.embedded import EmbeddedRedis
from pdserve.store.keys import Keyspace
from pdserve.store.worker_codec import encode_info, encode_stats
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.fuzz_calls import WARM_UP, Findings, Growth, Script, call, drive, paths_of
from pdserve.testing.fuzz_redis import RedisFuzzer, Samples
from pdserve.testing.fuzz_router import RouterScripts
from pdserve.testing.fuzz_workers import UNREADABLE, WorkerScripts
from pdserve.testing.reference import greedy_reference
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE
from pdserve.testing.waiting import eventually
from pdserve.types import WorkerStats

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]

CLUSTER = "fuzz"
CONTEXT = 96
PROMPT = (7, 30, 41, 12)
NUM_TOKENS = 6
SHORT_CASES = 80
"""Of each kind."""
SLACK_NBYTES = 48 << 20
"""What is remembered for minutes (peers and hand-offs that have ended, results, the flight recorder), caches that are
bounded, what allocators keep, and pytest's copy of the log: up to 29 MiB in ten minutes of this."""

Case = Callable[[], Coroutine[Any, Any, str]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The smallest there is, with a chat template: it computes for tens of thousands of calls."""
    torch.set_num_threads(1)
    shape = TinyShape(num_layers=1, hidden_size=32, intermediate_size=32, max_position_embeddings=CONTEXT)
    options = TinyOptions(add_bos=True, chat_template=CHAT_TEMPLATE)
    return make_tiny_kv(tmp_path_factory.mktemp("model") / "tiny", shape=shape, options=options)


@pytest.fixture(scope="module")
def answer(model: Path) -> list[int]:
    """To PROMPT, of transformers."""
    return list(greedy_reference(model, [list(PROMPT)], NUM_TOKENS)[0].ids)


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as server:
        yield server.url


class World:
    """A router and a worker of each kind in this process, and ways to reach them."""

    def __init__(self, cluster: InProcessCluster, answer: list[int]) -> None:
        assert cluster.router is not None
        self.router = cluster.router
        self.prefill = cluster.prefill[0].host.info
        self.decode = cluster.decode[0].host.info
        self._answer = answer
        self.to_router = grpc.aio.insecure_channel(self.router.address)
        self.to_prefill = grpc.aio.insecure_channel(self.prefill.address)
        self.to_decode = grpc.aio.insecure_channel(self.decode.address)

    async def serves(self) -> None:
        """A request of somebody else is answered, with the right tokens, by both workers."""
        async with AsyncClient(self.router.address, timeout_s=300) as client:
            result = await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
        assert list(result.token_ids) == self._answer
        assert result.placement.kv_bytes > 0

    async def close(self) -> None:
        for channel in (self.to_router, self.to_prefill, self.to_decode):
            await channel.close()


@pytest.fixture
async def world(redis_url: str, model: Path, answer: list[int]) -> AsyncIterator[World]:
    config = test_config(
        redis_url,
        CLUSTER,
        model={"path": str(model)},
        transfer={"transports": ["grpc"]},
        kv={"num_blocks": 256},
        router={
            "listen": "127.0.0.1:0",
            "default_max_tokens": 4,
            "max_outputs": 4,
            "default_deadline_s": 20.0,
            "resume_s": 0.5,
        },
        health={"heartbeat_s": 0.5, "peer_timeout_s": 4.0},
        prefill={"max_waiting": 1024},
    )
    threads = threading.active_count()
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        await eventually(lambda: cluster.router.pool.has_usable_pair, "the router has workers")  # type: ignore[union-attr]
        made = World(cluster, answer)
        await made.serves()
        yield made
        await made.serves()
        await made.close()
    await eventually(lambda: threading.active_count() <= threads + 8, "no thread is left")


class Run:
    """How much there is to do."""

    def __init__(self, pytestconfig: pytest.Config, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        self.long = pytestconfig.option.markexpr == "chaos"
        self.seed = int(os.environ.get("PDSERVE_FUZZ_SEED", "1"))
        self._cases = int(os.environ.get("PDSERVE_FUZZ_CASES", "100000"))

    async def all(self, make: Callable[[Random], Case], share: float) -> int:
        """`share` of the cases, which `make` makes one by one. Returns how many there were."""
        number = int(self._cases * share) if self.long else SHORT_CASES
        print(f"seed {self.seed}, {number} cases")
        rng, growth = Random(self.seed), Growth(SLACK_NBYTES)
        with Findings() as findings:
            for part in (int(number * WARM_UP), number - int(number * WARM_UP)):
                await drive((make(rng) for _ in range(part)), findings)
                assert not findings.found, "\n\n".join(findings.found)
                # pytest keeps every line of the log.
                self._caplog.clear()
                if part == int(number * WARM_UP):
                    growth.warmed_up()
        if self.long:
            growth.check()
        return number


@pytest.fixture
def run(pytestconfig: pytest.Config, caplog: pytest.LogCaptureFixture) -> Run:
    return Run(pytestconfig, caplog)


async def test_routers_answer_any_call_over_grpc(world: World, run: Run) -> None:
    """O-VAL-1, O-VAL-3, O-VAL-4."""
    first = [Script(path=path, messages=(b"",)) for path in paths_of(inference_pb2)]
    scripts = RouterScripts(Random(run.seed))

    def make(rng: Random) -> Case:
        script = first.pop() if first else scripts.grpc()
        return lambda: call(world.to_router, script)

    await run.all(make, 0.2)
    assert not first, "every method was called"


async def test_routers_answer_any_request_over_http(world: World, run: Run) -> None:
    """O-VAL-1, O-API-3. What the document promises of each answer: test_http_fuzz.py."""
    scripts = RouterScripts(Random(run.seed))
    async with httpx2.AsyncClient(base_url=f"http://{world.router.http_address}", timeout=60) as client:
        await run.all(lambda rng: lambda: scripts.http(client), 0.15)


async def test_workers_answer_any_call_and_any_chunk(world: World, run: Run) -> None:
    """O-KV-5, O-SEC."""
    scripts = WorkerScripts(Random(run.seed), world.prefill, world.decode)
    first = [
        # An empty message would be a drain like any other.
        Script(path=path, messages=(UNREADABLE if path.endswith("/Drain") else b"",), may_wait=True)
        for path in (*paths_of(worker_pb2, handoff_pb2, prefix_pb2), PUSH)
    ]

    def make(rng: Random) -> Case:
        kinds: list[Callable[[], Script]] = [
            scripts.prefill_session, scripts.decode_session, scripts.unary, scripts.control, scripts.push,
        ]  # fmt: skip
        kind = rng.randrange(len(kinds) + (not first))
        if kind == len(kinds):
            return lambda: scripts.hand_off(world.to_decode)
        script = first.pop() if first else kinds[kind]()
        # Each has its services, and sees those of the other as well.
        right = world.to_prefill if "PrefillWorker" in script.path else world.to_decode
        channel = right if rng.random() < 0.8 else rng.choice((world.to_prefill, world.to_decode))
        return lambda: call(channel, script)

    await run.all(make, 0.25)
    assert not first, "every method was called"


async def test_what_is_in_redis_is_not_taken_on_trust(world: World, run: Run, redis_url: str) -> None:
    """O-WRK-3, O-SEC."""
    keys = Keyspace(CLUSTER)
    async with (
        Redis.from_url(redis_url, protocol=2, socket_timeout=300) as redis,
        AsyncClient(world.router.address) as client,
    ):
        samples = await samples_of(world, redis, keys, client)
        workers = (world.prefill.worker_id, world.decode.worker_id)
        fuzzer = RedisFuzzer(Random(run.seed), redis, keys, samples, workers)

        async def ask(request: Any, path: str) -> str:
            return await call(world.to_router, Script(path=path, messages=(request.SerializeToString(),)))

        async def stored() -> str:
            name = await fuzzer.request()
            return (
                await ask(pb.GetRequestRequest(request_id=name), "/pdserve.rpc.v1.Inference/GetRequest")
                or await ask(pb.AttachRequest(request_id=name), "/pdserve.rpc.v1.Inference/Attach")
                or await ask(pb.CancelRequest(request_id=name), "/pdserve.rpc.v1.Inference/Cancel")
            )

        async def written(what: Callable[[], Awaitable[object]]) -> str:
            await what()
            return ""

        def make(rng: Random) -> Case:
            match rng.randrange(12):
                case 0:
                    return lambda: written(fuzzer.worker)
                case 1:
                    return lambda: written(fuzzer.lease)
                case 2 | 3:
                    return lambda: written(fuzzer.announcement)
                case _:
                    return stored

        await run.all(make, 0.1)

        await eventually(lambda: world.router.pool.has_usable_pair, "the workers are there again")


async def samples_of(world: World, redis: Redis, keys: Keyspace, client: AsyncClient) -> Samples:
    """What the cluster itself has written."""
    await client.generate(token_ids=PROMPT, max_tokens=NUM_TOKENS, request_id="sample", temperature=0.0)

    async def is_there() -> bool:
        return await redis.hget(keys.request("sample"), "state") == b"FINISHED"

    await eventually(is_there, "the record is in redis")
    # Their types depend on how the client was made.
    record: Any = await redis.hgetall(keys.request("sample"))
    resume: Any = await redis.get(keys.resume("sample"))
    assert isinstance(resume, bytes), "it is kept for a while"
    info = dataclasses.replace(world.decode, address="127.0.0.1:1", worker_id="there-is-none")
    event = {b"incarnation": world.decode.incarnation.encode(), b"seq": b"5", b"cleared": b"0"}
    return Samples(
        record=record,
        resume=resume,
        worker={
            b"info": encode_info(info).encode(),
            b"stats": encode_stats(WorkerStats()).encode(),
            b"incarnation": info.incarnation.encode(),
            b"epoch": b"1",
        },
        event=event | {b"removed": b"", b"stored": bytes(range(16))},
    )
