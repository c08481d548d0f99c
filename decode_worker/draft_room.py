"""How many tokens may be drafted for a sequence without anybody being worse off."""

from __future__ import annotations

from collections.abc import Iterable

from decode_worker.migrations import Migrations
from decode_worker.residents import Residents
from decode_worker.sequences import Sequence
from pdserve.engine.sequence_blocks import SequenceBlocks


class DraftRoom:
    """Of all sequences of one decode worker."""

    def __init__(self, residents: Residents, blocks: SequenceBlocks, migrations: Migrations) -> None:
        self._residents = residents
        self._blocks = blocks
        self._migrations = migrations

    def of_all(self, sequences: Iterable[Sequence]) -> list[int]:
        """For each, tokens that may be drafted: without another one having to give way, so that the output does not
        become longer than it may, and as the request says. None in a sequence's first step, by which others measure how
        long steps take."""
        more = self._blocks.block_size if self._blocks.num_available > self._residents.num_growing else 0
        return [self._of(sequence, more) for sequence in sequences]

    def _of(self, sequence: Sequence, more: int) -> int:
        if sequence.num_steps == 0:
            return 0
        room = self._blocks.room(sequence.key) + more
        room = min(room - len(sequence.tokens), sequence.num_left - 1)
        if sequence.job.max_draft_tokens is not None:
            room = min(room, sequence.job.max_draft_tokens)
        while room > 0 and not self._migrations.may_compute(sequence, len(sequence.tokens) + room):
            room -= 1
        return room

    def take(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks for as many drafted tokens as `of_all` allows; gives for how many there are."""
        if num_tokens <= 0 or self._blocks.grow(sequence.key, len(sequence.tokens) + num_tokens):
            return max(num_tokens, 0)
        # Another one has taken the last block.
        return max(self._blocks.room(sequence.key) - len(sequence.tokens), 0)
