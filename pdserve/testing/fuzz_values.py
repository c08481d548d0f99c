"""Values that programs get wrong, and damage to bytes. All is drawn from a `random.Random`: a seed repeats it, and
hypothesis, which makes such objects (`strategies.randoms`), shrinks it."""

from __future__ import annotations

import math
from random import Random
from typing import Final

_TEXTS: Final = (
    "", " ", "\0", "\n", "x", "../../etc/passwd", "\u202e", "é\u0301", "\U0001f336", "%s%n", "{}", "-1", "NaN", "1e999",
    "\x7f\x1b[2J", "a" * 65, "b" * 5000, "pdserve:{default}:", "*", "req\r\nX: y", "\ud7ff\ufffd",
)  # fmt: skip
_NUMBERS: Final = (0, 1, 2, 3, 7, 8, 15, 16, 17, 63, 64, 100, 127, 128, 255, 256, 1000, 4096, 65535, 65536)
_FLOATS: Final = (
    0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 1e9, 5e-324, 1.7e308, -1.7e308, math.inf, -math.inf, math.nan, 2.0**53, 86_401.0,
)  # fmt: skip


def odd_int(rng: Random, low: int, high: int) -> int:
    """In [low, high], and often at its ends or next to a power of two."""
    match rng.randrange(4):
        case 0:
            value = rng.choice(_NUMBERS)
        case 1:
            value = rng.choice((low, low + 1, high - 1, high, -1, 0))
        case 2:
            value = rng.choice((1, -1)) * (1 << rng.randrange(64)) + rng.randrange(-1, 2)
        case _:
            value = rng.randint(low, high)
    return min(max(value, low), high)


def odd_float(rng: Random) -> float:
    """Infinities and NaN among them."""
    return rng.choice(_FLOATS) if rng.random() < 0.7 else rng.uniform(-1e3, 1e3)


def odd_text(rng: Random) -> str:
    """That can be encoded as UTF-8."""
    if rng.random() < 0.7:
        return rng.choice(_TEXTS)
    return "".join(chr(rng.choice((rng.randrange(32, 127), rng.randrange(0xD7FF)))) for _ in range(rng.randrange(12)))


def odd_bytes(rng: Random) -> bytes:
    """Of any length up to some hundred."""
    return rng.randbytes(rng.choice((0, 1, 2, 8, 15, 16, 17, 32, 64, 300)))


def damaged(data: bytes, rng: Random) -> bytes:
    """`data` after one to three accidents: bits flipped, cut short, a piece left out, repeated, moved or foreign."""
    for _ in range(rng.randint(1, 3)):
        at, length = rng.randint(0, len(data)), rng.choice((1, 1, 2, 4, 8, 33))
        match rng.randrange(6):
            case 0 | 1 if data:
                place = rng.randrange(len(data))
                data = data[:place] + bytes((data[place] ^ 1 << rng.randrange(8),)) + data[place + 1 :]
            case 2:
                data = data[:at]
            case 3:
                data = data[:at] + data[at + length :]
            case 4:
                data = data[:at] + data[at : at + length] * rng.randint(2, 4) + data[at + length :]
            case _:
                data = data[:at] + rng.randbytes(length) + data[at:]
    return data
