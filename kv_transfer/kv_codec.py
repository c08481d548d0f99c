"""KV in 8 bits per value for slow networks: half of what a float16 pool sends, at the price of exactness.

Each head of K and of V of each layer of each block has a float32 scale of its own, so that one large value costs only
its own 16 or so tokens precision. `int8`: value = scale * code, code in [-127, 127]. `fp8`: value = scale * code, code
in e4m3 (4 bits of exponent, 3 of mantissa, no infinity; largest 448) of the OCP 8-bit floating point specification.

All arrays are little-endian, whatever the machine.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from pdserve.errors import HandoffError
from pdserve.kv_layout import DTYPE_NBYTES

Lossy = Literal["int8", "fp8"]
Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]
Bits = npt.NDArray[np.unsignedinteger[Any]]
"""Values of a pool as they are stored; bfloat16 has no numpy type."""

PEAK: Final[dict[Lossy, float]] = {"int8": 127.0, "fp8": 448.0}
"""Code of the largest value under a scale."""

_LARGEST: Final = {"float32": 3.4028235e38, "float16": 65504.0, "bfloat16": 3.3895314e38}
_FP8_NAN: Final = 0x7F


class PayloadError(HandoffError):
    """A payload arrived as it was sent, and yet no encoder of ours makes such a one."""


def bits_type(dtype: str) -> np.dtype[np.unsignedinteger[Any]]:
    """The unsigned integer that a value of a pool of `dtype` is stored as."""
    return np.dtype(f"<u{DTYPE_NBYTES[dtype]}")


def to_float32(bits: Bits, dtype: str) -> Float32:
    """Values of a pool of `dtype`."""
    if dtype == "float32":
        return bits.view(np.float32)
    if dtype == "float16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def from_float32(values: Float32, dtype: str) -> Bits:
    """Finite values as a pool of `dtype` stores them: rounded to nearest even, or to the largest that it has."""
    largest = np.float32(_LARGEST[dtype])
    values = np.clip(values, -largest, largest)
    if dtype == "float32":
        return values.view(np.uint32)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)


def encode(values: Float32, codec: Lossy) -> tuple[Float32, Codes]:
    """Scales [...] and codes [..., n] of values [..., n].

    Raises HandoffError if a value is not finite: no scale can hold it.
    """
    largest: Float32 = np.abs(values).max(axis=-1)
    if not np.isfinite(largest).all():
        raise HandoffError(
            f"KV of this prompt is not finite and cannot be sent with codec {codec}: the model overflows"
        )
    scales = largest / np.float32(PEAK[codec])
    return scales, to_codes(values, scales, codec)


def to_codes(values: Float32, scales: Float32, codec: Lossy) -> Codes:
    """Codes [..., n] of finite values [..., n] under finite scales [...]."""
    # Scales of 0, for values that are 0 or next to it, must not divide.
    divisors = scales.copy()
    divisors[divisors == 0] = 1.0
    peak = np.float32(PEAK[codec])
    scaled = np.clip(values / divisors[..., None], -peak, peak)
    return np.rint(scaled).astype(np.int8).view(np.uint8) if codec == "int8" else _to_fp8(scaled)


def from_codes(codes: Codes, codec: Lossy) -> Float32:
    """The numbers that codes stand for, without their scale.

    Raises PayloadError for codes that stand for none.
    """
    if codec == "int8":
        return codes.view(np.int8).astype(np.float32)
    if ((codes & _FP8_NAN) == _FP8_NAN).any():
        raise PayloadError("a code of eight bits (e4m3) is not a number")
    return _FP8_VALUES[codes]


def decode(scales: Float32, codes: Codes, codec: Lossy, dtype: str) -> Bits:
    """Values [..., n] for a pool of `dtype`, from scales [...] and codes [..., n].

    Raises PayloadError for scales that are negative, not finite, or beyond the range of `dtype`, and for codes that
    stand for no number.
    """
    # 0.1 % beyond: scales are rounded, and so is the product.
    limit = np.float32(_LARGEST[dtype] / PEAK[codec] * 1.001)
    if not ((scales >= 0) & (scales <= limit)).all():
        raise PayloadError(f"a scale of the {codec} payload is negative, not a number or too large for {dtype}")
    values = from_codes(codes, codec)
    with np.errstate(over="ignore"):  # only near the largest float32, and cut to it below
        values *= scales[..., None]
    return from_float32(values, dtype)


def _to_fp8(values: Float32) -> Codes:
    """e4m3 codes of values in [-448, 448].

    float16 has the same layout with 10 bits of mantissa, and an exponent that is larger by 8 for the same value: of
    value / 2**8 its upper byte, rounded to nearest even and moved by one bit, is the code; subnormal ones included.
    Rounding twice, to 11 bits and then to 4, puts a value at most 1/128 of half a step beyond the nearest code.
    """
    half = (values * np.float32(2.0**-8)).astype(np.float16).view(np.uint16)
    magnitude = half & np.uint16(0x7FFF)
    odd = (magnitude >> np.uint16(7)) & np.uint16(1)
    code = (magnitude + (np.uint16(0x3F) + odd)) >> np.uint16(7)
    return (code | (half >> np.uint16(8)) & np.uint16(0x80)).astype(np.uint8)


def _fp8_values() -> Float32:
    codes = np.arange(256, dtype=np.uint16)
    half = (codes & np.uint16(0x80)) << np.uint16(8) | (codes & np.uint16(0x7F)) << np.uint16(7)
    return half.view(np.float16).astype(np.float32) * np.float32(2.0**8)


_FP8_VALUES: Final = _fp8_values()
"""By code. The two that stand for "not a number" are refused before they are looked up."""
