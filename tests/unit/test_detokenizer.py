"""Streaming text: deltas joined are the whole text, and no delta holds a part of a character."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend

from pdserve.testing.tiny_tokenizers import byte_level_tokenizer, save_tokenizer, sentencepiece_tokenizer
from pdserve.tokenizer import IncrementalDetokenizer, Tokenizer
from pdserve.tokenizer.from_hf import tokenizer_from_hf

_PIECES = ("▁Hello", "▁big", "▁wor", "ld", "!", "▁Bye", "▁go", "▁", "日")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {
        "byte-level": _load(tmp_path_factory.mktemp("byte"), byte_level_tokenizer()),
        "sentencepiece": _load(tmp_path_factory.mktemp("spm"), sentencepiece_tokenizer(_PIECES)),
    }


def _load(directory: Path, tokenizer: Backend) -> Tokenizer:
    save_tokenizer(tokenizer, directory, chat_template=None)
    return tokenizer_from_hf(directory)


def _stream(
    tokenizer: Tokenizer, prompt: Sequence[int], groups: Sequence[Sequence[int]], skip: bool = True
) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(group) for group in groups), detokenizer.finish()]


def _ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    of_piece = {tokenizer.id_to_piece(i): i for i in range(tokenizer.vocab_size)}
    return [of_piece[piece] for piece in pieces]


def _bytes(tokenizer: Tokenizer, text: str) -> list[int]:
    return _ids(tokenizer, *(f"<0x{b:02X}>" for b in text.encode()))


_ID = st.one_of(st.integers(0, 300), st.integers(100, 260))


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
@given(
    prompt=st.lists(_ID, max_size=6),
    output=st.lists(_ID, max_size=20),
    cuts=st.lists(st.integers(0, 20)),
    skip=st.booleans(),
)
def test_joined_deltas_are_the_whole_text_without_the_prompt_however_tokens_are_grouped(
    tokenizers: dict[str, Tokenizer], kind: str, prompt: list[int], output: list[int], cuts: list[int], skip: bool
) -> None:
    """O-TOK-2, over any tokens at all: broken characters, special tokens, ids outside the vocabulary."""
    tokenizer = tokenizers[kind]
    before, whole = tokenizer.decode(prompt, skip), tokenizer.decode(prompt + output, skip)
    bounds = [0, *sorted(min(c, len(output)) for c in cuts), len(output)]
    groups = [output[a:b] for a, b in itertools.pairwise(bounds)]
    text = "".join(_stream(tokenizer, prompt, groups, skip))
    assert text == "".join(_stream(tokenizer, prompt, [[i] for i in output], skip))
    if whole.startswith(before):
        assert text == whole.removeprefix(before)
    else:
        # The output completed the character in which the prompt ended.
        assert before.endswith("\ufffd")
        assert before.removesuffix("\ufffd") + text == whole


@given(text=st.text(max_size=20))
def test_valid_text_streams_without_replacement_characters(tokenizers: dict[str, Tokenizer], text: str) -> None:
    """O-TOK-1."""
    tokenizer = tokenizers["byte-level"]
    deltas = _stream(tokenizer, [], [[i] for i in tokenizer.encode(text)], skip=False)
    assert "".join(deltas) == text
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


def test_emoji_of_four_tokens_comes_out_whole(tokenizers: dict[str, Tokenizer]) -> None:
    """O-TOK-1."""
    tokenizer = tokenizers["byte-level"]
    output = tokenizer.encode("ok🌶") + tokenizer.encode(" end</s>")
    deltas = _stream(tokenizer, tokenizer.encode(">"), [[i] for i in output])
    assert "".join(deltas) == "ok🌶 end"
    assert [d for d in deltas if "🌶" in d] == ["🌶"]
    assert not any("\ufffd" in delta for delta in deltas)


def test_sentencepiece_spaces_are_neither_lost_nor_doubled(tokenizers: dict[str, Tokenizer]) -> None:
    """O-TOK-2."""
    tokenizer = tokenizers["sentencepiece"]
    prompt, output = _ids(tokenizer, "<s>", "▁go"), _ids(tokenizer, "▁Hello", "▁big", "▁wor", "ld", "!", "▁Bye")
    assert _stream(tokenizer, prompt, [[i] for i in output]) == [" Hello", " big", " wor", "ld", "!", " Bye", ""]
    assert _stream(tokenizer, prompt, [output[:3], output[3:]]) == [" Hello big wor", "ld! Bye", ""]


def test_space_before_the_very_first_word_is_the_encoders(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    output = _ids(tokenizer, "▁Hello", "▁big")
    assert _stream(tokenizer, _ids(tokenizer, "<s>"), [[i] for i in output]) == ["Hello", " big", ""]
    # With BOS shown there is text before it.
    assert _stream(tokenizer, _ids(tokenizer, "<s>"), [output], skip=False) == [" Hello big", ""]


def test_characters_of_byte_tokens_come_out_as_soon_as_they_are_whole(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["sentencepiece"]
    output = _bytes(tokenizer, "é🌶")
    assert _stream(tokenizer, [], [[i] for i in output]) == ["", "é", "", "", "", "🌶", ""]
    # A bad byte after them does not take them back.
    assert _stream(tokenizer, [], [[*output, *_ids(tokenizer, "<0xFF>", "▁go")]]) == ["é🌶\ufffd go", ""]


def test_output_that_ends_inside_a_character_says_so_at_the_end_only(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    assert _stream(tokenizer, [], [[i] for i in tokenizer.encode("🌶")[:3]]) == ["", "", "", "\ufffd"]


def test_character_that_begins_in_the_prompt_belongs_to_the_output_if_that_completes_it(
    tokenizers: dict[str, Tokenizer],
) -> None:
    tokenizer = tokenizers["byte-level"]
    chili = tokenizer.encode("🌶")
    assert _stream(tokenizer, chili[:2], [chili[2:], tokenizer.encode("x")]) == ["🌶", "x", ""]
    assert _stream(tokenizer, chili[:2], [tokenizer.encode("x")]) == ["x", ""]
    assert _stream(tokenizer, chili[:2], []) == [""]
    # What no byte can complete is the prompt's alone.
    half_surrogate = _ids(tokenizer, "í", "ł")
    assert [tokenizer.id_to_bytes(i) for i in half_surrogate] == [b"\xed", b"\xa0"]
    assert _stream(tokenizer, half_surrogate, [tokenizer.encode("x")]) == ["x", ""]
    assert _stream(tokenizer, half_surrogate, []) == [""]


def test_cost_of_a_token_does_not_grow_with_the_output(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte-level"]
    invalid = tokenizer.encode("é")[1:]

    def cost(length: int) -> float:
        detokenizer = IncrementalDetokenizer(tokenizer, [])
        begin = time.process_time()
        for _ in range(length):
            detokenizer.push(invalid)
        return time.process_time() - begin

    cost(1_000)
    small = min(cost(5_000) for _ in range(3))
    assert min(cost(40_000) for _ in range(2)) < small * 8 * 4
