"""The shape of KV memory, and the narrow view of it that the transfer layer gets.

The pool is block-major: block `b` of a worker is one contiguous range of `[num_layers, 2 (K, V), num_kv_heads, ...]`,
so a whole block, a run of layers inside it, and a run of heads inside one layer's K or V are each one contiguous piece.
The order of the last two axes (tokens, head_dim) is the engine's business and part of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Geometry of one KV block. Two workers can exchange blocks if and only if theirs are equal."""

    dtype: str
    block_size: int
    """Tokens in a block."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    order: str = "token,dim"
    """Order of the last two axes of K and V, compared literally."""

    @property
    def layer_nbytes(self) -> int:
        """Bytes of K and V of one layer of one block."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_NBYTES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_nbytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def differences(self, other: KvLayout) -> list[str]:
        """Names and values of the fields in which two layouts differ, for an error message."""
        return [
            f"{name} {getattr(self, name)!r} != {getattr(other, name)!r}"
            for name in self.__dataclass_fields__
            if getattr(self, name) != getattr(other, name)
        ]


class KvBlockStore(Protocol):
    """KV memory as bytes: all that the transfer layer knows of a pool.

    `read` and `write` move whole layer ranges of whole blocks. They may be called from any thread, for blocks that the
    caller owns at that moment; they touch no other block.
    """

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks."""

    def read(self, blocks: Sequence[int], layer_begin: int, layer_end: int) -> list[memoryview]:
        """Bytes of layers [layer_begin, layer_end) of each block, in order, one view per contiguous piece.

        On CPU these are views of the pool itself: valid, and constant, as long as the caller owns the blocks and
        nobody computes into them. The bytes are final: a GPU store returns after the copy to host memory is complete.
        """

    def write(self, blocks: Sequence[int], layer_begin: int, layer_end: int, data: memoryview) -> None:
        """Store `data`, the concatenation that `read` of the same shape gives, into the blocks.

        Raises ValueError if the length does not fit. A GPU store returns once the engine may read the blocks.
        """
