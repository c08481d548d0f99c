"""A KV pool of plain numpy bytes, and a decode worker that only keeps count: the two ends of a hand-off in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.kv_layout import HeadRange, KvLayout
from pdserve.shared_memory import SharedMemory


class NumpyBlockStore:
    """`KvBlockStore` over one uint8 array `[num_blocks, num_layers, layer_nbytes]`."""

    def __init__(self, layout: KvLayout, num_blocks: int, *, shared: bool = False) -> None:
        """`shared`: in memory that other processes may map, as pools of engines are."""
        self._layout = layout
        shape = (num_blocks, layout.num_layers, layout.layer_nbytes)
        self.data: npt.NDArray[np.uint8] = (
            np.asarray(SharedMemory.create(num_blocks * layout.block_nbytes)).reshape(shape)
            if shared
            else np.zeros(shape, dtype=np.uint8)
        )

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks."""
        return self._layout

    @property
    def device(self) -> str:
        """See `KvBlockStore`."""
        return "cpu"

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Random bytes, a function of `seed` and the position in `blocks`, so that any mix-up shows."""
        rng = np.random.default_rng(seed)
        for block in blocks:
            self.data[block] = rng.integers(0, 256, self.data.shape[1:], dtype=np.uint8)

    def content(self, blocks: Sequence[int]) -> bytes:
        """Bytes of whole blocks, in order."""
        return self.data[list(blocks)].tobytes()

    def read(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview]:
        """Views of the array itself."""
        return self.views(blocks, layer_begin, layer_end, heads)

    def views(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview]:
        """One for each block or, if not all heads are asked for, for each K and V of each layer of each block."""
        if heads is None or heads == (0, self._layout.num_kv_heads):
            return [self.data[block, layer_begin:layer_end].reshape(-1).data for block in blocks]
        begin, end = (head * self._layout.head_nbytes for head in heads)
        half = self._layout.layer_nbytes // 2
        return [
            self.data[block, layer, part + begin : part + end].data
            for block in blocks
            for layer in range(layer_begin, layer_end)
            for part in (0, half)
        ]

    def write(
        self,
        blocks: Sequence[int],
        layer_begin: int,
        layer_end: int,
        data: memoryview,
        heads: HeadRange | None = None,
    ) -> None:
        """Copy `data` into the blocks. Raises ValueError if the length does not fit."""
        views = self.views(blocks, layer_begin, layer_end, heads)
        nbytes = sum(view.nbytes for view in views)
        if data.nbytes != nbytes:
            raise ValueError(f"{len(blocks)} blocks of {nbytes} bytes, got {data.nbytes}")
        for view in views:
            view[:], data = data[: view.nbytes], data[view.nbytes :]

    def copy(self, source: int, destination: int) -> None:
        """See `KvBlockStore`."""
        self.data[destination] = self.data[source]
