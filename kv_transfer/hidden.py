"""What a hand-off leaves out: the KV that nobody will read again, because every layer has a window.

The tables, plans and transports know nothing of it. To them a hand-off is of the tokens that are sent, as if these were
the whole sequence: the blocks of the others are taken out of the lists of both sides, and counts of tokens are
translated here. Both sides find out for themselves what is hidden, from the model and the tokens of the job.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.kv_layout import KvLayout
from pdserve.types import HandoffPurpose, PrefixFetch, RunningStream


def hidden_tokens(purpose: HandoffPurpose, layout: KvLayout) -> range:
    """Positions whose KV is not sent. Of a stream that runs on meanwhile they are those at its beginning, since it may
    stop at any token; of a prefix none, as it may be continued anywhere."""
    match purpose:
        case PrefixFetch():
            return range(0)
        case RunningStream():
            num_known = purpose.job.num_known_tokens
        case _:
            num_known = purpose.num_known_tokens
    return layout.window.hidden_tokens(num_known)


def sent_blocks(blocks: Sequence[int], hidden: range, block_size: int) -> tuple[int, ...]:
    """Of the blocks of a sequence, in order, those that are not `hidden`."""
    if not hidden:
        return tuple(blocks)
    return (*blocks[: hidden.start // block_size], *blocks[hidden.stop // block_size :])
