"""The batch of a step that follows another one of the same sequences, made from that one's.

While streams just go on, their next batch is the last one with every position one further. That is a handful of
operations on whole arrays, whatever the number of sequences; what does not change is shared.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from pdserve.engine.batch import Batch, IntArray, LongArray, SamplingBatch


def goes_on(batch: Batch) -> bool:
    """Whether `next_batch` may be asked for: every sequence computes one token and draws one after it, in a way that
    does not depend on which token that is or where it stands."""
    num_seqs, sampling = batch.num_seqs, batch.sampling
    return (
        batch.num_tokens == num_seqs == len(batch.logit_rows)
        and bool(np.array_equal(batch.logit_rows, batch.cu_seqlens[:-1]))
        and not len(batch.scoring)
        and not len(sampling.forbidden_ids)
        and not len(sampling.edits)
        and not sampling.allowed
    )


def next_batch(batch: Batch, block_tables: IntArray, block_size: int) -> Batch:
    """The batch after `batch`, of which `goes_on` is true: one more token of each of its sequences, in their order.

    `block_tables` [num_seqs, max_blocks] reach to those tokens, which are not known yet: `token_ids` is to be filled
    before the batch is computed.
    """
    positions = batch.positions + 1
    block, offset = np.divmod(positions, block_size)
    slots: LongArray = block_tables[batch.cu_seqlens[:-1], block].astype(np.int64)
    slots *= block_size
    slots += offset
    return Batch(
        token_ids=np.empty(len(positions), dtype=np.int32),
        positions=positions,
        cu_seqlens=batch.cu_seqlens,
        slot_mapping=slots,
        block_tables=block_tables,
        context_lens=batch.context_lens + 1,
        logit_rows=batch.logit_rows,
        sampling=_next_sampling(batch.sampling),
        scoring=batch.scoring,
    )


def _next_sampling(sampling: SamplingBatch) -> SamplingBatch:
    """The same parameters, with what has been derived from them, one position further."""
    following = copy.copy(sampling)
    object.__setattr__(following, "positions", sampling.positions + 1)
    return following


def with_tables(block_tables: IntArray, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> IntArray:
    """`block_tables` [num_seqs, max_blocks] of the tables `before`, as those are `after`: the same array if nothing has
    changed."""
    changed = [row for row, (old, new) in enumerate(zip(before, after, strict=True)) if old is not new]
    if not changed:
        return block_tables
    width = max(map(len, after))
    tables = np.zeros((len(after), width), dtype=np.int32)
    common = min(width, block_tables.shape[1])
    tables[:, :common] = block_tables[:, :common]
    for row in changed:
        tables[row, : len(after[row])] = after[row]
        tables[row, len(after[row]) :] = 0
    return tables
