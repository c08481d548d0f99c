"""What a draft was worth."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from decode_worker.sequences import PlannedChunk
from pdserve.types import FinishReason


def outcome(
    chunk: PlannedChunk, drawn: Seq[int], num_meaningful: int | None = None
) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens with which the output goes on, and why it ends if it does.

    `drawn` has a token for the place before each token of the draft, and for that after the last. One counts if the
    draft was right up to there: the token drawn before it is the one that it was computed after. At most the first
    `num_meaningful` of them are looked at.
    """
    if not chunk.draft and num_meaningful is None:
        (token_id,) = drawn
        return (token_id,), chunk.job.finish_reason(chunk.output_index, token_id)
    kept: list[int] = []
    for i, token_id in enumerate(drawn[:num_meaningful]):
        kept.append(token_id)
        reason = chunk.job.finish_reason(chunk.output_index + i, token_id)
        if reason is not None:
            return tuple(kept), reason
        if i == len(chunk.draft) or chunk.draft[i] != token_id:
            break
    return tuple(kept), None
