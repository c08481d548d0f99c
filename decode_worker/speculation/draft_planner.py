"""What the draft model computes next: KV of prompts and outputs that it lacks, and drafts for the next step.

Pure, as the scheduler of which it is a part. A prompt is known as soon as there is room for it, so its draft KV is
computed while the hand-off still goes on; in chunks, behind everything that the worker's own model has to compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from decode_worker.draft_room import DraftRoom
from decode_worker.residents import Residents
from decode_worker.sequences import Sequence, SequenceState
from decode_worker.speculation.draft_kv import DraftKv
from decode_worker.speculation.speculator import Candidate, Speculator
from pdserve.engine.sequence_blocks import SequenceBlocks
from pdserve.errors import PdServeError
from pdserve.types import GenerationJob, HandoffId

READY_TOKENS: Final = 16
"""A sequence with so many tokens without draft KV can be drafted for: they are computed on the way."""
CHUNK_TOKENS: Final = 64
"""Draft KV computed beside a step, for so many tokens: few, as the next step waits for it."""
IDLE_CHUNK_TOKENS: Final = 256
"""The same when there is no step."""


@dataclass(frozen=True, slots=True)
class DraftOrder:
    """One sequence's part in what the draft model computes."""

    sequence: Sequence
    job: GenerationJob
    token_ids: tuple[int, ...]
    """Whose KV is to be written."""
    start: int
    """Position of the first of them."""
    block_table: tuple[int, ...]
    num_tokens: int
    """To draft after them, as output tokens from number `output_index` on; 0: none."""
    output_index: int
    newest: tuple[int, ...]
    """See PlannedChunk."""

    @property
    def key(self) -> HandoffId:
        """Of the sequence."""
        return self.sequence.key


class DraftPlanner:
    """Orders for a draft model with contexts of up to `max_model_len` tokens."""

    def __init__(
        self,
        *,
        residents: Residents,
        blocks: SequenceBlocks,
        room: DraftRoom,
        speculation: Speculator,
        max_model_len: int,
    ) -> None:
        self._residents = residents
        self._blocks = blocks
        self._room = room
        self._speculation = speculation
        self._max_model_len = max_model_len
        self._kv = DraftKv(blocks)
        self._ahead: dict[HandoffId, tuple[int, tuple[int, ...]]] = {}
        """Number of tokens that a sequence had when it was drafted for, and those drafted tokens that have KV."""

    def room(self, sequence: Sequence, most: int) -> int:
        """Tokens that the model may draft for a sequence now, of the `most` that may be drafted for it."""
        if len(sequence.tokens) - self._num_computed(sequence) > READY_TOKENS:
            return 0
        return min(most, self._max_model_len - len(sequence.tokens))

    def drafts(self, may_draw: Callable[[GenerationJob], bool]) -> list[DraftOrder]:
        """For the next step, to be planned when they are there; empty if it is to do without, or has more to compute
        than one token of each sequence. `may_draw`: see StepPlanner.plan; if it raises, that is told there."""
        residents = self._residents
        if residents.count(SequenceState.PREEMPTED) or (len(residents.prompts) and not residents.are_still_refused()):
            return []
        running = [s for s in residents.sequences.values() if s.state is SequenceState.RUNNING]
        running = [sequence for sequence in running if _may_draw(sequence.job, may_draw)]
        if not self._speculation.may_draft_for(len(running)) or any(s.num_to_compute > 1 for s in running):
            return []
        rooms = self._room.of_all(running)
        candidates = [Candidate(s, room, self.room(s, room)) for s, room in zip(running, rooms, strict=True)]
        num_tokens = self._speculation.model_tokens(candidates)
        orders = []
        for candidate in candidates:
            number = self._room.take(candidate.sequence, min(num_tokens, candidate.model_room))
            if number > 0:
                orders.append(self._order(candidate.sequence, len(candidate.sequence.tokens), number))
        return orders

    def catch_up(self, *, idle: bool) -> list[DraftOrder]:
        """KV that the model lacks, of who runs or will; a chunk of it beside a step, or a larger one if there is none:
        `idle`. Nothing beside steps of more sequences than may have drafts."""
        if not self._speculation.model_keeps_up:
            return []
        if not idle and not self._speculation.may_draft_for(self._residents.count(SequenceState.RUNNING)):
            return []
        budget, least = (IDLE_CHUNK_TOKENS, 1) if idle else (CHUNK_TOKENS, READY_TOKENS + 1)
        orders = []
        for sequence in self._residents.sequences.values():
            if not self._is_to_catch_up(sequence):
                continue
            end = min(len(sequence.tokens) - 1, self._blocks.room(sequence.key))
            if end <= sequence.num_drafted_kv:
                continue
            missing = end - self._num_computed(sequence)
            if missing >= least and budget > 0:
                length = min(missing, budget)
                budget -= length
                orders.append(self._order(sequence, sequence.num_drafted_kv + length, 0))
        return orders

    def done(self, orders: Seq[DraftOrder], drafted: Mapping[HandoffId, tuple[int, ...]]) -> None:
        """They have been computed; `drafted` has the tokens for those that asked for some."""
        for order in orders:
            sequence, key = order.sequence, order.key
            is_here = self._residents.sequences.get(key) is sequence and self._blocks.holds(key)
            if not is_here or self._blocks.ids(key)[: len(order.block_table)] != order.block_table:
                continue
            self._kv.written(sequence, order.start + len(order.token_ids))
            if tokens := drafted.get(key):
                # There is no KV of the last one.
                self._ahead[key] = len(sequence.tokens), tokens[:-1]
                self._speculation.propose(sequence, tokens)
        if any(order.num_tokens == 0 for order in orders):
            self._speculation.disturbed()

    def forget(self, key: HandoffId) -> None:
        """The sequence is over. Harmless if it is not known."""
        self._ahead.pop(key, None)

    def _is_to_catch_up(self, sequence: Sequence) -> bool:
        if sequence.job.max_draft_tokens == 0 or len(sequence.tokens) >= self._max_model_len:
            return False
        if sequence.state is SequenceState.RUNNING:
            return True
        # Before they begin, outputs of one prompt share the blocks of the first.
        is_coming = sequence.state in (SequenceState.RESERVED, SequenceState.PREFILLING)
        return is_coming and sequence.key == sequence.handoff

    def _num_computed(self, sequence: Sequence) -> int:
        """Leading tokens with draft KV, never all of them."""
        ahead = self._ahead.pop(sequence.key, None)
        if ahead is not None and ahead[0] == sequence.num_drafted_kv:
            num_known, tokens = ahead
            right = 0
            while right < len(tokens) and sequence.tokens[num_known + right : num_known + right + 1] == [tokens[right]]:
                right += 1
            if num_known == len(sequence.tokens):
                self._ahead[sequence.key] = ahead  # nothing has come since
            else:
                self._kv.written(sequence, min(num_known + right, len(sequence.tokens) - 1))
        return min(self._kv.num_computed(sequence), len(sequence.tokens) - 1)

    def _order(self, sequence: Sequence, end: int, num_tokens: int) -> DraftOrder:
        # A draft begins with a token to compute, also if it has been computed before.
        start = sequence.num_drafted_kv = min(sequence.num_drafted_kv, len(sequence.tokens) - 1)
        self._kv.writing(sequence, end - start + max(num_tokens - 1, 0))
        return DraftOrder(
            sequence=sequence,
            job=sequence.job,
            token_ids=tuple(sequence.tokens[start:end]),
            start=start,
            block_table=self._blocks.ids(sequence.key),
            num_tokens=num_tokens,
            output_index=sequence.num_output,
            newest=tuple(sequence.tokens[-sequence.num_newest :]),
        )


def _may_draw(job: GenerationJob, may_draw: Callable[[GenerationJob], bool]) -> bool:
    try:
        return may_draw(job)
    except PdServeError:
        return False
