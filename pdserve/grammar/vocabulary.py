"""The vocabulary of a model as llguidance wants it: the bytes of each token, and how a text is usually cut into them.

A grammar is about text, so a token may come next if its bytes may. Special tokens have no text and are never allowed,
unless a Lark grammar names one. Where a grammar leaves only one text, llguidance asks for the tokens that the model is
used to see for it: a `"name"` that is spelt letter by letter is valid, but confuses the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from llguidance import LLTokenizer, TokenizerWrapper

from pdserve.tokenizer import Tokenizer
from pdserve.tokenizer.pieces import Spelling

_END = b"<end of text>"
"""Name of a token that no model has: it is allowed wherever the text may end, whatever tokens the request ends with."""

_START = "\n"
"""Put before a text whose tokenizer treats the start of a text in a way of its own; it joins with nothing."""


class Vocabulary:
    """Tokens by id, 0 to `vocab_size - 1`. Immutable; any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size` is the model's. Rows for which the tokenizer has no token are never allowed; tokens for which
        the model has no row cannot be drawn. Takes 0.3 s for 50,000 tokens."""
        self.vocab_size = vocab_size
        self.end_id = vocab_size
        """Bit of a mask that says whether the text may end here."""
        self._tokenizer = tokenizer
        tokens = [tokenizer.id_to_bytes(i) for i in range(vocab_size)]
        special = [i for i in sorted(tokenizer.special_token_ids) if i < vocab_size]
        self._tokens = tokens
        self._special = frozenset(special)
        self.backend = LLTokenizer(
            TokenizerWrapper(_Source([*tokens, _END], [*special, self.end_id], self.end_id, self))
        )

    def encode(self, text: str) -> Sequence[int]:
        """Tokens of this vocabulary whose bytes are those of `text`, none of them special: as the tokenizer cuts a text
        that goes on, if that is possible."""
        data = text.encode()
        if (ids := self._tokenizer.encode(text, add_special_tokens=False)) and self._spells(ids, data):
            return ids
        if self._tokenizer.decode_rule.spelling is Spelling.BYTE_FALLBACK:
            # A space is put before the text, which therefore begins with something else here.
            ids = self._tokenizer.encode(_START + text, add_special_tokens=False)
            for cut in range(1, 1 + len(_START) + 1):
                if self._spells(ids[cut:], data):
                    return ids[cut:]
        return self._longest_first(data)

    def _spells(self, ids: Sequence[int], data: bytes) -> bool:
        known = all(i < self.vocab_size and i not in self._special for i in ids)
        return known and b"".join([self._tokens[i] for i in ids]) == data

    def _longest_first(self, data: bytes) -> list[int]:
        """Always the longest token that fits; nothing is said of bytes that no token begins with."""
        by_bytes, longest = self._by_bytes
        ids: list[int] = []
        begin = 0
        while begin < len(data):
            for end in range(min(len(data), begin + longest), begin, -1):
                if (token_id := by_bytes.get(data[begin:end])) is not None:
                    ids.append(token_id)
                    begin = end
                    break
            else:
                break
        return ids

    @cached_property
    def _by_bytes(self) -> tuple[dict[bytes, int], int]:
        ids = {t: i for i, t in reversed([*enumerate(self._tokens)]) if t and i not in self._special}
        return ids, max(map(len, ids), default=0)


class _Source:
    """What `TokenizerWrapper` reads."""

    bos_token_id = None

    def __init__(
        self, tokens: Sequence[bytes], special_ids: Sequence[int], end_id: int, vocabulary: Vocabulary
    ) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end_id
        self._vocabulary = vocabulary

    def __call__(self, text: bytes) -> list[int]:
        return list(self._vocabulary.encode(text.decode("utf-8", "replace")))
