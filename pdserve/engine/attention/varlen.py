"""Prefill through `torch.nn.attention.varlen` (FlashAttention on ragged batches), where this torch has a usable one.

It is detected by its signature, as it changed between releases: grouped heads and windows are needed. Its paged form is
not used: which block sizes that takes depends on the kernel behind it, so keys are gathered, which for long queries
costs little beside the products.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pdserve.engine.batch import Batch, IntArray, LongArray
from pdserve.engine.device import upload

MAX_HEAD_DIM = 256
"""Of FlashAttention, which also wants a multiple of 8."""
_PARAMETERS = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "window_size", "enable_gqa")


class VarlenFunction(Protocol):
    """What is used of `torch.nn.attention.varlen.varlen_attn`."""

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> torch.Tensor:
        """[T_q, heads, head_dim]. `query` [T_q, heads, head_dim] and `key` [T_k, kv_heads, head_dim] of sequences back
        to back, which `cu_seq_*` [N + 1] int32 delimit. A window (left, 0) is causal, aligned at the last query and
        the last key, over `left` keys before the query's own; -1 is no limit."""


def find_varlen() -> VarlenFunction | None:
    """The one of this torch; None if it has none that can be used."""
    try:
        module = importlib.import_module("torch.nn.attention.varlen")
    except ModuleNotFoundError:
        return None
    function: VarlenFunction = module.varlen_attn
    return function if is_usable(function) else None


def is_usable(function: Callable[..., torch.Tensor]) -> bool:
    """Whether it has the parameters that are needed, by name."""
    parameters = inspect.signature(function).parameters
    return all(name in parameters for name in _PARAMETERS)


class VarlenSequences:
    """Some sequences of a batch, whose attention varlen attention computes."""

    def __init__(
        self, batch: Batch, sequences: IntArray, block_size: int, device: torch.device, function: VarlenFunction
    ) -> None:
        self._batch = batch
        self._sequences = sequences
        self._block_size = block_size
        self._device = device
        self._function = function
        begins, ends = batch.cu_seqlens[sequences], batch.cu_seqlens[sequences + 1]
        self._rows = upload(_ranges(begins, ends), device)
        self._cu_queries = upload(_cumulated(ends - begins), device)
        self._max_query = int((ends - begins).max())
        self._first_positions = batch.positions[begins].astype(np.int64)
        self._keys: dict[int, _Keys] = {}
        """By window: which keys are gathered. Layers with the same window share them."""

    def takes(self, query: torch.Tensor, key_blocks: torch.Tensor) -> bool:
        """Whether the function can compute these tensors: half precision, and not quantised."""
        return (
            query.dtype in (torch.float16, torch.bfloat16)
            and key_blocks.dtype == query.dtype
            and query.shape[2] <= MAX_HEAD_DIM
            and query.shape[2] % 8 == 0
        )

    def attend(
        self,
        query: torch.Tensor,
        key_blocks: torch.Tensor,
        value_blocks: torch.Tensor,
        output: torch.Tensor,
        window: int,
    ) -> None:
        """Write the rows of these sequences into `output`. Arguments as in `StepAttention`."""
        if window not in self._keys:
            self._keys[window] = self._plan_keys(window)
        keys = self._keys[window]
        attended = self._function(
            query[self._rows],
            key_blocks[keys.blocks, :, keys.offsets],
            value_blocks[keys.blocks, :, keys.offsets],
            self._cu_queries,
            keys.cu_keys,
            self._max_query,
            keys.max_keys,
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=query.shape[1] != key_blocks.shape[1],
        )
        output[self._rows] = attended

    def _plan_keys(self, window: int) -> _Keys:
        ends = self._batch.context_lens[self._sequences].astype(np.int64)
        # No query sees what is before the window of the first one: there may be no blocks any more.
        begins = np.maximum(self._first_positions - window + 1, 0) if window else np.zeros_like(ends)
        positions = _ranges(begins, ends)
        owner = np.repeat(self._sequences, ends - begins)
        block, offset = np.divmod(positions, self._block_size)
        return _Keys(
            blocks=upload(self._batch.block_tables[owner, block].astype(np.int64), self._device),
            offsets=upload(offset, self._device),
            cu_keys=upload(_cumulated(ends - begins), self._device),
            max_keys=int((ends - begins).max()),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class _Keys:
    """Keys to gather, K in all of N sequences."""

    blocks: torch.Tensor
    """[K] int64"""
    offsets: torch.Tensor
    """[K] int64 offset in the block."""
    cu_keys: torch.Tensor
    """[N + 1] int32"""
    max_keys: int


def _ranges(begins: IntArray | LongArray, ends: IntArray | LongArray) -> LongArray:
    """All of begins[0] ... ends[0] - 1, begins[1] ... and so on, int64."""
    lengths = (ends - begins).astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    positions: LongArray = np.arange(int(lengths.sum())) + np.repeat(begins - starts, lengths)
    return positions


def _cumulated(lengths: IntArray | LongArray) -> IntArray:
    result = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=result[1:])
    return result
