"""The KV memory: one block-major allocation, seen by attention as tensors and by the transfer layer as bytes.

On CPU the transfer layer reads the pool itself, see `host_store.py`; a device pool is gathered into, or scattered from,
a contiguous staging buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from pdserve.engine.device import TORCH_DTYPES
from pdserve.engine.host_store import check_range, words_of
from pdserve.engine.pool_codes import CODE_TYPES, Spread, encode
from pdserve.engine.shared_pool import PoolMemory, allocate_pool
from pdserve.kv_layout import HeadRange, KvLayout


class BlockPool:
    """`num_blocks` KV blocks of zeros on a device.

    Zeroed, as attention may multiply what was never written by a weight of exactly 0, and 0 * NaN is NaN.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, device: torch.device, memory: PoolMemory | None = None
    ) -> None:
        """`memory`: host memory to lie in, of just the size; None for memory of its own."""
        self.layout = layout
        self.num_blocks = num_blocks
        shape: tuple[int, ...] = (num_blocks, layout.num_layers, 2, layout.num_kv_heads)
        if layout.has_scales:
            shape, dtype = (*shape, layout.head_nbytes), torch.uint8
        else:
            shape, dtype = (*shape, layout.block_size, layout.head_dim), TORCH_DTYPES[layout.dtype]
        if device.type == "cpu":
            memory = memory or allocate_pool(num_blocks * layout.block_nbytes)
        self.kv = (
            torch.zeros(shape, dtype=dtype, device=device)
            if memory is None
            else torch.from_numpy(memory.data).view(dtype).view(shape)
        )
        """[num_blocks, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]; in eight bits the bytes of a head,
        [..., head_nbytes]"""
        self._spread = Spread(layout.head_dim, device) if layout.has_scales else None

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each [num_blocks, num_kv_heads, block_size, head_dim] with a long block stride. In
        eight bits these are codes, and between heads lie their `scales`."""
        if self._spread is None:
            return self.kv[:, index, 0], self.kv[:, index, 1]
        size = self.layout.block_size, self.layout.head_dim
        codes = self.kv[:, index, :, :, : size[0] * size[1]].view(CODE_TYPES[self.layout.dtype])
        parts = codes.view(*codes.shape[:-1], *size)
        return parts[:, 0], parts[:, 1]

    def scales(self, index: int) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """Scales of K and V of one layer, each [num_blocks, num_kv_heads, block_size] float16; None if values are
        stored."""
        if self._spread is None:
            return None, None
        scales = self.kv[:, index, :, :, self.layout.block_size * self.layout.head_dim :].view(torch.float16)
        return scales[:, 0], scales[:, 1]

    def queries(self, heads: torch.Tensor) -> torch.Tensor:
        """Queries [..., head_dim] as the stored keys are compared with them."""
        return heads if self._spread is None else self._spread.queries(heads)

    def write(
        self, index: int, blocks: torch.Tensor, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """K and V [T, num_kv_heads, head_dim] of one layer into slots `offsets` [T] of `blocks` [T]."""
        parts = self.layer(index)
        if self._spread is None:
            for part, heads in zip(parts, (keys, values), strict=True):
                part[blocks, :, offsets] = heads
            return
        for part, scales, heads in zip(parts, self.scales(index), (self._spread.keys(keys), values), strict=True):
            assert scales is not None, "what is spread has scales"
            codes, scales[blocks, :, offsets] = encode(heads, self.layout.dtype)
            # As bytes: torch moves no elements of float8.
            part.view(torch.uint8)[blocks, :, offsets] = codes.view(torch.uint8)

    @property
    def words(self) -> torch.Tensor:
        """The same memory as [num_blocks, num_layers, words] int32: a layer has K and V, so a multiple of 4 bytes."""
        return self.kv.view(self.num_blocks, self.layout.num_layers, -1).view(torch.int32)


class Staging(Protocol):
    """How bytes get between a device and host memory, and in what order with the computation."""

    def transferring(self) -> AbstractContextManager[object]:
        """Where transfer work runs; entered work starts after the last computation that was submitted before."""

    def host_buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        """A contiguous int32 host tensor that the device can copy from and to."""

    def wait(self) -> None:
        """Return when all work submitted inside `transferring` by this thread is complete."""


class StagedBlockStore:
    """A pool in device memory as bytes: gathered into one host buffer per read, scattered from one per write."""

    def __init__(self, pool: BlockPool, staging: Staging) -> None:
        self._pool = pool
        self._staging = staging

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks."""
        return self._pool.layout

    @property
    def device(self) -> str:
        """See `KvBlockStore`."""
        return str(self._pool.kv.device)

    def read(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview]:
        """One read-only view of a host copy of the blocks; it owns its memory."""
        begin, end = check_range(self.layout, self._pool.num_blocks, blocks, layer_begin, layer_end, heads)
        nbytes = len(blocks) * (layer_end - layer_begin) * 2 * (end - begin) * self.layout.head_nbytes
        buffer = self._staging.host_buffer((nbytes // 4,))
        with self._staging.transferring():
            part = self._pool.kv[:, layer_begin:layer_end, :, begin:end]
            gathered = part.index_select(0, self._index(blocks))
            buffer.copy_(gathered.view(-1).view(torch.int32), non_blocking=True)
            self._staging.wait()
        return [buffer.numpy().data.cast("B").toreadonly()]

    def views(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview] | None:
        """None: the host does not see the memory of a device."""
        return None

    def write(
        self,
        blocks: Sequence[int],
        layer_begin: int,
        layer_end: int,
        data: memoryview,
        heads: HeadRange | None = None,
    ) -> None:
        """Copy `data` into the blocks. Raises ValueError if its length does not fit."""
        begin, end = check_range(self.layout, self._pool.num_blocks, blocks, layer_begin, layer_end, heads)
        source = words_of(self.layout, len(blocks), layer_end - layer_begin, end - begin, data)
        buffer = self._staging.host_buffer((source.nbytes // 4,))
        buffer.numpy()[...] = source.reshape(-1).view(np.int32)
        with self._staging.transferring():
            part = self._pool.kv[:, layer_begin:layer_end, :, begin:end]
            arrived = buffer.to(part.device, non_blocking=True)
            shape = (len(blocks), *part.shape[1:])
            part.index_copy_(0, self._index(blocks), arrived.view(part.dtype).view(shape))
            self._staging.wait()

    def copy(self, source: int, destination: int) -> None:
        """See `KvBlockStore`. It does not leave the device."""
        check_range(self.layout, self._pool.num_blocks, (source, destination), 0, self.layout.num_layers, None)
        with self._staging.transferring():
            self._pool.kv[destination].copy_(self._pool.kv[source], non_blocking=True)
            self._staging.wait()

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        index = self._staging.host_buffer((len(blocks),))
        index.numpy()[...] = blocks
        return index.to(self._pool.kv.device, non_blocking=True).long()


class CudaStaging:
    """Pinned host buffers and a side stream, so that transfers overlap the computation of other blocks."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._computed: torch.cuda.Event | None = None

    def computation_submitted(self) -> None:
        """Call on the computing thread after each forward pass: transfers from now on start after it."""
        self._computed = self.mark()

    def mark(self) -> torch.cuda.Event:
        """The end of what the calling thread has submitted so far."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def transferring(self) -> AbstractContextManager[object]:
        """The side stream, behind the last forward pass: it wrote what is read, or last read what is overwritten."""
        if self._computed is not None:
            self._stream.wait_event(self._computed)
        return torch.cuda.stream(self._stream)

    def host_buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        """Pinned memory; torch caches it, so a buffer of a size seen before costs microseconds."""
        return torch.empty(shape, dtype=torch.int32, pin_memory=True)

    def wait(self) -> None:
        """Wait for an event of the side stream, not for the device: computation goes on."""
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        done.synchronize()
