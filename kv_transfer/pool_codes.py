"""KV from a pool with scales (int8, float8_e4m3) into one without, and back: for workers whose pools differ in dtype.

Codes and scales are those of `pdserve/kv_layout.py`, which engines write themselves. Between pools of one dtype they
are moved as they are. Here they become values on the way: [blocks, layers, 2 (K, V), heads, tokens, head_dim] float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kv_transfer import kv_codec
from kv_transfer.kv_codec import Bits, Float32, Lossy
from kv_transfer.reblock import by_token, group_of
from pdserve.kv_layout import CODE_PEAK, AxisOrder, KvLayout, spread_factors

_CODEC: Final[dict[str, Lossy]] = {"int8": "int8", "float8_e4m3": "fp8"}
"""By dtype of a pool with scales: how its codes are to be read."""


class Stored(NamedTuple):
    """What a pool holds of some blocks, heads and layers, as it is stored."""

    bits: Bits
    """[blocks, layers, 2 (K, V), heads, block_size * head_dim] values, or codes, in the order of axes of the pool."""
    scales: npt.NDArray[np.uint16] | None
    """[blocks, layers, 2, heads, block_size] bits of float16; None if the pool has none."""


def split(payload: memoryview, layout: KvLayout, shape: tuple[int, int, int, int, int]) -> Stored:
    """The bytes of a pool as views of its two parts; `shape` is that of the values."""
    if not layout.has_scales:
        return Stored(np.frombuffer(payload, kv_codec.bits_type(layout.dtype)).reshape(shape), None)
    heads = np.frombuffer(payload, np.uint8).reshape(*shape[:-1], layout.head_nbytes)
    return Stored(heads[..., : shape[-1]], heads[..., shape[-1] :].view("<u2"))


def join(stored: Stored) -> npt.NDArray[np.unsignedinteger[Any]]:
    """The contrary of `split`."""
    if stored.scales is None:
        return stored.bits
    scales = np.ascontiguousarray(stored.scales, "<u2").view(np.uint8)
    return np.concatenate([stored.bits, scales], axis=-1)


def to_values(stored: Stored, layout: KvLayout) -> Float32:
    """Raises PayloadError for codes that stand for no number. Scales that are not finite are those of values that
    were not: they spoil their token, as they do in the sender's pool."""
    shape = (*stored.bits.shape[:-1], layout.block_size, layout.head_dim)
    values = np.empty(shape, np.float32)
    for part, order in _orders(layout):
        stored_part = stored.bits[:, :, part]
        numbers = (
            kv_codec.to_float32(np.ascontiguousarray(stored_part), layout.dtype)
            if stored.scales is None
            else kv_codec.from_codes(np.ascontiguousarray(stored_part), _CODEC[layout.dtype])
        )
        values[:, :, part] = by_token(numbers, layout.block_size, order, group_of(order)).reshape(
            values[:, :, part].shape
        )
    if stored.scales is not None:
        with np.errstate(invalid="ignore", over="ignore"):  # 0 * infinity; products near the largest float32
            values *= stored.scales.view(np.float16).astype(np.float32)[..., None]
            values[:, :, 0] = spread(values[:, :, 0], spread_factors(layout.head_dim)[0])
    return values


def from_values(values: Float32, layout: KvLayout) -> Stored:
    """`values` rounded to what a pool of `layout` stores."""
    bits = np.empty((*values.shape[:-2], layout.block_size * layout.head_dim), kv_codec.bits_type(layout.dtype))
    if not layout.has_scales:
        for part, order in _orders(layout):
            _put(bits, part, kv_codec.from_float32(values[:, :, part], layout.dtype), layout, order)
        return Stored(bits, None)
    scales = np.empty(values.shape[:-1], np.float16)
    for part, order in _orders(layout):
        numbers = values[:, :, part]
        with np.errstate(invalid="ignore", over="ignore"):
            if part == 0:
                numbers = spread(numbers, spread_factors(layout.head_dim)[1])
            scales[:, :, part] = np.abs(numbers).max(axis=-1) / np.float32(CODE_PEAK[layout.dtype])
        wide = scales[:, :, part].astype(np.float32)
        # Where a value is not finite the scale is not: it spoils the token, and codes must be of something.
        usable = np.isfinite(wide)
        codes = kv_codec.to_codes(
            np.where(usable[..., None], numbers, np.float32(0)), np.where(usable, wide, np.float32(0)),
            _CODEC[layout.dtype],
        )  # fmt: skip
        codes[wide == 0] = 0
        _put(bits, part, codes, layout, order)
    return Stored(bits, scales.view(np.uint16))


def spread(values: Float32, factor: float) -> Float32:
    """`factor` times the Walsh-Hadamard transform of values [..., head_dim], see `spread_factors`."""
    group = values.shape[-1] & -values.shape[-1]
    grouped = values.reshape(*values.shape[:-1], -1, group)
    spreaded: Float32 = (grouped @ (_hadamard(group) * np.float32(factor))).reshape(values.shape)
    return spreaded


@cache
def _hadamard(n: int) -> Float32:
    """[n, n] of 1 and -1, n being a power of two (Sylvester's construction)."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix


def _orders(layout: KvLayout) -> tuple[tuple[int, AxisOrder], tuple[int, AxisOrder]]:
    return (0, layout.k_order), (1, layout.v_order)


def _put(bits: Bits, part: int, tokens: Bits, layout: KvLayout, order: AxisOrder) -> None:
    """Values of K or V [..., tokens, head_dim] into their place in a pool's order of axes."""
    group = group_of(order)
    place = by_token(bits[:, :, part], layout.block_size, order, group)
    place[...] = tokens.reshape(*tokens.shape[:-1], -1, group)
