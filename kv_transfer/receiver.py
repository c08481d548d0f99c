"""The decode worker's end of KV hand-off: one `HandoffReceiver` per process, on the worker's own gRPC server."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

import grpc

from kv_transfer import control_stream
from kv_transfer.chunk_io import decode_io
from kv_transfer.codec import reply_to_proto, request_from_proto
from kv_transfer.compatibility import check_prefill_peer
from kv_transfer.config import TransferConfig
from kv_transfer.control_stream import ControlContext, DamagedMessageError, request_from_wire, seal
from kv_transfer.counters import TransportTotals
from kv_transfer.decode_link import DecodeLink
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
from kv_transfer.landings import TransportSink
from kv_transfer.messages import (
    Commit,
    Endpoint,
    LinkHello,
    LinkId,
    LinkRefused,
    LinkWelcome,
    ProbeAck,
    Reserve,
    ToDecode,
    ToPrefill,
)
from kv_transfer.reservations import Admission, Origin, Reservations
from kv_transfer.transports import TRANSPORTS, select
from kv_transfer.transports.base import ReceivingTransport, TransportContext, TransportKind, new_accounts
from kv_transfer.wire_format import negotiate
from pdserve.errors import HandoffError, IncompatibleWorkersError, PdServeError, UnavailableError
from pdserve.kv_layout import KvBlockStore
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
    transports: Mapping[str, TransportTotals]
    """By name, those that have been used."""


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
        bind_host: str = "127.0.0.1",
        transports: Mapping[str, TransportKind] = TRANSPORTS,
    ) -> None:
        """`bind_host` is the address of this machine on which transports of their own sockets listen.

        Raises ConfigError for a transport that is not in `transports`.
        """
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
        self._origins = self._reservations.origins
        self.strangers = new_accounts()
        """Who was not let in by transports that listen for themselves."""
        context = TransportContext(
            incarnation=info.incarnation,
            store=store,
            config=config,
            bind_host=bind_host,
            advertised_host=info.address.rsplit(":", 1)[0] or bind_host,
            device=store.device,
            strangers=self.strangers,
        )
        landings = self._reservations.landings
        self._kinds = select(info.transports, transports)
        self._transports: dict[str, ReceivingTransport] = {
            name: kind.receiving(context, TransportSink(name, landings, self._reservations.deliver))
            for name, kind in self._kinds.items()
        }
        self._store = store
        self._peers: dict[str, _Peer] = {}
        """By incarnation of the prefill process; kept for a while after its last link, against late hellos."""
        self._ticker: asyncio.Task[None] | None = None
        self._closing = False

    def register(self, server: grpc.aio.Server) -> None:
        """Add the control and data services, before the server is started."""
        control_stream.register(server, self.serve_link)
        for transport in self._transports.values():
            transport.register(server)

    async def start(self) -> None:
        """Open the sockets of transports, and let time act on leases from now on.

        Raises ConfigError naming the setting if a transport cannot start.
        """
        self._reservations.landings.start()
        for transport in self._transports.values():
            await transport.start()
        self._ticker = asyncio.create_task(self._tick(), name="kv-receiver-ticker")

    async def aclose(self) -> None:
        """Refuse links, end those there are, and release every reservation. Committed requests stay with the worker."""
        self._closing = True
        self._reservations.apply_to_live(LocalCancel())
        for peer in self._peers.values():
            if peer.link is not None:
                peer.link.close("the decode worker is shutting down")
        self._reservations.apply_to_live(PeerDead())
        for transport in self._transports.values():
            await transport.aclose()
        self._reservations.landings.stop()
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
            transports=self._reservations.counters.snapshot(),
        )

    # Links ------------------------------------------------------------------------------------------------------------

    async def serve_link(self, requests: AsyncIterator[bytes], context: ControlContext) -> None:
        """One control stream, from its hello to its end."""
        try:
            await self._serve_link(requests, context)
        except grpc.aio.InternalError as error:
            # What gRPC raises for a write to a peer that is gone, of which it has not told us yet.
            logger.info("a KV link broke while it was answered: %s", error)

    async def _serve_link(self, requests: AsyncIterator[bytes], context: ControlContext) -> None:
        try:
            hello = await self._hello(requests)
            link, endpoints = self._open(hello)
        except DamagedMessageError as error:
            # Not a refusal, which would be for good: the prefill worker opens another stream.
            await context.abort(grpc.StatusCode.DATA_LOSS, error.message)
        except PdServeError as error:
            logger.warning("refused a KV link: %s", error.message)
            await context.write(seal(reply_to_proto(LinkRefused(code=error.code, message=error.message))))
            return
        peer_gone = False
        try:
            await context.write(seal(reply_to_proto(LinkWelcome(decode=self._info, endpoints=endpoints))))
            peer_gone = await link.serve(requests, context)
        finally:
            self._lost(link, peer_gone=peer_gone)

    async def _hello(self, requests: AsyncIterator[bytes]) -> LinkHello:
        try:
            async with asyncio.timeout(self._config.peer_timeout_s):
                async for request in requests:
                    message = request_from_proto(request_from_wire(request))
                    if isinstance(message, LinkHello):
                        return message
                    break
        except TimeoutError:
            raise HandoffError(f"no LinkHello within {self._config.peer_timeout_s:g} s") from None
        raise HandoffError("the first message of a KV link must be LinkHello")

    def _open(self, hello: LinkHello) -> tuple[DecodeLink, tuple[Endpoint, ...]]:
        """Raises a PdServeError if the link is to be refused."""
        if self._closing:
            raise UnavailableError(f"decode worker {self._info.worker_id} is shutting down")
        peer = self._peers.get(hello.prefill.incarnation)
        check_prefill_peer(hello, self._info, 0 if peer is None else peer.generation)
        wire = negotiate(hello.prefill.kv_layout, self._info.kv_layout, hello.prefill.codecs[0])
        if peer is not None and peer.link is not None:
            peer.link.close("replaced by a newer link")
            self._lost(peer.link, peer_gone=False)
        link = DecodeLink(hello, self._config, self._receive)
        endpoints = self._open_transports(link.id, hello)
        self._peers[hello.prefill.incarnation] = _Peer(hello.generation, link, time.monotonic())
        self._origins[link.id] = Origin(
            link=link.id,
            one_sided=any(self._kinds[endpoint.name].one_sided for endpoint in endpoints),
            wire=wire,
            io=decode_io(self._store, wire),
            target_chunk_bytes=hello.target_chunk_bytes,
            tail_tokens=hello.tail_tokens,
        )
        self._reservations.landings.open_link(link.id)
        return link, endpoints

    def _open_transports(self, link: LinkId, hello: LinkHello) -> tuple[Endpoint, ...]:
        """Every offered transport that can serve this link. Raises IncompatibleWorkersError if there is none."""
        endpoints: list[Endpoint] = []
        for offer in hello.offers:
            transport = self._transports.get(offer.name)
            endpoint = None if transport is None else transport.open(link, offer)
            if endpoint is not None:
                endpoints.append(endpoint)
        if not endpoints:
            raise IncompatibleWorkersError(
                f"transports: prefill {hello.prefill.worker_id} offers {[offer.name for offer in hello.offers]}, "
                f"decode {self._info.worker_id} has {list(self._kinds)}; none in common reaches from one to the other"
            )
        return tuple(endpoints)

    def _lost(self, link: DecodeLink, *, peer_gone: bool) -> None:
        """The stream of this link has ended. Idempotent."""
        if self._origins.pop(link.id, None) is None:
            return
        self._reservations.landings.close_link(link.id)
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
        self._reservations.landings.close_link(link_id)
        for transport in self._transports.values():
            transport.fence(link_id)

    def _send(self, prefill_incarnation: str, message: ToPrefill | ProbeAck) -> None:
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

    async def _tick(self) -> None:
        # A tenth of what blocks of a crashed peer wait in any case.
        interval_s = min(self._config.lease_s, self._config.reconnect_s, self._config.quarantine_s) / 10
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
