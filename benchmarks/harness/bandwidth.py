"""How fast this machine reads memory: the bound of decoding at batch 1, where every step reads all weights once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from numba import njit

BUFFER_NBYTES = 512 * 2**20
"""Many times the largest cache."""


@njit(nogil=True)
def _add_up(words: npt.NDArray[np.int64]) -> int:
    """Sum of all words. Integers may be added in any order, so LLVM makes independent vector sums of it."""
    total = 0
    for word in words:
        total += word
    return total


class ReadBandwidth:
    """Reads a large buffer with several threads, each its own part, as the kernels read weights."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        words = np.ones(BUFFER_NBYTES // 8, np.int64)
        self._parts = np.array_split(words, threads)
        self._expected = len(words)
        self.sample()  # compiles, and starts the threads

    def sample(self) -> float:
        """Bytes per second of one pass."""
        began = time.perf_counter()
        total = sum(self._pool.map(_add_up, self._parts))
        elapsed = time.perf_counter() - began
        assert total == self._expected
        return BUFFER_NBYTES / elapsed

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
