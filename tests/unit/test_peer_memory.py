"""Copies out of another process's memory, and their checksum: against the xxhash package and plain slices."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import xxhash

from kv_transfer import process_memory
from kv_transfer.copy_kernel import MAX_STEP_NBYTES, CopyKernel, copy_kernel
from kv_transfer.peer_memory import PeerMemory
from kv_transfer.process_memory import PIECES_TYPECODE, Pieces
from pdserve.shared_memory import SharedMemory

PREFIX = bytes(range(56))
ELSEWHERE = 1 << 40
"""Where the other process would have its pool."""


@pytest.fixture
def pool() -> SharedMemory:
    memory = SharedMemory.create(1 << 21)
    np.asarray(memory)[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, dtype=np.uint8)
    return memory


@pytest.fixture
def peer(pool: SharedMemory, monkeypatch: pytest.MonkeyPatch) -> PeerMemory:
    """With the pool mapped, so that nothing else can be read."""

    def forbidden(pid: int, source: Pieces, destination: Pieces) -> None:
        raise PermissionError("not mapped")

    monkeypatch.setattr(process_memory, "read", forbidden)
    peer = PeerMemory(os.getpid())
    peer.map(ELSEWHERE, pool.descriptor())
    return peer


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """LLVM knows nothing of this CPU."""

    def fail(kernel: CopyKernel) -> None:
        raise RuntimeError("no such target")

    monkeypatch.setattr(CopyKernel, "__init__", fail)
    copy_kernel.cache_clear()
    yield
    copy_kernel.cache_clear()


def cut(rng: random.Random, nbytes: int, lengths: list[int]) -> list[tuple[int, int]]:
    """[begin, end) of pieces that are `nbytes` long together."""
    ends = [0]
    while ends[-1] < nbytes:
        ends.append(min(nbytes, ends[-1] + rng.choice(lengths)))
    return list(pairwise(ends))


LENGTHS = [1, 7, 8, 55, 56, 63, 64, 65, 127, 128, 1000, 1024, 1032, 4096, 65_536]


@pytest.mark.parametrize("seed", range(60))
def test_scattered_pieces_arrive_with_the_checksum_that_xxhash_gives(
    pool: SharedMemory, peer: PeerMemory, seed: int
) -> None:
    """Of all ways in which pieces, stripes of 64 bytes and blocks of 1024 can lie to each other."""
    rng = random.Random(seed)
    nbytes = rng.choice([256, 264, 320, 1024 - 56, 1024, 1025, 3000, 70_000, 300_000]) - rng.choice([0, 1, 15])
    prefix = PREFIX[: rng.choice([0, 1, 56])]
    source, offsets = array(PIECES_TYPECODE), []
    for begin, end in cut(rng, nbytes, LENGTHS):
        offset = rng.randrange(pool.nbytes - (end - begin))
        offsets.append((offset, offset + end - begin))
        source.extend((ELSEWHERE + offset, end - begin))
    target = bytearray(nbytes)
    views = [memoryview(target)[begin:end] for begin, end in cut(rng, nbytes, LENGTHS)]
    content = b"".join(np.asarray(pool)[begin:end].tobytes() for begin, end in offsets)
    assert peer.copy(prefix, source, views) == xxhash.xxh3_64_intdigest(prefix + content)
    assert bytes(target) == content


def test_where_nothing_can_be_compiled_it_is_copied_all_the_same_and_the_log_says_so_once(
    pool: SharedMemory, peer: PeerMemory, no_compiler: None, caplog: pytest.LogCaptureFixture
) -> None:
    nbytes = 2 * MAX_STEP_NBYTES + 100
    target = bytearray(nbytes)
    for begin in (3, 4):
        digest = peer.copy(PREFIX, array(PIECES_TYPECODE, (ELSEWHERE + begin, nbytes)), [memoryview(target)])
        content = np.asarray(pool)[begin : begin + nbytes].tobytes()
        assert bytes(target) == content and digest == xxhash.xxh3_64_intdigest(PREFIX + content)
    assert [record.getMessage() for record in caplog.records] == [
        "KV is copied and hashed without machine code of its own, which is slower: no such target"
    ]


def test_a_long_piece_is_copied_in_steps(pool: SharedMemory, peer: PeerMemory) -> None:
    nbytes = 3 * MAX_STEP_NBYTES + 17
    target = bytearray(nbytes)
    digest = peer.copy(PREFIX, array(PIECES_TYPECODE, (ELSEWHERE + 5, nbytes)), [memoryview(target)])
    content = np.asarray(pool)[5 : 5 + nbytes].tobytes()
    assert bytes(target) == content and digest == xxhash.xxh3_64_intdigest(PREFIX + content)


@pytest.mark.parametrize("begin", [-1, (1 << 21) - 999])
def test_what_is_not_wholly_mapped_is_left_to_the_kernel(peer: PeerMemory, begin: int) -> None:
    with pytest.raises(PermissionError, match="not mapped"):
        peer.copy(PREFIX, array(PIECES_TYPECODE, (ELSEWHERE + begin, 1000)), [memoryview(bytearray(1000))])


def test_nothing_is_mapped_any_more_after_the_end(peer: PeerMemory) -> None:
    peer.close()
    assert peer.num_regions == 0
    with pytest.raises(PermissionError, match="not mapped"):
        peer.copy(PREFIX, array(PIECES_TYPECODE, (ELSEWHERE, 1000)), [memoryview(bytearray(1000))])


def test_memory_at_an_address_that_is_used_again_takes_the_place_of_the_old(peer: PeerMemory) -> None:
    newer = SharedMemory.create(4096)
    np.asarray(newer)[:] = 5
    peer.map(ELSEWHERE + 4096, newer.descriptor())
    target = bytearray(1000)
    peer.copy(PREFIX, array(PIECES_TYPECODE, (ELSEWHERE + 4096, 1000)), [memoryview(target)])
    assert bytes(target) == bytes([5]) * 1000 and peer.num_regions == 1


@pytest.mark.parametrize("nbytes", [184, 1, 100_000])
def test_without_a_mapping_the_kernel_reads_the_same(nbytes: int) -> None:
    content = np.random.default_rng(nbytes).bytes(nbytes)
    target = bytearray(nbytes)
    source = process_memory.pieces_of([memoryview(content)])
    digest = PeerMemory(os.getpid()).copy(PREFIX, source, [memoryview(target)])
    assert bytes(target) == content and digest == xxhash.xxh3_64_intdigest(PREFIX + content)
