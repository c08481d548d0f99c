"""One hand-off as the prefill worker sees it: awaitable calls round the pure table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer.messages import ChunkAck, Reserve
from kv_transfer.plan import ChunkPlan, Frontier
from kv_transfer.prefill_states import (
    Cancelled,
    CommitRequested,
    Committing,
    Computed,
    Failed,
    Failure,
    NotifyEnded,
    NotifyGranted,
    Offer,
    PrefillAction,
    PrefillEvent,
    PrefillState,
    PrefillTimers,
    Pushing,
)
from kv_transfer.prefill_table import start, step
from kv_transfer.table import Machine
from pdserve.errors import PdServeError, error_from_code
from pdserve.kv_window import without
from pdserve.types import HandoffId, HandoffPurpose


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoffResult:
    """How a committed hand-off went."""

    transport: str
    """Name of the transport that carried the chunks; of all of them, joined by "+", if one took over from another."""
    kv_bytes: int
    """Payload of all chunks, without repeats and without what the decode worker held already."""
    transfer_s: float
    """From the call of `commit` to the last chunk known to be stored: what compute did not hide."""
    commit_s: float
    """From there to the acknowledgement of the commit."""


class HandoffLink(Protocol):
    """What a hand-off needs of its link."""

    def add(self, handoff: Handoff) -> None:
        """Carry this hand-off from now on until it has ended."""

    def dispatch(self, handoff: Handoff, event: PrefillEvent) -> None:
        """Apply an event and carry out what follows from it."""


class Handoff:
    """One attempt to hand one request to one decode worker, or to send a prefix to the worker that asked for it.

    Call `reserve` once, then `advance` as often as tokens become final, then `commit`; `abort` at any time. The source
    blocks must stay owned and unchanged (below the frontier) until `commit` returns, or `abort` returns after anything
    else. Belongs to the event loop; no method may be called from another thread.
    """

    def __init__(
        self,
        *,
        job: HandoffPurpose,
        blocks: Sequence[int],
        plan: ChunkPlan,
        timers: PrefillTimers,
        link: HandoffLink,
        num_tokens: int,
        hidden: range,
    ) -> None:
        """`blocks` and `plan` are without the `hidden` ones of the `num_tokens` tokens, see `hidden.py`."""
        self.id = HandoffId(job.request_id, job.attempt)
        self.job = job
        self.blocks = tuple(blocks)
        self._num_tokens = num_tokens
        self._hidden = hidden
        self.plan = plan
        """What is sent: what is not hidden, until a grant says which tokens of it the decode worker holds already."""
        self.on_stored: Callable[[], None] | None = None
        """Called whenever the decode worker has confirmed a chunk."""
        self._link = link
        offer = Offer(id=self.id, plan=plan, timers=timers)
        self._machine: Machine[PrefillState, PrefillEvent, PrefillAction] = Machine(
            start(offer, time.monotonic()), step
        )
        self._frontier = Frontier()
        self._transports: dict[str, None] = {}
        """Those that have carried chunks, in order."""
        self._granted = asyncio.Event()
        self._ended = asyncio.Event()
        self._commit_called_at = 0.0
        self._stored_at = 0.0
        self._ended_at = 0.0

    @property
    def state(self) -> PrefillState:
        """Where it is now."""
        return self._machine.state

    @property
    def ended(self) -> bool:
        """Whether it is Done or Failed."""
        return self._ended.is_set()

    @property
    def history(self) -> tuple[str, ...]:
        """How it got there, for logs."""
        return self._machine.history

    @property
    def outstanding_nbytes(self) -> int:
        """Credit in use: payload that is posted but not known to be stored."""
        state = self.state
        if not isinstance(state, Pushing | Committing):
            return 0
        left, nbytes = state.push.outstanding, 0
        while left:
            nbytes += self.plan.chunk((left & -left).bit_length() - 1).nbytes
            left &= left - 1
        return nbytes

    @property
    def caught_up(self) -> bool:
        """Whether room is granted, and everything below the frontier is known to be stored."""
        state = self.state
        return isinstance(state, Pushing) and not state.push.ready & ~state.push.acked

    def reserve_message(self) -> Reserve:
        """The Reserve of this hand-off."""
        return Reserve(self.id, self.job, self._num_tokens, self.state.offer.plan.plan_hash)

    async def reserve(self) -> None:
        """Return once the decode worker has granted room.

        Raises OverloadedError (with `retry_after_s`) if it has none, HandoffError, WorkerLostError,
        IncompatibleWorkersError or StaleAttemptError otherwise. Then whatever the decode worker holds for this id is or
        will be released, and the caller may free or reuse the source blocks. Cancelling the call does not end the
        hand-off: call `abort`.
        """
        self._link.add(self)
        await self._granted.wait()
        self._raise_if_failed()

    def advance(self, num_final_tokens: int) -> None:
        """KV of the first `num_final_tokens` tokens is in the source blocks and final: send what that completes."""
        self.advance_to(Frontier(num_final_tokens))

    def advance_to(self, frontier: Frontier) -> None:
        """As `advance`, also in the middle of a step, after some of its layers.

        End the hand-off if that step fails. Should its tokens be computed again, in other company, an engine may round
        differently (the CPU engine does not), and the decode worker must not get layers of the one and of the other.
        """
        frontier = Frontier(
            without(self._hidden, frontier.num_tokens),
            without(self._hidden, frontier.step_tokens),
            frontier.step_layers,
        )
        if frontier > self._frontier:
            self._frontier = frontier
            self._link.dispatch(self, Computed(frontier))

    async def commit(self, *first_tokens: int) -> HandoffResult:
        """Hand the request over with the first drawn token of each branch, see `Commit`; every token must be final.

        Returns once the decode worker owns it: the caller may free the source blocks. Raises like `reserve`; an error
        with `details["outcome"] == "unknown"` means that the decode worker may own it all the same.
        """
        assert self._frontier.num_tokens >= self.plan.num_tokens, f"commit of {self.id} before all tokens are final"
        self._commit_called_at = time.monotonic()
        self._link.dispatch(self, CommitRequested(first_tokens))
        await self._ended.wait()
        self._raise_if_failed()
        stored_at = min(max(self._stored_at, self._commit_called_at), self._ended_at)
        return HandoffResult(
            transport="+".join(self.transports),
            kv_bytes=self.plan.total_nbytes,
            transfer_s=stored_at - self._commit_called_at,
            commit_s=self._ended_at - stored_at,
        )

    async def abort(self, reason: str = "cancelled by the prefill worker") -> None:
        """End it. Idempotent. Returns when no read of the source blocks is in flight.

        If a commit was under way, the decode worker may own the request all the same; the router tells it.
        """
        self._link.dispatch(self, Cancelled(Failure(code="cancelled", message=reason)))
        await self._ended.wait()

    def apply(self, event: PrefillEvent, now: float) -> tuple[PrefillAction, ...]:
        """For the link: one step of the table."""
        if isinstance(event, ChunkAck):
            self._stored_at = now
        actions = self._machine.apply(event, now)
        if isinstance(self.state, Pushing):
            self.plan = self.state.push.plan
        for action in actions:
            match action:
                case NotifyGranted():
                    self._granted.set()
                case NotifyEnded():
                    self._ended_at = now
                    self._granted.set()
                    self._ended.set()
        if isinstance(event, ChunkAck) and self.on_stored is not None:
            self.on_stored()
        return actions

    @property
    def transports(self) -> tuple[str, ...]:
        """Names of those that have carried chunks, in order."""
        return tuple(self._transports)

    def carried_by(self, transport: str) -> None:
        """For the link: a chunk is given to this transport."""
        self._transports[transport] = None

    @property
    def failure(self) -> Failure | None:
        """Why it failed, if it has."""
        return self.state.failure if isinstance(self.state, Failed) else None

    def _raise_if_failed(self) -> None:
        failure = self.failure
        if failure is not None:
            raise error_of(failure, self.id)


def error_of(failure: Failure, handoff: HandoffId) -> PdServeError:
    """The typed error for a failed hand-off."""
    error = error_from_code(failure.code, f"hand-off {handoff}: {failure.message}")
    error.retry_after_s = failure.retry_after_s
    if failure.outcome_unknown:
        error.details["outcome"] = "unknown"
    return error
