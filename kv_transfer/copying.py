"""Copies of payload within this process, with the checksum of what they leave behind: in one go, or message by message.

Memory that is mapped from another process counts as this one's.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import xxhash

from kv_transfer.copy_kernel import MAX_STEP_NBYTES, MIN_NBYTES, STRIPE_NBYTES, State, copy_kernel
from kv_transfer.process_memory import PIECES_TYPECODE, Pieces, pieces_of


class CheckedCopy:
    """Takes the xxh3_64 of `prefix` and of everything that is copied. One thread at a time."""

    def __init__(self, prefix: bytes, nbytes: int) -> None:
        """`nbytes` will be copied in all; `prefix` is shorter than `STRIPE_NBYTES`."""
        self._total = len(prefix) + nbytes
        self._tail = prefix
        """The last bytes of all so far, up to a stripe."""
        self._kernel = copy_kernel() if self._total >= MIN_NBYTES else None
        self._state = State.start(prefix, self._total) if self._kernel is not None else None
        self._digest = xxhash.xxh3_64(prefix)
        """For what is too short for the kernel, or where there is none."""

    def add(self, source: Pieces, destination: Sequence[memoryview]) -> None:
        """Copy `source` to `destination`, as long in all (a bug otherwise). The kernel needs no interpreter lock."""
        steps = _steps(source, pieces_of(destination))
        if self._kernel is None or self._state is None:
            for i in range(0, len(steps), 3):
                ctypes.memmove(steps[i + 1], steps[i], steps[i + 2])
            for view in destination:
                self._digest.update(view)
            return
        address, length = steps.buffer_info()
        self._kernel.take(ctypes.addressof(self._state), address, length // 3)
        tail = _last(destination)
        self._tail = (self._tail + tail)[-STRIPE_NBYTES:]

    def digest(self) -> int:
        """When everything has been copied."""
        if self._kernel is None or self._state is None:
            return self._digest.intdigest()
        digest: int = self._kernel.result(ctypes.addressof(self._state), self._tail, self._total)
        return digest


def checked_copy(prefix: bytes, source: Pieces, destination: Sequence[memoryview]) -> int:
    """Copy all at once, and return the checksum."""
    copy = CheckedCopy(prefix, sum(source[1::2]))
    copy.add(source, destination)
    return copy.digest()


def _steps(source: Pieces, target: Pieces) -> array[int]:
    """Source address, target address and length of what is contiguous on both sides and not too long for the kernel."""
    assert sum(source[1::2]) == sum(target[1::2]), "source and destination differ in length"
    steps = array(PIECES_TYPECODE)
    j, target_at, target_left = 0, 0, 0
    for i in range(0, len(source), 2):
        source_at, source_left = source[i], source[i + 1]
        while source_left:
            if not target_left:
                target_at, target_left = target[j], target[j + 1]
                j += 2
            nbytes = min(source_left, target_left, MAX_STEP_NBYTES)
            steps.extend((source_at, target_at, nbytes))
            source_at, source_left = source_at + nbytes, source_left - nbytes
            target_at, target_left = target_at + nbytes, target_left - nbytes
    return steps


def _last(views: Sequence[memoryview]) -> bytes:
    """The last bytes of these views, up to a stripe."""
    tail = b""
    for view in reversed(views):
        tail = bytes(view[-(STRIPE_NBYTES - len(tail)) :]) + tail
        if len(tail) == STRIPE_NBYTES:
            break
    return tail
