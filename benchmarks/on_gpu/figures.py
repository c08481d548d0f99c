"""What the benchmark measures, and how much of it. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("decode", "prefill", "graphs", "handover")
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything."""

    decode: Sequence[tuple[int, int]] = ((1, 1024), (16, 1024), (64, 2048))
    """(batch, context)"""
    prefill: Sequence[int] = (512, 2048, 8192)
    graphs: Sequence[tuple[int, int]] = ((1, 256), (8, 256), (64, 256))
    handover_blocks: int = 64
    repeats: int = 20
    roof_nbytes: int = 4 << 30
    roof_matrix: int = 8192

    @property
    def num_blocks(self) -> int:
        """That the pool needs."""
        tokens = [batch * context for batch, context in (*self.decode, *self.graphs)] + list(self.prefill)
        return max(max(tokens) // BLOCK_SIZE + 1, 2 * self.handover_blocks)

    @property
    def graph_tokens(self) -> int:
        """Largest decode batch."""
        return max(batch for batch, _ in (*self.decode, *self.graphs))


def names(part: str, sizes: Sizes) -> list[str]:
    """The figures of a part."""
    return {
        "decode": ["read_bandwidth", *(f"decode_{b}x{c}_over_read_bound" for b, c in sizes.decode)],
        "prefill": ["matrix_peak", *(f"prefill_{n}_of_matrix_peak" for n in sizes.prefill)],
        "graphs": [f"eager_over_graph_{b}x{c}" for b, c in sizes.graphs],
        "handover": ["handover_read_over_copy", "handover_write_over_copy"],
    }[part]


UNITS = {"read_bandwidth": "GB/s", "matrix_peak": "TFLOP/s"}
"""Of the figures that are not ratios."""
