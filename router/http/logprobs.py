"""Log-probabilities in the two shapes that OpenAI's endpoints have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pdserve.tokenizer import IncrementalDetokenizer, Tokenizer
from pdserve.types import TokenLogprobs

LOWEST: Final = -9999.0
"""In place of minus infinity, which JSON cannot write."""


class TokenNames:
    """Tokens as strings, each of which means one token's bytes."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool, as_ids: bool = False) -> None:
        """`skip_special_tokens`: whether special tokens have no bytes, as they add none to the text. `as_ids`: every
        token is called by its id."""
        self._tokenizer = tokenizer
        self._as_ids = as_ids
        self._skip_special_tokens = skip_special_tokens

    def name(self, token_id: int) -> str:
        """Its text; `bytes:\\xf0\\x9f` if it is not whole characters, so that no two of those have the same name;
        `token_id:7` if it has no text, or ids are wanted."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.id_to_bytes(token_id)
        try:
            return data.decode() or f"token_id:{token_id}"
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def data(self, token_id: int) -> list[int]:
        """The bytes that it adds to the text."""
        return list(self._tokenizer.id_to_bytes(token_id, self._skip_special_tokens))


def chat_logprobs(names: TokenNames, tokens: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """`choices[].logprobs.content`: one entry for each token."""
    return [
        {
            "token": names.name(token.token_id),
            "logprob": max(token.logprob, LOWEST),
            "bytes": names.data(token.token_id),
            "top_logprobs": [
                {"token": names.name(token_id), "logprob": max(logprob, LOWEST), "bytes": names.data(token_id)}
                for token_id, logprob in token.top
            ],
        }
        for token in tokens
    ]


class CompletionLogprobs:
    """`choices[].logprobs` of plain completions: parallel lists, over prompt and output if the prompt is echoed.

    `text_offset` is where a token's text begins in the text of the choice; of a character that several tokens make,
    all but the last begin where the character does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        echo: bool,
        skip_special_tokens: bool,
        as_ids: bool = False,
    ) -> None:
        """With `echo` the text begins with the prompt, otherwise after it."""
        self._names = TokenNames(tokenizer, skip_special_tokens=skip_special_tokens, as_ids=as_ids)
        self._text = IncrementalDetokenizer(tokenizer, () if echo else prompt_ids, skip_special_tokens)
        self._offset = 0

    def first(self, token_id: int) -> dict[str, list[Any]]:
        """Of the prompt's first token, which nothing comes before."""
        return {
            "tokens": [self._names.name(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._advance(token_id)],
        }

    def of(self, tokens: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """Of the next tokens, in order. The token itself is always among its `top_logprobs`."""
        return {
            "tokens": [self._names.name(token.token_id) for token in tokens],
            "token_logprobs": [max(token.logprob, LOWEST) for token in tokens],
            "top_logprobs": [self._top(token) for token in tokens],
            "text_offset": [self._advance(token.token_id) for token in tokens],
        }

    def _top(self, token: TokenLogprobs) -> dict[str, float]:
        result: dict[str, float] = {}
        for token_id, logprob in (*token.top, (token.token_id, token.logprob)):
            # Two spellings of the same bytes: the likelier one, which comes first, stays.
            result.setdefault(self._names.name(token_id), max(logprob, LOWEST))
        return result

    def _advance(self, token_id: int) -> int:
        begin = self._offset
        self._offset += len(self._text.push((token_id,)))
        return begin


def joined(parts: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """Pieces of one choice as one."""
    result: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for part in parts:
        for name, values in part.items():
            result[name].extend(values)
    return result
