"""Token ids to text as they come, never a part of a character."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from pdserve.tokenizer.tokenizer import Tokenizer

_MAX_CHARACTER_BYTES = 4


class IncrementalDetokenizer:
    """Text of an output that grows token by token.

    All deltas joined are `decode(prompt + output)` without its prefix `decode(prompt)`, however the tokens were
    grouped. The cost of a push depends on its own tokens only.

    A prompt of token ids may end inside a character. If the output completes the character, the whole of it belongs
    to the output; if not, its U+FFFD belongs to the prompt.
    """

    __slots__ = ("_at_start", "_is_whole", "_prompt_is_cut", "_skip_special_tokens", "_tokenizer", "_utf8")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._last_bytes(prompt_ids)
        self._utf8.decode(tail)
        pending = self._utf8.getstate()[0]
        self._prompt_is_cut = len(pending.decode("utf-8", "replace")) == 1
        """The next character begins in the prompt."""
        if not self._prompt_is_cut:
            # The decoder also waits after half a UTF-8 surrogate, but no byte can make a character of that.
            self._utf8.reset()
        self._at_start = not tail
        """Neither prompt nor output has any text yet."""
        self._is_whole = False
        """The text so far ends with a whole character, and nothing of the prompt touches what follows."""

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next output tokens; the text that is certain now, often of one token less or none."""
        data = b"".join([self._tokenizer.id_to_bytes(i, self._skip_special_tokens) for i in ids])
        text = self._emit(self._utf8.decode(data))
        self._is_whole = not (self._at_start or self._prompt_is_cut or self._utf8.getstate()[0])
        return text

    def push_token(self, token_id: int) -> str:
        """As `push` of one token. After whole characters a token of whole characters has one text, whatever it
        follows."""
        if self._is_whole:
            text = self._tokenizer.id_to_text(token_id, self._skip_special_tokens)
            if text is not None:
                return text
        return self.push((token_id,))

    def finish(self) -> str:
        """The rest, at the end of the output: U+FFFD if it ends inside a character, otherwise nothing."""
        return self._emit(self._utf8.decode(b"", final=True))

    def _emit(self, text: str) -> str:
        if not text:
            return text
        if self._at_start:
            self._at_start = False
            return text[1:] if self._tokenizer.decode_rule.strip_leading_space and text.startswith(" ") else text
        if self._prompt_is_cut:
            self._prompt_is_cut = False
            return text.removeprefix("\ufffd")
        return text

    def _last_bytes(self, ids: Sequence[int]) -> bytes:
        """Enough of the end of the prompt to see whether it ends inside a character; empty when it has no text."""
        tail = b""
        for token_id in reversed(ids):
            tail = self._tokenizer.id_to_bytes(token_id, self._skip_special_tokens) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return tail[-_MAX_CHARACTER_BYTES:]
