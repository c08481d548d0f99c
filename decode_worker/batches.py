"""What a planned step looks like to the engine."""

from __future__ import annotations

from collections.abc import Sequence

from decode_worker.sequences import PlannedChunk
from pdserve.engine.batch import Batch, SampleRequest, ScoreRequest, SequenceChunk, build_batch
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.engine.next_batch import goes_on, next_batch, with_tables
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.grammar import SequenceGrammars
from pdserve.types import GenerationJob, HandoffId


class StepBatches:
    """Makes the batches of one decode worker, in the order of its steps."""

    def __init__(self, blocks: SequenceBlocks, grammars: SequenceGrammars) -> None:
        self._blocks = blocks
        self._grammars = grammars
        self._edits: dict[HandoffId, SequenceEdits | None] = {}
        """Bias and penalties of each sequence that has been in a step; made from the job and then kept up to date."""
        self._latest: Batch | None = None
        """The newest batch, if another one can follow it that is made from it alone."""
        self._tables: list[tuple[int, ...]] = []
        """Block tables that it was made with."""

    def build(self, plan: Sequence[PlannedChunk]) -> Batch:
        """The batch of a planned step."""
        tables = [self._blocks.ids(chunk.key) for chunk in plan]
        batch = build_batch(
            [self._chunk(chunk, table) for chunk, table in zip(plan, tables, strict=True)], self._blocks.block_size
        )
        self._latest, self._tables = batch if goes_on(batch) else None, tables
        return batch

    def build_following(self, plan: Sequence[PlannedChunk], before: Batch) -> Batch:
        """The batch of the step that `StepPlanner.plan_following` has planned after that of `before`. Its tokens are
        not known yet."""
        if before is not self._latest:
            return self.build(plan)
        tables = [self._blocks.ids(chunk.key) for chunk in plan]
        block_tables = with_tables(before.block_tables, self._tables, tables)
        self._latest, self._tables = next_batch(before, block_tables, self._blocks.block_size), tables
        return self._latest

    def forget(self, key: HandoffId) -> None:
        """The sequence is over."""
        self._edits.pop(key, None)

    def edits_of(
        self, key: HandoffId, job: GenerationJob, output_index: int, newest: tuple[int, ...]
    ) -> SequenceEdits | None:
        """For output token number `output_index`, before which the tokens `newest` have come."""
        if key not in self._edits:
            self._edits[key] = SequenceEdits.for_job(job)
        edits = self._edits[key]
        if edits is not None:
            for index, token_id in enumerate(newest, start=output_index - len(newest)):
                edits.observe(index, token_id)
        return edits

    def _chunk(self, chunk: PlannedChunk, table: tuple[int, ...]) -> SequenceChunk:
        return SequenceChunk(
            token_ids=(*chunk.token_ids, *chunk.draft),
            start_position=chunk.start,
            block_table=table,
            samples=self._samples(chunk) if chunk.draws else (),
            num_drafted=len(chunk.draft),
            score=ScoreRequest.for_prompt(chunk.job, chunk.start, len(chunk.token_ids)) if chunk.is_prompt else None,
        )

    def _samples(self, chunk: PlannedChunk) -> tuple[SampleRequest, ...]:
        """How to draw the next token of each output that goes on from `chunk`."""
        job, output_index = chunk.job, chunk.output_index
        output = job.token_ids[job.num_prompt_tokens :]
        if chunk.is_prompt:
            # All of its outputs are at the same place: they have the same bias and penalties, and the same grammar.
            edits = SequenceEdits.for_job(job)
        else:
            edits = self.edits_of(chunk.key, job, output_index, chunk.newest)
            output = (*output, *chunk.newest)
        if chunk.draft:
            masks = self._grammars.allowed_along(job, output_index, output, chunk.draft)
            return SampleRequest.for_draft(job, output_index, chunk.draft, edits, masks)
        allowed = self._grammars.allowed(job, output_index, output)
        return tuple(SampleRequest.for_job(branch, output_index, edits, allowed) for branch in (job, *chunk.forks))
