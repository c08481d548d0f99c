"""Memory that a step works in, made once for the largest batch so far."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pdserve.engine.cpu.attention import scratch_size
from pdserve.engine.cpu.formats import BLOCK
from pdserve.engine.cpu.gemm import TOKEN_BLOCK
from pdserve.engine.cpu.shape import ModelShape

_GRANULE_TOKENS = 64
_GRANULE_ROWS = 8


class Workspace:
    """Arrays for up to `tokens` query tokens and `rows` rows of logits. Rows are padded as `ModelShape` says."""

    def __init__(self, shape: ModelShape, threads: int) -> None:
        self._shape = shape
        self.scratch = np.zeros(
            (threads, max(scratch_size(shape.group, shape.config.head_dim), 2 * TOKEN_BLOCK * BLOCK)), np.float32
        )
        """float32 [threads, S]: for attention, and for a strip of gate and up."""
        self._tokens = 0
        self._rows = 0
        self.reserve(_GRANULE_TOKENS, _GRANULE_ROWS)

    def reserve(self, tokens: int, rows: int) -> None:
        """Make room for a batch; what was in the arrays is lost if there was not enough."""
        shape = self._shape
        if tokens > self._tokens:
            self._tokens = -(-tokens // _GRANULE_TOKENS) * _GRANULE_TOKENS
            widest = max(shape.hidden_padded, shape.attention_padded)
            # Zeros: padding that is read before anything was written there must not be NaN.
            self.x = np.zeros(self._tokens * shape.hidden_padded, np.float32)
            self.xn = np.zeros(self._tokens * widest, np.float32)
            self.xq = np.zeros(self._tokens * widest, np.int8)
            self.xs = np.zeros(self._tokens * (widest // BLOCK), np.float32)
            self.xpair = np.zeros(self._tokens * (widest // BLOCK), np.int32)
            self.inner = np.zeros(self._tokens * shape.ffn_padded, np.float32)
            self.inner_q = np.zeros(self._tokens * shape.ffn_padded, np.int8)
            self.inner_s = np.zeros(self._tokens * (shape.ffn_padded // BLOCK), np.float32)
            self.inner_pair = np.zeros(self._tokens * (shape.ffn_padded // BLOCK), np.int32)
            self.y = np.zeros(self._tokens * shape.qkv_width, np.float32)
            # Without sinks it is not used, but kernels want an array.
            sink_rows = self._tokens if shape.config.attention_sinks else 1
            self.sink_q = np.zeros(sink_rows * shape.config.q_size, np.float32)
            self.items = np.zeros((self._tokens, 2), np.int64)
            self.sequence = np.zeros(self._tokens, np.int64)
        if rows > self._rows:
            self._rows = -(-rows // _GRANULE_ROWS) * _GRANULE_ROWS
            self._logits = np.zeros(self._rows * shape.vocab_padded, np.float32)

    @property
    def logits_flat(self) -> npt.NDArray[np.float32]:
        """Rows of padded logits, flat."""
        return self._logits

    def logits(self, rows: int) -> npt.NDArray[np.float32]:
        """Results of a step: a view [rows, vocab_size]."""
        padded = self._logits[: rows * self._shape.vocab_padded].reshape(rows, self._shape.vocab_padded)
        return padded[:, : self._shape.config.vocab_size]
