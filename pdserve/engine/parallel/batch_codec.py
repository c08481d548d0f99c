"""A batch as arrays, and back: what followers have to know of a step.

Masks are not among it: they may be known only while the model computes, and follow with `Kind.DRAW`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pdserve.engine.batch import Batch, SamplingBatch, ScoringBatch
from pdserve.engine.logit_edits import LogitEdits
from pdserve.engine.parallel.messages import Array, ProtocolError

NUM_ARRAYS = 23


def batch_to_arrays(batch: Batch) -> list[Array]:
    """In the order that `batch_from_arrays` expects."""
    sampling, scoring = batch.sampling, batch.scoring
    return [
        batch.token_ids,
        batch.positions,
        batch.cu_seqlens,
        batch.slot_mapping,
        batch.block_tables,
        batch.context_lens,
        batch.logit_rows,
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        sampling.min_p,
        sampling.seed,
        sampling.positions,
        sampling.forbidden_rows,
        sampling.forbidden_ids,
        sampling.edits.rows,
        sampling.edits.ids,
        sampling.edits.terms,
        sampling.num_logprobs,
        sampling.masked_rows,
        scoring.rows,
        scoring.target_ids,
        scoring.num_top,
    ]


def batch_from_arrays(arrays: Sequence[Array]) -> Batch:
    """The batch without its masks. Raises ProtocolError."""
    if len(arrays) != NUM_ARRAYS:
        raise ProtocolError(f"a batch of {len(arrays)} arrays, not {NUM_ARRAYS}")
    return Batch(
        token_ids=arrays[0],
        positions=arrays[1],
        cu_seqlens=arrays[2],
        slot_mapping=arrays[3],
        block_tables=arrays[4],
        context_lens=arrays[5],
        logit_rows=arrays[6],
        sampling=SamplingBatch(
            temperature=arrays[7],
            top_k=arrays[8],
            top_p=arrays[9],
            min_p=arrays[10],
            seed=arrays[11],
            positions=arrays[12],
            forbidden_rows=arrays[13],
            forbidden_ids=arrays[14],
            edits=LogitEdits(arrays[15], arrays[16], arrays[17]),
            num_logprobs=arrays[18],
            masked_rows=arrays[19],
            allowed=(),
        ),
        scoring=ScoringBatch(rows=arrays[20], target_ids=arrays[21], num_top=arrays[22]),
    )


def no_masks() -> Array:
    """What `Kind.DRAW` carries for a batch without masked rows."""
    return np.empty((0, 0), np.uint32)
