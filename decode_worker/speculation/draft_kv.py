"""Which tokens of a sequence have KV in the draft model's pool.

That pool has as many blocks as the worker's own, of as many tokens, and a sequence has the same ones in both: who gives
a sequence its room gives it room for drafts as well, and nothing is allocated, shared or freed twice. What differs is
what is in them. KV of a prompt comes by hand-off into the one pool and is computed for the other, so a block that is
found by its name may be filled in the one and not in the other. What fills a block of the draft model's pool is
remembered by that same name, and counts for whoever has the block under it.

Draft KV is written by the engine's thread, in the order in which it was asked for. So a block that changes hands while
it is written to is harmless: whoever has it then writes later.
"""

from __future__ import annotations

from decode_worker.sequences import Sequence
from pdserve.engine.sequence_blocks import SequenceBlocks


class DraftKv:
    """Bookkeeping of the draft model's pool. Knows sequences that hold blocks; nothing has to be told of their end."""

    def __init__(self, blocks: SequenceBlocks) -> None:
        """`blocks` of the worker's own pool."""
        self._blocks = blocks
        self._names: dict[int, bytes] = {}
        """What fills each block, if that is the KV of one block of tokens."""

    def num_computed(self, sequence: Sequence) -> int:
        """Leading tokens of a sequence that have KV, its newest one left out: its own work, and blocks that others have
        filled since."""
        ids, size = self._blocks.ids(sequence.key), self._blocks.block_size
        num_computed = sequence.num_drafted_kv
        index = num_computed // size
        if index < len(ids) and ids[index] in self._names:
            names = sequence.hashes.upto(len(sequence.tokens) - 1, sequence.tokens)
            while index < min(len(ids), len(names)) and self._names.get(ids[index]) == names[index]:
                index += 1
            num_computed = max(num_computed, index * size)
        sequence.num_drafted_kv = num_computed
        return num_computed

    def writing(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of the next `num_tokens` tokens, known or drafted, is about to be written."""
        size, begin = self._blocks.block_size, sequence.num_drafted_kv
        for block_id in self._blocks.ids(sequence.key)[begin // size : -(-(begin + num_tokens) // size)]:
            self._names.pop(block_id, None)

    def written(self, sequence: Sequence, num_computed: int) -> None:
        """The first `num_computed` of its tokens have KV now. It has had its blocks all the time."""
        ids, size = self._blocks.ids(sequence.key), self._blocks.block_size
        begin, end = sequence.num_drafted_kv // size, num_computed // size
        if end > begin:
            names = sequence.hashes.upto(num_computed, sequence.tokens)
            self._names.update(zip(ids[begin:end], names[begin:end], strict=True))
        sequence.num_drafted_kv = num_computed
