"""What fake workers of both roles share: sessions over real gRPC, heartbeats, pause points and a made-up next token."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc

from pdserve.kv_layout import KvLayout
from pdserve.rpc.codec import logprobs_to_proto
from pdserve.rpc.options import SERVER_OPTIONS
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.types import GenerationJob, Role, TokenLogprobs, WorkerStats
from pdserve.worker_info import WorkerInfo

NextToken = Callable[[Sequence[int]], int]

_E = TypeVar("_E", pb.PrefillEvents, pb.DecodeEvents)


def hashed_token(low: int, high: int) -> NextToken:
    """A next token in [low, high) that depends on all tokens before it."""

    def next_token(token_ids: Sequence[int]) -> int:
        state = 17
        for token_id in token_ids:
            state = (state * 31 + token_id + 1) % 1_000_003
        return low + state % (high - low)

    return next_token


def generate(job_tokens: Sequence[int], num_tokens: int, next_token: NextToken) -> list[int]:
    """What undisturbed workers would generate."""
    tokens = list(job_tokens)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(job_tokens) :]


def made_up_logprobs(token_ids: Sequence[int], num_top: int | None) -> common_pb2.Logprobs | None:
    """Of tokens, each with as many others; None if nobody has asked."""
    if num_top is None:
        return None
    return logprobs_to_proto(
        [
            TokenLogprobs(token_id, -(token_id % 8) / 8, tuple((40 + i, -i / 4) for i in range(num_top)))
            for token_id in token_ids
        ]
    )


def fake_info(
    worker_id: str,
    role: Role,
    *,
    model: str,
    model_fingerprint: str,
    num_blocks: int = 4096,
    max_model_len: int = 1 << 20,
    kv_dtype: str = "float32",
    prefill_chunk_tokens: int = 0,
    address: str = "",
) -> WorkerInfo:
    """Who a fake worker claims to be. The address is filled in when it starts."""
    return WorkerInfo(
        worker_id=worker_id,
        incarnation=secrets.token_hex(8),
        role=role,
        address=address,
        model=model,
        model_fingerprint=model_fingerprint,
        kv_layout=KvLayout(dtype=kv_dtype, block_size=16, num_layers=2, num_kv_heads=2, head_dim=8),
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        transports=("grpc",),
        version="0",
        prefill_chunk_tokens=prefill_chunk_tokens,
    )


class PausePoint:
    """A place where fakes stop while it is held. Open at first."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self.num_waiting = 0
        """Jobs stopped here now."""
        self._passes = 0

    def hold(self) -> None:
        """Stop whoever comes from now on."""
        self._open.clear()

    def release(self) -> None:
        """Let everybody pass."""
        self._open.set()

    def let_pass(self, num: int) -> None:
        """Let this many arrivals pass, then stop the rest."""
        self._passes = num
        self.hold()

    async def reach(self) -> None:
        """Wait until open."""
        if not self._open.is_set() and self._passes > 0:
            self._passes -= 1
            return
        self.num_waiting += 1
        try:
            await self._open.wait()
        finally:
            self.num_waiting -= 1


@dataclass
class _RouterSession(Generic[_E]):
    outgoing: asyncio.Queue[_E | None] = field(default_factory=asyncio.Queue)
    """None ends the session."""


class FakeWorker(Generic[_E]):
    """What both roles share: a server on a free port, sessions, heartbeats, jobs by (request, attempt)."""

    def __init__(self, info: WorkerInfo, next_token: NextToken, heartbeat_s: float = 0.1) -> None:
        self.info = info
        self.next_token = next_token
        self.seeded = False
        """Whether the next token of a job that is not greedy depends on its seed, too."""
        self.stats = WorkerStats()
        self.before_send = PausePoint()
        """While held nothing is sent, as if the process were stopped."""
        self.ready = True
        """While false sessions are refused."""
        self.cancelled: list[tuple[str, int]] = []
        """Cancels received, in order."""
        self.num_heartbeats_received = 0
        self.num_sessions = 0
        """Sessions opened so far."""
        self._heartbeat_s = heartbeat_s
        self._sessions: dict[str, _RouterSession[_E]] = {}
        self._jobs: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        """Others."""
        self._server: grpc.aio.Server | None = None

    @property
    def num_jobs(self) -> int:
        """Jobs it works on."""
        return len(self._jobs)

    async def start(self, address: str = "127.0.0.1:0") -> WorkerInfo:
        """Listen. Returns who it is, with the address."""
        self._server = grpc.aio.server(options=list(SERVER_OPTIONS))
        self._register(self._server)
        port = self._server.add_insecure_port(address)
        await self._server.start()
        self.info = dataclasses.replace(self.info, address=f"127.0.0.1:{port}")
        return self.info

    async def kill(self) -> None:
        """End at once, as a killed process does: every stream breaks, every job is gone."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_jobs(list(self._jobs))
        assert self._server is not None, "not started"
        await self._server.stop(None)

    def draw(self, job: GenerationJob, token_ids: Sequence[int]) -> int:
        """The token of `job` that follows `token_ids`."""
        if self.seeded and not job.sampling.greedy:
            return self.next_token((job.sampling.seed, *token_ids))
        return self.next_token(token_ids)

    def send_to_all(self, message: _E) -> None:
        """Send something of the test's making to every router."""
        for router_id in self._sessions:
            self._emit(router_id, message)

    def end_sessions(self) -> None:
        """Close the sessions properly, and listen on."""
        for session in self._sessions.values():
            session.outgoing.put_nowait(None)

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _wrap(self, hello: bool, stats: bool) -> _E:
        raise NotImplementedError

    def _run(self, job: GenerationJob, work: Callable[[], Any]) -> None:
        key = (job.request_id, job.attempt)

        async def body() -> None:
            try:
                await work()
            finally:
                self._jobs.pop(key, None)

        self._jobs[key] = asyncio.create_task(body(), name=f"{self.info.worker_id}-{key}")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Something beside the jobs."""
        task = asyncio.create_task(work, name=f"{self.info.worker_id}-work")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _cancel(self, cancel: pb.CancelJob) -> None:
        key = (cancel.request_id, cancel.attempt)
        self.cancelled.append(key)
        if (task := self._jobs.get(key)) is not None:
            task.cancel()

    async def _end_jobs(self, keys: Sequence[tuple[str, int]]) -> None:
        tasks = [self._jobs[key] for key in keys if key in self._jobs]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _emit(self, router_id: str, message: _E) -> None:
        """Send to a router; lost if its session is."""
        if (session := self._sessions.get(router_id)) is not None:
            session.outgoing.put_nowait(message)

    async def _serve(
        self, router_id: str, requests: AsyncIterator[Any], on_command: Callable[[Any], None]
    ) -> AsyncIterator[_E]:
        session = _RouterSession[_E]()
        self._sessions[router_id] = session
        self.num_sessions += 1
        reader = asyncio.create_task(self._read(requests, on_command, session))
        try:
            yield self._wrap(hello=True, stats=False)
            while True:
                try:
                    async with asyncio.timeout(self._heartbeat_s):
                        message = await session.outgoing.get()
                except TimeoutError:
                    message = self._wrap(hello=False, stats=True)
                if message is None:
                    return
                await self.before_send.reach()
                yield message
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
            if self._sessions.get(router_id) is session:
                del self._sessions[router_id]

    async def _read(
        self, requests: AsyncIterator[Any], on_command: Callable[[Any], None], session: _RouterSession[_E]
    ) -> None:
        async for command in requests:
            match command.WhichOneof("command"):
                case "cancel":
                    self._cancel(command.cancel)
                case "heartbeat":
                    self.num_heartbeats_received += 1
                case _:
                    on_command(command)
        session.outgoing.put_nowait(None)

    async def _greet(self, requests: AsyncIterator[Any], context: Any) -> str:
        first = await anext(requests)
        if not self.ready:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "loading")
        return str(first.hello.router_id)
