"""All hand-offs of a decode worker: the pure table of each, and the carrying out of its actions.

Everything goes through `apply`, which never awaits. Threads of transports write into reserved blocks meanwhile; the
ticket of a reservation is closed as soon as its state has left Reserved, before anything else is done, so that no byte
can land in blocks that have been released or handed to the scheduler.

The branches of a joint job (one with forks) share a hand-off, which has the name of the first of them. While it is
being filled a newer attempt of one of them ends that one only, by `Admission.supersede`. When it is committed each
branch becomes a hand-off of its own, which ends and is superseded alone.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.chunk_io import ChunkIo
from kv_transfer.counters import TransportCounters
from kv_transfer.decode_states import (
    Absent,
    Allocate,
    Allocated,
    ChunkArrived,
    Committed,
    DecodeAction,
    DecodeEvent,
    DecodeState,
    DecodeTimers,
    FenceLink,
    Forget,
    NoRoom,
    Quarantined,
    ReleaseBlocks,
    Reserved,
    Send,
    StartDecode,
    StopDecode,
    StoreChunk,
    Stored,
    StoreFailed,
    Superseded,
    SupersedeOlder,
    Terms,
    Tick,
    Tomb,
    Unservable,
)
from kv_transfer.decode_table import start, step
from kv_transfer.hidden import hidden_tokens, sent_blocks
from kv_transfer.landings import Damaged, Landings
from kv_transfer.messages import Busy, LinkId, ProbeAck, Reserve, ToPrefill
from kv_transfer.plan import ChunkPlan
from kv_transfer.table import Machine
from kv_transfer.tickets import Landed, Ticket
from kv_transfer.wire import FrameError, decode
from kv_transfer.wire_format import WireFormat
from pdserve.errors import DrainingError, IncompatibleWorkersError, InvalidRequestError, PdServeError
from pdserve.kv_layout import KvBlockStore
from pdserve.kv_window import without
from pdserve.types import GenerationJob, HandoffId, HandoffPurpose, RunningStream

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Room:
    """Where a hand-off's tokens go."""

    blocks: tuple[int, ...]
    """For all tokens, in order."""
    num_held_tokens: int
    """Leading tokens, whole blocks but never all, whose KV is there already; the blocks stay as they are until the
    release. 0 without a prefix cache."""


class Admission(Protocol):
    """The worker, as seen from its receiver. Every call is made in the event loop and must not block.

    Calls for one id come in this order: `reserve`, then `release` or `commit`, then perhaps `supersede`. After
    `release` the same id may be reserved again (its link broke). A branch of a joint job may be superseded from
    `reserve` on.
    """

    def reserve(self, job: HandoffPurpose, handoff: HandoffId, num_tokens: int) -> Room | Busy:
        """Destination blocks for `num_tokens` tokens, or Busy if there is no room now.

        A PdServeError means never; P is told its code and message.
        """

    def release(self, handoff: HandoffId) -> None:
        """The reservation has ended without a commit. Nothing writes to its blocks any more: free them."""

    def commit(self, handoff: HandoffId, first_tokens: tuple[int, ...], *, exact: bool) -> None:
        """Every byte is in place and verified. The request is the worker's: decode on from the first token.

        There is one for each branch of the job, `ENDED` for those that do not go on. The receiver is to be told of the
        end of every branch, also of those. A prefix is the worker's in the same way, and nobody decodes it. Of a stream
        that was running these are all tokens that it has beyond its job's.

        Not `exact`: the KV went through a lossy codec. It must not become anybody else's prefix.
        """

    def supersede(self, handoff: HandoffId) -> None:
        """A newer attempt of this request has arrived: stop decoding it and free its blocks.

        If it is a branch of a joint job that is not committed yet, the hand-off goes on for the others.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The link that an event came on, and what it fixes for a new hand-off."""

    link: LinkId
    one_sided: bool
    """Whether one of its transports is."""
    wire: WireFormat
    io: ChunkIo
    target_chunk_bytes: int
    tail_tokens: int


class _Entry:
    """One hand-off id, with what its actions need beside the pure state."""

    def __init__(self, state: DecodeState, origin: Origin | None) -> None:
        self.machine: Machine[DecodeState, DecodeEvent, DecodeAction] = Machine(state, step)
        self.origin = origin
        self.branches: tuple[HandoffId, ...] = ()
        """Of a joint job, itself first; empty for any other."""
        self.ticket: Ticket | None = None
        """Of the newest grant, also when it is over."""
        self.exact = True
        """Whether the sender's KV is that, in the newest grant."""


class Reservations:
    """See the module. Counters are plain totals for the worker's statistics."""

    def __init__(
        self,
        *,
        store: KvBlockStore,
        admission: Admission,
        timers: DecodeTimers,
        max_tokens: int,
        send: Callable[[str, ToPrefill | ProbeAck], None],
        fence: Callable[[LinkId], None],
    ) -> None:
        """`send` takes the incarnation of a prefill process and a message for it; `fence` closes a link for good."""
        self.draining = False
        """Refuses every new Reserve: the worker is about to end, so it is not worth waiting for."""
        self.bytes_received = 0
        self.num_committed = 0
        self.num_failed = 0
        self.num_bad_frames = 0
        self.counters = TransportCounters()
        self.landings = Landings(self._landed)
        """What transports see."""
        self.origins: dict[LinkId, Origin] = {}
        """Of open links."""
        self._store = store
        self._admission = admission
        self._timers = timers
        self._max_tokens = max_tokens
        self._send = send
        self._fence = fence
        self._entries: dict[HandoffId, _Entry] = {}
        self._attempts: dict[str, set[int]] = {}
        """Attempts in `_entries` of each request."""
        self._filling: set[HandoffId] = set()
        """Branches of joint jobs whose hand-off is being filled."""
        self._live: set[HandoffId] = set()
        """Reserved or quarantined: those that time can change."""
        self._tombs: dict[HandoffId, None] = {}
        """Oldest first."""
        self._payload: memoryview | None = None
        """Bytes of the chunk that is being applied."""

    @property
    def num_live(self) -> int:
        """Reservations being filled, or in quarantine."""
        return len(self._live)

    def newest_attempt(self, request_id: str) -> int:
        """Highest attempt of a request that is known here; 0 if none is."""
        filling = (branch.attempt for branch in self._filling if branch.request_id == request_id)
        return max((*self._attempts.get(request_id, ()), *filling), default=0)

    def history(self, handoff: HandoffId) -> tuple[str, ...]:
        """How a hand-off got where it is, for logs; empty if it is not known."""
        entry = self._entries.get(handoff)
        return () if entry is None else entry.machine.history

    def apply(self, handoff: HandoffId, event: DecodeEvent, origin: Origin | None = None) -> None:
        """Apply an event, from a link or (without `origin`) from this worker, and carry out what follows."""
        entry = self._entries.get(handoff)
        if entry is None:
            one_sided = origin is not None and origin.one_sided
            entry = _Entry(start(Terms(id=handoff, timers=self._timers, one_sided=one_sided)), origin)
            self._add(entry, handoff)
        elif origin is not None:
            entry.origin = origin
        actions = entry.machine.apply(event, time.monotonic())
        state = entry.machine.state
        if entry.ticket is not None:
            if isinstance(state, Reserved):
                entry.ticket.link = state.link
            else:
                entry.ticket.close()
        for action in actions:
            self._carry_out(entry, handoff, action)
        self._index(entry, handoff)

    def deliver(self, transport: str, link: LinkId, frame: bytes) -> None:
        """A whole frame from a transport: find its ticket, check it against the plan, and apply it."""
        if link not in self.origins:
            return
        try:
            header, payload = decode(frame)
        except FrameError as error:
            if error.nonce and error.seq is not None:
                self._landed(Landed(transport, link, error.nonce, error.seq, 0, error.message))
            else:
                self._landed(Damaged(transport, link, error.message))
            return
        if not header.nonce:
            self._landed(Landed(transport, link, 0, header.seq, header.payload_nbytes, None))
            return
        ticket = self.landings.get(header.nonce)
        if ticket is None:
            return  # a ticket that is over; its owner learns it by the next control message
        fault = ticket.mismatch(header)
        self._count(transport, header.payload_nbytes, fault)
        self._payload = payload
        try:
            event = ChunkArrived(header.nonce, link, header.seq, header.payload_nbytes, fault)
            self.apply(ticket.handoff, event, self.origins[link])
        finally:
            self._payload = None

    def _landed(self, report: Landed | Damaged) -> None:
        """What has become of a frame that a thread took care of, or that was damaged."""
        origin = self.origins.get(report.link)
        if isinstance(report, Damaged):
            self._count(report.transport, 0, report.message)
            logger.warning("damaged frame on link %s over %s: %s", report.link, report.transport, report.message)
            return
        if not report.nonce:
            if report.fault is None:
                self._send(report.link.prefill_incarnation, ProbeAck(report.transport, report.seq))
            return
        self._count(report.transport, report.nbytes, report.fault)
        if report.fault is not None:
            logger.warning("bad chunk on link %s over %s: %s", report.link, report.transport, report.fault)
        ticket = self.landings.get(report.nonce)
        if ticket is None or origin is None:
            return
        if report.fault is None and not report.repeated:
            self.bytes_received += report.nbytes
        event = ChunkArrived(report.nonce, report.link, report.seq, report.nbytes, report.fault, in_place=True)
        self.apply(ticket.handoff, event, origin)

    def _count(self, transport: str, nbytes: int, fault: str | None) -> None:
        if fault is None:
            self.counters.frame(transport, nbytes)
        else:
            self.num_bad_frames += 1
            self.counters.error(transport)

    def tick(self) -> None:
        """Let time act: leases, quarantines, tombstones. Costs nothing for committed hand-offs."""
        for handoff in list(self._live):
            self.apply(handoff, Tick())
        now = time.monotonic()
        while self._tombs:
            oldest = next(iter(self._tombs))
            state = self._entries[oldest].machine.state
            assert isinstance(state, Tomb)
            if now - state.since < self._timers.tombstone_s:
                break
            self.apply(oldest, Tick())

    def apply_to_peer(self, prefill_incarnation: str, event: DecodeEvent) -> None:
        """Apply an event to every live hand-off of one prefill process."""
        for handoff in list(self._live):
            origin = self._entries[handoff].origin
            if origin is not None and origin.link.prefill_incarnation == prefill_incarnation:
                self.apply(handoff, event)

    def apply_to_live(self, event: DecodeEvent) -> None:
        """Apply an event to every live hand-off."""
        for handoff in list(self._live):
            self.apply(handoff, event)

    # Actions ----------------------------------------------------------------------------------------------------------

    def _carry_out(self, entry: _Entry, handoff: HandoffId, action: DecodeAction) -> None:
        match action:
            case Send(message):
                if entry.origin is not None:
                    self._send(entry.origin.link.prefill_incarnation, message)
            case SupersedeOlder():
                self._supersede_older(handoff)
            case Allocate(message, link):
                self.apply(handoff, self._allocate(entry, message, link))
            case StoreChunk(seq, nbytes):
                self.apply(handoff, self._store_chunk(entry, seq, nbytes))
            case ReleaseBlocks():
                self.num_failed += 1
                self._admission.release(handoff)
            case StartDecode(first_tokens):
                self.num_committed += 1
                assert entry.ticket is not None, "a commit has a ticket"
                self._separate(entry)
                exact = entry.exact and entry.ticket.plan.wire.exact
                self._admission.commit(handoff, first_tokens, exact=exact)
            case StopDecode():
                self._admission.supersede(handoff)
            case FenceLink(link):
                self._fence(link)
            case Forget():
                self._drop(entry, handoff)

    def _supersede_older(self, handoff: HandoffId) -> None:
        attempts = {HandoffId(handoff.request_id, attempt) for attempt in self._attempts.get(handoff.request_id, ())}
        filling = {branch for branch in self._filling if branch.request_id == handoff.request_id}
        for older in sorted(key for key in attempts | filling if key.attempt < handoff.attempt):
            if older in self._filling:
                self._admission.supersede(older)
            else:
                self.apply(older, Superseded())

    def _separate(self, entry: _Entry) -> None:
        """The branches of a joint job are committed: from now on each of them is a hand-off of its own."""
        state = entry.machine.state
        assert isinstance(state, Committed)
        self._filling.difference_update(entry.branches)
        for branch in entry.branches[1:]:
            if branch not in self._entries:  # otherwise its end has come before its beginning
                terms = Terms(id=branch, timers=self._timers, one_sided=state.terms.one_sided)
                self._add(_Entry(Committed(terms=terms, nonce=state.nonce), None), branch)

    def _allocate(self, entry: _Entry, message: Reserve, link: LinkId) -> Allocated | NoRoom | Unservable:
        if self.draining:
            return Unservable(DrainingError.code, "the decode worker is draining")
        branches = _branches(message.job)
        for fork in branches[1:]:
            self._supersede_older(fork)
        try:
            whole_plan = self._plan(entry, message)
            answer = self._admission.reserve(message.job, message.id, message.num_tokens)
        except PdServeError as error:
            return Unservable(error.code, error.message)
        except Exception:
            logger.exception("admission of hand-off %s failed", message.id)
            return Unservable("internal", "the decode worker failed to admit it; see its log")
        if isinstance(answer, Busy):
            return NoRoom(answer.retry_after_s)
        layout = self._store.layout
        hidden = hidden_tokens(message.job, layout)
        num_held_tokens = without(hidden, answer.num_held_tokens)
        plan = whole_plan.after(num_held_tokens)
        num_blocks = layout.num_blocks(message.num_tokens)
        assert len(answer.blocks) == num_blocks, f"{num_blocks} blocks needed, got {len(answer.blocks)}"
        if entry.ticket is not None:
            self.landings.remove(entry.ticket.nonce)
        assert entry.origin is not None, "a Reserve comes from a link"
        entry.ticket = Ticket(
            handoff=message.id,
            nonce=secrets.randbits(63) + 1,
            link=link,
            plan=plan,
            blocks=sent_blocks(answer.blocks, hidden, layout.block_size),
            io=entry.origin.io,
            buffers=self.landings.buffers,
            report=self.landings.report,
        )
        self.landings.add(entry.ticket)
        entry.exact = not isinstance(message.job, RunningStream) or message.job.exact
        entry.branches = branches if len(branches) > 1 else ()
        for fork in branches[1:]:
            if fork in self._entries or self.newest_attempt(fork.request_id) > fork.attempt:
                self._admission.supersede(fork)
        return Allocated(
            entry.ticket.nonce,
            link,
            plan.num_chunks,
            num_held_tokens,
            plan.plan_hash,
            len(branches),
            _num_unknown(message),
        )

    def _plan(self, entry: _Entry, message: Reserve) -> ChunkPlan:
        """The plan for all tokens, on which both must agree. Raises a PdServeError that names the field at fault."""
        if (message.job.request_id, message.job.attempt) != (message.id.request_id, message.id.attempt):
            raise InvalidRequestError(f"Reserve {message.id}: its job is another request's", field="job")
        if message.num_tokens > self._max_tokens:
            raise InvalidRequestError(
                f"Reserve {message.id}: num_tokens {message.num_tokens} exceeds {self._max_tokens}", field="num_tokens"
            )
        assert entry.origin is not None, "a Reserve comes from a link"
        origin = entry.origin
        plan = ChunkPlan.make(
            without(hidden_tokens(message.job, self._store.layout), message.num_tokens),
            origin.wire.layout,
            origin.target_chunk_bytes,
            tail_tokens=origin.tail_tokens,
        ).on(origin.wire)
        if plan.plan_hash != message.plan_hash:
            raise IncompatibleWorkersError(
                f"Reserve {message.id}: the two workers cut {message.num_tokens} tokens into different chunks"
            )
        return plan

    def _store_chunk(self, entry: _Entry, seq: int, nbytes: int) -> Stored | StoreFailed | ChunkArrived:
        ticket = entry.ticket
        assert ticket is not None and self._payload is not None
        try:
            ticket.place(seq, self._payload)
        except PdServeError as error:
            return ChunkArrived(ticket.nonce, ticket.link, seq, nbytes, error.message)
        except Exception as error:
            # Whatever the pool's reason, only this hand-off is damaged; it ends and the next one may work.
            logger.exception("storing chunk %d failed", seq)
            return StoreFailed(str(error))
        self.bytes_received += nbytes
        return Stored(seq, nbytes)

    # Index ------------------------------------------------------------------------------------------------------------

    def _add(self, entry: _Entry, handoff: HandoffId) -> None:
        self._entries[handoff] = entry
        self._attempts.setdefault(handoff.request_id, set()).add(handoff.attempt)

    def _index(self, entry: _Entry, handoff: HandoffId) -> None:
        if self._entries.get(handoff) is not entry:
            return
        state = entry.machine.state
        if isinstance(state, Reserved):
            self._filling.update(entry.branches)
        else:
            self._filling.difference_update(entry.branches)
        if isinstance(state, Reserved | Quarantined):
            self._live.add(handoff)
        else:
            self._live.discard(handoff)
        if isinstance(state, Tomb):
            self._tombs.setdefault(handoff)
        elif isinstance(state, Absent):
            self._drop(entry, handoff)

    def _drop(self, entry: _Entry, handoff: HandoffId) -> None:
        del self._entries[handoff]
        self._live.discard(handoff)
        self._tombs.pop(handoff, None)
        if entry.ticket is not None:
            self.landings.remove(entry.ticket.nonce)
        attempts = self._attempts[handoff.request_id]
        attempts.discard(handoff.attempt)
        if not attempts:
            del self._attempts[handoff.request_id]


def _num_unknown(message: Reserve) -> int:
    """See Reserved."""
    return message.num_tokens - message.job.job.num_known_tokens if isinstance(message.job, RunningStream) else 0


def _branches(job: HandoffPurpose) -> tuple[HandoffId, ...]:
    forks = job.forks if isinstance(job, GenerationJob) else ()
    return (
        HandoffId(job.request_id, job.attempt),
        *(HandoffId(fork.request_id, fork.attempt) for fork in forks),
    )
