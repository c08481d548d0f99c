"""K and V of a pool in eight bits, in torch: values to codes with a scale for each token and head, and back.

What is stored is described in `pdserve/kv_layout.py`; the CPU engine's kernels do the same. Nothing here waits for a
device, so that a step with it can be captured as a graph.
"""

from __future__ import annotations

import torch

from pdserve.kv_layout import CODE_PEAK, spread_factors

CODE_TYPES = {"int8": torch.int8, "float8_e4m3": torch.float8_e4m3fn}
"""By dtype of a pool with scales."""


class Spread:
    """The Walsh-Hadamard transform of queries and keys that are compared in such a pool."""

    def __init__(self, head_dim: int, device: torch.device) -> None:
        group = head_dim & -head_dim
        matrix = torch.ones(1, 1)
        while len(matrix) < group:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        whole = torch.kron(torch.eye(head_dim // group), matrix)
        of_queries, of_keys = spread_factors(head_dim)
        self._of_queries: torch.Tensor = (whole * of_queries).to(device)
        self._of_keys: torch.Tensor = (whole * of_keys).to(device)

    def queries(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries [..., head_dim], in their own dtype."""
        return (heads.float() @ self._of_queries).to(heads.dtype)

    def keys(self, heads: torch.Tensor) -> torch.Tensor:
        """Keys [..., head_dim], in float32: they are rounded next."""
        return heads.float() @ self._of_keys


def encode(values: torch.Tensor, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [..., head_dim] and float16 scales [...] of values [..., head_dim], for a pool of `dtype`.

    scale = float16(max |value| / peak), code = value / scale rounded to nearest even. Where the scale is no positive
    number codes are 0; it is none if a value is infinite or not a number, and so is what is read back.
    """
    wide = values.float()
    peak = CODE_PEAK[dtype]
    scales = (wide.abs().amax(dim=-1) / peak).half()
    usable = ((scales > 0) & scales.isfinite())[..., None]
    scaled = (wide / scales.float()[..., None]).clamp(-peak, peak)
    scaled = torch.where(usable, scaled, 0.0)
    codes = scaled.round() if dtype == "int8" else scaled
    return codes.to(CODE_TYPES[dtype]), scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values [..., head_dim] in float32 of codes and scales [...]."""
    return codes.float() * scales.float()[..., None]
