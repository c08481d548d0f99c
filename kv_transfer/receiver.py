"""The decode worker's end of KV hand-off: one `HandoffReceiver` per process, on the worker's own gRPC server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import grpc

from kv_transfer.codec import reply_to_proto, request_from_proto
from kv_transfer.compatibility import check_prefill_peer
from kv_transfer.config import TransferConfig
from kv_transfer.decode_link import ControlContext, DecodeLink
from kv_transfer.decode_states import (
    CommitArrived,
    DecodeEvent,
    DecodeFinished,
    DecodeTimers,
    LinkDown,
    LocalCancel,
    PeerDead,
    ReserveArrived,
)
from kv_transfer.messages import Commit, LinkHello, LinkId, LinkRefused, LinkWelcome, Reserve, ToDecode, ToPrefill
from kv_transfer.reservations import Admission, Origin, Reservations
from kv_transfer.transports import TRANSPORTS, choose, select
from kv_transfer.transports.base import ReceivingTransport, TransportKind
from pdserve.errors import HandoffError, PdServeError, UnavailableError
from pdserve.kv_layout import KvBlockStore
from pdserve.rpc.v1 import handoff_pb2 as pb
from pdserve.rpc.v1.handoff_pb2_grpc import KvTransferServicer, add_KvTransferServicer_to_server
from pdserve.types import HandoffId
from pdserve.worker_info import WorkerInfo

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiverStats:
    """Totals since start, and what is under way."""

    bytes_received: int
    num_committed: int
    num_failed: int
    """Reservations that ended without a commit."""
    num_bad_frames: int
    """Frames that were damaged or did not fit the plan of their ticket."""
    num_live: int
    """Reservations being filled, or in quarantine."""
    num_links: int


@dataclass(slots=True)
class _Peer:
    """A prefill process that has or had a link."""

    generation: int
    link: DecodeLink | None
    since: float
    """When the link ended, if it has."""
    dead: bool = False


class HandoffReceiver:
    """Grants room, takes chunks and commits. Belongs to one event loop: `register`, `start`, …, `aclose`."""

    def __init__(
        self,
        *,
        info: WorkerInfo,
        store: KvBlockStore,
        admission: Admission,
        config: TransferConfig,
        transports: Mapping[str, TransportKind] = TRANSPORTS,
    ) -> None:
        """Raises ConfigError for a transport that is not in `transports`."""
        self._info = info
        self._config = config
        self._reservations = Reservations(
            store=store,
            admission=admission,
            timers=DecodeTimers(
                lease_s=config.lease_s,
                max_reservation_s=config.max_reservation_s,
                quarantine_s=config.quarantine_s,
                tombstone_s=config.tombstone_s,
                credit_bytes=config.credit_bytes,
            ),
            max_tokens=info.max_kv_tokens,
            send=self._send,
            fence=self._fence,
        )
        self._kinds = select(info.transports, transports)
        self._transports: dict[str, ReceivingTransport] = {
            name: kind.receiving(info.incarnation, self._deliver) for name, kind in self._kinds.items()
        }
        self._peers: dict[str, _Peer] = {}
        """By incarnation of the prefill process; kept for a while after its last link, against late hellos."""
        self._origins: dict[LinkId, Origin] = {}
        """Of open links."""
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False

    def register(self, server: grpc.aio.Server) -> None:
        """Add the control and data services, before the server is started."""
        add_KvTransferServicer_to_server(_Servicer(self), server)
        for transport in self._transports.values():
            transport.register(server)

    async def start(self) -> None:
        """Let time act on leases from now on."""
        self._ticker = asyncio.create_task(self._tick(), name="kv-receiver-ticker")

    async def aclose(self) -> None:
        """Refuse links, end those there are, and release every reservation. Committed requests stay with the worker."""
        self._closing = True
        self._reservations.apply_to_live(LocalCancel())
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close("the decode worker is shutting down")
        self._reservations.apply_to_live(PeerDead())
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.wait((self._ticker,))

    def cancel(self, handoff: HandoffId) -> None:
        """The worker gives the request up: a reservation is released and P told; a Reserve still to come is refused.

        A committed one is the worker's own to stop; this then counts as `finished`.
        """
        self._reservations.apply(handoff, LocalCancel())

    def finished(self, handoff: HandoffId) -> None:
        """A committed request has ended and its blocks are free. Only for ids that `Admission.commit` was given."""
        self._reservations.apply(handoff, DecodeFinished())

    def set_draining(self, draining: bool) -> None:
        """Answer Busy to every new Reserve. Hand-offs under way go on."""
        self._reservations.draining = draining

    @property
    def stats(self) -> ReceiverStats:
        """Totals since start, and what is under way."""
        return ReceiverStats(
            bytes_received=self._reservations.bytes_received,
            num_committed=self._reservations.num_committed,
            num_failed=self._reservations.num_failed,
            num_bad_frames=self._reservations.num_bad_frames,
            num_live=self._reservations.num_live,
            num_links=len(self._origins),
        )

    # Links ------------------------------------------------------------------------------------------------------------

    async def serve_link(self, requests: AsyncIterator[pb.HandoffRequest], context: ControlContext) -> None:
        """One control stream, from its hello to its end."""
        try:
            hello = await self._hello(requests)
            link = self._open(hello)
        except PdServeError as error:
            logger.warning("refused a KV link: %s", error.message)
            await context.write(reply_to_proto(LinkRefused(code=error.code, message=error.message)))
            return
        ended_by_peer = False
        try:
            await context.write(reply_to_proto(LinkWelcome(decode=self._info)))
            ended_by_peer = await link.serve(requests, context)
        finally:
            self._lost(link, peer_gone=ended_by_peer)

    async def _hello(self, requests: AsyncIterator[pb.HandoffRequest]) -> LinkHello:
        try:
            async with asyncio.timeout(self._config.peer_timeout_s):
                async for request in requests:
                    message = request_from_proto(request)
                    if isinstance(message, LinkHello):
                        return message
                    break
        except TimeoutError:
            raise HandoffError(f"no LinkHello within {self._config.peer_timeout_s:g} s") from None
        raise HandoffError("the first message of a KV link must be LinkHello")

    def _open(self, hello: LinkHello) -> DecodeLink:
        """Raises a PdServeError if the link is to be refused."""
        if self._closing:
            raise UnavailableError(f"decode worker {self._info.worker_id} is shutting down")
        peer = self._peers.get(hello.prefill.incarnation)
        check_prefill_peer(hello, self._info, 0 if peer is None else peer.generation)
        kind = self._kinds[choose(hello.prefill.transports, self._info.transports)]
        if peer is not None and peer.link is not None:
            peer.link.close("replaced by a newer link")
            self._lost(peer.link, peer_gone=False)
        link = DecodeLink(hello, self._config, self._receive)
        self._peers[hello.prefill.incarnation] = _Peer(hello.generation, link, time.monotonic())
        self._origins[link.id] = Origin(link.id, kind.one_sided, hello.target_chunk_bytes)
        self._transports[kind.name].open(link.id)
        return link

    def _lost(self, link: DecodeLink, *, peer_gone: bool) -> None:
        """The stream of this link has ended. Idempotent."""
        if self._origins.pop(link.id, None) is None:
            return
        for transport in self._transports.values():
            transport.fence(link.id)
        peer = self._peers[link.id.prefill_incarnation]
        if peer.link is link:
            peer.link, peer.since = None, time.monotonic()
        self._reservations.apply_to_peer(link.id.prefill_incarnation, LinkDown())
        if peer_gone:
            peer.dead = True
            self._reservations.apply_to_peer(link.id.prefill_incarnation, PeerDead())

    def _fence(self, link_id: LinkId) -> None:
        peer = self._peers.get(link_id.prefill_incarnation)
        if peer is not None and peer.link is not None and peer.link.id == link_id:
            peer.link.close("fenced by the decode worker")
        for transport in self._transports.values():
            transport.fence(link_id)

    def _send(self, prefill_incarnation: str, message: ToPrefill) -> None:
        peer = self._peers.get(prefill_incarnation)
        if peer is not None and peer.link is not None:
            peer.link.send(message)

    # Events -----------------------------------------------------------------------------------------------------------

    def _receive(self, link: DecodeLink, message: ToDecode) -> None:
        origin = self._origins.get(link.id)
        if origin is None:
            return  # the link has been closed while this was on its way
        event: DecodeEvent
        match message:
            case Reserve():
                newest = self._reservations.newest_attempt(message.id.request_id)
                event = ReserveArrived(message, link.id, newest)
            case Commit():
                event = CommitArrived(message, link.id)
            case _:
                event = message
        self._reservations.apply(message.id, event, origin)

    def _deliver(self, link_id: LinkId, frame: bytes) -> None:
        origin = self._origins.get(link_id)
        if origin is not None:
            self._reservations.deliver(origin, frame)

    async def _tick(self) -> None:
        interval_s = min(self._config.lease_s, self._config.reconnect_s, self._config.quarantine_s) / 4
        while True:
            await asyncio.sleep(interval_s)
            try:
                self._bury_peers(time.monotonic())
                self._reservations.tick()
            except Exception:
                # A bug in one hand-off must not keep the leases of all others from running out.
                logger.exception("the clock of KV reservations met an error")

    def _bury_peers(self, now: float) -> None:
        for incarnation, peer in list(self._peers.items()):
            if peer.link is not None:
                continue
            if not peer.dead and now - peer.since >= self._config.reconnect_s:
                peer.dead = True
                self._reservations.apply_to_peer(incarnation, PeerDead())
            if now - peer.since >= self._config.tombstone_s:
                del self._peers[incarnation]


class _Servicer(KvTransferServicer):
    """gRPC edge."""

    def __init__(self, receiver: HandoffReceiver) -> None:
        self._receiver = receiver

    # The stub's type knows generators only; grpc.aio also takes a coroutine that writes to the context.
    async def Control(  # type: ignore[override]  # noqa: N802 (the name in the .proto)
        self, request_iterator: AsyncIterator[pb.HandoffRequest], context: ControlContext
    ) -> None:
        await self._receiver.serve_link(request_iterator, context)
