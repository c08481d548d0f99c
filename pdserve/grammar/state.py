"""Where one output is in its grammar, and which tokens may come next."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from pdserve.errors import InternalError, InvalidRequestError

Mask = npt.NDArray[np.uint32]
"""[ceil(V / 32)] bit i % 32 of word i // 32 is set if token i may be drawn."""


class GrammarState:
    """One output. Depends on the grammar and the output's tokens alone, so every worker makes the same of them.

    One thread at a time.
    """

    def __init__(self, matcher: LLMatcher, *, vocab_size: int, stop_token_ids: Sequence[int]) -> None:
        """`matcher` is at the start of the text and belongs to the new object. `stop_token_ids` end the output; they
        are allowed where the text may end, also ids that the grammar knows nothing of."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._stops = np.zeros(num_words(vocab_size), np.uint32)
        for token_id in stop_token_ids:
            if token_id < vocab_size:
                self._stops[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Output tokens taken so far."""
        return self._num_tokens

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def advance(self, token_id: int) -> None:
        """Take the next output token. Raises InternalError if the grammar does not allow it, and InvalidRequestError if
        that is too costly to tell."""
        if not self._matcher.consume_token(token_id):
            if "doesn't satisfy the grammar" in self._matcher.get_error():
                raise InternalError(f"output token {self._num_tokens} does not fit the grammar of the request")
            raise self._too_complex()
        self._num_tokens += 1

    def mask(self, *, may_stop: bool = True) -> Mask:
        """What may be drawn next; never empty. The array is the caller's own.

        Without `may_stop` stop ids are left out as long as anything else is allowed. Where the text is complete and
        nothing can follow, they are all there is: a grammar has the last word over a minimum of tokens.

        Raises InvalidRequestError where the grammar is too complex to go on, or leads to a place that no token of the
        vocabulary leads on from.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._matcher.is_error():
            raise self._too_complex()
        may_end = bool(bits[self._vocab_size // 32] >> np.uint32(self._vocab_size % 32) & np.uint32(1))
        mask = bits[: len(self._stops)].copy()
        if self._vocab_size % 32:
            mask[-1] &= np.uint32((1 << self._vocab_size % 32) - 1)
        if may_end:
            mask |= self._stops
        if not may_stop and (going_on := mask & ~self._stops).any():
            return going_on
        if not mask.any():
            raise InvalidRequestError("grammar: no token of the vocabulary can go on from here", field="grammar")
        return mask

    def copy(self) -> GrammarState:
        """One that goes on from here on its own, also on another thread. Takes a microsecond."""
        twin = copy.copy(self)
        twin._matcher = self._matcher.deep_copy()
        return twin

    def _too_complex(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"grammar: cannot be followed any further: {one_line(self._matcher.get_error())}", field="grammar"
        )


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def one_line(problem: str) -> str:
    """What llguidance says of a grammar, short enough for an error."""
    text = " ".join(problem.replace("<non-verbose/>", "").split())
    return text if len(text) <= 300 else f"{text[:300]}..."
