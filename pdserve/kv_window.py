"""Which part of a sequence's KV can still be read, where every layer of the model has a window.

    tokens   0 ... sinks               first seen             num_tokens
             ├─ kept ─┤ ─── hidden ─── ├─ kept ─────────────────┤ next query

The query at position p sees the keys at (p - window, p] and those below `sinks`. Once `num_tokens` tokens have their KV
the next query is at position `num_tokens`, and no later one sees further back.

What is kept begins and ends at multiples of ALIGN_TOKENS, which are whole blocks of every worker: so both sides of a
hand-off keep the same tokens, whatever their block sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALIGN_TOKENS: Final = 128
"""A multiple of every block size that can be configured."""

AHEAD_TOKENS: Final = ALIGN_TOKENS
"""Room that a sequence gets at a time where it is not known to have blocks for all of its tokens."""


@dataclass(frozen=True, slots=True)
class KvWindow:
    """The widest window of any layer, and the sinks that all of them keep."""

    size: int = 0
    """Keys that a query sees at most, its own included; 0 if some layer sees all, so that all KV is kept."""
    sinks: int = 0
    """Leading tokens that are kept as well; 0 without a window."""

    def hidden_tokens(self, num_tokens: int) -> range:
        """Positions that nobody reads any more once the first `num_tokens` tokens of a sequence have their KV. With
        more of them the range grows at its end alone."""
        first = -(-self.sinks // ALIGN_TOKENS) * ALIGN_TOKENS
        if not self.size:
            return range(first, first)
        return range(first, max(first, (num_tokens - self.size + 1) // ALIGN_TOKENS * ALIGN_TOKENS))

    def hidden_blocks(self, num_tokens: int, block_size: int) -> range:
        """The same as places in the sequence's block table."""
        tokens = self.hidden_tokens(num_tokens)
        assert ALIGN_TOKENS % block_size == 0 or not tokens, f"windows need blocks that divide {ALIGN_TOKENS} tokens"
        return range(tokens.start // block_size, tokens.stop // block_size)

    def most_tokens(self, num_tokens: int, ahead: int) -> int:
        """Tokens for which a sequence that grows to `num_tokens` holds blocks at most at any time, when it never has
        room for more than `ahead` tokens behind those with KV."""
        if not self.size:
            return num_tokens
        return min(num_tokens, self.hidden_tokens(0).start + self.size + ALIGN_TOKENS + ahead)


NO_WINDOW: Final = KvWindow()
"""All KV is kept."""


def without(hidden: range, num_tokens: int) -> int:
    """How many of the first `num_tokens` tokens are not `hidden`."""
    return num_tokens - max(0, min(num_tokens, hidden.stop) - hidden.start)
