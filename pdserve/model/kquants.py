"""Decoding of the K-quants: ggml's formats with super-blocks of 256 elements.

A super-block has half-precision scales and 8 or 16 sub-blocks, each with a small integer scale (and minimum) of its
own. Arithmetic is in float32 and in the order of ggml's reference decoder. All functions take
uint8 [n, block_nbytes] and give float32 [n, 256].
"""

from __future__ import annotations

import numpy as np

from pdserve.model.tensors import Float32Array, UInt8Array

_PAIRS = np.arange(0, 8, 4, dtype=np.uint8)[:, None]
_QUADS = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
_BITS = np.arange(8, dtype=np.uint8)[:, None]


def q2_k(blocks: UInt8Array) -> Float32Array:
    """block: 16 x (scale 4 bits | min 4 bits) | 256 x 2 bits | d f16 | dmin f16;  x = d * scale * q - dmin * min."""
    packed, qs = blocks[:, 0:16], blocks[:, 16:80]
    scales = _f16(blocks[:, 80:82]) * (packed & np.uint8(15)).astype(np.float32)
    mins = _f16(blocks[:, 82:84]) * (packed >> np.uint8(4)).astype(np.float32)
    return _affine(_planes(qs, 32, _QUADS, 3).reshape(-1, 16, 16), scales, mins)


def q3_k(blocks: UInt8Array) -> Float32Array:
    """block: 256 high bits | 256 x 2 low bits | 16 x 6-bit scales | d f16;  x = d * (scale - 32) * (q - 4).

    Scales: low halves in 8 bytes, two nibbles each, then the upper two bits of all in 4 bytes.
    """
    high, low, packed = blocks[:, 0:32], blocks[:, 32:96], blocks[:, 96:108]
    scales = _planes(packed[:, 0:8], 8, _PAIRS, 15).reshape(-1, 16)
    scales |= _planes(packed[:, 8:12], 4, _QUADS, 3).reshape(-1, 16) << np.uint8(4)
    d = _f16(blocks[:, 108:110]) * (scales.view(np.int8) - np.int8(32)).astype(np.float32)
    q = _planes(low, 32, _QUADS, 3).reshape(-1, 8, 32) | (_planes(high, 32, _BITS, 1)[:, 0] << np.uint8(2))
    return _symmetric(q, d, 4)


def q4_k(blocks: UInt8Array) -> Float32Array:
    """block: d f16 | dmin f16 | 8 x (6-bit scale, 6-bit min) | 256 nibbles;  x = d * scale * q - dmin * min.

    Each 32 bytes hold one sub-block in their low and the next in their high halves.
    """
    scales, mins = _scales_and_mins(blocks)
    return _affine(_planes(blocks[:, 16:144], 32, _PAIRS, 15).reshape(-1, 8, 32), scales, mins)


def q5_k(blocks: UInt8Array) -> Float32Array:
    """As Q4_K with fifth bits before the nibbles: bit s of byte j belongs to element j of sub-block s."""
    scales, mins = _scales_and_mins(blocks)
    q = _planes(blocks[:, 48:176], 32, _PAIRS, 15).reshape(-1, 8, 32)
    q |= _planes(blocks[:, 16:48], 32, _BITS, 1)[:, 0] << np.uint8(4)
    return _affine(q, scales, mins)


def q6_k(blocks: UInt8Array) -> Float32Array:
    """block: 256 low nibbles | 256 x 2 high bits | 16 x int8 scale | d f16;  x = d * scale * (q - 32)."""
    d = _f16(blocks[:, 208:210]) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    q = _planes(blocks[:, 0:128], 64, _PAIRS, 15).reshape(-1, 8, 32)
    q |= _planes(blocks[:, 128:192], 32, _QUADS, 3).reshape(-1, 8, 32) << np.uint8(4)
    return _symmetric(q, d, 32)


def _f16(scale: UInt8Array) -> Float32Array:
    """[n, 2] bytes -> [n, 1]."""
    return np.ascontiguousarray(scale).view("<f2").astype(np.float32)


def _planes(packed: UInt8Array, width: int, shifts: UInt8Array, mask: int) -> UInt8Array:
    """Fields of `packed` [n, groups * width]: [n, groups, len(shifts), width], plane k being bits from `shifts[k]`."""
    return (packed.reshape(len(packed), -1, 1, width) >> shifts) & np.uint8(mask)


def _scales_and_mins(blocks: UInt8Array) -> tuple[Float32Array, Float32Array]:
    """Scales and minimums of the 8 sub-blocks of Q4_K and Q5_K, each float32 [n, 8].

    12 bytes from 4 on. 0-3: scales 0-3 in the low 6 bits; 4-7: minimums 0-3 likewise; 8-11: low and high nibble of
    scales and minimums 4-7, whose upper two bits are those left over in bytes 0-3 and 4-7.
    """
    scales, mins, rest = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    two, four, low = np.uint8(6), np.uint8(4), np.uint8(63)
    scales = np.concatenate([scales & low, (rest & np.uint8(15)) | (scales >> two << four)], axis=1)
    mins = np.concatenate([mins & low, (rest >> four) | (mins >> two << four)], axis=1)
    return _f16(blocks[:, 0:2]) * scales.astype(np.float32), _f16(blocks[:, 2:4]) * mins.astype(np.float32)


def _affine(q: UInt8Array, scales: Float32Array, mins: Float32Array) -> Float32Array:
    """q [n, sub-blocks, elements] with scale and minimum [n, sub-blocks]."""
    x = q.astype(np.float32)
    x *= scales[:, :, None]
    x -= mins[:, :, None]
    return x.reshape(-1, 256)


def _symmetric(q: UInt8Array, scales: Float32Array, offset: int) -> Float32Array:
    """q [n, 8, 32] around `offset`, with a scale for each 16 elements: [n, 16]."""
    x = (q.view(np.int8) - np.int8(offset)).astype(np.float32).reshape(-1, 16, 16)
    x *= scales[:, :, None]
    return x.reshape(-1, 256)
