"""Writing K-quants, which the `gguf` package can only read.

Plain rounding to the range of each sub-block. llama.cpp's quantisers search for better scales, but write the same
format, which is all that tests need.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
UInt8Array = npt.NDArray[np.uint8]

_FOUR, _NIBBLE = np.uint8(4), np.uint8(15)


def quantize_k(w: FloatArray, type_name: str) -> UInt8Array:
    """Float32 [rows, n * 256] as packed rows, uint8 [rows, n * block bytes], of type Q4_K, Q5_K or Q6_K."""
    return _QUANTISERS[type_name](w.reshape(-1, 256)).reshape(len(w), -1)


def _q4_k(x: FloatArray) -> UInt8Array:
    scales, q = _with_minimums(x, 15)
    return np.concatenate([scales, _pack(q.reshape(-1, 4, 2, 32), 4)], axis=1)


def _q5_k(x: FloatArray) -> UInt8Array:
    scales, q = _with_minimums(x, 31)
    high = _pack((q >> _FOUR).reshape(-1, 1, 8, 32), 1)
    return np.concatenate([scales, high, _pack((q & _NIBBLE).reshape(-1, 4, 2, 32), 4)], axis=1)


def _q6_k(x: FloatArray) -> UInt8Array:
    parts = x.reshape(-1, 16, 16)
    wanted = np.abs(parts).max(axis=2) / 31
    d = (wanted.max(axis=1, keepdims=True) / 127).astype(np.float16)
    scales = np.rint(_divide(wanted, d)).astype(np.int8)
    step = d.astype(np.float32) * scales
    q = (np.rint(_divide(parts, step[:, :, None])).clip(-32, 31) + 32).astype(np.uint8)
    low = _pack((q & _NIBBLE).reshape(-1, 2, 2, 64), 4)
    high = _pack((q >> _FOUR).reshape(-1, 2, 4, 32), 2)
    return np.concatenate([low, high, scales.view(np.uint8), d.view(np.uint8)], axis=1)


def _with_minimums(x: FloatArray, largest: int) -> tuple[UInt8Array, UInt8Array]:
    """Scales of 8 sub-blocks, the first 16 bytes of a block, and the quants [n, 8, 32] from 0 to `largest`."""
    parts = x.reshape(-1, 8, 32)
    below = np.maximum(-parts.min(axis=2), 0)
    wanted = (np.maximum(parts.max(axis=2), 0) + below) / largest
    d = (wanted.max(axis=1, keepdims=True) / 63).astype(np.float16)
    dmin = (below.max(axis=1, keepdims=True) / 63).astype(np.float16)
    s = np.rint(_divide(wanted, d)).clip(0, 63).astype(np.uint8)
    m = np.rint(_divide(below, dmin)).clip(0, 63).astype(np.uint8)
    step, offset = d.astype(np.float32) * s, dmin.astype(np.float32) * m
    q = np.rint(_divide(parts + offset[:, :, None], step[:, :, None])).clip(0, largest).astype(np.uint8)
    packed = [s[:, :4] | s[:, 4:] >> 4 << 6, m[:, :4] | m[:, 4:] >> 4 << 6, s[:, 4:] & 15 | (m[:, 4:] & 15) << 4]
    return np.concatenate([d.view(np.uint8), dmin.view(np.uint8), *packed], axis=1), q


def _pack(fields: UInt8Array, bits: int) -> UInt8Array:
    """[n, groups, k, width], `bits` each -> [n, groups * width]: field i of the k goes to bit i * bits."""
    shifts = (np.arange(fields.shape[2], dtype=np.uint8) * np.uint8(bits))[:, None]
    packed: UInt8Array = np.bitwise_or.reduce(fields << shifts, axis=2)
    return packed.reshape(len(fields), -1)


def _divide(a: npt.NDArray[np.floating], b: npt.NDArray[np.floating]) -> FloatArray:
    """a / b, broadcast; 0 where b is."""
    quotient = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32)
    np.divide(a, b, out=quotient, where=b != 0, casting="same_kind")
    return quotient


_QUANTISERS: dict[str, Callable[[FloatArray], UInt8Array]] = {"Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k}
K_QUANTS = tuple(_QUANTISERS)
"""Types that can be written."""
