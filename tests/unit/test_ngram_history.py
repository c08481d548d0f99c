"""Looking up how a sequence may go on: against a search that tries everything."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.speculation.history import LONGEST_MATCH, History, Match

TOKENS = st.lists(st.integers(0, 3), max_size=60)
"""Few different ones, so that they repeat."""


def searched(tokens: Sequence[int], min_match: int, num_tokens: int) -> Match | None:
    """Every earlier end of every suffix, the longest first and the newest first."""
    for length in range(min(LONGEST_MATCH, len(tokens) - 1), min_match - 1, -1):
        suffix = list(tokens[len(tokens) - length :])
        for end in range(len(tokens) - 1, length - 1, -1):
            if list(tokens[end - length : end]) == suffix:
                longer = list(tokens)
                for i in range(num_tokens):
                    longer.append(longer[end + i])
                return Match(length, tuple(longer[len(tokens) :]))
    return None


def history_of(*parts: Sequence[int]) -> History:
    history, tokens = History(), list[int]()
    for part in parts:
        tokens += part
        history.catch_up(tokens)
    return history


@given(TOKENS, st.integers(1, 4), st.integers(1, 12))
def test_finds_what_a_search_of_every_place_finds(tokens: list[int], min_match: int, num_tokens: int) -> None:
    assert history_of(tokens).find(min_match, num_tokens) == searched(tokens, min_match, num_tokens)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=1, max_size=12))
def test_it_does_not_matter_in_which_pieces_the_tokens_come(parts: list[list[int]]) -> None:
    assert history_of(*parts).find(2, 5) == history_of([t for part in parts for t in part]).find(2, 5)


def test_prefers_the_newest_of_the_longest_matches() -> None:
    tokens = [1, 2, 3, 40, 9, 1, 2, 3, 50, 8, 2, 3, 60, 7, 1, 2, 3]
    assert history_of(tokens).find(2, 1) == Match(3, (50,))


def test_sequence_that_repeats_itself_is_taken_to_go_on_so() -> None:
    assert history_of([9, 1, 2, 3, 1, 2, 3]).find(2, 8) == Match(3, (1, 2, 3, 1, 2, 3, 1, 2))
    assert history_of([5, 7, 7]).find(1, 4) == Match(1, (7, 7, 7, 7))


def test_finds_nothing_in_what_is_new() -> None:
    assert history_of([1, 2, 3, 4]).find(1, 4) is None
    assert history_of([]).find(1, 4) is None
    assert history_of([1, 2, 3, 1]).find(2, 4) is None
