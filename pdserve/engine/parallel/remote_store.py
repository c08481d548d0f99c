"""A shard of the KV pool that only its own rank reaches, as on a GPU: the rank copies for rank 0, through a socket.

Shards in host memory need none of this: they lie in memory that rank 0 has mapped as well.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from pdserve.engine.engine import EngineLostError
from pdserve.engine.parallel.messages import Array, Channel, ChannelClosedError, Kind, ProtocolError
from pdserve.kv_layout import HeadRange, KvBlockStore, KvLayout


class RemoteStore:
    """Implements `KvBlockStore` on rank 0, for the shard of one follower. Every call raises EngineLostError when that
    has ended."""

    def __init__(self, channel: Channel, layout: KvLayout, device: str) -> None:
        """`channel` leads to a `serve_store`. `layout` and `device`: of the shard."""
        self._channel = channel
        self._layout = layout
        self._device = device
        self._lock = threading.Lock()

    @property
    def layout(self) -> KvLayout:
        """Geometry of the blocks of this shard."""
        return self._layout

    @property
    def device(self) -> str:
        """See `KvBlockStore`."""
        return self._device

    def read(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview]:
        """See `KvBlockStore`. One view, which owns its memory."""
        data = self._ask(Kind.READ, [*self._where(blocks, layer_begin, layer_end, heads)])
        return [data.data.cast("B").toreadonly()]

    def views(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> list[memoryview] | None:
        """None: this process does not see the memory."""
        return None

    def write(
        self,
        blocks: Sequence[int],
        layer_begin: int,
        layer_end: int,
        data: memoryview,
        heads: HeadRange | None = None,
    ) -> None:
        """See `KvBlockStore`."""
        where = self._where(blocks, layer_begin, layer_end, heads)
        begin, end = where[1][2:].tolist()
        expected = len(blocks) * (layer_end - layer_begin) * 2 * (end - begin) * self._layout.head_nbytes
        if data.nbytes != expected:
            raise ValueError(f"{data.nbytes} bytes do not fit {len(blocks)} blocks: {expected} bytes")
        self._ask(Kind.WRITE, [*where, np.frombuffer(data, np.uint8)])

    def copy(self, source: int, destination: int) -> None:
        """See `KvBlockStore`."""
        self._ask(Kind.COPY, [np.array([source, destination], np.int64)])

    def _where(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None
    ) -> tuple[Array, Array]:
        begin, end = (0, self._layout.num_kv_heads) if heads is None else heads
        return np.asarray(blocks, np.int64), np.array([layer_begin, layer_end, begin, end], np.int64)

    def _ask(self, kind: Kind, arrays: list[Array]) -> Array:
        try:
            with self._lock:
                self._channel.send(kind, arrays)
                answer, found = self._channel.receive()
        except (ChannelClosedError, OSError) as error:
            raise EngineLostError("the rank that holds these KV heads has ended") from error
        if answer is not Kind.DONE or len(found) != 1:
            raise ProtocolError(f"{answer.name} is no answer to {kind.name}")
        return found[0]


def serve_store(channel: Channel, store: KvBlockStore) -> None:
    """On the rank that holds a shard, in a thread of its own: do what rank 0 asks for, until it goes.

    Raises ProtocolError, and whatever the store does.
    """
    while True:
        try:
            kind, arrays = channel.receive()
            channel.send(Kind.DONE, [_serve(store, kind, arrays)])
        except ChannelClosedError:
            return


def _serve(store: KvBlockStore, kind: Kind, arrays: list[Array]) -> Array:
    match kind, arrays:
        case Kind.READ, [blocks, bounds]:
            first, last, begin, end = bounds.tolist()
            pieces = store.read(blocks.tolist(), first, last, (begin, end))
            return np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces])
        case Kind.WRITE, [blocks, bounds, data]:
            first, last, begin, end = bounds.tolist()
            store.write(blocks.tolist(), first, last, data.data.cast("B"), (begin, end))
        case Kind.COPY, [pair]:
            store.copy(int(pair[0]), int(pair[1]))
        case _:
            raise ProtocolError(f"{kind.name} with {len(arrays)} arrays asks nothing of a KV pool")
    return np.empty(0, np.uint8)
