"""The draft model at work: between the planner, which says what to compute, and its engine.

It computes on the thread of the worker's own engine, in turns with it: never both at once, so that neither slows the
other one down, and draft KV is written in the order in which it was asked for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from decode_worker.speculation.draft_planner import DraftOrder, DraftPlanner
from pdserve.engine.batch import SampleRequest, SequenceChunk, build_batch
from pdserve.engine.engine import Engine
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.grammar.sequences import DraftMasks
from pdserve.types import GenerationJob, HandoffId
from pdserve.worker.engine_thread import MAX_CONSECUTIVE_FAILURES, StepRunner

log = logging.getLogger(__name__)

Drafted = dict[HandoffId, tuple[int, ...]]
"""Drafted tokens of each sequence that asked for some."""


@dataclass(frozen=True, slots=True)
class DraftSampler:
    """How to draw the tokens of one draft: as the output's own are drawn, with the same noise. A token that is likely
    to both models is then drawn by both, also where others are about as likely."""

    job: GenerationJob
    output_index: int
    """Of the draft's first token."""
    edits: SequenceEdits | None
    """Have observed every output token before that."""
    masks: DraftMasks | None

    def request(self, draft: tuple[int, ...]) -> SampleRequest:
        """For the token after `draft`."""
        masks = self.masks
        allowed = None if masks is None else lambda: masks.after(draft)
        request = SampleRequest.for_job(self.job, self.output_index + len(draft), None, allowed)
        edits = None
        if self.edits is not None:
            edits = self.edits.ahead(draft)[-1] if draft else self.edits.row()
        return replace(request, edits=edits, num_logprobs=None)


class DraftDriver:
    """Carries out a planner's orders. All methods are called by the task that runs the steps."""

    def __init__(
        self,
        engine: Engine,
        runner: StepRunner,
        planner: DraftPlanner,
        *,
        sampler: Callable[[DraftOrder], DraftSampler],
        on_lost: Callable[[], None],
    ) -> None:
        """`engine` is the draft model's, with as many blocks as that of `runner`. `on_lost` is called when it fails
        again and again, and is not used any more."""
        self._engine = engine
        self._runner = runner
        self._planner = planner
        self._sampler = sampler
        self._on_lost = on_lost
        self._catching_up: tuple[list[DraftOrder], asyncio.Future[Drafted]] | None = None
        self._failures = 0
        self._is_lost = False
        self.num_caught_up = 0
        """Tokens whose KV it has computed, those that it drafted left out."""
        self.num_drafted = 0
        """Tokens that it has drafted."""

    def counts(self) -> dict[str, int]:
        """Tokens that it has computed, by kind."""
        return {"caught_up": self.num_caught_up, "drafted": self.num_drafted}

    async def draft(self, may_draw: Callable[[GenerationJob], bool]) -> None:
        """Draft for the step that is to be planned next, if that is worth while."""
        if not self._is_lost and (orders := self._planner.drafts(may_draw)):
            await self._finish(orders, self._start(orders))

    def begin_catching_up(self) -> None:
        """Beside a step that has been started: compute some of the KV that the model lacks. Ends by
        `finish_catching_up`."""
        assert self._catching_up is None, "what was begun beside a step ends with it"
        if not self._is_lost and (orders := self._planner.catch_up(idle=False)):
            self._catching_up = orders, self._start(orders)

    async def finish_catching_up(self) -> None:
        """The step is over, or has failed."""
        if self._catching_up is not None:
            (orders, future), self._catching_up = self._catching_up, None
            await self._finish(orders, future)

    async def catch_up(self) -> bool:
        """There is no step: compute more of that KV. False if there is nothing to compute."""
        if self._is_lost or not (orders := self._planner.catch_up(idle=True)):
            return False
        await self._finish(orders, self._start(orders))
        return True

    def _start(self, orders: list[DraftOrder]) -> asyncio.Future[Drafted]:
        samplers = {order.key: self._sampler(order) for order in orders if order.num_tokens}
        return self._runner.beside_steps(lambda: self._compute(orders, samplers))

    async def _finish(self, orders: Sequence[DraftOrder], future: asyncio.Future[Drafted]) -> None:
        """No stream fails with the draft model: it goes on without drafts."""
        try:
            drafted = await future
        except Exception:
            self._failures += 1
            log.exception("the draft model failed", extra={"sequences": len(orders), "failures": self._failures})
            if self._failures >= MAX_CONSECUTIVE_FAILURES:
                log.error("the draft model is not used any more: it has failed %d times in a row", self._failures)
                self._is_lost = True
                self._on_lost()
            return
        self._failures = 0
        self.num_caught_up += sum(len(order.token_ids) for order in orders)
        self.num_drafted += sum(map(len, drafted.values()))
        self._planner.done(orders, drafted)

    def _compute(self, orders: Sequence[DraftOrder], samplers: Mapping[HandoffId, DraftSampler]) -> Drafted:
        """On the engine's thread: one pass over the known tokens, then one for each further token of the drafts."""
        drafted: Drafted = {}
        pending = list(orders)
        chunks = [self._chunk(order, order.token_ids, order.start, (), samplers) for order in orders]
        while True:
            output = self._engine.forward(build_batch(chunks, self._engine.layout.block_size))
            drawing = [order for order in pending if order.num_tokens]
            pending = []
            for order, token_id in zip(drawing, output.token_ids.tolist(), strict=True):
                draft = drafted.get(order.key, ())
                if token_id in order.job.stop_token_ids:
                    continue  # nothing comes after the end
                drafted[order.key] = draft = (*draft, token_id)
                if len(draft) < order.num_tokens:
                    pending.append(order)
            if not pending:
                return drafted
            chunks = []
            for order in pending:
                draft = drafted[order.key]
                position = order.start + len(order.token_ids) + len(draft) - 1
                chunks.append(self._chunk(order, draft[-1:], position, draft, samplers))

    def _chunk(
        self,
        order: DraftOrder,
        token_ids: Sequence[int],
        start: int,
        draft: tuple[int, ...],
        samplers: Mapping[HandoffId, DraftSampler],
    ) -> SequenceChunk:
        return SequenceChunk(
            token_ids=token_ids,
            start_position=start,
            block_table=order.block_table,
            samples=(samplers[order.key].request(draft),) if order.num_tokens else (),
        )
