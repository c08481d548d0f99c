"""The shape of KV memory, and the narrow view of it that the transfer layer gets.

The pool is block-major: block `b` of a worker is one contiguous range of `[num_layers, 2 (K, V), num_kv_heads, ...]`,
so a whole block, a run of layers inside it, and a run of heads inside one layer's K or V are each one contiguous piece.
The order of the last two axes (tokens, head_dim) is the engine's business, and part of the layout.

A pool in eight bits has codes there and, behind the codes of a head, a float16 scale for each of its tokens: value =
scale * code. A head is still one contiguous piece, and what was written is never rounded again. Its keys are spread:
turned by a Walsh-Hadamard transform (`spread_factors`), so that no dimension is much larger than the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, get_args

from pdserve.kv_window import AHEAD_TOKENS, NO_WINDOW, KvWindow

DTYPE_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "float8_e4m3": 1}
"""Of a value, or of its code."""
CODE_PEAK: Final = {"int8": 127.0, "float8_e4m3": 448.0}
"""By dtype of a pool with scales: the code of the largest value of a token and head."""
SCALE_NBYTES: Final = 2
"""Of the float16 scale of one token and head of K or V."""

AxisOrder = Literal["token,dim", "dim,token", "dim/4,token,4"]
AXIS_ORDERS: Final[tuple[AxisOrder, ...]] = get_args(AxisOrder)
"""The last: `[head_dim / 4, tokens, 4]`."""

HeadRange = tuple[int, int]
"""KV heads [begin, end)."""


def spread_factors(head_dim: int) -> tuple[float, float]:
    """What queries, and keys, of a pool with scales are multiplied by beside the Walsh-Hadamard transform over groups
    of the largest power of two, n, that divides `head_dim`.

    Both are powers of two, so that they round nothing, about 1 / sqrt(n) each, and together 1 / n: products stay the
    same, and a key is the transform of what is stored, times the first.
    """
    bits = (head_dim & -head_dim).bit_length() - 1
    return 2.0 ** -(bits - bits // 2), 2.0 ** -(bits // 2)


def axis_order(name: str) -> AxisOrder | None:
    """`name` if it is one of `AXIS_ORDERS`, None otherwise."""
    return next((order for order in AXIS_ORDERS if order == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """Geometry of a worker's KV blocks, and what else tells whether another worker's KV means the same."""

    dtype: str
    """Of the values, or of their codes."""
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

    window: KvWindow = NO_WINDOW
    """Which tokens of a sequence have KV that is still read, and so have blocks."""

    @property
    def has_scales(self) -> bool:
        """Whether the pool holds codes with scales, see above."""
        return self.dtype in CODE_PEAK

    @property
    def head_nbytes(self) -> int:
        """Bytes of K (or V) of one head of one layer of one block."""
        values = self.block_size * self.head_dim * DTYPE_NBYTES[self.dtype]
        return values + self.block_size * SCALE_NBYTES if self.has_scales else values

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

    def longest_sequence(self, max_model_len: int, num_blocks: int) -> int:
        """Tokens of the longest sequence of a model that a pool of so many blocks can have KV of: those that the model
        takes, or what fits, unless a window bounds what is kept."""
        capacity = num_blocks * self.block_size
        is_endless = self.window.size and self.window.most_tokens(max_model_len, AHEAD_TOKENS) <= capacity
        return max_model_len if is_endless else min(max_model_len, capacity)

    def incompatibilities(self, other: KvLayout, *, exact: bool = True) -> list[str]:
        """Why KV of one means nothing to the other, each as "field ours != theirs"; empty if it can be exchanged.

        Block size, order of axes and split of the heads may differ: the receiving side converts. If it need not be
        `exact`, that is, if nobody takes what arrives for what the receiver would have computed, one of the two may
        also be in eight bits: the receiver rounds, or takes what is rounded already. Other dtypes never mix: they are
        those that an engine computes in.
        """
        names: tuple[str, ...] = ("dtype", "num_layers", "num_kv_heads", "head_dim", "numerics", "window")
        if not exact and (self.has_scales or other.has_scales):
            names = names[1:]
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
    ) -> Sequence[memoryview]:
        """Bytes of the blocks, one view per contiguous piece.

        On CPU these are views of the pool itself: valid, and constant, as long as the caller owns the blocks and
        nobody computes into them. The bytes are final: a GPU store returns after the copy to host memory is complete.
        """

    def views(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> Sequence[memoryview] | None:
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
