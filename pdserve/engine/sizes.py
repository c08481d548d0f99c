"""How many blocks a KV pool gets, and how large steps become."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import ConfigError
from pdserve.kv_layout import KvLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """The largest steps that a worker computes."""

    max_tokens: int
    """Tokens of prompts in one step."""
    max_rows: int
    """Tokens that are drawn in one step."""


def pool_blocks(layout: KvLayout, num_blocks: int | None, kv_cache_bytes: int | None) -> int:
    """`num_blocks`, or as many as fit in `kv_cache_bytes`. Raises ConfigError unless exactly one is given and > 0."""
    if (num_blocks is None) == (kv_cache_bytes is None):
        raise ConfigError("num_blocks: give either num_blocks or kv_cache_bytes", field="num_blocks")
    if kv_cache_bytes is not None:
        if kv_cache_bytes < layout.block_nbytes:
            raise ConfigError(
                f"kv_cache_bytes: {kv_cache_bytes} holds no block; one takes {layout.block_nbytes} bytes",
                field="kv_cache_bytes",
            )
        return kv_cache_bytes // layout.block_nbytes
    assert num_blocks is not None
    if num_blocks < 1:
        raise ConfigError(f"num_blocks: must be at least 1, got {num_blocks}", field="num_blocks")
    return num_blocks
