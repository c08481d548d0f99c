"""All hand-offs of a decode worker: the pure table of each, and the carrying out of its actions.

Everything goes through `apply`, which never awaits: a ticket is checked and its bytes are stored in one go, so that no
store can land in blocks that have been released meanwhile.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.decode_states import (
    Absent,
    Allocate,
    Allocated,
    ChunkArrived,
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
from kv_transfer.messages import Busy, LinkId, Reserve, ToPrefill
from kv_transfer.plan import ChunkPlan
from kv_transfer.table import Machine
from kv_transfer.wire import ChunkHeader, FrameError, decode
from pdserve.errors import IncompatibleWorkersError, InvalidRequestError, PdServeError, UnavailableError
from pdserve.kv_layout import KvBlockStore
from pdserve.types import GenerationJob, HandoffId

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
    """The decode worker, as seen from its receiver. Every call is made in the event loop and must not block.

    Calls for one id come in this order: `reserve`, then `release` or `commit`, then perhaps `supersede`. After
    `release` the same id may be reserved again (its link broke).
    """

    def reserve(self, job: GenerationJob, handoff: HandoffId, num_tokens: int) -> Room | Busy:
        """Destination blocks for `num_tokens` tokens, or Busy if there is no room now.

        A PdServeError means never; P is told its code and message.
        """

    def release(self, handoff: HandoffId) -> None:
        """The reservation has ended without a commit. Nothing writes to its blocks any more: free them."""

    def commit(self, handoff: HandoffId, first_token: int) -> None:
        """Every byte is in place and verified. The request is the worker's: decode on from `first_token`."""

    def supersede(self, handoff: HandoffId) -> None:
        """A newer attempt of this committed request has arrived: stop decoding it and free its blocks."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The link that an event came on, and what it fixes for a new hand-off."""

    link: LinkId
    one_sided: bool
    target_chunk_bytes: int


class _Entry:
    """One hand-off id, with what its actions need beside the pure state."""

    def __init__(self, terms: Terms, origin: Origin | None) -> None:
        self.machine: Machine[DecodeState, DecodeEvent, DecodeAction] = Machine(start(terms), step)
        self.origin = origin
        self.nonce = 0
        self.plan: ChunkPlan | None = None
        self.blocks: tuple[int, ...] = ()


class Reservations:
    """See the module. Counters are plain totals for the worker's statistics."""

    def __init__(
        self,
        *,
        store: KvBlockStore,
        admission: Admission,
        timers: DecodeTimers,
        max_tokens: int,
        send: Callable[[str, ToPrefill], None],
        fence: Callable[[LinkId], None],
    ) -> None:
        """`send` takes the incarnation of a prefill process and a message for it; `fence` closes a link for good."""
        self.draining = False
        """Refuses every new Reserve: the worker is about to end, so it is not worth waiting for."""
        self.bytes_received = 0
        self.num_committed = 0
        self.num_failed = 0
        self.num_bad_frames = 0
        self._store = store
        self._admission = admission
        self._timers = timers
        self._max_tokens = max_tokens
        self._send = send
        self._fence = fence
        self._entries: dict[HandoffId, _Entry] = {}
        self._attempts: dict[str, set[int]] = {}
        """Attempts in `_entries` of each request."""
        self._by_nonce: dict[int, HandoffId] = {}
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
        return max(self._attempts.get(request_id, ()), default=0)

    def history(self, handoff: HandoffId) -> tuple[str, ...]:
        """How a hand-off got where it is, for logs; empty if it is not known."""
        entry = self._entries.get(handoff)
        return () if entry is None else entry.machine.history

    def apply(self, handoff: HandoffId, event: DecodeEvent, origin: Origin | None = None) -> None:
        """Apply an event, from a link or (without `origin`) from this worker, and carry out what follows."""
        entry = self._entries.get(handoff)
        if entry is None:
            one_sided = origin is not None and origin.one_sided
            entry = _Entry(Terms(id=handoff, timers=self._timers, one_sided=one_sided), origin)
            self._entries[handoff] = entry
            self._attempts.setdefault(handoff.request_id, set()).add(handoff.attempt)
        elif origin is not None:
            entry.origin = origin
        for action in entry.machine.apply(event, time.monotonic()):
            self._carry_out(entry, handoff, action)
        self._index(entry, handoff)

    def deliver(self, origin: Origin, frame: bytes) -> None:
        """A frame from a transport: find its ticket, check it against the plan, and apply it."""
        try:
            header, payload = decode(frame)
        except FrameError as error:
            self.num_bad_frames += 1
            logger.warning("damaged chunk frame on link %s: %s", origin.link, error.message)
            handoff = None if error.nonce is None else self._by_nonce.get(error.nonce)
            if handoff is not None and error.nonce is not None and error.seq is not None:
                self.apply(handoff, ChunkArrived(error.nonce, origin.link, error.seq, 0, error.message), origin)
            return
        handoff = self._by_nonce.get(header.nonce)
        if handoff is None:
            return  # a ticket that is over; its owner learns it by the next control message
        fault = self._mismatch(handoff, header)
        self.num_bad_frames += fault is not None
        self._payload = payload
        try:
            event = ChunkArrived(header.nonce, origin.link, header.seq, header.payload_nbytes, fault)
            self.apply(handoff, event, origin)
        finally:
            self._payload = None

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
                for attempt in sorted(self._attempts[handoff.request_id]):
                    if attempt < handoff.attempt:
                        self.apply(HandoffId(handoff.request_id, attempt), Superseded())
            case Allocate(message, link):
                self.apply(handoff, self._allocate(entry, message, link))
            case StoreChunk(seq, nbytes):
                self.apply(handoff, self._store_chunk(entry, seq, nbytes))
            case ReleaseBlocks():
                self.num_failed += 1
                entry.blocks = ()
                self._admission.release(handoff)
            case StartDecode(first_token):
                self.num_committed += 1
                entry.blocks = ()
                self._admission.commit(handoff, first_token)
            case StopDecode():
                self._admission.supersede(handoff)
            case FenceLink(link):
                self._fence(link)
            case Forget():
                self._drop(entry, handoff)

    def _allocate(self, entry: _Entry, message: Reserve, link: LinkId) -> Allocated | NoRoom | Unservable:
        if self.draining:
            return Unservable(UnavailableError.code, "the decode worker is draining")
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
        plan = whole_plan.after(answer.num_held_tokens)
        assert len(answer.blocks) == plan.num_blocks, f"{plan.num_blocks} blocks needed, got {len(answer.blocks)}"
        self._by_nonce.pop(entry.nonce, None)
        entry.plan = plan
        entry.blocks = answer.blocks
        entry.nonce = secrets.randbits(63) + 1
        self._by_nonce[entry.nonce] = message.id
        return Allocated(entry.nonce, link, plan.num_chunks, answer.num_held_tokens, plan.plan_hash)

    def _plan(self, entry: _Entry, message: Reserve) -> ChunkPlan:
        """The plan for all tokens, on which both must agree. Raises a PdServeError that names the field at fault."""
        if (message.job.request_id, message.job.attempt) != (message.id.request_id, message.id.attempt):
            raise InvalidRequestError(f"Reserve {message.id}: its job is another request's", field="job")
        if message.num_tokens > self._max_tokens:
            raise InvalidRequestError(
                f"Reserve {message.id}: num_tokens {message.num_tokens} exceeds {self._max_tokens}", field="num_tokens"
            )
        assert entry.origin is not None, "a Reserve comes from a link"
        plan = ChunkPlan.make(message.num_tokens, self._store.layout, entry.origin.target_chunk_bytes)
        if plan.plan_hash != message.plan_hash:
            raise IncompatibleWorkersError(
                f"Reserve {message.id}: the two workers cut {message.num_tokens} tokens into different chunks"
            )
        return plan

    def _store_chunk(self, entry: _Entry, seq: int, nbytes: int) -> Stored | StoreFailed:
        assert entry.plan is not None and self._payload is not None
        chunk = entry.plan.chunk(seq)
        blocks = entry.blocks[chunk.block_begin : chunk.block_end]
        try:
            self._store.write(blocks, chunk.layer_begin, chunk.layer_end, self._payload)
        except Exception as error:
            # Whatever the pool's reason, only this hand-off is damaged; it ends and the next one may work.
            logger.exception("storing chunk %d failed", seq)
            return StoreFailed(str(error))
        self.bytes_received += nbytes
        return Stored(seq, nbytes)

    def _mismatch(self, handoff: HandoffId, header: ChunkHeader) -> str | None:
        """In what an undamaged frame differs from the plan of its ticket."""
        plan = self._entries[handoff].plan
        assert plan is not None, "a ticket has a plan"
        if header.attempt != handoff.attempt:
            return f"attempt {header.attempt}, the ticket is for {handoff.attempt}"
        if header.seq >= plan.num_chunks:
            return f"no such chunk, the plan has {plan.num_chunks}"
        expected = plan.header(header.seq, nonce=header.nonce, attempt=header.attempt)
        return None if header == expected else f"{header} is not what the plan says: {expected}"

    # Index ------------------------------------------------------------------------------------------------------------

    def _index(self, entry: _Entry, handoff: HandoffId) -> None:
        if self._entries.get(handoff) is not entry:
            return
        state = entry.machine.state
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
        self._by_nonce.pop(entry.nonce, None)
        attempts = self._attempts[handoff.request_id]
        attempts.discard(handoff.attempt)
        if not attempts:
            del self._attempts[handoff.request_id]
