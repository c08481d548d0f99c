"""Numbers that the packing of weights and the kernels share."""

from __future__ import annotations

ROWS = 16
"""Output rows in a tile: one for each vector lane."""
BLOCK = 32
"""Values of a quantised row that share a scale."""

F32, F16, Q8_0, Q4_0, Q4_1 = range(5)
"""Weight formats. Those after F16 meet quantised activations."""
