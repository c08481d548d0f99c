"""What the leading thread does before a step can be shared out: look at the batch, and fetch the embeddings.

Compiled, although it is little: whatever Python runs here comes right after a step, which has left nothing of the
interpreter in the caches, and every thread of the step waits for it. Nor do these functions let go of the interpreter's
lock, as numpy does for some hundred numbers: another thread would take it, and keep it for as long as it has to do.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import njit

from pdserve.engine.cpu.jit import OPTIONS
from pdserve.engine.cpu.step import attention_items

HOLDING: Final = {**OPTIONS, "nogil": False}
NO_TOKEN, NO_POSITION, NO_BLOCK = -1, -2, -3
WRONG: Final = {NO_TOKEN: "no such token id", NO_POSITION: "no such position", NO_BLOCK: "no such block"}
"""What `prepare` has found."""

_HALF_SCALE = np.ldexp(np.float32(1.0), np.maximum(np.arange(32), 1) - 25).astype(np.float32)
"""By the exponent of a float16: what one unit of its mantissa stands for."""


@njit(**HOLDING)
def prepare(token_ids, positions, slots, cu_seqlens, vocab_size, num_positions, num_slots, group, sequence, items):
    """Fills `sequence`, int64 [num_tokens], with the sequence of each token, and `items` as `attention_items` does,
    whose result it gives. Less than 0 if the batch points to something that does not exist: see `WRONG`."""
    for i in range(len(token_ids)):
        if token_ids[i] < 0 or token_ids[i] >= vocab_size:
            return NO_TOKEN
        if positions[i] < 0 or positions[i] >= num_positions:
            return NO_POSITION
        if slots[i] < 0 or slots[i] >= num_slots:
            return NO_BLOCK
    for s in range(len(cu_seqlens) - 1):
        for t in range(cu_seqlens[s], cu_seqlens[s + 1]):
            sequence[t] = s
    return attention_items(cu_seqlens, group, items)


@njit(**HOLDING)
def _half(bits):
    """A float16 as float32, exactly."""
    exponent = (bits >> 10) & 31
    mantissa = bits & 1023
    if exponent == 31:
        value = np.float32(np.inf) if mantissa == 0 else np.float32(np.nan)
    else:
        value = np.float32(mantissa + 1024 if exponent > 0 else mantissa) * _HALF_SCALE[exponent]
    return -value if bits >> 15 else value


@njit(**HOLDING)
def fetch_q8_0(rows, token_ids, x, stride):
    """Rows of blocks: d float16 | 32 x int8; x = d * q. rows: uint8 [vocab_size, bytes]; x: float32, flat."""
    blocks = rows.shape[1] // 34
    for t in range(len(token_ids)):
        row = rows[token_ids[t]]
        for b in range(blocks):
            d = _half(np.int64(row[b * 34]) | (np.int64(row[b * 34 + 1]) << 8))
            at = t * stride + b * 32
            for i in range(32):
                x[at + i] = np.float32(np.int8(row[b * 34 + 2 + i])) * d


@njit(**HOLDING)
def fetch_f16(rows, token_ids, x, stride):
    """rows: uint16 [vocab_size, hidden]; x: float32, flat."""
    for t in range(len(token_ids)):
        row = rows[token_ids[t]]
        for i in range(len(row)):
            x[t * stride + i] = _half(np.int64(row[i]))


@njit(**HOLDING)
def fetch_f32(rows, token_ids, x, stride):
    """rows: float32 [vocab_size, hidden]; x: float32, flat."""
    for t in range(len(token_ids)):
        row = rows[token_ids[t]]
        for i in range(len(row)):
            x[t * stride + i] = row[i]
