"""Decoding of stored tensors to float32, one function per tensor type.

The block formats are those of ggml: a block of 32 consecutive elements of a row shares a half-precision scale `d`
(and, in Q4_1 and Q5_1, a half-precision minimum `m`); the K-quants have a file of their own. Arithmetic is in float32
and in the order of ggml's own reference decoder, so results agree with it bit for bit. Which types *exist* is a matter
of the file formats; which are *supported* is the table below.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pdserve.errors import ModelLoadError
from pdserve.model.kquants import q2_k, q3_k, q4_k, q5_k, q6_k
from pdserve.model.tensors import Float32Array, StoredTensor, UInt8Array


def _f32(blocks: UInt8Array) -> Float32Array:
    return blocks.view("<f4")


def _f16(blocks: UInt8Array) -> Float32Array:
    return blocks.view("<f2").astype(np.float32)


def _bf16(blocks: UInt8Array) -> Float32Array:
    # bfloat16 is the upper half of a float32.
    return (blocks.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)


def _q8_0(blocks: UInt8Array) -> Float32Array:
    # block: d f16 | 32 x int8;  x = d * q
    d = blocks[:, 0:2].view("<f2").astype(np.float32)
    return blocks[:, 2:].view(np.int8).astype(np.float32) * d


def _nibbles(packed: UInt8Array) -> UInt8Array:
    # Byte j of 16 holds element j in its low and element j + 16 in its high half.
    return np.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=1)


def _q4_0(blocks: UInt8Array) -> Float32Array:
    # block: d f16 | 16 x 2 nibbles;  x = d * (q - 8)
    d = blocks[:, 0:2].view("<f2").astype(np.float32)
    return (_nibbles(blocks[:, 2:]).view(np.int8) - np.int8(8)).astype(np.float32) * d


def _q4_1(blocks: UInt8Array) -> Float32Array:
    # block: d f16 | m f16 | 16 x 2 nibbles;  x = d * q + m
    d = blocks[:, 0:2].view("<f2").astype(np.float32)
    m = blocks[:, 2:4].view("<f2").astype(np.float32)
    x = _nibbles(blocks[:, 4:]).astype(np.float32)
    x *= d
    x += m
    return x


def _five_bits(high: UInt8Array, packed: UInt8Array) -> UInt8Array:
    # Bit j of the 32 high bits is the fifth bit of element j.
    return _nibbles(packed) | (np.unpackbits(high, axis=1, bitorder="little") << np.uint8(4))


def _q5_0(blocks: UInt8Array) -> Float32Array:
    # block: d f16 | 32 high bits | 16 x 2 nibbles;  x = d * (q - 16)
    d = blocks[:, 0:2].view("<f2").astype(np.float32)
    return (_five_bits(blocks[:, 2:6], blocks[:, 6:]).view(np.int8) - np.int8(16)).astype(np.float32) * d


def _q5_1(blocks: UInt8Array) -> Float32Array:
    # block: d f16 | m f16 | 32 high bits | 16 x 2 nibbles;  x = d * q + m
    d = blocks[:, 0:2].view("<f2").astype(np.float32)
    m = blocks[:, 2:4].view("<f2").astype(np.float32)
    x = _five_bits(blocks[:, 4:8], blocks[:, 8:]).astype(np.float32)
    x *= d
    x += m
    return x


_CHUNK_ELEMS = 1 << 17  # The temporaries of so many elements stay in the cache.
_DECODERS: dict[str, Callable[[UInt8Array], Float32Array]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
"""uint8 [num_blocks, block_nbytes] -> float32 [num_blocks, block_elems], by type name."""


def check_supported(tensor: StoredTensor) -> None:
    """Raise ModelLoadError, naming file, tensor and type, if `dequantize` has no decoder for this tensor."""
    if tensor.type.name not in _DECODERS:
        raise ModelLoadError(
            f"{tensor.file}: tensor {tensor.name!r} has type {tensor.type.name}, which is not supported; "
            f"convert the file to one of {', '.join(_DECODERS)}",
            field=tensor.name,
            file=str(tensor.file),
        )


def dequantize(tensor: StoredTensor) -> Float32Array:
    """The tensor as float32 of its own shape: C-contiguous, writable, sharing no memory with the file.

    Raises ModelLoadError as `check_supported` does.
    """
    check_supported(tensor)
    return dequantize_blocks(tensor, tensor.data).reshape(tensor.shape)


def dequantize_blocks(tensor: StoredTensor, data: UInt8Array) -> Float32Array:
    """Some blocks of a tensor that is supported, for instance picked rows: `data`, of any shape, as float32
    [num_blocks, block_elems]."""
    decode = _DECODERS[tensor.type.name]
    blocks = data.reshape(-1, tensor.type.block_nbytes)
    out = np.empty((len(blocks), tensor.type.block_elems), np.float32)
    step = _CHUNK_ELEMS // tensor.type.block_elems
    for begin in range(0, len(blocks), step):
        out[begin : begin + step] = decode(blocks[begin : begin + step])
    return out
