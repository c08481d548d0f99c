"""Gives prefixes that this worker has in its cache to prefill workers that ask for them.

A fetch is a hand-off in which the holder is the sender: the blocks are pinned, go to the requester through the ordinary
tables, and are let go of again, whatever happens. The call of the requester is the lease of the pin: it ends with the
call, with its time-out, or with this worker, whichever comes first, as soon as nothing reads the blocks any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Protocol

import grpc

from kv_transfer.codec import prefix_request_from_proto
from kv_transfer.config import TransferConfig
from kv_transfer.handoff import Handoff
from kv_transfer.messages import PrefixRequest
from kv_transfer.sender import HandoffSender
from pdserve.errors import (
    DeadlineExceededError,
    IncompatibleWorkersError,
    OverloadedError,
    StaleAttemptError,
    UnavailableError,
)
from pdserve.kv_layout import KvBlockStore
from pdserve.rpc.v1 import prefix_pb2 as pb
from pdserve.rpc.v1.prefix_pb2_grpc import PrefixStoreServicer, add_PrefixStoreServicer_to_server
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.types import HandoffId, PrefixFetch, Role
from pdserve.worker.tasks import TaskScope
from pdserve.worker_info import WorkerInfo

logger = logging.getLogger(__name__)

MAX_SERVED: Final = 8
"""Fetches served at once; one more is refused, and its request computed. Their blocks cannot be used for anything else
meanwhile, and this worker has requests of its own to hand over or to decode."""
MAX_TIMEOUT_S: Final = 30.0
"""Longest time for which a requester can have blocks pinned."""


class PrefixCache(Protocol):
    """The worker's cache, as seen from here. Both calls are made in the event loop and must not block."""

    def pin(self, key: HandoffId, names: Sequence[bytes]) -> tuple[int, ...]:
        """The blocks of the longest run of `names` that is here, exact and final, kept as they are until `unpin`.

        Empty, and nothing to unpin, if there is none.
        """

    def unpin(self, key: HandoffId) -> None:
        """Nothing reads the blocks of `key` any more."""


class PrefixServer:
    """One per worker. Belongs to one event loop: `register`, …, `aclose`."""

    def __init__(
        self,
        *,
        info: WorkerInfo,
        store: KvBlockStore,
        cache: PrefixCache,
        config: TransferConfig,
        tasks: TaskScope,
        bind_host: str = "127.0.0.1",
        channels: Channels = PLAINTEXT,
    ) -> None:
        """`tasks` must outlive `aclose`; `bind_host` and `channels` are as for `HandoffSender`."""
        self._info = info.as_prefix_peer
        self._block_size = store.layout.block_size
        self._cache = cache
        # Everything is final from the beginning: layers have nothing to overlap with. And a requester does not wait
        # until the transports of a new link are measured; the configured order will do.
        config = replace(config, tail_tokens=0, preflight=False)
        self._sender = HandoffSender(
            info=self._info, store=store, config=config, bind_host=bind_host, for_prefixes=True, channels=channels
        )
        self._numbers = itertools.count(1)
        self._tasks = tasks
        self._pinned: set[HandoffId] = set()
        self._serving: set[tuple[str, HandoffId]] = set()
        """Incarnation of the requester and its own id of what is under way."""
        self._idle = asyncio.Event()
        """Set while nothing is pinned."""
        self._idle.set()
        self._refusing = False
        self.num_served = 0
        """Prefixes given since start."""

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to the worker's server."""
        add_PrefixStoreServicer_to_server(_Servicer(self), server)

    def set_draining(self) -> None:
        """Refuse new fetches; those under way go on."""
        self._refusing = True

    async def aclose(self) -> None:
        """End every fetch and let go of its blocks, within about two seconds."""
        self._refusing = True
        await self._sender.aclose()
        # Every hand-off has ended, and each call is about to notice.
        await self._idle.wait()

    async def serve(self, request: PrefixRequest) -> int:
        """Send what is here of a prefix; returns its tokens, 0 if there is nothing, once the requester has them.

        Raises UnavailableError, OverloadedError, StaleAttemptError (it is on its way to this requester already),
        IncompatibleWorkersError, DeadlineExceededError, or what ended the transfer.
        """
        self._check(request)
        # Ids are unique among those of one requester only.
        key = HandoffId(f"{request.id.request_id}/{next(self._numbers)}", request.id.attempt)
        blocks = self._cache.pin(key, request.names)
        if not blocks:
            return 0
        self._pinned.add(key)
        served = (request.requester.incarnation, request.id)
        self._serving.add(served)
        self._idle.clear()
        handoff: Handoff | None = None
        num_tokens = len(blocks) * self._block_size
        job = PrefixFetch(
            request_id=request.id.request_id, attempt=request.id.attempt, last_block=request.names[len(blocks) - 1]
        )
        try:
            async with asyncio.timeout(min(request.timeout_s, MAX_TIMEOUT_S)):
                handoff = self._sender.begin(job, request.requester.target, blocks, num_tokens)
                await handoff.reserve()
                handoff.advance(num_tokens)
                await handoff.commit(0)
        except TimeoutError:
            raise DeadlineExceededError(
                f"prefix {request.id}: not sent to {request.requester.worker_id} within {request.timeout_s:g} s"
            ) from None
        finally:
            # Not here: the call may be over, and its coroutine cancelled, before the last read is.
            self._tasks.spawn(self._release(key, served, handoff), f"release-{key}")
        self.num_served += 1
        return num_tokens

    def _check(self, request: PrefixRequest) -> None:
        requester = request.requester
        if self._refusing:
            raise UnavailableError(f"{self._info.role.value} worker {self._info.worker_id} is shutting down")
        problems = self._info.incompatibilities(requester)
        if requester.role is not Role.PREFILL:
            problems.append(f"role of {requester.worker_id} is {requester.role.value!r}, must be 'prefill'")
        if problems:
            raise IncompatibleWorkersError(
                f"{self._info.worker_id} has no prefix for {requester.worker_id}: " + "; ".join(problems)
            )
        if (requester.incarnation, request.id) in self._serving:
            raise StaleAttemptError(f"prefix {request.id} is on its way to {requester.worker_id} already")
        if len(self._pinned) >= MAX_SERVED:
            raise OverloadedError(f"{self._info.worker_id} is giving {MAX_SERVED} prefixes away already")

    async def _release(self, key: HandoffId, served: tuple[str, HandoffId], handoff: Handoff | None) -> None:
        if handoff is not None:
            await handoff.abort("the requester has given up")
        self._cache.unpin(key)
        self._pinned.remove(key)
        self._serving.remove(served)
        if not self._pinned:
            self._idle.set()


class _Servicer(PrefixStoreServicer):
    """gRPC edge."""

    def __init__(self, server: PrefixServer) -> None:
        self._server = server

    async def Fetch(  # noqa: N802 (the name in the .proto)
        self, request: pb.FetchRequest, context: grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchResponse]
    ) -> pb.FetchResponse:
        return pb.FetchResponse(num_tokens=await self._server.serve(prefix_request_from_proto(request)))
