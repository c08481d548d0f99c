"""Copies of blocks into staging buffers. numpy releases the GIL for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Gather:
    """The concatenation of C-contiguous views, taken in portions."""

    def __init__(self, pieces: Sequence[memoryview]) -> None:
        self.nbytes_left = sum(piece.nbytes for piece in pieces)
        self._pieces = [as_bytes(piece) for piece in reversed(pieces)]

    def fill(self, target: Bytes) -> int:
        """Copy the next bytes to the start of `target`: as many as it holds, or all that are left. Returns how many."""
        filled = 0
        while self._pieces and filled < len(target):
            piece = self._pieces.pop()
            num = min(len(piece), len(target) - filled)
            target[filled : filled + num] = piece[:num]
            filled += num
            if num < len(piece):
                self._pieces.append(piece[num:])
        self.nbytes_left -= filled
        return filled


def as_bytes(view: memoryview) -> Bytes:
    """A C-contiguous view as bytes."""
    return np.frombuffer(view, dtype=np.uint8)
