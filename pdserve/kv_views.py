"""Equally long pieces of one memory as a sequence of views that are only made when somebody wants to see them.

A chunk of KV lies in dozens of pieces. Who copies or hashes by address, as transports in machine code do, needs none of
the views, which would cost more than the addresses.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]


class PoolViews(Sequence[memoryview]):
    """Immutable. Keeps the memory alive, and with it the addresses."""

    __slots__ = ("_address", "_made", "_memory", "_offsets", "_piece_nbytes")

    def __init__(self, memory: memoryview, address: int, offsets: Offsets, piece_nbytes: int) -> None:
        """`memory` are bytes, of which the first lies at `address`; piece i is [offsets[i], offsets[i] + piece_nbytes)
        of them."""
        self._memory = memory
        self._address = address
        self._offsets = offsets
        self._piece_nbytes = piece_nbytes
        self._made: list[memoryview] | None = None
        """The views, once somebody has asked for one: sockets ask for them again and again."""

    @property
    def nbytes(self) -> int:
        """Of all pieces together."""
        return len(self._offsets) * self._piece_nbytes

    @property
    def pieces(self) -> array[int]:
        """Address, length, address, length, ... as unsigned 64-bit numbers."""
        table = np.empty((len(self._offsets), 2), np.uint64)
        table[:, 0] = self._offsets + self._address
        table[:, 1] = self._piece_nbytes
        return array("Q", table.tobytes())

    def read_only(self) -> PoolViews:
        """The same, not to be written."""
        return PoolViews(self._memory.toreadonly(), self._address, self._offsets, self._piece_nbytes)

    def __len__(self) -> int:
        return len(self._offsets)

    @overload
    def __getitem__(self, index: int) -> memoryview: ...

    @overload
    def __getitem__(self, index: slice) -> list[memoryview]: ...

    def __getitem__(self, index: int | slice) -> memoryview | list[memoryview]:
        return self._views()[index]

    def __iter__(self) -> Iterator[memoryview]:
        return iter(self._views())

    def _views(self) -> list[memoryview]:
        if self._made is None:
            nbytes = self._piece_nbytes
            self._made = [self._memory[begin : begin + nbytes] for begin in self._offsets.tolist()]
        return self._made
