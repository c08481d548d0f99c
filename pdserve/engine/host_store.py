"""A KV pool in host memory as bytes, for the transfer layer. Knows no engine and no torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pdserve.kv_layout import HeadRange, KvLayout
from pdserve.kv_views import PoolViews

Words = npt.NDArray[np.int16]
"""Bytes move as 16-bit words: no dtype is narrower, and bfloat16 has no numpy type."""


class HostBlockStore:
    """Implements `KvBlockStore`: reads copy nothing."""

    def __init__(self, layout: KvLayout, words: npt.NDArray[np.int32]) -> None:
        """`words` is the pool, [num_blocks, num_layers, words of a layer], C-contiguous."""
        self._layout = layout
        shape = (len(words), layout.num_layers, 2, layout.num_kv_heads, layout.head_nbytes // 2)
        self._words: Words = words.view(np.int16).reshape(shape)
        self._bytes = words.reshape(-1).data.cast("B")
        self._address = int(words.ctypes.data)

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks."""
        return self._layout

    @property
    def device(self) -> str:
        """See `KvBlockStore`."""
        return "cpu"

    def read(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> Sequence[memoryview]:
        """Read-only views of the pool, as long as they can be: a run of consecutive whole blocks is one piece."""
        views = self.views(blocks, layer_begin, layer_end, heads)
        return views.read_only() if isinstance(views, PoolViews) else [view.toreadonly() for view in views]

    def views(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> Sequence[memoryview]:
        """Like `read`, but writable."""
        begin, end = check_range(self._layout, len(self._words), blocks, layer_begin, layer_end, heads)
        if end - begin < self._layout.num_kv_heads:
            return [
                self._words[block, layer, part, begin:end].data.cast("B")
                for block in blocks
                for layer in range(layer_begin, layer_end)
                for part in range(2)
            ]
        if layer_end - layer_begin < self._layout.num_layers:
            layer_nbytes = self._layout.layer_nbytes
            offsets = np.asarray(blocks, np.int64) * self._layout.block_nbytes + layer_begin * layer_nbytes
            return PoolViews(self._bytes, self._address, offsets, (layer_end - layer_begin) * layer_nbytes)
        return [self._words[first:last].data.cast("B") for first, last in _runs(blocks)]

    def write(
        self,
        blocks: Sequence[int],
        layer_begin: int,
        layer_end: int,
        data: memoryview,
        heads: HeadRange | None = None,
    ) -> None:
        """Copy `data` into the blocks. Raises ValueError if its length does not fit."""
        begin, end = check_range(self._layout, len(self._words), blocks, layer_begin, layer_end, heads)
        source = words_of(self._layout, len(blocks), layer_end - layer_begin, end - begin, data)
        for block, piece in zip(blocks, source, strict=True):
            self._words[block, layer_begin:layer_end, :, begin:end] = piece

    def copy(self, source: int, destination: int) -> None:
        """See `KvBlockStore`."""
        check_range(self._layout, len(self._words), (source, destination), 0, self._layout.num_layers, None)
        self._words[destination] = self._words[source]


def check_range(
    layout: KvLayout,
    num_blocks: int,
    blocks: Sequence[int],
    layer_begin: int,
    layer_end: int,
    heads: HeadRange | None,
) -> HeadRange:
    """Assert that these blocks, layers and heads exist, and give the range of heads that is meant."""
    assert 0 <= layer_begin < layer_end <= layout.num_layers, f"no layers [{layer_begin}, {layer_end})"
    # A negative index would silently reach another request's block.
    assert len(blocks) > 0 and min(blocks) >= 0 and max(blocks) < num_blocks, f"no such blocks: {list(blocks)}"
    begin, end = (0, layout.num_kv_heads) if heads is None else heads
    assert 0 <= begin < end <= layout.num_kv_heads, f"no heads [{begin}, {end})"
    return begin, end


def words_of(layout: KvLayout, num_blocks: int, num_layers: int, num_heads: int, data: memoryview) -> Words:
    """Bytes as words [num_blocks, num_layers, 2, num_heads, words]. Raises ValueError if the length does not fit."""
    expected = num_blocks * num_layers * 2 * num_heads * layout.head_nbytes
    if data.nbytes != expected:
        raise ValueError(
            f"{data.nbytes} bytes do not fit {num_blocks} blocks x {num_layers} layers x {num_heads} heads: "
            f"{expected} bytes"
        )
    return np.frombuffer(data, dtype=np.int16).reshape(num_blocks, num_layers, 2, num_heads, layout.head_nbytes // 2)


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Maximal runs [begin, end) of consecutive ids, in order."""
    ids = np.asarray(blocks, dtype=np.int64)
    breaks = np.flatnonzero(np.diff(ids) != 1)
    begins = ids[np.concatenate([[0], breaks + 1])]
    ends = ids[np.concatenate([breaks, [len(ids) - 1]])] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
