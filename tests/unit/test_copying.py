"""Copies with their checksum, line by line and otherwise, and pieces of pools: against xxhash and plain slices."""

from __future__ import annotations

import random
from array import array

import numpy as np
import pytest
import xxhash

from kv_transfer.copying import CheckedCopy, checked_copy, fill_in, joined, portion
from kv_transfer.process_memory import PIECES_TYPECODE, pieces_of
from pdserve.engine.host_store import HostBlockStore
from pdserve.kv_layout import KvLayout
from pdserve.kv_views import PoolViews
from pdserve.shared_memory import SharedMemory

PREFIX = bytes(range(56))
LINE_LENGTHS = [64, 128, 960, 1024, 1088, 4096, 12_288]


@pytest.fixture(scope="module")
def memory() -> SharedMemory:
    memory = SharedMemory.create(1 << 20)
    np.asarray(memory)[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, dtype=np.uint8)
    return memory


@pytest.mark.parametrize("for_reading", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_whole_lines_are_copied_with_the_checksum_that_xxhash_gives(
    memory: SharedMemory, seed: int, for_reading: bool
) -> None:
    """With odd pieces among them, sources that do not begin with a line, and in several calls."""
    rng = random.Random(seed)
    lengths = [rng.choice(LINE_LENGTHS) for _ in range(rng.randrange(4, 40))]
    if seed % 3 == 0:
        lengths[rng.randrange(len(lengths))] = rng.choice([1, 8, 72, 1000])
    target = SharedMemory.create(1 << 20)
    content, copy, at = b"", CheckedCopy(PREFIX, sum(lengths), for_reading=for_reading), 0
    for call in (lengths[:2], lengths[2:]):
        source, destination = array(PIECES_TYPECODE), array(PIECES_TYPECODE)
        for nbytes in call:
            begin = rng.randrange(0, memory.nbytes - nbytes, rng.choice([1, 8, 64]))
            content += np.asarray(memory)[begin : begin + nbytes].tobytes()
            source.extend((memory.address + begin, nbytes))
            destination.extend((target.address + at, nbytes))
            at += nbytes + (64 if seed % 2 else 0)
        copy.add(source, destination)
    assert copy.digest() == xxhash.xxh3_64_intdigest(PREFIX + content)
    gaps = 64 if seed % 2 else 0
    copied, at = b"", 0
    for nbytes in lengths:
        copied += np.asarray(target)[at : at + nbytes].tobytes()
        at += nbytes + gaps
    assert copied == content
    if gaps:
        assert not np.asarray(target)[at - gaps : at].any(), "more was written than belongs there"


def test_a_portion_is_what_a_slice_of_the_concatenation_is() -> None:
    pieces = array(PIECES_TYPECODE, (1000, 10, 2000, 5, 3000, 7))
    whole = [address + i for address, nbytes in ((1000, 10), (2000, 5), (3000, 7)) for i in range(nbytes)]
    for offset in range(23):
        for nbytes in range(24):
            part = portion(pieces, offset, nbytes)
            taken = [part[i] + j for i in range(0, len(part), 2) for j in range(part[i + 1])]
            assert taken == whole[offset : offset + nbytes] and 0 not in part[1::2]


@pytest.mark.parametrize("nbytes", [1, 100, 5000])
def test_joined_bytes_are_a_beginning_and_a_copy(nbytes: int) -> None:
    content = np.random.default_rng(2).bytes(nbytes)
    data, digest = joined(PREFIX, 3, pieces_of([memoryview(content)]))
    fill_in(data, b"abc")
    assert data == b"abc" + content and digest == xxhash.xxh3_64_intdigest(PREFIX + content)


def test_some_layers_of_blocks_are_the_bytes_that_lie_there() -> None:
    layout = KvLayout(dtype="float32", block_size=4, num_layers=5, num_kv_heads=2, head_dim=4)
    words = np.random.default_rng(3).integers(0, 2**31, (6, 5, layout.layer_nbytes // 4), dtype=np.int32)
    store = HostBlockStore(layout, words)
    blocks = (4, 0, 5)
    views = store.views(blocks, 1, 4)
    assert isinstance(views, PoolViews) and views.nbytes == 3 * 3 * layout.layer_nbytes
    expected = [words[block, 1:4].tobytes() for block in blocks]
    assert [view.tobytes() for view in views] == expected == [bytes(view) for view in views[0:3]]
    assert pieces_of(views) == pieces_of(list(views))
    read = store.read(blocks, 1, 4)
    assert all(view.readonly for view in read) and [bytes(view) for view in read] == expected
    target = [memoryview(bytearray(sum(map(len, expected))))]
    assert checked_copy(PREFIX, pieces_of(read), target) == xxhash.xxh3_64_intdigest(PREFIX + b"".join(expected))
    views[1][:4] = b"\xff" * 4
    assert words[0, 1].tobytes()[:4] == b"\xff" * 4
