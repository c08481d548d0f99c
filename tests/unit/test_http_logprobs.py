"""Tokens as strings, and where their text begins."""

from __future__ import annotations

import pytest

from pdserve.model.source import open_model
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_tiny_kv
from pdserve.tokenizer import Tokenizer, load_tokenizer
from pdserve.types import TokenLogprobs
from router.http.logprobs import LOWEST, CompletionLogprobs, TokenNames, chat_logprobs, joined

TEXT = "the 🌶 and é"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    shape = TinyShape(num_layers=1, hidden_size=32, intermediate_size=32)
    model = make_tiny_kv(tmp_path_factory.mktemp("model") / "m", shape=shape, options=TinyOptions(add_bos=True))
    return load_tokenizer(open_model(str(model)))


def at(*token_ids: int) -> list[TokenLogprobs]:
    return [TokenLogprobs(token_id, -0.5, ((token_id, -0.5), (5, -1.0))) for token_id in token_ids]


def test_names_of_tokens_tell_any_two_of_them_apart(tokenizer: Tokenizer) -> None:
    """O-API-2: entries must not collide for partial characters."""
    names = TokenNames(tokenizer, skip_special_tokens=True)
    every = [names.name(token_id) for token_id in range(tokenizer.vocab_size + 3)]
    assert len(set(every)) == len(every)
    assert every[0] == "<s>"
    assert every[-1] == f"token_id:{tokenizer.vocab_size + 2}"


def test_bytes_of_all_entries_are_the_text(tokenizer: Tokenizer) -> None:
    """O-API-2."""
    ids = tokenizer.encode(TEXT)
    names = TokenNames(tokenizer, skip_special_tokens=True)
    entries = chat_logprobs(names, at(*ids))
    assert len(entries) == len(ids)
    assert bytes(b for entry in entries for b in entry["bytes"]).decode() == TEXT
    assert entries[0]["token"] == "<s>"
    assert entries[0]["bytes"] == [], "a special token adds nothing to the text"
    shown = chat_logprobs(TokenNames(tokenizer, skip_special_tokens=False), at(ids[0]))
    assert bytes(shown[0]["bytes"]) == b"<s>"


def test_offsets_point_into_the_text_and_never_fall(tokenizer: Tokenizer) -> None:
    """O-API-2."""
    ids = tokenizer.encode(TEXT)
    lists = CompletionLogprobs(tokenizer, (), echo=True, skip_special_tokens=True)
    result = joined([lists.first(ids[0]), lists.of(at(*ids[1:]))])
    offsets = result["text_offset"]
    assert offsets == sorted(offsets)
    for token_id, offset in zip(ids, offsets, strict=True):
        piece = tokenizer.decode([token_id], skip_special_tokens=True)
        assert "\ufffd" in piece or TEXT[offset:].startswith(piece)
    pepper = TEXT.index("🌶")
    assert offsets.count(pepper) == 4
    assert (result["token_logprobs"][0], result["top_logprobs"][0]) == (None, None)
    assert {len(values) for values in result.values()} == {len(ids)}


def test_without_echo_offsets_begin_after_the_prompt(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    lists = CompletionLogprobs(tokenizer, ids[:3], echo=False, skip_special_tokens=True)
    assert lists.of(at(*ids[3:]))["text_offset"][0] == 0


def test_the_token_itself_is_among_its_alternatives(tokenizer: Tokenizer) -> None:
    lists = CompletionLogprobs(tokenizer, (), echo=False, skip_special_tokens=True)
    token = TokenLogprobs(40, -3.0, ((41, -0.5), (42, -1.0)))
    (top,) = lists.of([token])["top_logprobs"]
    names = TokenNames(tokenizer, skip_special_tokens=True)
    assert top == {names.name(41): -0.5, names.name(42): -1.0, names.name(40): -3.0}


def test_minus_infinity_is_a_number(tokenizer: Tokenizer) -> None:
    token = TokenLogprobs(40, float("-inf"), ((41, 0.0),))
    names = TokenNames(tokenizer, skip_special_tokens=True)
    assert chat_logprobs(names, [token])[0]["logprob"] == LOWEST


def test_tokens_may_be_called_by_their_ids(tokenizer: Tokenizer) -> None:
    names = TokenNames(tokenizer, skip_special_tokens=True, as_ids=True)
    (entry,) = chat_logprobs(names, at(5))
    assert entry["token"] == "token_id:5"
    assert entry["bytes"] == list(tokenizer.id_to_bytes(5))
    lists = CompletionLogprobs(tokenizer, (), echo=True, skip_special_tokens=True, as_ids=True)
    assert lists.first(5)["tokens"] == ["token_id:5"]
