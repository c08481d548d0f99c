"""How the query tokens of a batch become tiles, the work items of the Triton kernels. Host arrays only.

Sequences with few query tokens (decode, and verification of drafts) read a long context for little work: their keys are
split over many programs. Those with many (prefill) have enough tiles to fill a GPU, and are not split.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.engine.batch import Batch, IntArray

_PROGRAMS = 512
"""Programs that fill a large GPU a few times over. A constant and not a property of the device: the number of splits
decides in which order numbers are added, which should not depend on where a worker runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSizes:
    """What kernels compute at once: powers of two, those of tiles at least 16."""

    short_query: int = 32
    """Query tokens up to which a sequence counts as short: one, and the longest draft that may be configured."""
    short_rows: int = 32
    """Rows, which are query tokens times query heads that share a KV head, of a tile of a short sequence."""
    long_rows: int = 64
    """The same of a long one."""
    keys: int = 64
    """Keys at a time."""
    max_splits: int = 32
    """Parts of a context that are computed side by side, at most."""

    def is_short(self, batch: Batch) -> npt.NDArray[np.bool_]:
        """[num_seqs] which sequences are."""
        return np.diff(batch.cu_seqlens) <= self.short_query

    def short_tokens(self, heads_per_kv_head: int) -> int:
        """Query tokens in a tile of a short sequence; the same for decode and verification, which thus add up alike."""
        return _tokens(self.short_rows, heads_per_kv_head)

    def long_tokens(self, heads_per_kv_head: int) -> int:
        """Query tokens in a tile of a long one."""
        return _tokens(self.long_rows, heads_per_kv_head)

    def num_splits(self, num_rows: int, num_kv_heads: int) -> int:
        """Parts of each context, a power of two, for `num_rows` query tokens in all.

        Equal for all numbers between two powers of two, so that a batch adds up in the same order by itself and in a
        graph that was captured for a few more rows.
        """
        rows = 1 << (num_rows - 1).bit_length()
        return max(1, min(self.max_splits, _power_of_two_below(_PROGRAMS // (rows * num_kv_heads))))


def packed_tables(batch: Batch, block_size: int) -> tuple[IntArray, IntArray]:
    """The block tables without padding, back to back, and where each begins, [num_seqs]."""
    counts = -(-batch.context_lens // block_size)
    ids = batch.block_tables[np.arange(batch.block_tables.shape[1]) < counts[:, None]]
    return ids, (np.cumsum(counts) - counts).astype(np.int32)


def make_tiles(batch: Batch, sequences: IntArray, table_starts: IntArray, tile_tokens: int) -> IntArray:
    """Tiles of `tile_tokens` query tokens of the given sequences, [4, num_tiles]: first row of the batch, number of
    tokens, position of the first one, where the block table begins."""
    begins = batch.cu_seqlens[sequences]
    lengths = batch.cu_seqlens[sequences + 1] - begins
    counts = -(-lengths // tile_tokens)
    owner = np.repeat(np.arange(len(sequences)), counts)
    done = (np.arange(len(owner)) - (np.cumsum(counts) - counts)[owner]) * tile_tokens
    rows = begins[owner] + done
    tiles = np.stack(
        [
            rows,
            np.minimum(lengths[owner] - done, tile_tokens),
            batch.positions[rows],
            table_starts[sequences][owner],
        ]
    )
    return tiles.astype(np.int32)


def _tokens(rows: int, heads_per_kv_head: int) -> int:
    return max(1, _power_of_two_below(rows // heads_per_kv_head))


def _power_of_two_below(number: int) -> int:
    """The greatest one that is not above `number`; 0 for 0."""
    return 1 << number.bit_length() >> 1
