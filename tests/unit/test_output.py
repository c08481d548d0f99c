"""Token order and text of one output."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import InternalError
from pdserve.model.source import open_model
from pdserve.testing.router_rig import EOS, make_model
from pdserve.tokenizer import Tokenizer, load_tokenizer
from pdserve.types import FinishReason
from router.output import Ending, Output, TextOutput, TokenSequence


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(open_model(str(make_model(tmp_path_factory.mktemp("model")))))


def output(tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0, max_tokens: int = 100) -> Output:
    return Output(TokenSequence(max_tokens), TextOutput(tokenizer, (50,), stop, min_tokens))


def test_tokens_wait_for_those_before_them() -> None:
    sequence = TokenSequence(10)
    assert sequence.add(1, [11, 12], None) == []
    assert sequence.add(4, [14], FinishReason.STOP) == []
    assert sequence.add(0, [10], None) == [10, 11, 12]
    assert sequence.finished is None
    assert sequence.add(3, [13], None) == [13, 14]
    assert sequence.finished is FinishReason.STOP
    assert list(sequence.tokens) == [10, 11, 12, 13, 14]


def test_repeated_tokens_are_dropped() -> None:
    sequence = TokenSequence(10)
    assert sequence.add(0, [10, 11], None) == [10, 11]
    assert sequence.add(0, [10, 11, 12], None) == [12]
    assert sequence.add(0, [99], None) == []
    assert sequence.add(5, [15], None) == []
    assert sequence.add(5, [98], None) == []
    assert sequence.add(3, [13, 14], None) == [13, 14, 15]


@pytest.mark.parametrize(("first", "tokens"), [(-1, [1]), (10, [1]), (8, [1, 2, 3]), (10**9, [1])])
def test_an_index_that_the_output_cannot_have_is_an_error(first: int, tokens: list[int]) -> None:
    with pytest.raises(InternalError):
        TokenSequence(10).add(first, tokens, None)


def test_nothing_comes_after_the_end_and_the_end_not_before_what_is_out() -> None:
    sequence = TokenSequence(10)
    sequence.add(1, [11], FinishReason.STOP)
    with pytest.raises(InternalError):
        sequence.add(2, [12], None)
    sequence = TokenSequence(10)
    sequence.add(0, [10, 11], None)
    with pytest.raises(InternalError):
        sequence.add(0, [10], FinishReason.STOP)


def test_a_new_attempt_forgets_what_waited_and_keeps_what_is_out() -> None:
    sequence = TokenSequence(10)
    sequence.add(0, [10], None)
    sequence.add(2, [99], FinishReason.STOP)
    sequence.start_over()
    assert sequence.add(1, [11], None) == [11]
    assert sequence.finished is None
    assert sequence.add(2, [12], FinishReason.LENGTH) == [12]
    assert sequence.finished is FinishReason.LENGTH


@given(st.data())
def test_any_order_and_any_repetition_give_the_same_tokens(data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 1000), min_size=1, max_size=30))
    pieces = [(i, tokens[i : i + data.draw(st.integers(1, 4))]) for i in range(len(tokens))]
    shuffled = data.draw(st.permutations(pieces * data.draw(st.integers(1, 2))))
    sequence = TokenSequence(len(tokens))
    got: list[int] = []
    for first, piece in shuffled:
        last = first + len(piece) == len(tokens)
        got += sequence.add(first, piece, FinishReason.LENGTH if last else None)
        assert got == tokens[: len(got)]
    assert got == tokens
    assert sequence.finished is FinishReason.LENGTH


def test_the_text_of_a_stop_token_is_not_shown_and_that_of_a_last_token_is(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    stopped = output(tokenizer)
    assert stopped.add(0, [*ids, EOS], FinishReason.STOP) == ([*ids, EOS], ["a", "b", "c", ""])
    assert stopped.ending == Ending(FinishReason.STOP, stop_token_id=EOS)
    full = output(tokenizer, max_tokens=len(ids))
    assert full.add(0, ids, FinishReason.LENGTH) == (ids, ["a", "b", "c"])
    assert full.ending == Ending(FinishReason.LENGTH)


def test_a_character_that_is_cut_at_the_end_is_shown_as_one_replacement(tokenizer: Tokenizer) -> None:
    """O-TOK-1."""
    ids = tokenizer.encode("🌶")
    cut = output(tokenizer)
    assert cut.add(0, ids[:2], None) == (ids[:2], ["", ""])
    assert cut.add(2, ids[2:3], FinishReason.LENGTH) == (ids[2:3], ["�"])


def test_held_back_text_comes_out_when_the_output_ends_otherwise(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab<")
    held = output(tokenizer, stop=["<end>"])
    assert held.add(0, ids, None)[1] == ["a", "b", ""]
    assert held.add(len(ids), [EOS], FinishReason.STOP)[1] == ["<"]
    assert held.ending == Ending(FinishReason.STOP, stop_token_id=EOS)


def test_a_stop_string_cuts_tokens_and_text_at_its_completion(tokenizer: Tokenizer) -> None:
    """O-TOK-3."""
    ids = tokenizer.encode("one two\nObs x")
    whole = tokenizer.decode(ids)
    for cut in range(1, len(ids)):
        stopping = output(tokenizer, stop=["\nObs"])
        got, texts = stopping.add(0, ids[:cut], None)
        if stopping.ending is None:
            more, rest = stopping.add(cut, ids[cut:], FinishReason.LENGTH)
            got, texts = got + more, texts + rest
        assert "".join(texts) == "one two"
        assert len(texts) == len(got)
        assert stopping.ending == Ending(FinishReason.STOP, stop_string="\nObs")
        assert tokenizer.decode(got).endswith("\nObs")
        assert whole.startswith(tokenizer.decode(got))
        assert stopping.num_tokens == len(got)
        assert list(stopping.tokens) == got


def test_stop_strings_do_not_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a.b.c.d")
    assert len(ids) == 7
    stopping = output(tokenizer, stop=["."], min_tokens=2)
    got, texts = stopping.add(0, ids, FinishReason.LENGTH)
    assert (len(got), "".join(texts)) == (4, "a.b")


@pytest.mark.parametrize("seed", range(20))
def test_the_text_with_each_token_does_not_depend_on_how_tokens_arrive(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choice(["a", "é", "🌶", " the", "<s", "stop", " "]) for _ in range(30))
    ids = tokenizer.encode(text)
    at_once = output(tokenizer, stop=["nowhere"]).add(0, ids, FinishReason.LENGTH)[1]
    shown = output(tokenizer, stop=["nowhere"])
    texts: list[str] = []
    at = 0
    while at < len(ids):
        size = min(rng.randint(1, 5), len(ids) - at)
        texts += shown.add(at, ids[at : at + size], FinishReason.LENGTH if at + size == len(ids) else None)[1]
        at += size
    assert texts == at_once
    assert "".join(texts) == text


def test_an_end_comes_with_a_token(tokenizer: Tokenizer) -> None:
    shown = output(tokenizer)
    shown.add(0, [50, 51], None)
    with pytest.raises(InternalError, match="ended the output after token 1"):
        shown.add(0, [50, 51], FinishReason.STOP)
