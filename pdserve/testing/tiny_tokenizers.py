"""Small tokenizers of the two kinds that Llama models have, as Hugging Face tokenizer files.

Both take `pieces`: strings that become one token each. A piece is reachable by encoding text as well, through merges
that build it from left to right.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

BOS, EOS, END_OF_TURN = "<s>", "</s>", "<|end|>"
UNK = "<unk>"
SPECIAL_TOKENS = (BOS, EOS, END_OF_TURN)
"""In every tokenizer made here. END_OF_TURN is there for models with two EOS ids."""

_WORDS = """the of and to in is that it was for on are as with they be at one have this from or had by not but what some
we can out other were all there when up use your how said an each she which do their time if will way about many then"""
COMMON_PIECES = (*(f" {word}" for word in _WORDS.split()), "ing", "ed", "er", "ion", "re", "th", "he", "on", "es", "st")
"""Makes the byte-level vocabulary a little more like a real one."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('Unknown role: ' + m['role']) }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
"""Writes BOS itself, as many real templates do."""


def byte_level_tokenizer(pieces: Sequence[str] = COMMON_PIECES, *, add_bos: bool = False) -> Tokenizer:
    """Byte-level BPE: BOS 0, EOS 1, END_OF_TURN 2, then the 256 bytes, then pieces and what they are merged from.

    A character beyond ASCII is as many tokens as it has bytes in UTF-8, unless it is in a piece.
    """
    vocab = {BOS: 0, EOS: 1, END_OF_TURN: 2}
    for c in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[c] = len(vocab)
    merges = _add_pieces(vocab, [byte_level_spelling(p) for p in pieces])
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, SPECIAL_TOKENS, add_bos)


def byte_level_spelling(text: str) -> str:
    """How byte-level vocabularies write a text: one printable character per byte of its UTF-8."""
    return "".join(part for part, _ in pre_tokenizers.ByteLevel(False, False).pre_tokenize_str(text))


def sentencepiece_tokenizer(pieces: Sequence[str], *, add_bos: bool = False) -> Tokenizer:
    """The Llama 2 kind: UNK 0, BOS 1, EOS 2, END_OF_TURN 3, then 256 byte-fallback tokens, then pieces.

    A space is written U+2581 and belongs to the word it precedes; text is encoded as if a space came first, and the
    decoder takes one leading space away.
    """
    vocab = {UNK: 0, BOS: 1, EOS: 2, END_OF_TURN: 3} | {f"<0x{b:02X}>": 4 + b for b in range(256)}
    for c in sorted({c for p in pieces for c in p}):
        vocab[c] = len(vocab)
    merges = _add_pieces(vocab, pieces)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=UNK, byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finish(tokenizer, (UNK, *SPECIAL_TOKENS), add_bos)


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of a token given as it is in the vocabulary; it must be there."""
    found = tokenizer.token_to_id(token)
    assert found is not None, f"{token!r} is not in the vocabulary"
    return int(found)


def save_tokenizer(tokenizer: Tokenizer, directory: Path, *, chat_template: str | None) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.token_to_id(UNK) is not None:
        config["unk_token"] = UNK
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")


def _add_pieces(vocab: dict[str, int], pieces: Sequence[str]) -> list[tuple[str, str]]:
    """Add each piece and its beginnings to the vocabulary; returns the merges, in order of rank."""
    merges: dict[tuple[str, str], None] = {}
    for piece in pieces:
        left = piece[0]
        for c in piece[1:]:
            merges[left, c] = None
            left += c
            vocab.setdefault(left, len(vocab))
    return list(merges)


def _finish(tokenizer: Tokenizer, special: Sequence[str], add_bos: bool) -> Tokenizer:
    tokenizer.add_special_tokens(list(special))
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, token_id(tokenizer, BOS))]
        )
    return tokenizer
