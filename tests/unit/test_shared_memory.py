"""Memory that other processes may map: who may do what with it, and how long it lasts."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from pdserve import shared_memory
from pdserve.engine.shared_pool import allocate_pool
from pdserve.shared_memory import HUGE_PAGE_NBYTES, SharedMemory

NBYTES = 3 * 4096 + 5


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def num_mappings() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


def test_it_is_zeros_where_huge_pages_and_vectors_can_begin() -> None:
    memory = SharedMemory.create(NBYTES)
    assert np.asarray(memory).tobytes() == bytes(NBYTES)
    assert memory.address % HUGE_PAGE_NBYTES == 0


def test_what_one_writes_others_see_but_cannot_change() -> None:
    memory = SharedMemory.create(NBYTES)
    ours, theirs = np.asarray(memory), SharedMemory.attach(memory.descriptor())
    ours[-1] = 7
    assert theirs.nbytes == NBYTES and np.asarray(theirs)[-1] == 7
    assert not np.asarray(theirs).flags.writeable
    with pytest.raises(OSError, match="Permission denied"):
        SharedMemory.attach(memory.descriptor(), writable=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(fd := memory.descriptor(), b"x", 0)
    os.close(fd)


def test_ranks_of_a_worker_may_write_until_it_is_sealed() -> None:
    memory = SharedMemory.create(NBYTES)
    rank = np.asarray(SharedMemory.attach(memory.descriptor(writable=True), writable=True))
    memory.seal_writes()
    rank[0] = 9  # a mapping that exists stays as it is
    assert np.asarray(memory)[0] == 9
    with pytest.raises(OSError, match="not permitted"):
        SharedMemory.attach(memory.descriptor(writable=True), writable=True)


def test_nobody_can_shrink_it_under_a_reader() -> None:
    memory = SharedMemory.create(NBYTES)
    fd = memory.descriptor(writable=True)
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(fd, 4096)
    os.close(fd)


def test_memory_that_could_be_shrunk_or_is_none_is_not_mapped(tmp_path: Path) -> None:
    at_first = num_descriptors()
    unsealed = os.memfd_create("pdserve-kv-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 4096)
    with pytest.raises(PermissionError, match="can be shrunk"):
        SharedMemory.attach(unsealed)
    (tmp_path / "file").write_bytes(bytes(4096))
    with pytest.raises(OSError, match="Invalid argument"):
        SharedMemory.attach(os.open(tmp_path / "file", os.O_RDONLY))
    assert num_descriptors() == at_first


def test_it_outlives_its_owner_and_leaves_nothing_behind() -> None:
    gc.collect()  # what tests before this one have left
    at_first = num_descriptors(), num_mappings()
    memory = SharedMemory.create(NBYTES)
    np.asarray(memory)[0] = 1
    reader = SharedMemory.attach(memory.descriptor())
    view = np.asarray(memory)[:10]
    del memory
    assert view[0] == 1, "an array keeps the memory"
    del view
    gc.collect()
    assert num_mappings() == at_first[1] + 1
    assert np.asarray(reader)[0] == 1
    del reader
    gc.collect()
    assert (num_descriptors(), num_mappings()) == at_first


class Advice:
    """Stands in for madvise: refuses what is asked of some huge pages, and keeps what was asked."""

    def __init__(self, memory: SharedMemory, refused: set[int]) -> None:
        self.refused = refused
        self.asked: list[int] = []
        self._memory = memory

    def __call__(self, address: int, nbytes: int, advice: int) -> int:
        """See madvise(2)."""
        begin = address - self._memory.address
        assert begin % HUGE_PAGE_NBYTES == 0 and nbytes <= HUGE_PAGE_NBYTES and begin + nbytes <= self._memory.nbytes
        self.asked.append(begin // HUGE_PAGE_NBYTES)
        return -1 if self.asked[-1] in self.refused else 0


def test_huge_pages_are_asked_for_one_by_one_and_only_where_there_is_something_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SharedMemory.create(5 * HUGE_PAGE_NBYTES)
    data = np.asarray(memory)
    for page in (1, 2, 4):
        data[(page + 1) * HUGE_PAGE_NBYTES - 1] = 1
    advice = Advice(memory, refused={2})
    monkeypatch.setattr(shared_memory, "_madvise", advice)
    assert not memory.collapse()
    assert advice.asked == [1, 2, 4], "what was never touched is left out, and the others do not suffer from a refusal"
    data[0] = 1
    advice.refused.clear()
    assert not memory.collapse()
    assert advice.asked[3:] == [0, 2], "what is huge already is left out"
    data[3 * HUGE_PAGE_NBYTES] = 1
    assert memory.collapse()
    assert advice.asked[5:] == [3]


def test_an_address_tells_its_memory_as_long_as_there_is_one() -> None:
    memory = SharedMemory.create(NBYTES)
    begin, end = memory.address, memory.address + NBYTES
    assert SharedMemory.holding(begin) is memory and SharedMemory.holding(end - 1) is memory
    assert SharedMemory.holding(end) is None and SharedMemory.holding(begin - 1) is None
    del memory
    gc.collect()
    assert SharedMemory.holding(begin) is None


def test_a_pool_can_be_read_by_others_and_written_by_the_engine() -> None:
    pool = allocate_pool(NBYTES)
    (memory,) = pool.shared
    pool.data[0] = 3
    assert np.asarray(SharedMemory.attach(memory.descriptor()))[0] == 3
    with pytest.raises(OSError, match="not permitted"):
        SharedMemory.attach(memory.descriptor(writable=True), writable=True)


def test_where_the_kernel_has_none_a_pool_is_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(nbytes: int) -> SharedMemory:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(SharedMemory, "create", refuse)
    pool = allocate_pool(NBYTES)
    assert pool.shared == () and pool.data.tobytes() == bytes(NBYTES)
    assert "cannot be shared (" in caplog.text
