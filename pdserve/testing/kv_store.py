"""A KV pool of plain numpy bytes, and a decode worker that only keeps count: the two ends of a hand-off in tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.kv_layout import KvLayout


class NumpyBlockStore:
    """`KvBlockStore` over one uint8 array `[num_blocks, num_layers, layer_nbytes]`."""

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self._layout = layout
        self.data: npt.NDArray[np.uint8] = np.zeros(
            (num_blocks, layout.num_layers, layout.layer_nbytes), dtype=np.uint8
        )

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks."""
        return self._layout

    def fill(self, blocks: Sequence[int], seed: int) -> None:
        """Random bytes, a function of `seed` and the position in `blocks`, so that any mix-up shows."""
        rng = np.random.default_rng(seed)
        for block in blocks:
            self.data[block] = rng.integers(0, 256, self.data.shape[1:], dtype=np.uint8)

    def content(self, blocks: Sequence[int]) -> bytes:
        """Bytes of whole blocks, in order."""
        return self.data[list(blocks)].tobytes()

    def read(self, blocks: Sequence[int], layer_begin: int, layer_end: int) -> list[memoryview]:
        """Views of the array itself, one per block."""
        return [self.data[block, layer_begin:layer_end].reshape(-1).data for block in blocks]

    def write(self, blocks: Sequence[int], layer_begin: int, layer_end: int, data: memoryview) -> None:
        """Copy `data` into the blocks. Raises ValueError if the length does not fit."""
        nbytes = (layer_end - layer_begin) * self._layout.layer_nbytes
        if len(data) != nbytes * len(blocks):
            raise ValueError(f"{len(blocks)} blocks x {nbytes} bytes, got {len(data)}")
        source = np.frombuffer(data, dtype=np.uint8).reshape(len(blocks), layer_end - layer_begin, -1)
        for row, block in enumerate(blocks):
            self.data[block, layer_begin:layer_end] = source[row]
