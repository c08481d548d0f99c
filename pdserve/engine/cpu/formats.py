"""Numbers that the packing of weights and the kernels share."""

from __future__ import annotations

ROWS = 16
"""Output rows in a tile: one for each vector lane."""
STRIP = 2
"""Tiles whose quantised blocks alternate in memory, so that both are read front to back. The last may stand alone."""
BLOCK = 32
"""Values of a quantised row that share a scale."""

LINE_NBYTES = 64
"""Bytes of a cache line."""

F32, F16, Q8_0, Q4_0, Q4_1 = range(5)
"""Weight formats. Those after F16 meet quantised activations."""

HEAD_NBYTES = 64
"""Bytes at the start of a strip's block: sixteen float16 scales of each tile. What follows is whole cache lines."""
PAIRS_NBYTES = 64
"""Bytes of a tile's sixteen pairs in a block."""
Q4_NBYTES = 64 * 4
Q8_NBYTES = 64 * 8
"""Bytes of a tile's codes in a block."""

Q4_FINENESS = 64
"""Parts of a step in which the minimum of a Q4 block and the sums of its codes are counted."""
Q4_CODE = 16
"""Parts of a step in which codes of four bits are counted while they are multiplied: they lie in the upper half of a
byte."""
