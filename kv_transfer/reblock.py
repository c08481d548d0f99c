"""KV from blocks of one geometry into those of another: other block size, other order of axes. Bits stay the same.

Scales of a pool that has some are moved the same way, as heads of a single dimension.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from pdserve.kv_layout import AxisOrder, KvLayout

T = TypeVar("T", bound=np.generic)


def same_blocks(one: KvLayout, other: KvLayout) -> bool:
    """Whether the bytes of a layer of one head mean the same in both."""
    ours, theirs = ((of.dtype, of.block_size, of.k_order, of.v_order) for of in (one, other))
    return ours == theirs


def by_token(part: npt.NDArray[T], block_size: int, order: AxisOrder, group: int = 1) -> npt.NDArray[T]:
    """A view [..., block_size, head_dim / group, group] of K or V as stored, [..., values of a head].

    With "dim/4,token,4" there is such a view for groups of 4 only.
    """
    rest = part.shape[:-1]
    match order:
        case "token,dim":
            return part.reshape(*rest, block_size, -1, group)
        case "dim,token":
            return np.moveaxis(part.reshape(*rest, -1, group, block_size), -1, -3)
        case "dim/4,token,4":
            assert group == 4, f"four values of a token are together, not {group}"
            return part.reshape(*rest, -1, block_size, 4).swapaxes(-2, -3)


def group_of(*orders: AxisOrder) -> int:
    """The group with which `by_token` has views of all these orders."""
    return 4 if "dim/4,token,4" in orders else 1


def reblock(
    bits: npt.NDArray[T], source: KvLayout, target: KvLayout, token_begin: int, token_end: int
) -> npt.NDArray[T]:
    """Tokens [token_begin, token_end), which begin a block of `target`, in blocks of `target`.

    `bits` is [blocks, layers, 2 (K, V), heads, values] of the blocks of `source` that hold them; so is the result, of
    the blocks of `target`. Values before and behind these tokens are left out; the last block is filled with zeros.
    Dtypes are not looked at.
    """
    assert token_begin % target.block_size == 0, f"token {token_begin} does not begin a block of {target.block_size}"
    first_source, first_target = token_begin // source.block_size, token_begin // target.block_size
    num_blocks = target.num_blocks(token_end) - first_target
    out = np.zeros((num_blocks, *bits.shape[1:4], target.block_size * target.head_dim), bits.dtype)
    for part, source_order, target_order in ((0, source.k_order, target.k_order), (1, source.v_order, target.v_order)):
        # Both [block, layer, head, token, dim / group, group].
        group = group_of(source_order, target_order)
        there = by_token(bits[:, :, part], source.block_size, source_order, group)
        here = by_token(out[:, :, part], target.block_size, target_order, group)
        token = token_begin
        while token < token_end:
            s, t = token % source.block_size, token % target.block_size
            count = min(source.block_size - s, target.block_size - t, token_end - token)
            here[token // target.block_size - first_target, :, :, t : t + count] = there[
                token // source.block_size - first_source, :, :, s : s + count
            ]
            token += count
    return out
