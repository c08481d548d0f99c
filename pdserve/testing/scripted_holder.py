"""A holder of prefixes that does what a test tells it to: a real server and sender over a pool of plain bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import grpc

from kv_transfer import Handoff, HandoffSender, TransferConfig
from kv_transfer.codec import prefix_request_from_proto
from kv_transfer.messages import PrefixRequest
from pdserve.rpc.errors import ErrorInterceptor
from pdserve.rpc.options import SERVER_OPTIONS
from pdserve.rpc.v1 import prefix_pb2 as pb
from pdserve.rpc.v1.prefix_pb2_grpc import PrefixStoreServicer, add_PrefixStoreServicer_to_server
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.types import PrefixFetch, PrefixHolder
from pdserve.worker_info import WorkerInfo

Script = Callable[["ScriptedHolder", PrefixRequest], Awaitable[int]]
"""What to do about a request; gives the tokens for the answer."""


class ScriptedHolder(PrefixStoreServicer):
    """Use as `async with`. Its KV is random: none of it may ever be used."""

    def __init__(self, info: WorkerInfo, script: Script) -> None:
        """`info` is a worker's, as which it introduces itself; its address is filled in."""
        self.script = script
        self.asked: list[PrefixRequest] = []
        self.num_ended = 0
        """Calls that are over, also those that the requester has cancelled."""
        self._info = info
        self._store = NumpyBlockStore(info.kv_layout, 64)
        self._store.fill(range(64), seed=1)
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=list(SERVER_OPTIONS))
        self._sender = HandoffSender(
            info=info, store=self._store, config=TransferConfig(preflight=False, tail_tokens=0), for_prefixes=True
        )

    async def __aenter__(self) -> Self:
        add_PrefixStoreServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.die()

    def holder(self, num_tokens: int) -> PrefixHolder:
        """This holder, as a hint that it has so many tokens."""
        return PrefixHolder(
            worker_id=self._info.worker_id,
            incarnation=self._info.incarnation,
            address=f"127.0.0.1:{self._port}",
            num_tokens=num_tokens,
        )

    def begin(self, request: PrefixRequest, num_tokens: int, *, last_block: bytes | None = None) -> Handoff:
        """The hand-off of the first `num_tokens` tokens that are asked for."""
        num_blocks = self._info.kv_layout.num_blocks(num_tokens)
        job = PrefixFetch(
            request_id=request.id.request_id,
            attempt=request.id.attempt,
            last_block=last_block or request.names[num_blocks - 1],
        )
        return self._sender.begin(job, request.requester.target, range(num_blocks), num_tokens)

    async def die(self) -> None:
        """End without a word about what is under way."""
        await self._server.stop(0)
        await self._sender.aclose()

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> pb.FetchResponse:  # noqa: N802
        """See prefix.proto."""
        asked = prefix_request_from_proto(request)
        self.asked.append(asked)
        try:
            return pb.FetchResponse(num_tokens=await self.script(self, asked))
        finally:
            self.num_ended += 1


async def say_nothing(holder: ScriptedHolder, request: PrefixRequest) -> int:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError("unreachable")
