"""A router in this process with fake workers around it: real gRPC, real redis, a made-up next token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc

from pdserve.config.schema import Config
from pdserve.errors import PdServeError
from pdserve.lifecycle import TERMINAL_STATES
from pdserve.model.source import open_model
from pdserve.rpc.errors import error_of
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import common_pb2, inference_pb2_grpc
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.store.client import Store
from pdserve.testing.asyncio_leaks import assert_no_leaks
from pdserve.testing.fake_fleet import FakeFleet
from pdserve.testing.fake_worker_base import NextToken, generate, hashed_token
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.testing.waiting import eventually
from pdserve.types import Role
from router.service import RouterService

MODEL = "tiny"
CONTEXT = 100_000
"""max_position_embeddings of the model."""
EOS = 1
NEXT_TOKEN = hashed_token(40, 90)
"""Only tokens that are one byte of printable ASCII, so no output ends by itself."""
PROMPT = (50, 51, 52)


def make_model(directory: Path) -> Path:
    """A checkpoint whose tokenizer and configuration the router serves; nobody computes with it."""
    shape = TinyShape(num_layers=1, hidden_size=32, intermediate_size=32, max_position_embeddings=CONTEXT)
    return make_tiny_kv(directory / MODEL, shape=shape)


def make_config(redis_url: str, cluster: str, model_path: Path, **router: Any) -> Config:
    """Short time-outs; `router` are settings of that section."""
    return Config.model_validate(
        {
            "cluster": cluster,
            "model": {"path": str(model_path)},
            "store": {"url": redis_url, "poll_s": 0.02, "timeout_s": 1.0},
            "router": {"listen": "127.0.0.1:0", "worker_wait_s": 2.0, "drain_timeout_s": 2.0, **router},
            "health": {"heartbeat_s": 0.1, "peer_timeout_s": 0.8},
        }
    )


class RouterClient:
    """A client of one router."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.aio.insecure_channel(address, options=list(CHANNEL_OPTIONS))
        self.inference = inference_pb2_grpc.InferenceStub(self.channel)
        self.cluster = inference_pb2_grpc.ClusterStub(self.channel)

    async def generate(self, request: pb.GenerateRequest, timeout: float | None = 20.0) -> Answer:
        """Every response. Raises what the request ended with."""
        try:
            return Answer([response async for response in self.inference.Generate(request, timeout=timeout)])
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from error

    async def error(self, request: pb.GenerateRequest, timeout: float | None = 20.0) -> PdServeError:
        """What the request ends with, which must not be success."""
        try:
            answer = await self.generate(request, timeout)
        except PdServeError as error:
            return error
        raise AssertionError(f"it succeeded: {answer.token_ids}")

    async def status(self) -> pb.ClusterStatus:
        """GetStatus."""
        return await self.cluster.GetStatus(pb.GetStatusRequest())

    async def info_of(self, request_id: str) -> pb.RequestInfo | None:
        """GetRequest; None if there is no such request."""
        try:
            return await self.inference.GetRequest(pb.GetRequestRequest(request_id=request_id))
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                return None
            raise

    async def state_of(self, request_id: str) -> str:
        """State by GetRequest; empty if there is no such request."""
        info = await self.info_of(request_id)
        return "" if info is None else info.state


class Answer:
    """All responses of a request."""

    def __init__(self, responses: Sequence[pb.GenerateResponse]) -> None:
        self.responses = responses
        self.last = responses[-1]
        self.token_ids = [token for response in responses for token in response.token_ids]
        self.text = "".join(response.text_delta for response in responses)


class RouterRig:
    """A router, its fake workers and a client."""

    def __init__(self, router: RouterService, fleet: FakeFleet, client: RouterClient) -> None:
        self.router = router
        self.fleet = fleet
        self.client = client

    async def wait_ready(self, num_workers: int) -> None:
        """Until the router may use that many workers."""

        async def ready() -> bool:
            status = await self.client.status()
            return sum(worker.state == "ready" for worker in status.workers) == num_workers

        await eventually(ready, f"{num_workers} workers are ready")

    async def wait_state(self, request_id: str, *states: str) -> None:
        """Until GetRequest gives one of `states`."""

        async def reached() -> bool:
            return await self.client.state_of(request_id) in states

        await eventually(reached, f"{request_id} is {' or '.join(states)}")

    async def wait_ended(self, request_id: str) -> None:
        """Until the record says that it has ended, if there is one."""
        await self.wait_state(request_id, "", *TERMINAL_STATES)

    async def wait_lost(self, worker_id: str) -> None:
        """Until the router has noticed that the worker is gone."""

        async def lost() -> bool:
            states = {worker.info.worker_id: worker.state for worker in (await self.client.status()).workers}
            return states.get(worker_id) in (None, "lost")

        await eventually(lost, f"{worker_id} is lost")

    async def wait_tokens(self, request_id: str, num_tokens: int) -> None:
        """Until the router has that many output tokens of an active request."""

        async def there() -> bool:
            info = await self.client.info_of(request_id)
            return info is not None and info.completion_tokens >= num_tokens

        await eventually(there, f"{request_id} has {num_tokens} tokens")

    async def wait_quiet(self) -> None:
        """Until no request is anywhere: not in the router, not on a worker, no load charged."""

        async def quiet() -> bool:
            busy = [w.num_jobs for w in self.fleet.prefill.values()] + [w.num_jobs for w in self.fleet.decode.values()]
            charged = [w.num_requests + w.view().num_sequences for w in self.router.pool.workers]
            status = await self.client.status()
            return status.num_active_requests == 0 and not any(charged) and not any(busy)

        await eventually(quiet, "no request is left anywhere")


class RouterRigs:
    """Starts rigs for the tests of one deployment."""

    def __init__(self, store: Store, redis_url: str, model_path: Path) -> None:
        self._store = store
        self._redis_url = redis_url
        self._model_path = model_path

    def new_fleet(self, next_token: NextToken = NEXT_TOKEN, *, seeded: bool = False) -> FakeFleet:
        """Fake workers of the model, see FakeFleet."""
        fingerprint = open_model(str(self._model_path)).fingerprint
        return FakeFleet(self._store, model=MODEL, model_fingerprint=fingerprint, next_token=next_token, seeded=seeded)

    @contextlib.asynccontextmanager
    async def router(self, **router: Any) -> AsyncIterator[tuple[RouterService, RouterClient]]:
        """A router of the deployment and a client of it. Settings of the section can be given. At the end it must not
        have ended by itself, as it does when one of its background tasks fails."""
        service = RouterService(make_config(self._redis_url, self._store.keys.cluster, self._model_path, **router))
        try:
            await service.start()
            running = asyncio.create_task(service.run())
            client = RouterClient(service.address)
            try:
                yield service, client
            finally:
                await client.channel.close()
                await _end(running)
        finally:
            await service.stop()

    @contextlib.asynccontextmanager
    async def start(
        self,
        prefill: int = 1,
        decode: int = 1,
        *,
        next_token: NextToken = NEXT_TOKEN,
        seeded: bool = False,
        prefill_chunk_tokens: int = 0,
        **router: Any,
    ) -> AsyncIterator[RouterRig]:
        """A router with that many workers, p0.. and d0... Decode workers compute prompts if `prefill_chunk_tokens` is
        not 0. At the end no request and no task may be left."""
        async with assert_no_leaks():
            fleet = self.new_fleet(next_token, seeded=seeded)
            try:
                for i in range(prefill):
                    await fleet.add_prefill(f"p{i}")
                for i in range(decode):
                    info = fleet.info(f"d{i}", Role.DECODE, prefill_chunk_tokens=prefill_chunk_tokens)
                    await fleet.add_decode(f"d{i}", info)
                async with self.router(**router) as (service, client):
                    rig = RouterRig(service, fleet, client)
                    await rig.wait_ready(prefill + decode)
                    yield rig
                    await rig.wait_quiet()
            finally:
                await fleet.aclose()


async def _end(running: asyncio.Task[None]) -> None:
    """Of a router that has been stopped, or is going to be."""
    # What has ended in this very moment has ended, too.
    await asyncio.wait([running], timeout=0.0)
    if running.done() and not running.cancelled():
        raise AssertionError("the router has ended by itself") from running.exception()
    running.cancel()
    await asyncio.wait([running])


def ask(max_tokens: int | None = 8, prompt: Sequence[int] = PROMPT, **fields: Any) -> pb.GenerateRequest:
    """A greedy request with token ids; `fields` are those of the message."""
    fields.setdefault("stop", common_pb2.StopParams(max_tokens=max_tokens))
    fields.setdefault("sampling", common_pb2.SamplingParams(temperature=0))
    if not {"text", "chat"} & fields.keys():
        fields["token_ids"] = pb.TokenIds(ids=prompt)
    return pb.GenerateRequest(**fields)


def expected(num_tokens: int, prompt: Sequence[int] = PROMPT, *, seed: int | None = None) -> list[int]:
    """What an undisturbed run generates, with a seed if the workers of the fleet heed it."""
    return generate(prompt if seed is None else (seed, *prompt), num_tokens, NEXT_TOKEN)
