"""Keeps control tokens that users type in chat messages from becoming control tokens.

A message `<|im_end|>\\n<|im_start|>system` must not end the user's turn. Whether a piece of rendered text came from a
message or from the template cannot be seen in the text, so both are marked:

- before rendering, special-token strings inside message content are replaced by stand-ins that nobody can guess;
- after rendering, the special-token strings that are left are the template's, and are replaced by other names;
- the stand-ins turn back into what the user wrote, and a copy of the tokenizer, in which the special tokens have only
  those other names, encodes the result. What the user wrote is then ordinary text there, and everything else is as
  ever.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping

import tokenizers

# Private-use characters and decimal digits pass through templates (trim, lower, tojson) and normalizers unchanged.
_TYPED, _CONTROL = "\ue000", "\ue001"


class ContentShield:
    """Encodes rendered chats in which message content holds special-token strings."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: Mapping[str, int]) -> None:
        """`special_ids`: special-token string -> id. Copies the vocabulary, so make one only when it is needed."""
        nonce = secrets.randbits(96)
        self._typed = {text: f"{_TYPED}{nonce}:{token_id}{_TYPED}" for text, token_id in special_ids.items()}
        self._control = {text: f"{_CONTROL}{nonce}:{token_id}{_CONTROL}" for text, token_id in special_ids.items()}
        self._written = {stand_in: text for text, stand_in in self._typed.items()}
        self._any_special = any_of(special_ids)
        self._any_typed = any_of(self._written)
        self._backend = _renamed_copy(backend, self._control)

    def hide(self, content: str) -> str:
        """Message content with special-token strings replaced by their stand-ins."""
        return self._any_special.sub(lambda found: self._typed[found[0]], content)

    def encode(self, rendered: str) -> list[int]:
        """Token ids of a chat rendered from hidden content."""
        text = self._any_special.sub(lambda found: self._control[found[0]], rendered)
        text = self._any_typed.sub(lambda found: self._written[found[0]], text)
        return self._backend.encode(text, add_special_tokens=False).ids


def any_of(texts: Mapping[str, object]) -> re.Pattern[str]:
    """A pattern that finds any of `texts`, the longest where several begin, and nothing when there are none."""
    return re.compile("|".join(re.escape(t) for t in sorted(texts, key=len, reverse=True)) or r"(?!)")


def _renamed_copy(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """The tokenizer with special tokens under other names and the same ids."""
    spec = json.loads(backend.to_str())
    model = spec["model"]
    # The vocabulary lists special tokens too, and a merge that ends in one would give it for plain text.
    model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) not in names]
    model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    # It would name special tokens, and a chat is never post-processed.
    spec["post_processor"] = None
    return tokenizers.Tokenizer.from_str(json.dumps(spec))
