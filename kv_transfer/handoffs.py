"""Drives the hand-offs that a worker makes: one task each, from the request for room to the decode worker's word."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.handoff import Handoff, HandoffResult
from kv_transfer.plan import Frontier
from kv_transfer.sender import HandoffSender
from pdserve.errors import PdServeError
from pdserve.types import DecodeTarget, HandoffId, HandoffPurpose
from pdserve.worker.tasks import TaskScope


class HandoffListener(Protocol):
    """Who is told about hand-offs. Exactly one of the last three calls ends each of them; then nothing of it reads the
    source blocks any more."""

    def on_reserved(self, key: HandoffId) -> None:
        """The decode worker has room."""

    def on_committed(self, key: HandoffId, result: HandoffResult) -> None:
        """The decode worker owns the request."""

    def on_failed(self, key: HandoffId, error: PdServeError) -> None:
        """It ended without a commit."""

    def on_closed(self, key: HandoffId) -> None:
        """It was aborted from this side."""


@dataclass(slots=True, eq=False)
class _Live:
    first_tokens: asyncio.Future[tuple[int, ...]]
    frontier: Frontier = field(default_factory=Frontier)
    """How far the KV is final."""
    handoff: Handoff | None = None
    """None until its task has begun."""
    task: asyncio.Task[None] | None = None


class Handoffs:
    """All hand-offs that have begun and not ended; at most one of each name."""

    def __init__(self, sender: HandoffSender, listener: HandoffListener, tasks: TaskScope) -> None:
        self._sender = sender
        self._listener = listener
        self._tasks = tasks
        self._live: dict[HandoffId, _Live] = {}

    def reserve(
        self,
        job: HandoffPurpose,
        target: DecodeTarget,
        blocks: Sequence[int],
        num_tokens: int,
        *,
        on_stored: Callable[[], None] | None = None,
    ) -> None:
        """Begin to hand the KV of `num_tokens` tokens of `job`, which will be in `blocks`, to `target`. `on_stored` is
        called whenever the decode worker has confirmed a chunk."""
        key = HandoffId(job.request_id, job.attempt)
        assert key not in self._live, f"{key} has a hand-off already"
        live = self._live[key] = _Live(asyncio.get_running_loop().create_future())
        driving = self._drive(key, live, job, target, blocks, num_tokens, on_stored)
        live.task = self._tasks.spawn(driving, f"handoff-{key}")

    def advance(self, key: HandoffId, num_tokens: int, step_tokens: int = 0, step_layers: int = 0) -> None:
        """The KV of the first `num_tokens` tokens is final, and that of the first `step_tokens` is in `step_layers`
        layers: send it once there is room. Ignored for a hand-off that has ended."""
        if (live := self._live.get(key)) is not None:
            live.frontier = Frontier(num_tokens, step_tokens, step_layers)
            if live.handoff is not None:
                live.handoff.advance_to(live.frontier)

    def caught_up(self, key: HandoffId) -> bool:
        """Whether the decode worker has all that is final. False before it has granted room, and for a hand-off that
        has ended."""
        live = self._live.get(key)
        return live is not None and live.handoff is not None and live.handoff.caught_up

    def useful_layers(self, keys: Iterable[HandoffId]) -> tuple[int, ...]:
        """Leading layers whose completion in a step lets hand-offs of its jobs send something, ascending."""
        plans = (live.handoff.plan for key in keys if (live := self._live.get(key)) is not None and live.handoff)
        return tuple(sorted({layers for plan in plans for layers in plan.tail_layers}))

    def commit(self, key: HandoffId, first_tokens: tuple[int, ...]) -> None:
        """Everything is final; `kv_transfer.messages.Commit` says what the tokens are. Ignored for a hand-off that has
        ended."""
        if (live := self._live.get(key)) is not None:
            live.first_tokens.set_result(first_tokens)

    def abort(self, key: HandoffId) -> None:
        """Call it off. Ignored for a hand-off that has ended: the listener has heard of that."""
        if (live := self._live.get(key)) is not None:
            assert live.task is not None
            live.task.cancel()
            self._tasks.spawn(self._close(key, live, live.task), f"abort-{key}")

    async def _drive(
        self,
        key: HandoffId,
        live: _Live,
        job: HandoffPurpose,
        target: DecodeTarget,
        blocks: Sequence[int],
        num_tokens: int,
        on_stored: Callable[[], None] | None,
    ) -> None:
        try:
            live.handoff = self._sender.begin(job, target, blocks, num_tokens)
            live.handoff.on_stored = on_stored
            live.handoff.advance_to(live.frontier)
            await live.handoff.reserve()
            self._listener.on_reserved(key)
            result = await live.handoff.commit(*await live.first_tokens)
        except PdServeError as error:
            if live.handoff is not None:
                await live.handoff.abort()
            self._ended(key, live)
            self._listener.on_failed(key, error)
        else:
            self._ended(key, live)
            self._listener.on_committed(key, result)

    async def _close(self, key: HandoffId, live: _Live, task: asyncio.Task[None]) -> None:
        await asyncio.wait((task,))
        if self._live.get(key) is live:
            if live.handoff is not None:
                await live.handoff.abort()
            self._ended(key, live)
            self._listener.on_closed(key)

    def _ended(self, key: HandoffId, live: _Live) -> None:
        assert self._live.pop(key) is live, f"{key} ended twice"
