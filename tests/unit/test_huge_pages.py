"""Huge pages of pools: when they have to be asked for, and that they come."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from pdserve.engine.huge_pages import HugePages, must_be_asked_for
from pdserve.shared_memory import HUGE_PAGE_NBYTES, SharedMemory
from pdserve.testing.waiting import eventually


@pytest.mark.parametrize(
    ("release", "enabled", "shmem", "expected"),
    [
        ("6.8.0-31-generic", "always [madvise] never", "always within_size advise [never] deny force", True),
        ("6.1.0", "[always] madvise never", "always within_size advise [never] deny force", True),
        ("5.15.0-105-generic", "always [madvise] never", "always within_size advise [never] deny force", False),
        ("6.8.0", "always madvise [never]", "always within_size advise [never] deny force", False),
        ("6.8.0", "always [madvise] never", "always within_size [advise] never deny force", False),
        ("6.8.0", "always [madvise] never", "always within_size advise never [deny] force", False),
        ("unknown", "always [madvise] never", "always within_size advise [never] deny force", False),
    ],
)
def test_they_are_asked_for_where_nothing_else_gives_them(
    tmp_path: Path, release: str, enabled: str, shmem: str, expected: bool
) -> None:
    (tmp_path / "enabled").write_text(enabled + "\n")
    (tmp_path / "shmem_enabled").write_text(shmem + "\n")
    assert must_be_asked_for(tmp_path, release) is expected


def test_a_kernel_that_says_nothing_is_not_asked(tmp_path: Path) -> None:
    assert not must_be_asked_for(tmp_path, "6.8.0")


def huge_nbytes(memory: SharedMemory) -> int:
    """Bytes of the mapping that are in huge pages, as the kernel counts."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{memory.address:x}-"))
    return next(int(line.split()[1]) << 10 for line in lines[start:] if line.startswith("ShmemPmdMapped"))


@pytest.mark.skipif(not must_be_asked_for(), reason="this kernel gives them in another way, or not at all")
async def test_what_comes_into_use_gets_them_and_keeps_its_content() -> None:
    before = threading.enumerate()
    memory = SharedMemory.create(4 * HUGE_PAGE_NBYTES)
    data = np.asarray(memory)
    pages = HugePages(first_pause_s=0.01)
    data[:HUGE_PAGE_NBYTES:4096] = 1
    pages.look_after(memory)
    await eventually(lambda: huge_nbytes(memory) == HUGE_PAGE_NBYTES, "what was touched has huge pages")
    data[:] = 2
    await eventually(lambda: huge_nbytes(memory) == memory.nbytes, "the rest has them as well")
    assert (data == 2).all()
    await eventually(lambda: not threads_since(before), "nothing is left to be done")


@pytest.mark.skipif(not must_be_asked_for(), reason="this kernel gives them in another way, or not at all")
async def test_what_was_never_touched_does_not_keep_them_from_what_lies_behind_it() -> None:
    memory = SharedMemory.create(4 * HUGE_PAGE_NBYTES)
    data = np.asarray(memory)
    pages = HugePages(first_pause_s=0.01)
    data[HUGE_PAGE_NBYTES : 2 * HUGE_PAGE_NBYTES : 4096] = 1
    data[3 * HUGE_PAGE_NBYTES :: 4096] = 1
    pages.look_after(memory)
    await eventually(lambda: huge_nbytes(memory) == 2 * HUGE_PAGE_NBYTES, "both that were touched are huge")


async def test_the_thread_ends_with_the_last_pool_and_keeps_none() -> None:
    before = threading.enumerate()
    pages = HugePages(first_pause_s=0.01)
    memory = SharedMemory.create(HUGE_PAGE_NBYTES)
    begin = memory.address
    pages.look_after(memory)
    assert threads_since(before)
    del memory
    gc.collect()
    await eventually(lambda: not threads_since(before), "the thread has ended")
    assert SharedMemory.holding(begin) is None


def threads_since(before: list[threading.Thread]) -> list[threading.Thread]:
    """Of these pages, not of other tests' pools."""
    return [each for each in threading.enumerate() if each.name == "kv-huge-pages" and each not in before]
