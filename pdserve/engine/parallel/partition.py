"""Which part of a model each rank holds. Pure numbers: knows nothing of torch, processes or devices.

Rows of a matrix are its outputs. What is cut by rows (query, key, value, gate, up, embedding, head) gives each rank
some outputs; what is cut by columns (attention output, down) gives each a summand of all outputs. This is the scheme of
Megatron-LM (Shoeybi et al., 2019): two sums per layer, and one for the embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdserve.model.config import ModelConfig

Span = tuple[int, int]
"""[begin, end)."""

VOCAB_UNIT = 32
"""Parts of the vocabulary begin at a multiple of this, at a word of a token mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one rank holds."""

    rank: int
    size: int
    """Ranks of the group."""
    query_heads: Span
    kv_heads: Span
    """With fewer KV heads than ranks, some ranks hold copies of the same one."""
    inner: Span
    """Of the intermediate size."""
    vocab: Span

    def config(self, whole: ModelConfig) -> ModelConfig:
        """The model as this rank computes it: fewer heads, a narrower MLP, some of the tokens.

        A bias that is added after a sum over ranks is rank 0's alone.
        """
        return replace(
            whole,
            num_heads=_length(self.query_heads),
            num_kv_heads=_length(self.kv_heads),
            intermediate_size=_length(self.inner),
            vocab_size=_length(self.vocab),
            output_bias=whole.output_bias and self.rank == 0,
        )


def obstacle(config: ModelConfig, size: int) -> str | None:
    """Why the model cannot be cut into `size` parts; None if it can."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    if kv_heads < size:
        if size % kv_heads:
            return f"the model's {kv_heads} KV heads cannot be copied evenly to {size} ranks; use a multiple of them"
        if heads % size:
            return f"the model's {heads} query heads cannot be shared evenly by {size} ranks; use a divisor of them"
    if config.vocab_size < size * VOCAB_UNIT or config.intermediate_size < size:
        return f"the model is too small for {size} ranks"
    return None


def partition(config: ModelConfig, size: int) -> tuple[Part, ...]:
    """The parts of all ranks. Where numbers do not divide evenly, later ranks hold more: KV heads stay whole, with the
    query heads that read them. The model must have no `obstacle`."""
    assert obstacle(config, size) is None, "such a model is refused before"
    group = config.num_heads // config.num_kv_heads
    parts = []
    for rank in range(size):
        if config.num_kv_heads >= size:
            kv = _share(config.num_kv_heads, rank, size)
            query = (kv[0] * group, kv[1] * group)
        else:
            copies = size // config.num_kv_heads
            kv = (rank // copies, rank // copies + 1)
            query = _share(config.num_heads, rank, size)
        begin, end = _share(-(-config.vocab_size // VOCAB_UNIT), rank, size)
        parts.append(
            Part(
                rank=rank,
                size=size,
                query_heads=query,
                kv_heads=kv,
                inner=_share(config.intermediate_size, rank, size),
                vocab=(begin * VOCAB_UNIT, min(end * VOCAB_UNIT, config.vocab_size)),
            )
        )
    return tuple(parts)


def head_cuts(parts: Sequence[Part]) -> tuple[int, ...]:
    """`KvLayout.head_cuts` of all ranks together."""
    return tuple(sorted({part.kv_heads[0] for part in parts} - {0}))


def _share(number: int, rank: int, size: int) -> Span:
    return number * rank // size, number * (rank + 1) // size


def _length(span: Span) -> int:
    return span[1] - span[0]
