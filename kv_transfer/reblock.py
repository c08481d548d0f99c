"""KV from blocks of one geometry into those of another: other block size, other order of axes. Bits stay the same."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kv_transfer.kv_codec import Bits
from pdserve.kv_layout import AxisOrder, KvLayout

T = TypeVar("T", bound=np.generic)


def same_blocks(one: KvLayout, other: KvLayout) -> bool:
    """Whether the bytes of a layer of one head mean the same in both."""
    return (one.block_size, one.k_order, one.v_order) == (other.block_size, other.k_order, other.v_order)


def by_token(part: npt.NDArray[T], block_size: int, order: AxisOrder) -> npt.NDArray[T]:
    """A view [..., block_size, head_dim] of K or V as stored, [..., values of a head]."""
    if order == "token,dim":
        return part.reshape(*part.shape[:-1], block_size, -1)
    return part.reshape(*part.shape[:-1], -1, block_size).swapaxes(-1, -2)


def reblock(bits: Bits, source: KvLayout, target: KvLayout, token_begin: int, token_end: int) -> Bits:
    """Tokens [token_begin, token_end), which begin a block of `target`, in blocks of `target`.

    `bits` is [blocks, layers, 2 (K, V), heads, values] of the blocks of `source` that hold them; so is the result, of
    the blocks of `target`. Values before and behind these tokens are left out; the last block is filled with zeros.
    """
    assert token_begin % target.block_size == 0, f"token {token_begin} does not begin a block of {target.block_size}"
    first_source, first_target = token_begin // source.block_size, token_begin // target.block_size
    num_blocks = target.num_blocks(token_end) - first_target
    out = np.zeros((num_blocks, *bits.shape[1:4], target.block_size * target.head_dim), bits.dtype)
    for part, source_order, target_order in ((0, source.k_order, target.k_order), (1, source.v_order, target.v_order)):
        # Both [block, layer, head, token, dim].
        there = by_token(bits[:, :, part], source.block_size, source_order)
        here = by_token(out[:, :, part], target.block_size, target_order)
        token = token_begin
        while token < token_end:
            s, t = token % source.block_size, token % target.block_size
            count = min(source.block_size - s, target.block_size - t, token_end - token)
            here[token // target.block_size - first_target, :, :, t : t + count] = there[
                token // source.block_size - first_source, :, :, s : s + count
            ]
            token += count
    return out
