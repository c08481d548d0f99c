"""The vocabulary in the metadata of a GGUF file, checked against itself."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pdserve.model.fields import Fields

_PREFIX = "tokenizer.ggml."


class TokenType(enum.IntEnum):
    """Values of `tokenizer.ggml.token_type` that matter here; NORMAL is 1."""

    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class GgufVocab:
    """Reads `tokenizer.ggml.*`. Every method raises ModelLoadError, naming file and key, for what it cannot take."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self.fields = Fields(path, metadata)
        self.tokens: list[str] = self.strings("tokens")
        """Pieces by id."""
        self.ids = {piece: i for i, piece in enumerate(self.tokens)}
        """Ids by piece."""
        if len(self.ids) != len(self.tokens):
            twice = next(piece for i, piece in enumerate(self.tokens) if self.ids[piece] != i)
            self.fail("tokens", f"holds {twice!r} more than once")
        self._types = self.numbers("token_type")

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raises ModelLoadError about `tokenizer.ggml.NAME`."""
        self.fields.fail(_PREFIX + name, problem)

    def text(self, name: str) -> str:
        """A string that must be there."""
        return self.fields.text(_PREFIX + name)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean."""
        return self.fields.boolean(_PREFIX + name, default)

    def token_id(self, name: str) -> int | None:
        """An id in the vocabulary, or None."""
        value = self.fields.optional_integer(_PREFIX + name, minimum=0)
        if value is not None and value >= len(self.tokens):
            self.fail(name, f"is {value}, but the vocabulary has {len(self.tokens)} tokens")
        return value

    def strings(self, name: str) -> list[str]:
        """An array of strings that must be there."""
        value = self.fields.raw(_PREFIX + name)
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(s, str) for s in value):
            self.fail(name, "is missing" if value is None else "must be an array of strings")
        return list(value)

    def numbers(self, name: str) -> list[int | float]:
        """An array with one number for each token."""
        value = self.fields.raw(_PREFIX + name)
        if value is None:
            self.fail(name, "is missing")
        array = np.asarray(value)
        if array.ndim != 1 or array.dtype.kind not in "iuf":
            self.fail(name, "must be an array of numbers")
        if len(array) != len(self.tokens):
            self.fail(name, f"has {len(array)} entries, but the vocabulary has {len(self.tokens)} tokens")
        numbers: list[int | float] = array.tolist()
        return numbers

    def of_type(self, *types: TokenType) -> list[str]:
        """Pieces of these types, by id."""
        return [piece for piece, kind in zip(self.tokens, self._types, strict=True) if kind in types]
