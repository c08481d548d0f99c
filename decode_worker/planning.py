"""What the next step of a decode worker computes: tokens of running sequences, drafts, and chunks of prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from decode_worker.chunk_budget import ChunkBudget
from decode_worker.draft_room import DraftRoom
from decode_worker.migrations import Migrations
from decode_worker.residents import Residents
from decode_worker.sequences import NOT_DRAWN, PlannedChunk, Sequence, SequenceState
from decode_worker.speculation.draft_planner import DraftPlanner
from decode_worker.speculation.speculator import Candidate, Speculator
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import PdServeError
from pdserve.types import GenerationJob, HandoffId

RECOMPUTE_TOKENS_PER_STEP = 64
"""Tokens computed again in one step after preemptions. Few, so that the streams in the same step hardly notice."""

_NOT_DRAWN_YET = (NOT_DRAWN,)


@dataclass(slots=True)
class Steps:
    """What the engine is at."""

    current: list[tuple[Sequence, PlannedChunk]] = field(default_factory=list)
    """What it computes now, in the order of the batch."""
    following: list[tuple[Sequence, PlannedChunk]] = field(default_factory=list)
    """What it computes after that, unless something comes between."""

    def is_computing(self, sequence: Sequence) -> bool:
        """Whether a step computes into its blocks, or is about to."""
        return any(sequence is computing for step in (self.current, self.following) for computing, _ in step)

    def done(self) -> list[tuple[Sequence, PlannedChunk]]:
        """The current one is computed; what follows takes its turn."""
        step, self.current, self.following = self.current, self.following, []
        return step

    def stopped(self) -> list[tuple[Sequence, PlannedChunk]]:
        """The current one is not computed, and so nothing follows it."""
        step, self.current, self.following = self.current, [], []
        return step


class StepPlanner:
    """Fills `Steps`."""

    def __init__(
        self,
        steps: Steps,
        *,
        worker_id: str,
        residents: Residents,
        blocks: SequenceBlocks,
        migrations: Migrations,
        speculation: Speculator,
        draft_room: DraftRoom,
        budget: ChunkBudget,
        max_batch_tokens: int,
        fail: Callable[[HandoffId, PdServeError], None],
    ) -> None:
        """`budget`: for prompts beside streams; `max_batch_tokens`: see DecodeScheduler. `fail` ends a sequence of
        which nothing can be drawn."""
        self._steps = steps
        self._worker_id = worker_id
        self._residents = residents
        self._blocks = blocks
        self._migrations = migrations
        self._speculation = speculation
        self._draft_room = draft_room
        self.drafting: DraftPlanner | None = None
        """What a draft model computes; None: there is none."""
        self._budget = budget
        self._max_batch_tokens = max_batch_tokens
        self._fail = fail
        self.num_held_tokens = 0
        """Tokens of all prompts begun here whose KV was here already."""

    def plan(self, now: float, may_draw: Callable[[GenerationJob], bool] = lambda _: True) -> list[PlannedChunk]:
        """One token for each running sequence, more for those that were preempted, and then as much of the prompts as
        is due. Empty if nothing can be computed.

        `may_draw` says whether it is known how to draw a sequence's next token; if not it has no part in the step, and
        of a prompt all but the last token is computed. If it raises PdServeError, that ends the sequence.
        """
        assert not self._steps.current and not self._steps.following, "a step is running"
        self._residents.resume()
        budget = RECOMPUTE_TOKENS_PER_STEP
        for sequence in list(self._residents.sequences.values()):
            # The state is looked at late: one before it may have pushed this one out a moment ago.
            if sequence.state is not SequenceState.RUNNING or not self._may_draw(sequence.job, may_draw):
                continue
            may_go_on = self._migrations.may_compute(sequence, len(sequence.tokens))
            length = sequence.num_to_compute
            if length > 1:
                length = min(length, budget)
            if not may_go_on or not self._residents.make_room(sequence, sequence.num_computed + length):
                continue
            if sequence.num_to_compute > 1:
                budget -= length
            if length:
                self._steps.current.append((sequence, _chunk(sequence, length)))
        self._plan_prompts(now, may_draw)
        for index, draft in enumerate(self._speculation.drafts(self._candidates())):
            sequence, chunk = self._steps.current[index]
            if draft := draft[: self._draft_room.take(sequence, len(draft))]:
                self._steps.current[index] = (sequence, replace(chunk, draft=draft))
        return [chunk for _, chunk in self._steps.current]

    def plan_following(self) -> list[PlannedChunk]:
        """The step after the one that runs, if only the tokens that this one draws are missing: one for each of the
        same sequences. Empty if more may change, as far as can be told now.

        It takes its turn when the running step is reported by `step_done`, and ends by `step_done`, `step_skipped` or
        `step_failed` itself. A sequence that joins or leaves meanwhile does so after it, unless it is skipped.
        """
        assert self._steps.current and not self._steps.following, (
            "there is one step to follow, and nothing follows it yet"
        )
        current, residents = self._steps.current, self._residents
        if residents.count(SequenceState.RUNNING) != len(current) or residents.count(SequenceState.PREEMPTED):
            return []
        if len(residents.prompts) and not residents.are_still_refused():
            return []
        may_move, grow = self._migrations.num_live > 0, self._blocks.grow
        for sequence, chunk in current:
            if sequence.state is not SequenceState.RUNNING or not chunk.draws:
                return []
            if chunk.output_index + 1 >= chunk.job.max_new_tokens:
                return []
            if not sequence.draws_blindly:
                return []  # how to draw the next token depends on this one
            # What is drafted for the next step depends on the tokens of this one, too.
            if chunk.draft:
                return []
            num_tokens = len(sequence.tokens) + 1
            if may_move and not self._migrations.may_compute(sequence, num_tokens):
                return []
            # Nobody has to give way for a step that may be skipped.
            if not grow(sequence.key, num_tokens):
                return []
        # Where nothing would be drafted if it were for what is known by now, nothing is missed.
        if self._expects_drafts():
            return []
        self._steps.following = [(sequence, _chunk_after(chunk)) for sequence, chunk in current]
        return [chunk for _, chunk in self._steps.following]

    def _expects_drafts(self) -> bool:
        sequences = [sequence for sequence, _ in self._steps.current]
        if not self._speculation.may_draft_for(len(sequences)):
            return False
        if self.drafting is None and not self._speculation.finds_something(sequences):
            return False
        return self._speculation.expects_drafts(self._candidates())

    def _candidates(self) -> list[Candidate]:
        """The sequences of the step, if drafts may be computed with their next tokens: nothing beside prompts and what
        is computed again, with which there is enough to do, nor for more sequences than may have some."""
        if not self._speculation.may_draft_for(len(self._steps.current)):
            return []
        if any(chunk.is_prompt or not chunk.draws or len(chunk.token_ids) > 1 for _, chunk in self._steps.current):
            return []
        sequences = [sequence for sequence, _ in self._steps.current]
        return [
            Candidate(sequence, room, 0 if self.drafting is None else self.drafting.room(sequence, room))
            for sequence, room in zip(sequences, self._draft_room.of_all(sequences), strict=True)
        ]

    def _plan_prompts(self, now: float, may_draw: Callable[[GenerationJob], bool]) -> None:
        """Add chunks of prompts to the step, in order of rank. A prompt gets its room when there are tokens for it; one
        that finds none holds those back that are behind it and have none either."""
        self._residents.refused = None
        # A stream that begins meanwhile has to wait for the end of the step.
        has_streams = bool(self._steps.current) or self._residents.count(SequenceState.RESERVED) > 0
        budget = self._budget.tokens if has_streams else self._max_batch_tokens
        budget -= sum(len(chunk.token_ids) for _, chunk in self._steps.current if len(chunk.token_ids) > 1)
        for prompt in self._residents.prompts.ranked():
            if budget <= 0:
                return
            if not prompt.sequences and (self._residents.refused or not self._residents.admit(prompt)):
                continue
            lead, length = prompt.sequences[0], min(prompt.num_left, budget)
            if length == prompt.num_left and not self._may_draw(lead.job, may_draw):
                length -= 1
                if length == 0 or prompt not in self._residents.prompts:
                    continue
            budget -= length
            self._steps.current.append((lead, prompt.chunk(length)))
            if prompt.started_at is None:
                prompt.started_at = now
                self.num_held_tokens += lead.num_held
                self._residents.emit(lead.job.router_id, *prompt.started(self._worker_id))

    def _may_draw(self, job: GenerationJob, may_draw: Callable[[GenerationJob], bool]) -> bool:
        try:
            return may_draw(job)
        except PdServeError as error:
            self._fail(HandoffId(job.request_id, job.attempt), error)
            return False


def _chunk_after(chunk: PlannedChunk) -> PlannedChunk:
    return PlannedChunk(
        chunk.key,
        chunk.job,
        _NOT_DRAWN_YET,
        chunk.start + len(chunk.token_ids),
        chunk.output_index + 1,
        True,
        newest=_NOT_DRAWN_YET,
    )


def _chunk(sequence: Sequence, length: int) -> PlannedChunk:
    start = sequence.num_computed
    return PlannedChunk(
        key=sequence.key,
        job=sequence.job,
        token_ids=tuple(sequence.tokens[start : start + length]),
        start=start,
        output_index=sequence.num_output,
        draws=length == sequence.num_to_compute,
        newest=tuple(sequence.tokens[-sequence.num_newest :]),
    )
