"""What the payload of a link's chunks looks like: agreed when the link opens, part of the hash of every plan.

The payload is in the sender's block order and covers the sender's blocks whole; the receiving side converts. Both sides
derive the format for themselves from what hello and welcome say of the two workers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, cast, get_args

from pdserve.errors import IncompatibleWorkersError
from pdserve.kv_layout import HeadRange, KvLayout

Codec = Literal["none", "int8", "fp8"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)

SCALE_NBYTES: Final = 4
"""Of the float32 scale of one head of K or V of one layer of one block."""

_ELEMENTS: Final = {"int8": "int8", "fp8": "float8_e4m3"}


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """How chunks of one prefill worker reach one decode worker."""

    layout: KvLayout
    """Of the sender's blocks."""
    receiver_block_size: int
    """Tokens in a block of the receiver."""
    receiver_dtype: str
    """Of the receiver's blocks."""
    head_cuts: tuple[int, ...] = ()
    """Heads at which a chunk ends at the latest: where a shard of either side begins. Ascending, without 0."""
    codec: Codec = "none"

    @classmethod
    def like(cls, layout: KvLayout) -> WireFormat:
        """Between two workers of the same layout, byte by byte."""
        return cls(
            layout=layout,
            receiver_block_size=layout.block_size,
            receiver_dtype=layout.dtype,
            head_cuts=layout.head_cuts,
        )

    @property
    def exact(self) -> bool:
        """Whether what arrives is what was sent, and what the receiver would have computed itself. If not, it must
        never be taken for the KV of its tokens by others: such blocks are not published as prefix cache."""
        return self.codec == "none" and self.receiver_dtype == self.layout.dtype

    @property
    def element(self) -> str:
        """Type of the values in the payload, one of `wire.DTYPE_CODES`."""
        return _ELEMENTS.get(self.codec, self.layout.dtype)

    @property
    def unit_tokens(self) -> int:
        """Chunks end at a multiple of this, or with the sequence: the least number of tokens that is whole blocks on
        both sides, so that no block of either side belongs to two chunks."""
        return math.lcm(self.layout.block_size, self.receiver_block_size)

    @cached_property
    def head_ranges(self) -> tuple[HeadRange, ...]:
        """The ranges of heads that chunks carry, in order."""
        cuts = (0, *self.head_cuts, self.layout.num_kv_heads)
        return tuple(itertools.pairwise(cuts))

    def layer_nbytes(self, num_heads: int) -> int:
        """Payload of `num_heads` heads of one layer of one block of the sender."""
        values = 2 * num_heads * self.layout.block_size * self.layout.head_dim
        if self.codec == "none":
            return 2 * num_heads * self.layout.head_nbytes
        return values + 2 * num_heads * SCALE_NBYTES


def negotiate(sender: KvLayout, receiver: KvLayout, codec: str) -> WireFormat:
    """The format in which `sender` reaches `receiver` with the codec that the prefill worker has chosen.

    Raises IncompatibleWorkersError naming the field if there is none. Whether the receiver can do with a format that is
    not exact is up to the caller, see `WorkerInfo.incompatibilities`.
    """
    problems = [f"kv_layout.{problem}" for problem in sender.incompatibilities(receiver, exact=False)]
    if codec not in CODECS:
        problems.append(f"codec {codec!r} is none of {list(CODECS)}")
    elif codec != "none" and sender.has_scales:
        problems.append(f"codec {codec!r}: KV of the sender is in eight bits already ({sender.dtype}); use none")
    if problems:
        raise IncompatibleWorkersError("the two workers cannot exchange KV: " + "; ".join(problems))
    return WireFormat(
        layout=sender,
        receiver_block_size=receiver.block_size,
        receiver_dtype=receiver.dtype,
        head_cuts=tuple(sorted({*sender.head_cuts, *receiver.head_cuts})),
        codec=cast(Codec, codec),
    )
