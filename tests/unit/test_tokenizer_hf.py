"""Tokenizers of Hugging Face directories, with transformers as the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from pdserve.errors import InvalidRequestError, ModelLoadError
from pdserve.testing.tiny_tokenizers import byte_level_tokenizer, save_tokenizer, sentencepiece_tokenizer
from pdserve.tokenizer import Tokenizer
from pdserve.tokenizer.from_hf import tokenizer_from_hf

_TEXT = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            ["<s>", "</s>", "<|end|>", "<unk>", " ", "  ", "\n", "▁", "<0x41>", "Hello", " the", "日", "🏽‍♂️", "\x00"]
        ),
    ),
    max_size=8,
).map("".join)


def _byte_level(directory: Path) -> None:
    save_tokenizer(byte_level_tokenizer(), directory, chat_template=None)


def _byte_level_with_bos(directory: Path) -> None:
    save_tokenizer(byte_level_tokenizer(add_bos=True), directory, chat_template=None)


def _sentencepiece_with_bos(directory: Path) -> None:
    save_tokenizer(sentencepiece_tokenizer(("▁Hello", "▁the", "日"), add_bos=True), directory, chat_template=None)


@pytest.fixture(scope="module", params=[_byte_level, _byte_level_with_bos, _sentencepiece_with_bos])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours and transformers' tokenizer of the same files."""
    directory = tmp_path_factory.mktemp("model")
    request.param(directory)
    return tokenizer_from_hf(directory), AutoTokenizer.from_pretrained(directory)


def _edit(directory: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / name
    value = json.loads(path.read_text("utf-8")) if path.exists() else {}
    change(value)
    path.write_text(json.dumps(value), "utf-8")


@given(text=_TEXT)
def test_text_is_encoded_and_decoded_as_by_transformers(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == theirs.encode(text, add_special_tokens=False)
    for skip in (False, True):
        assert ours.decode(ids, skip) == theirs.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )


@given(text=_TEXT)
def test_raw_text_has_exactly_one_bos_if_the_tokenizer_adds_it(pair: tuple[Tokenizer, Any], text: str) -> None:
    """O-TOK-4."""
    ours, theirs = pair
    ids, expected = ours.encode(text), theirs.encode(text)
    adds_bos = theirs.encode("") == [theirs.bos_token_id]
    if adds_bos and text.startswith("<s>"):
        expected = expected[1:]
    assert ids == expected
    assert ours.adds_bos is adds_bos


def test_byte_level_text_comes_back_from_its_ids(tmp_path: Path) -> None:
    _byte_level(tmp_path)
    tokenizer = tokenizer_from_hf(tmp_path)
    text = "".join(chr(c) for c in range(0x20, 0x3000)) + "\x00\r\n🌶\U0010ffff"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_and_names(pair: tuple[Tokenizer, Any]) -> None:
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_token_ids >= set(theirs.all_special_ids)
    assert [ours.id_to_piece(i) for i in range(len(theirs))] == theirs.convert_ids_to_tokens(list(range(len(theirs))))
    assert ours.id_to_piece(len(theirs)) is None
    assert ours.id_to_piece(-1) is None


def test_ids_outside_the_vocabulary_give_no_text(pair: tuple[Tokenizer, Any]) -> None:
    ours, _ = pair
    ids = ours.encode("Hello")
    assert ours.decode([*ids, ours.vocab_size, 2**40, -1]) == ours.decode(ids)


def test_lone_surrogate_is_an_input_error(pair: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=r"text: character 2 is a lone surrogate \(U\+DFFF\)"):
        pair[0].encode("ab\udfff")


def test_many_threads_may_encode_at_once(pair: tuple[Tokenizer, Any]) -> None:
    texts = [f"Hello number {i} of the 日本 {'x' * i}" for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pair[0].encode, texts)) == [pair[0].encode(text) for text in texts]


@pytest.mark.parametrize("add_bos", [True, False])
def test_tokenizer_json_goes_before_the_bos_setting_of_the_config(tmp_path: Path, add_bos: bool) -> None:
    save_tokenizer(byte_level_tokenizer(add_bos=add_bos), tmp_path, chat_template=None)
    _edit(tmp_path, "tokenizer_config.json", lambda config: config.update(add_bos_token=not add_bos))
    ours, theirs = tokenizer_from_hf(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours.encode("Hi") == theirs.encode("Hi")
    assert ours.adds_bos is add_bos


def test_truncation_and_padding_left_in_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    save_tokenizer(backend, tmp_path, chat_template=None)
    assert len(tokenizer_from_hf(tmp_path).encode("12345")) == 5


def test_tokens_named_special_in_the_config_only_are_special(tmp_path: Path) -> None:
    _byte_level(tmp_path)
    _edit(tmp_path, "tokenizer.json", lambda spec: spec.update(added_tokens=[]))
    _edit(tmp_path, "tokenizer_config.json", lambda c: c.update(eos_token={"content": "</s>", "lstrip": False}))
    _edit(tmp_path, "tokenizer_config.json", lambda c: c.update(extra_special_tokens=["<|end|>", "<|not there|>"]))
    tokenizer = tokenizer_from_hf(tmp_path)
    assert tokenizer.encode("a<s></s><|end|>")[1:] == [0, 1, 2]
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.decode([0, 1, 2], skip_special_tokens=True) == ""


def test_special_tokens_map_is_read_when_the_config_names_none(tmp_path: Path) -> None:
    _byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": {"content": "<|end|>"}}')
    tokenizer = tokenizer_from_hf(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (2,))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [(None, None, (1,)), ([2, 1], 1, (2, 1)), (2, 1, (2,)), (None, [1, 2], (1, 2))],
)
def test_eos_ids_are_those_of_the_generation_config(
    tmp_path: Path, generation: object, config: object, expected: tuple[int, ...]
) -> None:
    _byte_level(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert tokenizer_from_hf(tmp_path).eos_token_ids == expected


def test_named_chat_templates_and_the_template_file(tmp_path: Path) -> None:
    _byte_level(tmp_path)
    chat = [{"role": "user", "content": "x"}]
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    _edit(tmp_path, "tokenizer_config.json", lambda config: config.update(chat_template=named))
    assert tokenizer_from_hf(tmp_path).render_chat(chat) == "plain"
    _edit(tmp_path, "tokenizer_config.json", lambda config: config.update(chat_template=named[:1]))
    assert not tokenizer_from_hf(tmp_path).has_chat_template
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer_from_hf(tmp_path).render_chat(chat) == "file"


def _without_decoder(spec: dict[str, Any]) -> None:
    spec["decoder"] = None


def _wordpiece_decoder(spec: dict[str, Any]) -> None:
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}


def _strip_more(spec: dict[str, Any]) -> None:
    spec["decoder"]["decoders"][-1]["start"] = 2


def _unigram(spec: dict[str, Any]) -> None:
    spec["model"]["type"] = "Unigram"


def _bad_merge(spec: dict[str, Any]) -> None:
    spec["model"]["merges"] = [["no such", "piece"]]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_without_decoder, "decoder: none is not supported"),
        (_wordpiece_decoder, "decoder: WordPiece is not supported"),
        (_strip_more, "decoder: Replace .* Strip is not supported"),
        (_unigram, "model.type: 'Unigram' is not supported"),
        (_bad_merge, "tokenizer.json: "),
        (lambda spec: spec.update(model=[]), "model: must be a JSON object, got list"),
    ],
)
def test_unsupported_tokenizer_json_is_refused_by_name(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], match: str
) -> None:
    _sentencepiece_with_bos(tmp_path)
    _edit(tmp_path, "tokenizer.json", change)
    with pytest.raises(ModelLoadError, match=match) as caught:
        tokenizer_from_hf(tmp_path)
    assert str(tmp_path / "tokenizer.json") in caught.value.message


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: no such file"):
        tokenizer_from_hf(tmp_path)
    _byte_level(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: is not JSON"):
        tokenizer_from_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": 7}')
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: bos_token: must be a string"):
        tokenizer_from_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": 7}')
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: chat_template: must be a string"):
        tokenizer_from_hf(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: eos_token_id"):
        tokenizer_from_hf(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json: cannot be read"):
        tokenizer_from_hf(tmp_path)
