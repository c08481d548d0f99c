"""KV stores that each hold some heads, acting as one: what a tensor-parallel worker shows the transfer layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pdserve.kv_layout import HeadRange, KvBlockStore, KvLayout


class ShardedStore:
    """`KvBlockStore` over shards that use the same block numbers. No call may cross from one shard to another."""

    def __init__(self, shards: Sequence[tuple[int, KvBlockStore]]) -> None:
        """`shards` are pairs of the first head that a store holds, and the store. Stores that hold the same heads are
        copies of each other, as there are where a model has fewer KV heads than there are shards."""
        self._shards = sorted(shards, key=lambda shard: shard[0])
        begins = sorted({begin for begin, _ in shards})
        ends = {begin: begin + store.layout.num_kv_heads for begin, store in shards}
        assert begins[0] == 0, "nobody holds head 0"
        assert [ends[begin] for begin in begins[:-1]] == begins[1:], f"shards leave gaps or overlap: {ends}"
        self._layout = replace(self._shards[0][1].layout, num_kv_heads=ends[begins[-1]], head_cuts=tuple(begins[1:]))

    @property
    def layout(self) -> KvLayout:
        """That of a block of all shards together."""
        return self._layout

    @property
    def device(self) -> str:
        """See `KvBlockStore`: where the first shard is."""
        return self._shards[0][1].device

    def read(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> Sequence[memoryview]:
        """See `KvBlockStore`. Of copies, that of the first rank."""
        stores, own = self._holders(heads)
        return stores[0].read(blocks, layer_begin, layer_end, own)

    def views(
        self, blocks: Sequence[int], layer_begin: int, layer_end: int, heads: HeadRange | None = None
    ) -> Sequence[memoryview] | None:
        """See `KvBlockStore`. None if there are copies, all of which have to be written, and of more heads than one
        shard has."""
        found, own = self._shards_with(heads)
        return found[0].views(blocks, layer_begin, layer_end, own) if len(found) == 1 else None

    def write(
        self,
        blocks: Sequence[int],
        layer_begin: int,
        layer_end: int,
        data: memoryview,
        heads: HeadRange | None = None,
    ) -> None:
        """See `KvBlockStore`."""
        stores, own = self._holders(heads)
        for store in stores:
            store.write(blocks, layer_begin, layer_end, data, own)

    def copy(self, source: int, destination: int) -> None:
        """See `KvBlockStore`."""
        for _, store in self._shards:
            store.copy(source, destination)

    def _holders(self, heads: HeadRange | None) -> tuple[list[KvBlockStore], HeadRange]:
        """The stores that hold these heads, and where there."""
        found, own = self._shards_with(heads)
        assert found, f"heads {heads} lie in no shard"
        return found, own

    def _shards_with(self, heads: HeadRange | None) -> tuple[list[KvBlockStore], HeadRange]:
        """The stores that have all of these heads, maybe none, and where there."""
        begin, end = (0, self._layout.num_kv_heads) if heads is None else heads
        found = [(b, s) for b, s in self._shards if b <= begin < end <= b + s.layout.num_kv_heads]
        first = found[0][0] if found else 0
        return [store for _, store in found], (begin - first, end - first)
