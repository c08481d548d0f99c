"""The randomness of sampling: a pure function of (seed, position, token id), with no state to move or lose.

A request that is resumed on another worker, in another batch or on another device draws the same noise. Everything is
32-bit integer arithmetic modulo 2**32, which SIMD units and GPUs do exactly and alike; only the final logarithms are
floating point. The mixer is `lowbias32` of Chris Wellons' hash-prospector (public domain): a bijection of 32-bit
words in which each input bit flips each output bit with a probability within 0.2 % of one half.

A row's (seed, position) becomes two key words here, on the host. Per token id, an engine then computes

    x = mix(key[0] ^ mix(id))
    y = mix(key[1] ^ x)
    v = (x * 2**20 + (y >> 12) + 1/2) / 2**52
    noise = -log(-log1p(-v))

**Why 52 bits.** Noise is standard Gumbel, and a token wins by the upper tail. From a 24-bit uniform Gumbel noise
never exceeds 17.3; among 49152 tokens those with a probability below about exp(-17) = 4e-8, whose sum can well be 0.1
%, would hardly ever be drawn, and the largest noise values would collide. `v` near 0 is the upper tail here, where
doubles are densest: noise reaches 36.7, its steps up there are finer than those of float32 logits, and v < 1 keeps it
finite below. For one row the x of different ids are all different (the mixer is a bijection): like drawing without
replacement from 2**32, an effect of relative size vocab / 2**32.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MULTIPLIER_1 = 0x7FEB352D
MULTIPLIER_2 = 0x846CA68B
_GOLDEN_RATIO = 0x9E3779B9
"""Separates the words of a key, so that (seed, position) and (position, seed) differ."""


def mix(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """`lowbias32` of each word."""
    words = (words ^ (words >> np.uint32(16))) * np.uint32(MULTIPLIER_1)
    words = (words ^ (words >> np.uint32(15))) * np.uint32(MULTIPLIER_2)
    return words ^ (words >> np.uint32(16))


def row_keys(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """The two key words [R, 2] of each row, from all 64 bits of its seed [R] and all bits of its position [R]."""
    key = np.zeros(len(seeds), dtype=np.uint32)
    words = []
    for value in (seeds, positions.astype(np.uint64)):
        for shift in (0, 32):
            key = mix((key + np.uint32(_GOLDEN_RATIO)) ^ (value >> np.uint64(shift)).astype(np.uint32))
            words.append(key)
    # The chain ends in one word; the second one also takes what the chain was after the seed, to have 64 bits in all.
    return np.stack([key, mix((key + np.uint32(_GOLDEN_RATIO)) ^ words[1])], axis=1)
