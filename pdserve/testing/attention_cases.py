"""Batches with KV for checking attention kernels, on any device and in any dtype; what nobody may read is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pdserve.engine.attention import AttentionBackend, ReferenceAttention
from pdserve.engine.batch import Batch, SequenceChunk, build_batch

LAYERS = 2
"""Of the pool; the case is its second one, so the block stride is not what the shape says."""


@dataclass(frozen=True, kw_only=True)
class AttentionCase:
    """Arguments of one call of `StepAttention`, and what `plan` gets."""

    batch: Batch
    block_size: int
    query: torch.Tensor
    """[num_tokens, num_heads, head_dim]"""
    keys: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim]"""
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    """[num_blocks, num_kv_heads, block_size]; None if keys and values are what they are."""
    value_scales: torch.Tensor | None = None
    window: int = 0
    sinks: int = 0
    sink_query: torch.Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> AttentionCase:
        """The same on a device, with everything but codes and their scales in a dtype."""
        is_coded = self.key_scales is not None
        return replace(
            self,
            query=_moved(self.query, device, dtype),
            keys=_moved(self.keys, device, self.keys.dtype if is_coded else dtype),
            values=_moved(self.values, device, self.values.dtype if is_coded else dtype),
            key_scales=None if self.key_scales is None else _moved(self.key_scales, device, torch.float16),
            value_scales=None if self.value_scales is None else _moved(self.value_scales, device, torch.float16),
            sink_query=None if self.sink_query is None else _moved(self.sink_query, device, dtype),
        )

    def attend(self, backend: AttentionBackend) -> torch.Tensor:
        """What a backend makes of it, [num_tokens, num_heads, head_dim]."""
        step = backend.plan(self.batch, self.block_size, self.query.device)
        return step(
            self.query,
            self.keys,
            self.values,
            window=self.window,
            sinks=self.sinks,
            sink_query=self.sink_query,
            key_scales=self.key_scales,
            value_scales=self.value_scales,
        )

    def expected(self) -> torch.Tensor:
        """What the reference makes of it in float32 on the CPU, of keys and values without scales."""
        cpu = torch.device("cpu")
        plain = replace(
            self, keys=_unscaled(self.keys, self.key_scales), values=_unscaled(self.values, self.value_scales)
        )
        return replace(plain, key_scales=None, value_scales=None).to(cpu, torch.float32).attend(ReferenceAttention())


def make_attention_case(
    lengths: Sequence[tuple[int, int]],
    *,
    block_size: int = 16,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    window: int = 0,
    sinks: int = 0,
    own_sink_query: bool = False,
    seed: int = 0,
) -> AttentionCase:
    """A float32 case on the CPU, with sequences of (prefix, query) tokens in shuffled blocks and (query, KV) `heads`.

    With a window, blocks that no query sees into are block 0, as if they had been freed.
    """
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    counts = [-(-(prefix + query) // block_size) for prefix, query in lengths]
    num_blocks = sum(counts) + 2
    ids = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    pool = torch.full((num_blocks, LAYERS, 2, num_kv_heads, block_size, head_dim), torch.nan)
    for (prefix, query), table in zip(lengths, tables, strict=True):
        seen = [p for p in range(prefix + query) if not window or p > prefix - window or p < sinks]
        for position in seen:
            block, offset = table[position // block_size], position % block_size
            pool[block, 1, :, :, offset] = torch.randn((2, num_kv_heads, head_dim), generator=generator)
        live = {position // block_size for position in seen}
        table[:] = [block if i in live else 0 for i, block in enumerate(table)]
    batch = build_batch(
        [
            SequenceChunk(token_ids=[0] * query, start_position=prefix, block_table=table)
            for (prefix, query), table in zip(lengths, tables, strict=True)
        ],
        block_size,
    )
    shape = (batch.num_tokens, num_heads, head_dim)
    # Heads beyond those of the query, as the fused projection has them.
    fused = torch.randn((batch.num_tokens, num_heads + 3, head_dim), generator=generator)
    own_query = fused[:, :num_heads]
    sink_query = None
    if own_sink_query:
        # A key that is a sink and in the window is compared with the same query either way.
        positions = torch.from_numpy(batch.positions)[:, None, None]
        sink_query = torch.where(positions >= window + sinks, torch.randn(shape, generator=generator), own_query)
    return AttentionCase(
        batch=batch,
        block_size=block_size,
        query=own_query,
        keys=pool[:, 1, 0],
        values=pool[:, 1, 1],
        window=window,
        sinks=sinks,
        sink_query=sink_query,
    )


def random_attention_case(seed: int) -> AttentionCase:
    """Prompts, chunks with a prefix, drafts and decode rows in one batch, of a shape that `seed` decides."""
    rng = np.random.default_rng(seed)
    window = int(rng.choice([0, 0, 1, 10, 40]))
    sinks = int(rng.choice([0, 4, 20])) if window else 0
    return make_attention_case(
        [(int(rng.integers(0, 70)), int(rng.choice([1, 1, 3, 8, 9, 25]))) for _ in range(rng.integers(1, 4))],
        block_size=int(rng.choice([1, 4, 8, 16, 32])),
        heads=((1, 1), (4, 2), (3, 1), (7, 1), (4, 4))[rng.integers(5)],
        head_dim=int(rng.choice([8, 16, 24])),
        window=window,
        sinks=sinks,
        own_sink_query=bool(sinks and rng.integers(2)),
        seed=seed,
    )


def quantised(case: AttentionCase, dtype: torch.dtype) -> AttentionCase:
    """`case` with keys and values as 8-bit codes and one float16 scale for each token and head, which follow the codes
    of a head piece in memory as in the pool."""
    largest = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max

    def encode(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_blocks, num_heads, block_size, head_dim = values.shape
        pieces = torch.zeros((num_blocks, num_heads, block_size * (head_dim + 2)), dtype=torch.int8)
        codes = pieces[:, :, : block_size * head_dim].view(dtype)
        codes = codes.view(num_blocks, num_heads, block_size, head_dim)
        scales = pieces.view(torch.float16)[:, :, block_size * head_dim // 2 :]
        scales.copy_(values.abs().amax(-1) / largest)
        scaled = values / scales[..., None].float()
        codes.copy_((scaled.round() if dtype == torch.int8 else scaled).clamp(-largest, largest).nan_to_num(0))
        return codes, scales

    keys, key_scales = encode(case.keys)
    values, value_scales = encode(case.values)
    return replace(case, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)


def _unscaled(codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    return codes if scales is None else codes.float() * scales[..., None].float()


def _moved(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A copy with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device).copy_(tensor)
