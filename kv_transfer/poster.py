"""What posts the chunks of a link: whose turn it is, over which transport, and when to change that."""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from kv_transfer.chunk_io import ChunkIo
from kv_transfer.codec import Reply
from kv_transfer.config import TransferConfig
from kv_transfer.counters import TransportCounters
from kv_transfer.handoff import Handoff
from kv_transfer.lanes import Lane, Lanes
from kv_transfer.liveness import PeerWatch
from kv_transfer.messages import ChunkAck, ChunkNak, Grant, ProbeAck
from kv_transfer.prefill_states import (
    Cancelled,
    Committing,
    Failure,
    PostChunk,
    PrefillEvent,
    Pushing,
    SourceFree,
    TransportChanged,
    Window,
)
from kv_transfer.transports.base import PostError
from kv_transfer.wire import Frame
from pdserve.errors import PdServeError
from pdserve.types import HandoffId

MAX_NAKS = 2
"""Chunks that arrive damaged in a row, after which the transport is to blame. Less than what ends a hand-off."""


class ChunkPoster:
    """For one life of a link: `run` until it raises or is cancelled. The caller fences the lanes afterwards."""

    def __init__(
        self,
        *,
        lanes: Lanes,
        io: ChunkIo,
        config: TransferConfig,
        tick_s: float,
        handoffs: Mapping[HandoffId, Handoff],
        dispatch: Callable[[Handoff, PrefillEvent], None],
        counters: TransportCounters,
    ) -> None:
        """`handoffs` are the live ones of the link, oldest first; `dispatch` applies an event to one of them.

        `check` is called about every `tick_s` seconds.
        """
        self.lanes = lanes
        self._io = io
        self._config = config
        self._tick_s = tick_s
        self._handoffs = handoffs
        self._dispatch = dispatch
        self._counters = counters
        self._posts: deque[PostChunk] = deque()
        self._work = asyncio.Event()
        """Set whenever a chunk may have become postable."""
        self._credit_nbytes = config.credit_bytes
        self._lane: Lane | None = None
        """The transport in use, once one is chosen."""
        self._lane_failed: asyncio.Future[str] | None = None
        """Set to the reason when the transport in use is to be given up."""
        self._num_naks = 0
        """Damaged chunks since the last good one."""
        self._is_posting = False
        """A call of the transport's `post` is under way."""
        self._progress = self._watch()
        """Whether chunks that are out get through."""

    @property
    def one_sided(self) -> bool:
        """Whether the transport in use is."""
        return self._lane is not None and self._lane.kind.one_sided

    @property
    def has_transport(self) -> bool:
        """Whether one has been found that works, at least at first."""
        return self._lane is not None

    def wake(self) -> None:
        """The state of a hand-off has changed: perhaps a chunk can be posted."""
        self._work.set()

    def take(self, post: PostChunk) -> None:
        """What a hand-off answers to Window."""
        self._posts.append(post)

    def received(self, reply: Reply) -> None:
        """Learn from what the decode worker says. Before the hand-off that is concerned learns it."""
        match reply:
            case Grant():
                self._credit_nbytes = reply.credit_bytes
            case ProbeAck():
                self.lanes.probe_acked(reply)
            case ChunkAck():
                self._num_naks = 0
                self._progress.heard(time.monotonic())
                self.lanes.got_through()
            case ChunkNak():
                self._num_naks += 1
                self._progress.heard(time.monotonic())
                if self._num_naks >= MAX_NAKS:
                    self._fail_lane(f"{self._num_naks} chunks in a row arrived damaged, last: {reply.reason}")

    def check(self, now: float, *, peer_is_alive: bool) -> None:
        """Give the transport up if chunks are out and nothing comes of it. Only a peer that is alive can tell."""
        if not self._is_waiting or not peer_is_alive:
            self._progress.heard(now)
        if self._progress.is_dead(now):
            self._fail_lane(f"no chunk was acknowledged for {self._config.chunk_timeout_s:g} s")

    @property
    def _is_waiting(self) -> bool:
        """Whether chunks are out."""
        # A post that hangs counts by itself: once a CommitNack has come, its chunk is not out any more but due again.
        return self._is_posting or any(
            isinstance(handoff.state, Pushing | Committing) and handoff.state.push.outstanding
            for handoff in self._handoffs.values()
        )

    async def run(self) -> None:
        """Post over one transport after the other. Raises NoTransport when none is left."""
        await self.lanes.open(preflight=self._config.preflight)
        while True:
            lane = self._lane = self.lanes.current
            self._tell_all(TransportChanged(lane.kind.one_sided))
            reason = await self._use(lane)
            # Before the fence, which makes all of the source free: a Commit would go out for chunks that are lost.
            self._tell_all(TransportChanged(lane.kind.one_sided))
            await self.lanes.fall_back(reason)

    def _watch(self) -> PeerWatch:
        return PeerWatch(self._config.chunk_timeout_s, self._tick_s, time.monotonic())

    def _fail_lane(self, reason: str) -> None:
        if self._lane_failed is not None and not self._lane_failed.done():
            self._lane_failed.set_result(reason)

    def _tell_all(self, event: PrefillEvent) -> None:
        for handoff in list(self._handoffs.values()):
            self._dispatch(handoff, event)

    async def _use(self, lane: Lane) -> str:
        """Post over this transport until it fails; returns why."""
        self._num_naks = 0
        self._progress = self._watch()
        failed = self._lane_failed = asyncio.get_running_loop().create_future()
        posting = asyncio.ensure_future(self._post_chunks(lane, failed))
        try:
            await asyncio.wait((posting, failed), return_when=asyncio.FIRST_COMPLETED)
            return failed.result() if failed.done() else posting.result()
        finally:
            posting.cancel()
            await asyncio.wait((posting,))

    async def _post_chunks(self, lane: Lane, failed: asyncio.Future[str]) -> str:
        # A chunk that comes back is due at once, before the transport that is given up for it is left.
        while not failed.done():
            self._work.clear()
            choice = self._next_chunk(time.monotonic())
            if choice is None:
                await self._work.wait()
                continue
            handoff, seq = choice
            self._dispatch(handoff, Window(seq))
            post = self._posts.popleft()
            handoff.carried_by(lane.name)
            freed = functools.partial(self._dispatch, handoff, SourceFree(post.nonce, post.seq))
            frame = self._frame(handoff, post)
            self._is_posting = True
            try:
                await lane.transport.post(frame, freed)
            except PostError as error:
                return str(error)
            except PdServeError:
                continue  # the frame itself has ended the hand-off whose source cannot be read
            finally:
                self._is_posting = False
            self._counters.frame(lane.name, frame.chunk.payload_nbytes)
        return failed.result()

    def _next_chunk(self, now: float) -> tuple[Handoff, int] | None:
        """The first sendable chunk of the oldest hand-off that has one, if there is credit for it.

        Younger ones never overtake an older one that waits for credit.
        """
        in_flight = sum(handoff.outstanding_nbytes for handoff in self._handoffs.values())
        num_pushing = 0
        for handoff in self._handoffs.values():
            state = handoff.state
            if not isinstance(state, Pushing):
                continue
            sendable = state.sendable(now)
            if not sendable and not state.push.outstanding:
                continue  # waits for compute
            num_pushing += 1
            if num_pushing > self._config.max_pushing_per_link:
                return None
            if sendable:
                seq = (sendable & -sendable).bit_length() - 1
                # A chunk larger than the whole window goes alone.
                fits = not in_flight or in_flight + handoff.plan.chunk(seq).nbytes <= self._credit_nbytes
                return (handoff, seq) if fits else None
        return None

    def _frame(self, handoff: Handoff, post: PostChunk) -> Frame:
        plan, loop = handoff.plan, asyncio.get_running_loop()
        chunk = plan.chunk(post.seq)

        def read() -> Sequence[memoryview]:
            """Called by the transport, in a thread of its own."""
            try:
                return self._io.read(handoff.blocks, chunk)
            except PdServeError as error:
                # No transport can send this. It may be posting for somebody else by now, so it need not tell.
                failure = Failure(code=error.code, message=error.message)
                loop.call_soon_threadsafe(self._dispatch, handoff, Cancelled(failure))
                raise

        lost = functools.partial(self._lost, self._lane)
        return Frame(plan.header(post.seq, nonce=post.nonce, attempt=handoff.id.attempt), read, lost)

    def _lost(self, lane: Lane | None, reason: str) -> None:
        """A transport says of a frame that it was given some time ago that it does not arrive."""
        if lane is self._lane and self._is_waiting:
            self._fail_lane(reason)
