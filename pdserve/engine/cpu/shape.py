"""Sizes of a model as the kernels take them: an int64 vector, with rows padded to whole vectors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.engine.cpu.formats import BLOCK, ROWS
from pdserve.errors import ModelLoadError
from pdserve.kv_layout import SCALE_NBYTES
from pdserve.model.config import ModelConfig

(HIDDEN, HIDDEN_PADDED, HEADS, KV_HEADS, HEAD_DIM, FFN_PADDED, LAYERS, VOCAB_PADDED, BLOCK_SIZE, ATTENTION_PADDED,
 QKV_WIDTH, SINKS, HEAD_STRIDE, SHAPE_LENGTH) = range(14)  # fmt: skip
"""Places in `ModelShape.vector`."""

Q, K, V, O, GATE, UP, DOWN, MATRICES_PER_LAYER = range(8)  # noqa: E741 - the projections' usual names
"""Matrices of a layer, in the order of their rows in `PackedModel.matrices`."""

MAX_HEAD_DIM = 256
"""Rows of queries in the scratch memory of attention are so long."""


def padded(n: int, multiple: int) -> int:
    """`n` rounded up to a multiple."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of `config` with KV blocks of `block_size` tokens, in float16 or in codes of eight bits with scales."""

    config: ModelConfig
    block_size: int
    coded_kv: bool = False

    def __post_init__(self) -> None:
        """Raises ModelLoadError for a head size that does not fill vectors, or is too large."""
        head_dim = self.config.head_dim
        if head_dim % ROWS or head_dim > MAX_HEAD_DIM:
            raise ModelLoadError(
                f"head_dim is {head_dim}, but the CPU engine needs a multiple of {ROWS} up to {MAX_HEAD_DIM}; "
                "set engine.kind: torch",
                field="head_dim",
            )

    @property
    def hidden_padded(self) -> int:
        """Length of a row of the residual stream."""
        return padded(self.config.hidden_size, BLOCK)

    @property
    def ffn_padded(self) -> int:
        """Length of a row between gate/up and down."""
        return padded(self.config.intermediate_size, BLOCK)

    @property
    def attention_padded(self) -> int:
        """Length of a row of attention output."""
        return padded(self.config.q_size, BLOCK)

    @property
    def qkv_width(self) -> int:
        """Length of a row of queries, keys and values."""
        return self.config.q_size + 2 * self.config.kv_size

    @property
    def vocab_padded(self) -> int:
        """Length of a row of logits."""
        return padded(self.config.vocab_size, ROWS)

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.config.num_heads // self.config.num_kv_heads

    @property
    def head_stride(self) -> int:
        """Elements of K or V of one head of a layer of a block: float16, or bytes, with two for each scale."""
        return self.block_size * (self.config.head_dim + (SCALE_NBYTES if self.coded_kv else 0))

    @property
    def block_elements(self) -> int:
        """Elements of a KV block over all layers."""
        return self.config.num_layers * 2 * self.config.num_kv_heads * self.head_stride

    @property
    def vector(self) -> npt.NDArray[np.int64]:
        """The sizes at the places named above."""
        c = self.config
        values = {
            HIDDEN: c.hidden_size, HIDDEN_PADDED: self.hidden_padded, HEADS: c.num_heads, KV_HEADS: c.num_kv_heads,
            HEAD_DIM: c.head_dim, FFN_PADDED: self.ffn_padded, LAYERS: c.num_layers, VOCAB_PADDED: self.vocab_padded,
            BLOCK_SIZE: self.block_size, ATTENTION_PADDED: self.attention_padded, QKV_WIDTH: self.qkv_width,
            SINKS: c.attention_sinks, HEAD_STRIDE: self.head_stride,
        }  # fmt: skip
        return np.array([values[i] for i in range(SHAPE_LENGTH)], np.int64)

    @property
    def windows(self) -> npt.NDArray[np.int64]:
        """Of each layer the keys that a query sees, 0 for all."""
        return np.array([self.config.window(layer) for layer in range(self.config.num_layers)], np.int64)
