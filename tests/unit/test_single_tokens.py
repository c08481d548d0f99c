"""Taking a token by itself: the same text and the same output as any other way."""

from __future__ import annotations

import random

import pytest

from pdserve.testing.tiny_tokenizers import byte_level_tokenizer, save_tokenizer, sentencepiece_tokenizer
from pdserve.tokenizer import IncrementalDetokenizer, Tokenizer
from pdserve.tokenizer.from_hf import tokenizer_from_hf
from pdserve.types import FinishReason
from router.output import Output, TextOutput, TokenSequence

PIECES = ("▁Hello", "▁wor", "ld", "!", "▁", "日")


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp(request.param)
    made = byte_level_tokenizer() if request.param == "byte-level" else sentencepiece_tokenizer(PIECES)
    save_tokenizer(made, directory, chat_template=None)
    return tokenizer_from_hf(directory)


def random_ids(tokenizer: Tokenizer, rng: random.Random, count: int) -> list[int]:
    """Any tokens, and now and then a whole character of several bytes."""
    ids: list[int] = []
    while len(ids) < count:
        if rng.random() < 0.4:
            ids += tokenizer.encode(rng.choice(("é", "日本", "🌶 a", "Hello world!")), add_special_tokens=False)
        else:
            ids.append(rng.randrange(tokenizer.vocab_size + 2))
    return ids[:count]


@pytest.mark.parametrize("skip_special_tokens", [False, True])
def test_the_text_of_single_tokens_is_that_of_tokens_in_groups(tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
    rng = random.Random(3)
    for _ in range(200):
        prompt, ids = random_ids(tokenizer, rng, rng.randrange(6)), random_ids(tokenizer, rng, 12)
        single = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens)
        grouped = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens)
        for token_id in ids:
            assert single.push_token(token_id) == grouped.push((token_id,))
        assert single.finish() == grouped.finish()


def test_a_token_has_a_text_of_its_own_only_if_it_is_whole_characters(tokenizer: Tokenizer) -> None:
    for token_id in range(tokenizer.vocab_size):
        data = tokenizer.id_to_bytes(token_id)
        text = tokenizer.id_to_text(token_id)
        assert (text is None) == ("\ufffd" in data.decode("utf-8", "replace") and "\ufffd".encode() not in data)
        assert text is None or text.encode() == data
        if token_id in tokenizer.special_token_ids:
            assert tokenizer.id_to_text(token_id, skip_special_tokens=True) == ""
    assert tokenizer.id_to_text(10**9) == ""


def new_output(tokenizer: Tokenizer, stop_strings: tuple[str, ...] = (), max_tokens: int = 20) -> Output:
    return Output(TokenSequence(max_tokens), TextOutput(tokenizer, (5,), stop_strings, 0))


def test_the_next_token_is_taken_as_any_other_would_be(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    for _ in range(50):
        one, other = new_output(tokenizer), new_output(tokenizer)
        for index, token_id in enumerate(random_ids(tokenizer, rng, 12)):
            _, (text,) = other.add(index, [token_id], None)
            assert one.add_next(index, token_id) == text
        assert list(one.tokens) == list(other.tokens) and one.num_tokens == 12
        assert one.add(12, [7], FinishReason.LENGTH) == other.add(12, [7], FinishReason.LENGTH)
        assert one.ending == other.ending


def test_what_is_not_simply_the_next_token_is_left_to_others_and_changes_nothing(tokenizer: Tokenizer) -> None:
    output = new_output(tokenizer, max_tokens=3)
    assert output.add_next(1, 9) is None
    assert output.add_next(0, 9) is not None
    assert output.add_next(0, 9) is None
    output.add(2, [9], None)
    assert output.add_next(1, 9) is None, "one waits for it"
    output.add(1, [9], None)
    assert output.add_next(3, 9) is None, "more than there may be"
    assert list(output.tokens) == [9, 9, 9]
    ended = new_output(tokenizer)
    ended.add(1, [9], FinishReason.LENGTH)
    assert ended.add_next(0, 9) is None, "the end is known"
    ended.add(0, [9], None)
    assert ended.ending is not None and ended.add_next(2, 9) is None
    assert new_output(tokenizer, stop_strings=("x",)).add_next(0, 9) is None
