"""Stop strings over text in pieces, checked against a search of the whole text."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InvalidRequestError
from pdserve.tokenizer import StopStringMatcher

# Few letters, so that stop strings overlap each other and themselves.
_LETTERS = st.text(alphabet="ab\n", max_size=30)
_STOPS = st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4)


def _whole_search(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Shortest beginning of the text that ends in a stop string, by trying all."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def _run(pieces: list[str], stops: list[str]) -> tuple[list[str], str | None]:
    matcher, deltas = StopStringMatcher(stops), []
    for piece in pieces:
        delta, matched = matcher.push(piece)
        deltas.append(delta)
        if matched is not None:
            assert matcher.finish() == ""
            return deltas, matched
    return [*deltas, matcher.finish()], None


@given(text=_LETTERS, stops=_STOPS, cuts=st.lists(st.integers(0, 30), max_size=10))
def test_result_is_that_of_a_whole_search_however_the_text_was_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    bounds = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    deltas, matched = _run(pieces, stops)
    assert ("".join(deltas), matched) == _whole_search(text, stops)


@given(text=_LETTERS, stops=_STOPS)
def test_only_text_that_may_still_become_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher, emitted = StopStringMatcher(stops), ""
    for end, char in enumerate(text, start=1):
        delta, matched = matcher.push(char)
        if matched is not None:
            return
        emitted += delta
        held = max((n for s in stops for n in range(len(s)) if text[:end].endswith(s[:n])), default=0)
        assert emitted == text[: end - held]


def test_stop_string_that_starts_and_ends_inside_tokens_never_leaks() -> None:
    """O-TOK-3."""
    deltas, matched = _run(["one", " tw", "o\n", "Obs", "erv", "ation:", " x"], ["\nObservation:"])
    assert deltas == ["one", " tw", "o", "", "", ""]
    assert matched == "\nObservation:"


def test_text_that_only_looked_like_a_stop_string_comes_out() -> None:
    assert _run(["a\nObs", "olete"], ["\nObservation:"]) == (["a", "\nObsolete", ""], None)
    assert _run(["a\nObs"], ["\nObservation:"]) == (["a", "\nObs"], None)


def test_without_stop_strings_text_passes_at_once() -> None:
    assert StopStringMatcher([]).push("anything") == ("anything", None)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"stop\.strings\[1\]"):
        StopStringMatcher(["a", ""])


def test_cost_is_linear_with_many_self_overlapping_stop_strings() -> None:
    stops = ["a" * n + "b" for n in range(1, 400, 2)]

    def cost(length: int) -> float:
        matcher = StopStringMatcher(stops)
        begin = time.process_time()
        for _ in range(length // 10):
            matcher.push("a" * 9 + "c")
        return time.process_time() - begin

    cost(10_000)
    small = min(cost(10_000) for _ in range(3))
    assert min(cost(80_000) for _ in range(2)) < small * 8 * 4
