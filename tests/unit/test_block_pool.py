"""KV memory as bytes: what the transfer layer moves is exactly what attention sees, and nothing else moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import pytest
import torch

from pdserve.engine.block_pool import BlockPool, StagedBlockStore
from pdserve.engine.device import TORCH_DTYPES
from pdserve.engine.host_store import HostBlockStore
from pdserve.kv_layout import KvBlockStore, KvLayout

NUM_BLOCKS = 8
Store = Callable[[BlockPool], KvBlockStore]


class DirectStaging:
    """Staging where device and host are the same memory: everything but streams is as on a GPU."""

    def __init__(self) -> None:
        self.waits = 0

    def transferring(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_buffer(self, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32)

    def wait(self) -> None:
        self.waits += 1


def host(pool: BlockPool) -> HostBlockStore:
    return HostBlockStore(pool.layout, pool.words.numpy())


def staged(pool: BlockPool) -> KvBlockStore:
    return StagedBlockStore(pool, DirectStaging())


def layout(dtype: str = "float32") -> KvLayout:
    return KvLayout(dtype=dtype, block_size=4, num_layers=3, num_kv_heads=2, head_dim=6)


def random_pool(dtype: str = "float32", seed: int = 0) -> BlockPool:
    pool = BlockPool(layout(dtype), NUM_BLOCKS, torch.device("cpu"))
    pool.kv.copy_(torch.randn(pool.kv.shape, generator=torch.Generator().manual_seed(seed)))
    return pool


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


STORES = pytest.mark.parametrize("store", [host, staged], ids=["host", "staged"])
DTYPES = pytest.mark.parametrize("dtype", list(TORCH_DTYPES))


def test_a_new_pool_is_all_zeros() -> None:
    assert not BlockPool(layout(), NUM_BLOCKS, torch.device("cpu")).kv.any()


@STORES
@DTYPES
@pytest.mark.parametrize(("begin", "end"), [(0, 3), (0, 1), (1, 3)])
def test_read_gives_the_bytes_of_the_blocks_in_the_order_asked_for(
    store: Store, dtype: str, begin: int, end: int
) -> None:
    pool = random_pool(dtype)
    blocks = [6, 7, 0, 3, 4, 5, 1]
    views = store(pool).read(blocks, begin, end)
    assert b"".join(views) == raw(pool.kv[blocks][:, begin:end])
    assert all(v.readonly and v.contiguous and v.format == "B" for v in views)


@STORES
@DTYPES
@pytest.mark.parametrize(("begin", "end"), [(0, 3), (2, 3), (0, 2)])
def test_what_one_pool_reads_another_can_write_and_nothing_else_changes(
    store: Store, dtype: str, begin: int, end: int
) -> None:
    source, target = random_pool(dtype, seed=1), random_pool(dtype, seed=2)
    before = target.kv.clone()
    data = b"".join(store(source).read([5, 1, 2], begin, end))
    store(target).write([0, 7, 3], begin, end, memoryview(data))
    assert raw(target.kv[[0, 7, 3]][:, begin:end]) == raw(source.kv[[5, 1, 2]][:, begin:end])
    before[[0, 7, 3], begin:end] = target.kv[[0, 7, 3], begin:end]
    assert raw(target.kv) == raw(before)


@STORES
@DTYPES
def test_copied_block_equals_its_source_and_nothing_else_changes(store: Store, dtype: str) -> None:
    pool = random_pool(dtype)
    expected = pool.kv.clone()
    expected[2] = expected[5]
    store(pool).copy(5, 2)
    assert raw(pool.kv) == raw(expected)
    with pytest.raises(AssertionError):
        store(pool).copy(5, NUM_BLOCKS)


@STORES
@DTYPES
def test_a_range_of_heads_is_read_and_written_and_nothing_else_changes(store: Store, dtype: str) -> None:
    source, target = random_pool(dtype, seed=1), random_pool(dtype, seed=2)
    before = target.kv.clone()
    data = b"".join(store(source).read([5, 1], 1, 3, (1, 2)))
    assert data == raw(source.kv[[5, 1]][:, 1:3, :, 1:2])
    store(target).write([0, 7], 1, 3, memoryview(data), (1, 2))
    before[[0, 7], 1:3, :, 1:2] = source.kv[[5, 1], 1:3, :, 1:2]
    assert raw(target.kv) == raw(before)


@pytest.mark.parametrize(("begin", "end", "heads"), [(0, 3, None), (0, 3, (0, 2)), (1, 3, None), (1, 3, (1, 2))])
def test_what_is_put_into_the_views_of_a_host_pool_is_what_it_holds(
    begin: int, end: int, heads: tuple[int, int] | None
) -> None:
    source, target = random_pool(seed=1), random_pool(seed=2)
    before = target.kv.clone()
    pieces = host(source).read([5, 1, 2], begin, end, heads)
    views = host(target).views([0, 6, 7], begin, end, heads)
    data = b"".join(pieces)
    for view in views:
        view[:], data = data[: len(view)], data[len(view) :]
    assert data == b""
    first, last = heads or (0, 2)
    before[[0, 6, 7], begin:end, :, first:last] = source.kv[[5, 1, 2], begin:end, :, first:last]
    assert raw(target.kv) == raw(before)
    assert all(piece.readonly for piece in pieces)


def test_a_device_pool_has_no_views() -> None:
    assert staged(random_pool()).views([1], 0, 3) is None


def test_host_reads_are_views_of_the_pool_itself() -> None:
    pool = random_pool()
    (view,) = host(pool).read([2], 0, 3)
    pool.kv[2] = 7.0
    assert np.frombuffer(view, dtype=np.float32).tolist() == [7.0] * (len(view) // 4)


def test_host_reads_of_consecutive_whole_blocks_are_one_piece() -> None:
    store = host(random_pool())
    assert [len(v) // store.layout.block_nbytes for v in store.read([4, 5, 6, 1, 0, 1], 0, 3)] == [3, 1, 2]
    assert [len(v) for v in store.read([4, 5], 0, 2)] == [2 * store.layout.layer_nbytes] * 2


def test_staged_reads_are_copies_that_outlive_the_next_write() -> None:
    pool = random_pool()
    expected = raw(pool.kv[2])
    (view,) = staged(pool).read([2], 0, 3)
    pool.kv[2] = 7.0
    assert bytes(view) == expected


def test_staged_transfers_wait_for_their_own_completion() -> None:
    staging = DirectStaging()
    store = StagedBlockStore(random_pool(), staging)
    views = store.read([1, 2], 0, 3)
    assert staging.waits == 1
    store.write([3, 4], 0, 3, views[0])
    assert staging.waits == 2


@STORES
@pytest.mark.parametrize("change", [-4, 4, -1])
def test_data_of_the_wrong_length_is_refused_and_changes_nothing(store: Store, change: int) -> None:
    pool = random_pool()
    before = raw(pool.kv)
    data = memoryview(bytes(2 * pool.layout.block_nbytes + change))
    with pytest.raises(ValueError, match="do not fit 2 blocks x 3 layers"):
        store(pool).write([0, 1], 0, 3, data)
    assert raw(pool.kv) == before


@STORES
@pytest.mark.parametrize("blocks", [[-1], [NUM_BLOCKS], []])
def test_blocks_outside_the_pool_are_our_own_bug(store: Store, blocks: list[int]) -> None:
    with pytest.raises(AssertionError, match="no such blocks"):
        store(random_pool()).read(blocks, 0, 3)


@STORES
@pytest.mark.parametrize("heads", [(0, 3), (-1, 1), (1, 1)])
def test_heads_outside_the_model_are_our_own_bug(store: Store, heads: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="no heads"):
        store(random_pool()).read([0], 0, 3, heads)


@STORES
@pytest.mark.parametrize(("begin", "end"), [(1, 1), (0, 4), (-1, 2)])
def test_layers_outside_the_model_are_our_own_bug(store: Store, begin: int, end: int) -> None:
    with pytest.raises(AssertionError, match="no layers"):
        store(random_pool()).read([0], begin, end)


def test_layer_views_share_the_memory_of_the_pool() -> None:
    pool = random_pool()
    key, value = pool.layer(1)
    assert key.shape == value.shape == (NUM_BLOCKS, 2, 4, 6)
    key[3], value[3] = 1.0, 2.0
    (view,) = host(pool).read([3], 1, 2)
    assert np.frombuffer(view, dtype=np.float32).reshape(2, -1).mean(axis=1).tolist() == [1.0, 2.0]
