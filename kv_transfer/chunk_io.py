"""How the chunks of a pair of workers map to the memory of each: what to read at P, where to put it at D.

Between equal sides the payload is the memory itself and nobody copies. Otherwise D converts: it decodes what P encoded
(`kv_codec.py`), moves it from P's blocks into its own (`reblock.py`), and rounds it to its own dtype (`pool_codes.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from kv_transfer import kv_codec
from kv_transfer.kv_codec import PayloadError
from kv_transfer.plan import Chunk
from kv_transfer.pool_codes import Stored, from_values, join, split, to_values
from kv_transfer.reblock import by_token, group_of, reblock, same_blocks
from kv_transfer.wire_format import SCALE_NBYTES, WireFormat
from pdserve.kv_layout import HeadRange, KvBlockStore, KvLayout


class ChunkIo(Protocol):
    """One side of a link. Any thread may call it, for blocks that the caller owns at that moment.

    `blocks` are all blocks of the sequence on this side.
    """

    def read(self, blocks: Sequence[int], chunk: Chunk) -> Sequence[memoryview]:
        """The payload of a chunk, at P: views of the pool where possible.

        Raises HandoffError if its values cannot be encoded.
        """

    def views(self, blocks: Sequence[int], chunk: Chunk) -> Sequence[memoryview] | None:
        """Where the payload goes, at D: writable, in order of the payload. None if only `write` can."""

    def write(self, blocks: Sequence[int], chunk: Chunk, payload: memoryview) -> None:
        """Put a payload in place, at D. Raises PayloadError, with nothing written, if it cannot be what P had."""


def prefill_io(store: KvBlockStore, wire: WireFormat) -> ChunkIo:
    """The sending side of a link; `store` has the blocks that `wire` describes."""
    assert same_blocks(store.layout, wire.layout), "the wire has the sender's blocks"
    return _Io(store, wire)


def decode_io(store: KvBlockStore, wire: WireFormat) -> ChunkIo:
    """The receiving side of a link."""
    assert store.layout.block_size == wire.receiver_block_size, "the wire was negotiated for other blocks"
    return _Io(store, wire)


class _Io:
    """Implements `ChunkIo` for a store at either end of `wire`."""

    def __init__(self, store: KvBlockStore, wire: WireFormat) -> None:
        self._store = store
        self._wire = wire
        self._same_blocks = same_blocks(store.layout, wire.layout)

    def read(self, blocks: Sequence[int], chunk: Chunk) -> Sequence[memoryview]:
        """See `ChunkIo`."""
        ids = blocks[chunk.block_begin : chunk.block_end]
        pieces = self._store.read(ids, chunk.layer_begin, chunk.layer_end, self._heads(chunk))
        codec = self._wire.codec
        if codec == "none":
            return pieces
        layout = self._wire.layout
        stored = np.frombuffer(bytearray().join(pieces), kv_codec.bits_type(layout.dtype)).reshape(
            _shape(layout, chunk)
        )
        values = kv_codec.to_float32(stored, layout.dtype)
        _clear_after(values, layout, chunk)
        scales, codes = kv_codec.encode(values, codec)
        return [scales.astype("<f4", copy=False).data.cast("B"), codes.data.cast("B")]

    def views(self, blocks: Sequence[int], chunk: Chunk) -> Sequence[memoryview] | None:
        """See `ChunkIo`."""
        if not self._is_memory:
            return None
        return self._store.views(
            self._own_blocks(blocks, chunk), chunk.layer_begin, chunk.layer_end, self._heads(chunk)
        )

    def write(self, blocks: Sequence[int], chunk: Chunk, payload: memoryview) -> None:
        """See `ChunkIo`."""
        if payload.nbytes != chunk.nbytes:
            raise PayloadError(f"chunk {chunk.seq}: payload of {payload.nbytes} bytes, the plan says {chunk.nbytes}")
        if not self._is_memory:
            payload = join(self._converted(chunk, self._decode(chunk, payload))).data.cast("B")
        ids = self._own_blocks(blocks, chunk)
        self._store.write(ids, chunk.layer_begin, chunk.layer_end, payload, self._heads(chunk))

    @property
    def _is_memory(self) -> bool:
        """Whether payloads are what lies in the blocks."""
        return self._same_blocks and self._wire.codec == "none"

    def _converted(self, chunk: Chunk, stored: Stored) -> Stored:
        """From blocks of the sender to blocks of this side."""
        source, target = self._wire.layout, self._store.layout
        tokens = chunk.token_begin, chunk.token_end
        if self._same_blocks:
            return stored
        if source.dtype == target.dtype:
            scales = stored.scales
            return Stored(
                reblock(stored.bits, source, target, *tokens),
                None if scales is None else reblock(scales, _of_scales(source), _of_scales(target), *tokens),
            )
        values = to_values(stored, source)
        own = reblock(values.reshape(*values.shape[:-2], -1), _by_token(source), _by_token(target), *tokens)
        return from_values(own.reshape(*own.shape[:-1], target.block_size, target.head_dim), target)

    def _decode(self, chunk: Chunk, payload: memoryview) -> Stored:
        """What the sender has in its blocks."""
        layout, codec = self._wire.layout, self._wire.codec
        shape = _shape(layout, chunk)
        if codec == "none":
            return split(payload, layout, shape)
        scales_nbytes = int(np.prod(shape[:-1])) * SCALE_NBYTES
        scales = np.frombuffer(payload[:scales_nbytes], "<f4").reshape(shape[:-1])
        codes = np.frombuffer(payload[scales_nbytes:], np.uint8).reshape(shape)
        return Stored(kv_codec.decode(scales, codes, codec, layout.dtype), None)

    def _own_blocks(self, blocks: Sequence[int], chunk: Chunk) -> Sequence[int]:
        """Those of `blocks`, all of this side, that the chunk's tokens lie in."""
        size = self._store.layout.block_size
        return blocks[chunk.token_begin // size : -(-chunk.token_end // size)]

    def _heads(self, chunk: Chunk) -> HeadRange:
        return (chunk.head_begin, chunk.head_end)


def _shape(layout: KvLayout, chunk: Chunk) -> tuple[int, int, int, int, int]:
    """Of the values of a chunk."""
    return (
        chunk.block_end - chunk.block_begin,
        chunk.layer_end - chunk.layer_begin,
        2,
        chunk.head_end - chunk.head_begin,
        layout.block_size * layout.head_dim,
    )


def _by_token(layout: KvLayout) -> KvLayout:
    """Of values that lie token by token."""
    return replace(layout, k_order="token,dim", v_order="token,dim")


def _of_scales(layout: KvLayout) -> KvLayout:
    """Of the scales of a pool: one for each token and head."""
    return replace(_by_token(layout), head_dim=1)


def _clear_after(values: kv_codec.Float32, layout: KvLayout, chunk: Chunk) -> None:
    """Zeros behind the last token: what an earlier owner of the block left there must not have a say in the scales."""
    used = chunk.token_end - (chunk.block_end - 1) * layout.block_size
    for part, order in ((0, layout.k_order), (1, layout.v_order)):
        by_token(values[-1:, :, part], layout.block_size, order, group_of(order))[..., used:, :, :] = 0.0
