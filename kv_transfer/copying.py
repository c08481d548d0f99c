"""Copies of payload within this process, with the checksum of what they leave behind: in one go, or message by message.

Memory that is mapped from another process counts as this one's.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import xxhash

from kv_transfer.copy_kernel import MAX_STEP_NBYTES, MIN_NBYTES, State, copy_kernel
from kv_transfer.process_memory import PIECES_TYPECODE, Pieces, pieces_of
from kv_transfer.xxh3_ir import STRIPE_NBYTES

_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t)
_content_of = ctypes.pythonapi.PyBytes_AsString
_content_of.restype = ctypes.c_void_p
_content_of.argtypes = (ctypes.py_object,)


class CheckedCopy:
    """Takes the xxh3_64 of `prefix` and of everything that is copied. One thread at a time."""

    def __init__(self, prefix: bytes, nbytes: int, *, for_reading: bool = False) -> None:
        """`nbytes` will be copied in all; `prefix` is shorter than `STRIPE_NBYTES`.

        `for_reading`: the copy is read again at once, so it should stay in the cache.
        """
        self._total = len(prefix) + nbytes
        self._tail = prefix
        """The last bytes of all so far, up to a stripe."""
        self._kernel = copy_kernel() if self._total >= MIN_NBYTES else None
        self._state = State.start(prefix, self._total) if self._kernel is not None else None
        self._for_reading = for_reading
        self._digest = xxhash.xxh3_64(prefix)
        """For what is too short for the kernel, or where there is none."""

    def add(self, source: Pieces, destination: Pieces) -> None:
        """Copy `source` to `destination`, as long in all (a bug otherwise), which the caller keeps alive.

        The kernel needs no interpreter lock.
        """
        steps = _steps(source, destination)
        if self._kernel is None or self._state is None:
            for i in range(0, len(steps), 3):
                ctypes.memmove(steps[i + 1], steps[i], steps[i + 2])
                self._digest.update((ctypes.c_char * steps[i + 2]).from_address(steps[i + 1]))
            return
        take = self._kernel.take_for_reading if self._for_reading else self._kernel.take
        address, length = steps.buffer_info()
        take(ctypes.addressof(self._state), address, length // 3)
        self._tail = (self._tail + _last(destination))[-STRIPE_NBYTES:]

    def digest(self) -> int:
        """When everything has been copied."""
        if self._kernel is None or self._state is None:
            return self._digest.intdigest()
        digest: int = self._kernel.result(ctypes.addressof(self._state), self._tail, self._total)
        return digest


def checked_copy(prefix: bytes, source: Pieces, destination: Sequence[memoryview]) -> int:
    """Copy all at once, and return the checksum."""
    copy = CheckedCopy(prefix, sum(source[1::2]))
    copy.add(source, pieces_of(destination))
    return copy.digest()


def portion(pieces: Pieces, offset: int, nbytes: int) -> Pieces:
    """Bytes [offset, offset + nbytes) of what the pieces are together, or as many of them as there are."""
    part = array(PIECES_TYPECODE)
    for i in range(0, len(pieces), 2):
        address, length = pieces[i], pieces[i + 1]
        skipped = min(offset, length)
        taken = min(length - skipped, nbytes)
        if taken:
            part.extend((address + skipped, taken))
        offset, nbytes = offset - skipped, nbytes - taken
        if not nbytes:
            break
    return part


def joined(prefix: bytes, nbytes: int, source: Pieces) -> tuple[bytes, int]:
    """New bytes whose first `nbytes` are left to `fill_in`, followed by a copy of `source`; and the checksum of
    `prefix` and that copy."""
    length = sum(source[1::2])
    data: bytes = _new_bytes(None, nbytes + length)
    copy = CheckedCopy(prefix, length, for_reading=True)
    copy.add(source, array(PIECES_TYPECODE, (_content_of(data) + nbytes, length)))
    return data, copy.digest()


def fill_in(data: bytes, beginning: bytes) -> None:
    """Complete what `joined` has begun, before anybody else sees it."""
    ctypes.memmove(_content_of(data), beginning, len(beginning))


def _steps(source: Pieces, target: Pieces) -> array[int]:
    """Source address, target address and length of what is contiguous on both sides and not too long for the kernel."""
    assert sum(source[1::2]) == sum(target[1::2]), "source and destination differ in length"
    steps = array(PIECES_TYPECODE)
    table, of_target = (np.frombuffer(pieces, np.uint64).reshape(-1, 2) for pieces in (source, target))
    is_cut_alike = table.shape == of_target.shape and (table[:, 1] == of_target[:, 1]).all()
    if is_cut_alike and table[:, 1].max(initial=0) <= MAX_STEP_NBYTES:
        steps.frombytes(np.column_stack((table[:, 0], of_target)).tobytes())
        return steps
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


def _last(pieces: Pieces) -> bytes:
    """The last bytes of these pieces, up to a stripe."""
    tail = b""
    for i in range(len(pieces) - 2, -1, -2):
        nbytes = min(pieces[i + 1], STRIPE_NBYTES - len(tail))
        tail = ctypes.string_at(pieces[i] + pieces[i + 1] - nbytes, nbytes) + tail
        if len(tail) == STRIPE_NBYTES:
            break
    return tail
