"""What `tokenizer.ggml.pre` means: how text is cut into words before byte-pair merges.

The names are those that llama.cpp's converter writes; the rules are those of the models' own tokenizers, which
llama.cpp follows. A wrong rule gives plausible but wrong token ids, so names that are not listed here are refused.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class PreTokenizerRule:
    """One way to cut text into words."""

    patterns: tuple[str, ...]
    """Applied one after the other; each cuts what the ones before left into matches and the gaps between them."""
    whole_words_first: bool = False
    """A word that is in the vocabulary is taken whole, whatever the merges say."""
    adds_bos: bool = False
    """Whether text gets a BOS when the file does not say."""
    nfc: bool = False
    """Text is composed (Unicode NFC) first."""

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        """The rule, followed by the byte-level alphabet."""
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    def normalizer(self) -> normalizers.Normalizer | None:
        """What happens to text before it is cut."""
        return normalizers.NFC() if self.nfc else None


_GPT2_RULE = PreTokenizerRule(patterns=(_GPT2,))
_LLAMA3_RULE = PreTokenizerRule(
    patterns=(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}",),
    whole_words_first=True,
    adds_bos=True,
)

RULES: dict[str, PreTokenizerRule] = {
    # llama.cpp's fallback for files that name no model: punctuation and digits are cut more finely than in GPT-2.
    "default": PreTokenizerRule(patterns=(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2_RULE,
    "gpt2": _GPT2_RULE,
    "llama-bpe": _LLAMA3_RULE,
    "llama-v3": _LLAMA3_RULE,
    "llama3": _LLAMA3_RULE,
    "qwen2": PreTokenizerRule(patterns=(rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}",), nfc=True),
    # Every number character is a word of its own, also ones like '½' and '٣'.
    "smollm": PreTokenizerRule(patterns=(r"\p{N}", _GPT2)),
}
