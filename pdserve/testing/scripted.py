"""Fake workers that say what a test wants."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.tokenizer import Tokenizer

ASSISTANT = "[assistant] "
"""How the template of tiny models begins the assistant's turn."""


class Script:
    """A next token for fake workers: after the beginning of the assistant's turn comes `text`, then EOS for ever."""

    def __init__(self, tokenizer: Tokenizer, text: str = "") -> None:
        self._tokenizer = tokenizer
        self._marker = tokenizer.encode(ASSISTANT, add_special_tokens=False)
        self.text = text
        """May be changed between requests."""

    def __call__(self, token_ids: Sequence[int]) -> int:
        """See fake_worker_base.NextToken."""
        reply = self._tokenizer.encode(self.text, add_special_tokens=False)
        size = len(self._marker)
        for begin in range(len(token_ids) - size, -1, -1):
            if list(token_ids[begin : begin + size]) == self._marker:
                said = len(token_ids) - begin - size
                return reply[said] if said < len(reply) else self._tokenizer.eos_token_ids[0]
        raise AssertionError("no assistant's turn in the prompt")
