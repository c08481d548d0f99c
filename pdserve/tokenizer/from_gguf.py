"""Builds the tokenizer from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, processors

from pdserve.tokenizer.chat import ChatTemplate
from pdserve.tokenizer.gguf_pretokenizers import RULES
from pdserve.tokenizer.gguf_vocab import GgufVocab, TokenType
from pdserve.tokenizer.pieces import SPACE_MARKER, DecodeRule, Spelling
from pdserve.tokenizer.tokenizer import Tokenizer


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The tokenizer that the metadata of a GGUF file describes; `path` names the file in errors.

    Supports byte-level BPE (`gpt2`, with the pre-tokenizers of `gguf_pretokenizers`) and SentencePiece BPE (`llama`).
    Raises ModelLoadError, naming the key, for anything else and for metadata that contradicts itself.
    """
    vocab = GgufVocab(metadata, path)
    model = vocab.text("model")
    if model == "gpt2":
        backend, rule, adds_bos = _byte_level(vocab)
    elif model == "llama":
        backend, rule, adds_bos = _sentencepiece(vocab)
    else:
        vocab.fail("model", f"is {model!r}; supported are 'gpt2' and 'llama'")
    control, user = vocab.of_type(TokenType.CONTROL), vocab.of_type(TokenType.USER_DEFINED)
    backend.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in control])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in user])
    bos, eos = vocab.token_id("bos_token_id"), vocab.token_id("eos_token_id")
    _add_around_text(backend, vocab, bos=bos, eos=eos, adds_bos=adds_bos)
    ends = [eos, vocab.token_id("eot_token_id"), vocab.token_id("eom_token_id")]
    return Tokenizer(
        backend,
        decode_rule=rule,
        bos_token_id=bos,
        eos_token_ids=[i for i in ends if i is not None],
        chat_template=_chat_template(vocab, path),
    )


def _byte_level(vocab: GgufVocab) -> tuple[tokenizers.Tokenizer, DecodeRule, bool]:
    """Tokenizer, how it decodes, and whether text gets a BOS unless the file says otherwise."""
    name = vocab.text("pre")
    if name not in RULES:
        vocab.fail("pre", f"is {name!r}; supported are {', '.join(RULES)}")
    rule = RULES[name]
    merges = [_split_merge(vocab, i, merge) for i, merge in enumerate(vocab.strings("merges"))]
    try:
        model = models.BPE(vocab=vocab.ids, merges=merges, ignore_merges=rule.whole_words_first)
    except Exception as exc:  # The library raises nothing narrower.
        vocab.fail("merges", f"does not fit the vocabulary: {exc}")
    backend = tokenizers.Tokenizer(model)
    if (normalizer := rule.normalizer()) is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = rule.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    return backend, DecodeRule(spelling=Spelling.BYTE_LEVEL), rule.adds_bos


def _split_merge(vocab: GgufVocab, index: int, merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        vocab.fail("merges", f"[{index}] must be two pieces with a space between, got {merge!r}")
    return left, right


def _sentencepiece(vocab: GgufVocab) -> tuple[tokenizers.Tokenizer, DecodeRule, bool]:
    """As `_byte_level`. The normalizer, model and decoder are those of Llama 2's own tokenizer.json."""
    if vocab.flag("remove_extra_whitespaces", default=False):
        vocab.fail("remove_extra_whitespaces", "is true, which is not supported")
    unknown = vocab.token_id("unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab.ids,
            merges=_merges_from_scores(vocab),
            unk_token=None if unknown is None else vocab.tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    adds_space = vocab.flag("add_space_prefix", default=True)
    marker = normalizers.Replace(" ", SPACE_MARKER)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARKER), marker]) if adds_space else marker
    steps = [decoders.Replace(SPACE_MARKER, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend, DecodeRule(spelling=Spelling.BYTE_FALLBACK, strip_leading_space=adds_space), True


def _merges_from_scores(vocab: GgufVocab) -> list[tuple[str, str]]:
    """The merges that make BPE do as SentencePiece does: join the neighbours whose union has the best score.

    SentencePiece files have no merges: any two neighbours may join if their union is a piece. So every way to cut a
    piece in two pieces is a merge, ranked by the score of the piece.
    """
    scores = vocab.numbers("scores")
    never_joined = {*vocab.of_type(*TokenType)}
    parts = {piece: i for piece, i in vocab.ids.items() if piece not in never_joined}
    by_score = sorted(parts, key=lambda piece: (-scores[parts[piece]], parts[piece]))
    return [
        (piece[:cut], piece[cut:])
        for piece in by_score
        for cut in range(1, len(piece))
        if piece[:cut] in parts and piece[cut:] in parts
    ]


def _add_around_text(
    backend: tokenizers.Tokenizer, vocab: GgufVocab, *, bos: int | None, eos: int | None, adds_bos: bool
) -> None:
    """Makes raw text begin and end as the file says. `adds_bos` holds where it says nothing."""
    begin: list[tuple[str, int]] = []
    end: list[tuple[str, int]] = []
    if vocab.flag("add_bos_token", default=adds_bos):
        if bos is None:
            vocab.fail("bos_token_id", "is missing, but BOS is to be added to text")
        begin.append((vocab.tokens[bos], bos))
    if vocab.flag("add_eos_token", default=False):
        if eos is None:
            vocab.fail("eos_token_id", "is missing, but EOS is to be added to text")
        end.append((vocab.tokens[eos], eos))
    backend.post_processor = processors.TemplateProcessing(
        single=[*(f"{piece}:0" for piece, _ in begin), "$A:0", *(f"{piece}:0" for piece, _ in end)],
        special_tokens=[*begin, *end],
    )


def _chat_template(vocab: GgufVocab, path: Path) -> ChatTemplate | None:
    key = "tokenizer.chat_template"
    if key not in vocab.fields:
        return None
    ids = {
        "bos_token": vocab.token_id("bos_token_id"),
        "eos_token": vocab.token_id("eos_token_id"),
        "unk_token": vocab.token_id("unknown_token_id"),
        "pad_token": vocab.token_id("padding_token_id"),
    }
    variables = {name: vocab.tokens[i] for name, i in ids.items() if i is not None}
    return ChatTemplate(vocab.fields.text(key), variables=variables, where=f"{path}: {key}")
