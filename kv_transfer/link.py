"""The prefill side of a link: one control stream to one decode process, and the hand-offs it carries.

One task (`run`) owns the stream, its reader, writer, ticker and poster, and brings the stream back after a break. All
state changes go through `dispatch`, which never awaits, so that each event is carried out whole before the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import deque
from collections.abc import Iterator, Mapping

import grpc

from kv_transfer.codec import Reply, Request, reply_from_proto, request_to_proto
from kv_transfer.compatibility import check_decode_peer
from kv_transfer.config import TransferConfig
from kv_transfer.handoff import Handoff
from kv_transfer.liveness import PeerWatch, backoff_s
from kv_transfer.messages import (
    Abort,
    Grant,
    LinkHeartbeat,
    LinkHello,
    LinkId,
    LinkRefused,
    LinkWelcome,
)
from kv_transfer.prefill_states import (
    Cancelled,
    DecodeLost,
    Failure,
    LinkLost,
    LinkUp,
    NotifyEnded,
    PostChunk,
    PostFailed,
    PrefillEvent,
    Pushing,
    Send,
    SendReserve,
    SourceFree,
    Tick,
    Window,
)
from kv_transfer.transports import choose
from kv_transfer.transports.base import PostError, SendingTransport, TransportKind
from kv_transfer.transports.grpc_raw import grpc_reason
from kv_transfer.wire import Frame, encode
from pdserve.errors import InternalError, OverloadedError, PdServeError, WorkerLostError, error_from_code
from pdserve.kv_layout import KvBlockStore
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import handoff_pb2 as pb
from pdserve.rpc.v1.handoff_pb2_grpc import KvTransferStub
from pdserve.types import DecodeTarget, HandoffId
from pdserve.worker_info import WorkerInfo

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 1.0
"""How long a link that is being closed may take to deliver its last messages."""

ControlCall = grpc.aio.StreamStreamCall[pb.HandoffRequest, pb.HandoffReply]


class LinkDown(Exception):  # noqa: N818 (an event in the life of a link, not an error of a caller)
    """The control stream is broken or silent; the message says how. The peer may still be alive."""


class PrefillLink:
    """See the module. Counters are plain totals for the worker's statistics."""

    def __init__(
        self,
        *,
        target: DecodeTarget,
        info: WorkerInfo,
        store: KvBlockStore,
        config: TransferConfig,
        transports: Mapping[str, TransportKind],
        generations: Iterator[int],
    ) -> None:
        self.target = target
        self.bytes_posted = 0
        """Payload given to the transport, repeats included."""
        self.num_committed = 0
        self.num_failed = 0
        self._info = info
        self._store = store
        self._config = config
        self._transports = transports
        self._generations = generations
        self._tick_s = min(config.heartbeat_s, config.resend_s, config.stall_timeout_s, config.commit_timeout_s) / 4
        self._handoffs: dict[HandoffId, Handoff] = {}
        """Live ones, oldest first."""
        self._events: deque[tuple[Handoff, PrefillEvent]] = deque()
        self._dispatching = False
        self._posts: deque[PostChunk] = deque()
        self._work = asyncio.Event()
        """Set whenever a chunk may have become postable."""
        self._outbox: asyncio.Queue[Request | None] | None = None
        """Messages to write; None while the link is down, and in the queue as the mark of its end."""
        self._sent_at = 0.0
        self._credit_nbytes = config.credit_bytes
        self._transport_name = ""
        self._failure: Failure | None = None
        self._was_up = False
        self._overflowed = False
        self._closing = asyncio.Event()
        self._peer = f"decode worker {target.worker_id} at {target.address}"

    @property
    def transport_name(self) -> str:
        """Name of the transport that the link uses; empty before it was first up."""
        return self._transport_name

    @property
    def num_live(self) -> int:
        """Hand-offs that have not ended."""
        return len(self._handoffs)

    # Hand-offs --------------------------------------------------------------------------------------------------------

    def add(self, handoff: Handoff) -> None:
        """Carry a new hand-off. Its Reserve goes out as soon as the link is up."""
        assert handoff.id not in self._handoffs, f"hand-off {handoff.id} is already under way on this link"
        if handoff.ended:
            return
        self._handoffs[handoff.id] = handoff
        if self._failure is not None:
            self.dispatch(handoff, DecodeLost(self._failure))
        elif self._outbox is not None:
            self.dispatch(handoff, LinkUp(self._transports[self._transport_name].one_sided))

    def dispatch(self, handoff: Handoff, event: PrefillEvent) -> None:
        """Apply an event and carry out its actions; events that these cause follow in order."""
        self._events.append((handoff, event))
        if self._dispatching:
            return
        self._dispatching = True
        try:
            while self._events:
                self._carry_out(*self._events.popleft())
        finally:
            self._dispatching = False
        self._work.set()

    def _dispatch_all(self, event: PrefillEvent) -> None:
        for handoff in list(self._handoffs.values()):
            self.dispatch(handoff, event)

    def _carry_out(self, handoff: Handoff, event: PrefillEvent) -> None:
        for action in handoff.apply(event, time.monotonic()):
            match action:
                case SendReserve():
                    self._send(handoff.reserve_message())
                case Send(message):
                    self._send(message)
                case PostChunk():
                    self._posts.append(action)
                case NotifyEnded():
                    self._forget(handoff)

    def _forget(self, handoff: Handoff) -> None:
        if self._handoffs.get(handoff.id) is handoff:
            del self._handoffs[handoff.id]
        failure = handoff.failure
        if failure is None:
            self.num_committed += 1
            return
        if failure.code == OverloadedError.code:
            # Back-pressure, not a failure: the sender asks again, here or elsewhere.
            return
        self.num_failed += 1
        logger.info(
            "hand-off %s to %s failed (%s): %s", handoff.id, self.target.worker_id, failure.code, failure.message
        )

    def _send(self, message: Request) -> None:
        if self._outbox is None:
            return  # lost like any message on a broken link; the tables send again
        self._put(message)

    def _put(self, message: Request | None) -> None:
        assert self._outbox is not None
        try:
            self._outbox.put_nowait(message)
        except asyncio.QueueFull:
            self._overflowed = True

    # Life of the link -------------------------------------------------------------------------------------------------

    async def run(self) -> PdServeError | None:
        """Keep the link up until it is closed (None) or the decode worker counts as lost (why).

        Afterwards every hand-off has ended and every new one fails at once.
        """
        error: PdServeError | None = WorkerLostError(f"the link to {self._peer} was closed by the prefill worker")
        try:
            error = await self._keep_up()
        except Exception:
            logger.exception("KV link to %s failed", self._peer)
            error = InternalError(f"the KV link to {self._peer} failed; see the log of the prefill worker")
        finally:
            lost = error or WorkerLostError(f"the link to {self._peer} is closed")
            self._failure = Failure(code=lost.code, message=lost.message)
            self._dispatch_all(DecodeLost(self._failure))
        return error

    def close(self) -> None:
        """End every hand-off, write what is waiting, end the stream and let `run` return."""
        failure = Failure(code="unavailable", message="the prefill worker is shutting down")
        self._dispatch_all(Cancelled(failure))
        self._closing.set()
        if self._outbox is not None:
            self._put(None)

    async def _keep_up(self) -> PdServeError | None:
        deadline = time.monotonic() + self._config.peer_timeout_s
        pauses = backoff_s()
        while not self._closing.is_set():
            link = LinkId(self._info.incarnation, next(self._generations))
            try:
                await self._session(link)
                return None
            except LinkDown as error:
                reason = str(error)
            except PdServeError as error:
                return error
            now = time.monotonic()
            if self._was_up:
                logger.warning("KV link %s to %s is down: %s", link, self._peer, reason)
                self._was_up = False
                deadline, pauses = now + self._config.reconnect_s, backoff_s()
            self._dispatch_all(LinkLost())
            if now >= deadline:
                return WorkerLostError(f"{self._peer} does not answer: {reason}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), min(next(pauses), deadline - now))
        return None

    async def _session(self, link: LinkId) -> None:
        """One life of the stream. Returns after `close`; raises LinkDown when it breaks.

        Raises IncompatibleWorkersError, WorkerLostError (another incarnation answers) or what the decode worker says if
        the link cannot be used at all.
        """
        channel = grpc.aio.insecure_channel(self.target.address, options=CHANNEL_OPTIONS)
        transport: SendingTransport | None = None
        call: ControlCall | None = None
        try:
            call = KvTransferStub(channel).Control()
            kind = await self._open(call, link)
            transport = kind.sending(self.target.address, self.target.incarnation, link)
            await self._serve(call, transport, link)
        finally:
            self._outbox = None
            if call is not None:
                call.cancel()
            if transport is not None:
                await transport.fence()
            self._posts.clear()
            await channel.close()

    async def _open(self, call: ControlCall, link: LinkId) -> TransportKind:
        """Exchange hello and welcome."""
        hello = LinkHello(
            prefill=self._info,
            generation=link.generation,
            decode_incarnation=self.target.incarnation,
            target_chunk_bytes=self._config.target_chunk_bytes,
        )
        try:
            async with asyncio.timeout(self._config.peer_timeout_s):
                await _write(call, hello)
                reply = await _read(call)
        except TimeoutError:
            raise LinkDown(f"no answer within {self._config.peer_timeout_s:g} s") from None
        match reply:
            case LinkRefused(code=code, message=message):
                raise error_from_code(code, message)
            case LinkWelcome(decode=decode):
                check_decode_peer(self._info, decode, self.target)
            case _:
                raise LinkDown(f"answered with {type(reply).__name__} instead of a welcome")
        self._transport_name = choose(self._info.transports, decode.transports)
        return self._transports[self._transport_name]

    async def _serve(self, call: ControlCall, transport: SendingTransport, link: LinkId) -> None:
        watch = PeerWatch(self._config.peer_timeout_s, self._tick_s, time.monotonic())
        self._outbox = asyncio.Queue(maxsize=self._config.control_queue_size)
        self._overflowed = False
        self._was_up = True
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._read_replies(call, watch), name=f"kv-link-{link}-read")
                tasks.create_task(self._write_requests(call, self._outbox), name=f"kv-link-{link}-write")
                tasks.create_task(self._tick(watch), name=f"kv-link-{link}-tick")
                tasks.create_task(self._post_chunks(transport), name=f"kv-link-{link}-post")
                if self._closing.is_set():
                    self._outbox.put_nowait(None)
                self._dispatch_all(LinkUp(self._transports[self._transport_name].one_sided))
        except* _Closed:
            logger.debug("KV link %s to %s is closed", link, self._peer)
        except* LinkDown as group:
            raise LinkDown("; ".join(str(error) for error in group.exceptions)) from group

    async def _read_replies(self, call: ControlCall, watch: PeerWatch) -> None:
        while True:
            try:
                reply = await _read(call)
            except LinkDown:
                if self._closing.is_set():
                    raise _Closed from None
                raise
            watch.heard(time.monotonic())
            self._receive(reply)

    def _receive(self, reply: Reply) -> None:
        if isinstance(reply, LinkHeartbeat):
            return
        if isinstance(reply, LinkWelcome | LinkRefused):
            raise LinkDown(f"{type(reply).__name__} in the middle of the stream")
        handoff = self._handoffs.get(reply.id)
        if handoff is not None:
            if isinstance(reply, Grant):
                self._credit_nbytes = reply.credit_bytes
            self.dispatch(handoff, reply)
        elif isinstance(reply, Grant):
            # The table's answer in Done and Failed, which are not kept: nobody wants this room any more.
            self._send(Abort(reply.id, reply.nonce))

    async def _write_requests(self, call: ControlCall, outbox: asyncio.Queue[Request | None]) -> None:
        while (message := await outbox.get()) is not None:
            await _write(call, message)
            self._sent_at = time.monotonic()
        await call.done_writing()
        await asyncio.sleep(_CLOSE_TIMEOUT_S)
        raise _Closed

    async def _tick(self, watch: PeerWatch) -> None:
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            if watch.is_dead(now):
                raise LinkDown(f"silent for {self._config.peer_timeout_s:g} s")
            if self._overflowed:
                raise LinkDown(
                    f"{self._config.control_queue_size} control messages are waiting; the peer does not read"
                )
            if now - self._sent_at >= self._config.heartbeat_s - self._tick_s:
                self._send(LinkHeartbeat())
            self._dispatch_all(Tick())

    # Chunks -----------------------------------------------------------------------------------------------------------

    async def _post_chunks(self, transport: SendingTransport) -> None:
        pauses = backoff_s()
        while True:
            self._work.clear()
            choice = self._next_chunk(time.monotonic())
            if choice is None:
                await self._work.wait()
                continue
            handoff, seq = choice
            self.dispatch(handoff, Window(seq))
            post = self._posts.popleft()
            frame = self._frame(handoff, post)
            freed = functools.partial(self.dispatch, handoff, SourceFree(post.nonce, post.seq))
            try:
                await transport.post(frame, freed)
            except PostError as error:
                self.dispatch(handoff, PostFailed(post.nonce, post.seq, str(error)))
                await asyncio.sleep(next(pauses))
            else:
                self.bytes_posted += handoff.plan.chunk(seq).nbytes
                pauses = backoff_s()

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
        chunk = handoff.plan.chunk(post.seq)
        blocks = handoff.blocks[chunk.block_begin : chunk.block_end]
        header = handoff.plan.header(post.seq, nonce=post.nonce, attempt=handoff.id.attempt)
        return encode(header, self._store.read(blocks, chunk.layer_begin, chunk.layer_end))


class _Closed(Exception):  # noqa: N818 (ends the tasks of a link)
    """The link was closed on purpose."""


async def _write(call: ControlCall, message: Request) -> None:
    try:
        await call.write(request_to_proto(message))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise LinkDown(grpc_reason(error)) from error


async def _read(call: ControlCall) -> Reply:
    """Raises LinkDown at the end of the stream and for a message that is not of this protocol."""
    try:
        message = await call.read()
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
        raise LinkDown(grpc_reason(error)) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # grpc reports a call that the other side cancelled by a CancelledError that nobody asked for.
        raise LinkDown("cancelled by the decode worker") from None
    if not isinstance(message, pb.HandoffReply):
        raise LinkDown("the decode worker closed the stream")
    try:
        return reply_from_proto(message)
    except PdServeError as error:
        raise LinkDown(error.message) from error
