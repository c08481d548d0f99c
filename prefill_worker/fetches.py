"""Drives the fetches of a prefill worker: the question to the holder, and the receiving end of its answer.

Each fetch has blocks of its own, which the receiver's tables guard like those of any hand-off. When all bytes are there
and verified the blocks go into the prefix cache, where the jobs that have waited find them. When nobody waits any more
the receiver is told; it frees the blocks as soon as nothing can be written into them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kv_transfer import Busy, HandoffReceiver, Room
from kv_transfer.messages import PrefixRequest
from kv_transfer.prefix_client import PrefixClient
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import InvalidRequestError, PdServeError, StaleAttemptError, UnavailableError
from pdserve.security.internal import PLAINTEXT, Channels
from pdserve.types import HandoffId, HandoffPurpose, PrefixFetch
from pdserve.worker.tasks import TaskScope
from pdserve.worker_info import WorkerInfo
from prefill_worker.fetch_book import Fetch, FetchOutcome

log = logging.getLogger(__name__)

RETRY_S = 0.05
"""Said to a holder for which there is no room. It does not ask again: by then the prompt is being computed."""


class FetchListener(Protocol):
    """Who is told about fetches."""

    def accepts_prefix(self, fetch: HandoffId, num_tokens: int, num_held: int) -> bool:
        """Whether `num_tokens` tokens are still wanted, of which `num_held` are here."""

    def on_fetch_ended(self, fetch: HandoffId, outcome: FetchOutcome) -> None:
        """It is over, in one way or another. Not called after `abandon`."""

    def on_fetch_released(self) -> None:
        """Blocks of a fetch that has brought nothing are free again."""


@dataclass(slots=True, eq=False)
class _Live:
    fetch: Fetch
    token_ids: Sequence[int]
    """Tokens of all wanted blocks, and perhaps more."""
    cache_salt: str
    started_at: float
    num_tokens: int = 0
    """What the holder sends, once it has asked for room."""
    num_held: int = 0
    """Those of them that were here."""
    reserved_at: float = 0.0
    is_declined: bool = False
    """What the holder had to offer was not wanted, or there was no room for it."""
    task: asyncio.Task[None] | None = None


class PrefixFetches:
    """All fetches that have begun and not ended. Implements `kv_transfer`'s `Admission`; belongs to the event loop."""

    def __init__(
        self,
        *,
        info: WorkerInfo,
        blocks: SequenceBlocks,
        listener: FetchListener,
        tasks: TaskScope,
        channels: Channels = PLAINTEXT,
    ) -> None:
        """`channels` makes the connections to holders."""
        self.info = info.as_prefix_peer
        """This worker as holders and the receiver know it."""
        self._blocks = blocks
        self._listener = listener
        self._tasks = tasks
        self._client = PrefixClient(channels)
        self._receiver: HandoffReceiver | None = None
        self._live: dict[HandoffId, _Live] = {}

    def use(self, receiver: HandoffReceiver) -> None:
        """Give it the receiver that it is the admission of, before the first `start`."""
        self._receiver = receiver

    def start(self, fetch: Fetch, token_ids: Sequence[int], cache_salt: str) -> None:
        """Ask the holder. `token_ids` are those of the sequence, at least of all wanted blocks."""
        live = self._live[fetch.id] = _Live(fetch, token_ids, cache_salt, time.monotonic())
        live.task = self._tasks.spawn(self._drive(live), f"fetch-{fetch.id}")

    def abandon(self, fetch: HandoffId) -> None:
        """Nobody waits for it any more. Ignored for a fetch that has ended."""
        live = self._live.pop(fetch, None)
        if live is not None:
            assert live.task is not None
            live.task.cancel()
            self._cancel(fetch)

    async def aclose(self) -> None:
        """Call off all of them and close connections."""
        for fetch in list(self._live):
            self.abandon(fetch)
        await self._client.aclose()

    # Admission --------------------------------------------------------------------------------------------------------

    def reserve(self, job: HandoffPurpose, handoff: HandoffId, num_tokens: int) -> Room | Busy:
        """See `Admission.reserve`."""
        if not isinstance(job, PrefixFetch):
            raise InvalidRequestError("reserve.job: a prefill worker takes prefixes, not requests", field="reserve.job")
        live = self._live.get(handoff)
        if live is None:
            raise StaleAttemptError(f"nobody waits for prefix {handoff} any more")
        self._check(live.fetch, job, num_tokens)
        names = live.fetch.names[: num_tokens // self._blocks.block_size]
        num_held = min(self._blocks.num_cached_tokens(names), num_tokens)
        if not self._listener.accepts_prefix(handoff, num_tokens, num_held):
            live.is_declined = True
            raise UnavailableError(f"{num_tokens} tokens of prefix {handoff} are not worth waiting for")
        opened = self._blocks.open(
            handoff, live.token_ids[:num_tokens], self._blocks.chain(live.cache_salt), room=num_tokens
        )
        if opened is None:
            live.is_declined = True
            return Busy(handoff, RETRY_S)
        live.num_tokens, live.num_held, live.reserved_at = num_tokens, opened, time.monotonic()
        return Room(self._blocks.ids(handoff), opened)

    def release(self, handoff: HandoffId) -> None:
        """See `Admission.release`."""
        self._blocks.close(handoff)
        self._listener.on_fetch_released()

    def commit(self, handoff: HandoffId, first_tokens: tuple[int, ...], *, exact: bool) -> None:
        """See `Admission.commit`."""
        assert exact, "a link for prefixes has no codec"
        assert self._receiver is not None
        # Whoever gives a fetch up cancels its reservation first.
        live = self._live.pop(handoff)
        self._blocks.publish(handoff, live.num_tokens, live.token_ids)
        self._blocks.close(handoff)
        self._receiver.finished(handoff)
        now = time.monotonic()
        self._listener.on_fetch_ended(
            handoff,
            FetchOutcome(
                num_tokens=live.num_tokens,
                num_moved_tokens=live.num_tokens - live.num_held,
                setup_s=live.reserved_at - live.started_at,
                transfer_s=now - live.reserved_at,
            ),
        )

    def supersede(self, handoff: HandoffId) -> None:
        """See `Admission.supersede`."""
        raise AssertionError(f"{handoff}: the id of a fetch is never used again")

    # Inside -----------------------------------------------------------------------------------------------------------

    async def _drive(self, live: _Live) -> None:
        fetch = live.fetch
        request = PrefixRequest(
            id=fetch.id,
            requester=self.info,
            names=fetch.names,
            timeout_s=max(fetch.deadline - time.monotonic(), 0.001),
        )
        holder_at_fault = False
        try:
            await self._client.fetch(fetch.holder, request)
        except PdServeError as error:
            holder_at_fault = not live.is_declined
            log.info("prefix %s did not come from %s: %s", fetch.id, fetch.holder.worker_id, error.message)
        if self._live.get(fetch.id) is live:
            # Otherwise it has come.
            del self._live[fetch.id]
            # Also if the holder says that it has nothing: it may have reserved room all the same.
            self._cancel(fetch.id)
            self._listener.on_fetch_ended(fetch.id, FetchOutcome(holder_at_fault=holder_at_fault))

    def _cancel(self, fetch: HandoffId) -> None:
        """Free what is reserved for it, and refuse what may still come."""
        assert self._receiver is not None
        self._receiver.cancel(fetch)

    def _check(self, fetch: Fetch, job: PrefixFetch, num_tokens: int) -> None:
        num_blocks, rest = divmod(num_tokens, self._blocks.block_size)
        if rest or not 1 <= num_blocks <= len(fetch.names):
            raise InvalidRequestError(
                f"reserve.num_tokens: {num_tokens} are not whole blocks of {self._blocks.block_size} of the "
                f"{len(fetch.names)} that prefix {fetch.id} asks for",
                field="reserve.num_tokens",
            )
        if fetch.names[num_blocks - 1] != job.last_block:
            raise InvalidRequestError(
                f"reserve.fetch.last_block: not block {num_blocks - 1} of prefix {fetch.id}",
                field="reserve.fetch.last_block",
            )
