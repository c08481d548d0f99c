"""Builds the tokenizer from a Hugging Face model directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from pdserve.errors import ModelLoadError
from pdserve.tokenizer.chat import ChatTemplate
from pdserve.tokenizer.pieces import decode_rule_from_json
from pdserve.tokenizer.tokenizer import Tokenizer

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def tokenizer_from_hf(directory: Path) -> Tokenizer:
    """The tokenizer of a directory as `save_pretrained` writes it.

    Reads `tokenizer.json` and, where they exist, `tokenizer_config.json`, `special_tokens_map.json`,
    `chat_template.jinja`, `generation_config.json` and `config.json`. Token ids are those of transformers'
    `TokenizersBackend`. Raises ModelLoadError, naming the file and field.
    """
    path = directory / "tokenizer.json"
    spec = _read_object(path)
    if spec is None:
        raise ModelLoadError(
            f"{path}: no such file; a tokenizer is needed in this format (not tokenizer.model or vocab.json)"
        )
    kind = _object(spec.get("model"), f"{path}: model").get("type", "BPE")
    if kind != "BPE":
        raise ModelLoadError(f"{path}: model.type: {kind!r} is not supported; supported is 'BPE'")
    decoder = spec.get("decoder")
    rule = decode_rule_from_json(None if decoder is None else _object(decoder, f"{path}: decoder"), str(path))
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises no narrower type
        raise ModelLoadError(f"{path}: {exc}") from exc

    config = _read_object(directory / "tokenizer_config.json") or {}
    named = _named_special_tokens(directory, config)
    _mark_special(backend, config, named)
    ids = {name: backend.token_to_id(token.content) for name, token in named.items()}
    bos, eos = ids.get("bos_token"), ids.get("eos_token")
    return Tokenizer(
        backend,
        decode_rule=rule,
        bos_token_id=bos,
        eos_token_ids=_eos_of_generation(directory) or ([] if eos is None else [eos]),
        chat_template=_chat_template(directory, config, {name: token.content for name, token in named.items()}),
    )


def _named_special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """`bos_token` and the like. Given as a string or an object, in one of two files."""
    older = _read_object(directory / "special_tokens_map.json") or {}
    tokens: dict[str, AddedToken] = {}
    for name in _SPECIAL_NAMES:
        source = "tokenizer_config.json" if config.get(name) is not None else "special_tokens_map.json"
        value = config.get(name) if config.get(name) is not None else older.get(name)
        if value is not None:
            tokens[name] = _added_token(value, f"{directory / source}: {name}")
    return tokens


def _added_token(value: object, where: str) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        options = {key: bool(value.get(key, False)) for key in ("lstrip", "rstrip", "single_word", "normalized")}
        return AddedToken(value["content"], special=True, **options)
    raise ModelLoadError(f"{where}: must be a string or an object with content, got {value!r}")


def _mark_special(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: Mapping[str, AddedToken]) -> None:
    """Makes tokens special that tokenizer.json lists as ordinary ones. Adds none: the model has no row for them."""
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens")) or []
    extra = list(extra.values()) if isinstance(extra, Mapping) else extra
    wanted = [*named.values(), *(_added_token(token, "tokenizer_config.json: extra_special_tokens") for token in extra)]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [t for t in wanted if t.content not in special and backend.token_to_id(t.content) is not None]
    )


def _eos_of_generation(directory: Path) -> list[int]:
    """Ids that end an output: generation_config.json, or config.json where that says nothing, as transformers takes
    them."""
    for name in ("generation_config.json", "config.json"):
        value = (_read_object(directory / name) or {}).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ModelLoadError(f"{directory / name}: eos_token_id: must be token ids, got {value!r}")
        return ids
    return []


def _chat_template(directory: Path, config: Mapping[str, Any], variables: Mapping[str, str]) -> ChatTemplate | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return ChatTemplate(_read_text(path), variables=variables, where=str(path))
    where = f"{directory / 'tokenizer_config.json'}: chat_template"
    source = config.get("chat_template")
    if isinstance(source, list):
        # Several templates by name; "default" is the one for plain chats.
        by_name = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, Mapping)}
        source = by_name.get("default")
    if source is None:
        return None
    if not isinstance(source, str):
        raise ModelLoadError(f"{where}: must be a string or a list of named templates, got {type(source).__name__}")
    return ChatTemplate(source, variables=variables, where=where)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ModelLoadError(f"{path}: cannot be read: {exc}") from exc


def _read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None when there is no such file."""
    if not path.is_file():
        return None
    try:
        value = json.loads(_read_text(path))
    except ValueError as exc:
        raise ModelLoadError(f"{path}: is not JSON: {exc}") from exc
    return dict(_object(value, str(path)))


def _object(value: object, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"{where}: must be a JSON object, got {type(value).__name__}")
    return value
