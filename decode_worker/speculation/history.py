"""Prompt look-up: what came after the last tokens of a sequence when they were there before.

After Saxena, "Prompt Lookup Decoding" (2023): rewritten code, quoted passages and extracted fields repeat their source
word for word, and no model is needed to see how they go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

LONGEST_MATCH: Final = 8
"""Tokens beyond which a match is as good as any."""

_FEW: Final = 8
"""Tokens for which the filter is brought up to date one by one."""
_SMALLEST_FILTER: Final = 1 << 12
_PLACES_PER_TOKEN: Final = 16
"""Bytes of the filter for each token: one in sixteen pairs that were never there passes it at most."""
_MULTIPLIERS: Final = (0x9E3779B1, 0x85EBCA77)
_MASK: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Match:
    """The end of a sequence was there before."""

    length: int
    """How many of its last tokens, up to `LONGEST_MATCH`."""
    next_tokens: tuple[int, ...]
    """What came after them."""


class History:
    """The tokens of one sequence, which only ever grows.

    Most often its end was never there before. A filter says so at once: a byte for each hash of two tokens in a row.
    """

    def __init__(self) -> None:
        self._known: Sequence[int] = ()
        """The sequence's own list, of which the first `_length` tokens are known here."""
        self._length = 0
        self._tokens = np.empty(0, np.int32)
        self._num_copied = 0
        """Leading tokens that are in the array as well, for searching."""
        self._filter = bytearray(_SMALLEST_FILTER)
        """1 where the hash of a pair is that of two tokens in a row; those of the newest pair are not in it yet."""
        self._num_filtered = 0
        """Leading tokens of which all pairs are in the filter."""

    def __len__(self) -> int:
        return self._length

    def catch_up(self, tokens: Sequence[int]) -> None:
        """`tokens` are all of the sequence's, of which those that are known here have not changed, nor ever will."""
        self._known = tokens
        self._length = len(tokens)

    def find(self, min_match: int, num_tokens: int) -> Match | None:
        """The longest earlier occurrence of the last tokens, of several the newest, and the `num_tokens` tokens that
        come after it; None if not even `min_match` tokens were there before.

        What comes after it may overlap the end itself: then the sequence repeats itself, and is taken to go on so.
        Takes some microseconds for every thousand tokens where there may be one, and about one where there is none.
        """
        end = self._length
        if end <= min_match or (min_match >= 2 and not self._may_have_been_there()):
            return None
        tokens = self._copied()
        # Index of the last token of each candidate; the sequence's own end is none.
        candidates = np.flatnonzero(tokens[:-1] == tokens[-1])
        found = self._newest_of_the_longest(candidates[-_FEW:].tolist())
        if found is None:
            found = _longest(tokens, candidates)
        last, length = found
        return None if length < min_match else Match(length, self._after(last, num_tokens))

    def _newest_of_the_longest(self, candidates: list[int]) -> tuple[int, int] | None:
        """One of these that is as good as any, and its length; None if none is. Of a sequence that repeats itself, most
        often the last one is."""
        known, end = self._known, self._length
        suffix = known[max(end - LONGEST_MATCH, 0) : end]
        for last in reversed(candidates):
            if last + 1 >= LONGEST_MATCH and known[last + 1 - LONGEST_MATCH : last + 1] == suffix:
                return last, LONGEST_MATCH
        return None

    def _after(self, last: int, num_tokens: int) -> tuple[int, ...]:
        """The tokens that come after that place, and so on."""
        begin, end = last + 1, self._length
        ahead = tuple(self._known[begin : min(begin + num_tokens, end)])
        whole, rest = divmod(num_tokens, len(ahead))
        return ahead * whole + ahead[:rest]

    def _copied(self) -> npt.NDArray[np.int32]:
        """All known tokens, as an array."""
        begin, end = self._num_copied, self._length
        if end > len(self._tokens):
            grown = np.empty(max(2 * len(self._tokens), end + 64), np.int32)
            grown[:begin] = self._tokens[:begin]
            self._tokens = grown
        self._tokens[begin:end] = self._known[begin:end]
        self._num_copied = end
        return self._tokens[:end]

    def _may_have_been_there(self) -> bool:
        """Whether the last two tokens may have followed each other before. False is certain."""
        known, end = self._known, self._length - 1
        if len(self._filter) < end * _PLACES_PER_TOKEN:
            self._filter = bytearray(1 << (2 * end * _PLACES_PER_TOKEN).bit_length())
            self._num_filtered = 0
        bits, at = len(self._filter) - 1, max(self._num_filtered, 1)
        if end - at > _FEW:
            pairs = np.array(known[at - 1 : end], np.uint64)
            hashes = ((pairs[:-1] * _MULTIPLIERS[0]) ^ (pairs[1:] * _MULTIPLIERS[1])) & _MASK
            np.frombuffer(self._filter, np.uint8)[(hashes ^ (hashes >> 15)) & bits] = 1
        else:
            for i in range(at, end):
                self._filter[_hash(known[i - 1], known[i]) & bits] = 1
        self._num_filtered = end
        return self._filter[_hash(known[end - 1], known[end]) & bits] == 1


def _hash(before: int, token: int) -> int:
    """Of two tokens in a row."""
    hashed = ((before * _MULTIPLIERS[0]) ^ (token * _MULTIPLIERS[1])) & _MASK
    return hashed ^ (hashed >> 15)


def _longest(tokens: npt.NDArray[np.int32], candidates: npt.NDArray[np.intp]) -> tuple[int, int]:
    """The newest of the candidates with the longest match, and its length; (0, 0) if there are none."""
    end, length = len(tokens), 1
    if len(candidates) == 0:
        return 0, 0
    while length < LONGEST_MATCH:
        longer = candidates[candidates >= length]
        longer = longer[tokens[longer - length] == tokens[end - 1 - length]]
        if len(longer) == 0:
            break
        candidates, length = longer, length + 1
    return int(candidates[-1]), length
