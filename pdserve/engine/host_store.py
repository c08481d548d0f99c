"""A KV pool in host memory as bytes, for the transfer layer. Knows no engine and no torch.

Bytes move as 32-bit words in whole contiguous block ranges. (Indexed assignment to a uint8 view moves the same bytes
many times slower.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.kv_layout import KvLayout


class HostBlockStore:
    """Implements `KvBlockStore`: reads copy nothing."""

    def __init__(self, layout: KvLayout, words: npt.NDArray[np.int32]) -> None:
        """`words` is the pool, [num_blocks, num_layers, words of a layer], C-contiguous."""
        self._layout = layout
        self._words = words

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks."""
        return self._layout

    def read(self, blocks: Sequence[int], layer_begin: int, layer_end: int) -> list[memoryview]:
        """Read-only views of the pool: one per block, or per run of consecutive blocks if all layers are asked for."""
        check_range(self._layout, len(self._words), blocks, layer_begin, layer_end)
        if layer_begin == 0 and layer_end == self._layout.num_layers:
            return [bytes_of(self._words[begin:end]) for begin, end in _runs(blocks)]
        return [bytes_of(self._words[block, layer_begin:layer_end]) for block in blocks]

    def write(self, blocks: Sequence[int], layer_begin: int, layer_end: int, data: memoryview) -> None:
        """Copy `data` into the blocks. Raises ValueError if its length does not fit."""
        check_range(self._layout, len(self._words), blocks, layer_begin, layer_end)
        source = words_of(self._layout, len(blocks), layer_end - layer_begin, data)
        for block, piece in zip(blocks, source, strict=True):
            self._words[block, layer_begin:layer_end] = piece


def check_range(layout: KvLayout, num_blocks: int, blocks: Sequence[int], layer_begin: int, layer_end: int) -> None:
    """Assert that these blocks and layers exist."""
    assert 0 <= layer_begin < layer_end <= layout.num_layers, f"no layers [{layer_begin}, {layer_end})"
    # A negative index would silently reach another request's block.
    assert len(blocks) > 0 and min(blocks) >= 0 and max(blocks) < num_blocks, f"no such blocks: {list(blocks)}"


def bytes_of(words: npt.NDArray[np.int32]) -> memoryview:
    """Contiguous words as a read-only view of bytes."""
    return words.data.cast("B").toreadonly()


def words_of(layout: KvLayout, num_blocks: int, num_layers: int, data: memoryview) -> npt.NDArray[np.int32]:
    """Bytes as words [num_blocks, num_layers, words of a layer]. Raises ValueError if the length does not fit."""
    expected = num_blocks * num_layers * layout.layer_nbytes
    if data.nbytes != expected:
        raise ValueError(f"{data.nbytes} bytes do not fit {num_blocks} blocks x {num_layers} layers: {expected} bytes")
    return np.frombuffer(data, dtype=np.int32).reshape(num_blocks, num_layers, layout.layer_nbytes // 4)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs [begin, end) of consecutive ids, in order."""
    ids = np.asarray(blocks, dtype=np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1)
    begins = ids[np.concatenate([[0], breaks + 1])]
    ends = ids[np.concatenate([breaks, [len(ids) - 1]])] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
