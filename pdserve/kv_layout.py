"""The shape of KV memory, and the narrow view of it that the transfer layer gets.

The pool is block-major: block `b` of a worker is one contiguous range of `[num_layers, 2 (K, V), num_kv_heads, ...]`,
so a whole block, a run of layers inside it, and a run of heads inside one layer's K or V are each one contiguous piece.
The order of the last two axes (tokens, head_dim) is the engine's business, and part of the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

AxisOrder = Literal["token,dim", "dim,token"]
AXIS_ORDERS: Final[tuple[AxisOrder, ...]] = get_args(AxisOrder)

HeadRange = tuple[int, int]
"""KV heads [begin, end)."""


def axis_order(name: str) -> AxisOrder | None:
    """`name` if it is one of `AXIS_ORDERS`, None otherwise."""
    return next((order for order in AXIS_ORDERS if order == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Geometry of a worker's KV blocks, and what else tells whether another worker's KV means the same."""

    dtype: str
    block_size: int
    """Tokens in a block."""
    num_layers: int
    num_kv_heads: int
    """All KV heads of the model, whether one store holds them or several."""
    head_dim: int
    k_order: AxisOrder = "token,dim"
    """Order of the last two axes of K."""
    v_order: AxisOrder = "token,dim"
    numerics: str = ""
    """What the values depend on beside model and dtype: the same prompt gives other KV where this differs, say on
    weights of another format."""
    head_cuts: tuple[int, ...] = ()
    """Heads at which the memory of another shard begins (tensor parallelism): ascending, without 0. Empty if one store
    holds all heads."""

    @property
    def head_nbytes(self) -> int:
        """Bytes of K (or V) of one head of one layer of one block."""
        return self.block_size * self.head_dim * DTYPE_NBYTES[self.dtype]

    @property
    def layer_nbytes(self) -> int:
        """Bytes of K and V of one layer of one block."""
        return 2 * self.num_kv_heads * self.head_nbytes

    @property
    def block_nbytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.num_layers * self.layer_nbytes

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def incompatibilities(self, other: KvLayout) -> list[str]:
        """Why KV of one means nothing to the other, each as "field ours != theirs"; empty if it can be exchanged.

        Block size, order of axes and split of the heads may differ: the receiving side converts.
        """
        names = ("dtype", "num_layers", "num_kv_heads", "head_dim", "numerics")
        return [
            f"{name} {getattr(self, name)!r} != {getattr(other, name)!r}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


class KvBlockStore(Protocol):
    """KV memory as bytes: all that the transfer layer knows of a pool.

    All methods move layers [layer_begin, layer_end) and KV heads `heads` (None: all) of whole blocks. They may be
    called from any thread, for blocks that the caller owns at that moment; they touch no other block.

    The bytes of several blocks are `[block, layer, 2 (K, V), head, ...]`, in the order of `blocks`.
    """

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks."""

    @property
    def device(self) -> str:
        """Where the pool is, as torch names it: "cpu", "cuda:0"."""

    def read(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview]:
        """Bytes of the blocks, one view per contiguous piece.

        On CPU these are views of the pool itself: valid, and constant, as long as the caller owns the blocks and
        nobody computes into them. The bytes are final: a GPU store returns after the copy to host memory is complete.
        """

    def views(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview] | None:
        """Writable views of the blocks themselves, one per contiguous piece, or None if only `write` gets there."""

    def write(
        self,
        blocks: Sequence[int],
        layer_begin: int,
        layer_end: int,
        data: memoryview,
        heads: HeadRange | None = None,
    ) -> None:
        """Store `data`, the concatenation that `read` of the same shape gives, into the blocks.

        Raises ValueError if the length does not fit. A GPU store returns once the engine may read the blocks.
        """

    def copy(self, source: int, destination: int) -> None:
        """Make block `destination` equal to `source`, in all layers. Both are as `read` and `write` want them."""
