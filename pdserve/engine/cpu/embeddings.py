"""The embeddings of a step's tokens, from where they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np

from pdserve.engine.cpu.entry import fetch_f16, fetch_f32, fetch_q8_0
from pdserve.model.quants import dequantize_blocks
from pdserve.model.tensors import Float32Array, StoredTensor

Array = np.ndarray[Any, Any]

MOST_TOKENS: Final = 64
"""Rows that compiled code fetches, which keeps the interpreter's lock: those of more tokens take long enough for others
to have it meanwhile."""

_FETCH: Final[Mapping[str, tuple[type[np.generic], Callable[..., None]]]] = {
    "Q8_0": (np.uint8, fetch_q8_0),
    "F16": (np.uint16, fetch_f16),
    "F32": (np.float32, fetch_f32),
}
"""By type of the embedding: as what it is read, and by whom. Other types are decoded by numpy."""


class Embeddings:
    """Rows of a stored embedding as float32, the same bits whichever way they are fetched."""

    def __init__(self, stored: StoredTensor) -> None:
        """`stored` is [vocab_size, hidden]."""
        self._stored = stored
        self._rows = stored.data.reshape(stored.shape[0], -1)
        self._fetch: Callable[..., None] | None = None
        self._view: Array = self._rows
        if stored.type.name in _FETCH:
            kind, self._fetch = _FETCH[stored.type.name]
            self._view = self._rows.view(kind)

    def fetch(self, token_ids: Array, x: Float32Array, stride: int) -> None:
        """Row `token_ids[t]` to x[t * stride:], for each of them."""
        if self._fetch is not None and len(token_ids) <= MOST_TOKENS:
            self._fetch(self._view, token_ids, x, stride)
            return
        num_tokens, hidden = len(token_ids), self._stored.shape[1]
        rows = x[: num_tokens * stride].reshape(num_tokens, stride)
        rows[:, :hidden] = dequantize_blocks(self._stored, self._rows[token_ids]).reshape(num_tokens, hidden)
