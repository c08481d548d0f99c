"""A tensor as it lies in a model file, and how its bytes become numbers.

Both file formats describe their tensors with `StoredTensor`, so whoever wants the packed bytes (a kernel that
computes on quantised rows) and whoever wants float32 start from the same object. What is on disk is always
little-endian and row-major.
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdserve.errors import ModelLoadError

UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TensorType:
    """How elements are stored: in blocks of `block_elems` consecutive elements of a row, `block_nbytes` bytes each."""

    name: str
    block_elems: int
    block_nbytes: int

    def row_nbytes(self, row_elems: int) -> int:
        """Bytes of a row of `row_elems` elements, which must be a whole number of blocks."""
        assert row_elems % self.block_elems == 0
        return row_elems // self.block_elems * self.block_nbytes


class MappedFile:
    """A whole file as read-only memory that is read when it is looked at; unmapped when the last view of it is gone."""

    def __init__(self, path: Path) -> None:
        """Raises ModelLoadError if it cannot be opened or is empty."""
        assert sys.byteorder == "little", "model files are little-endian and are used in place"
        try:
            if path.stat().st_size == 0:
                raise ModelLoadError(f"{path}: the file is empty", file=str(path))
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as e:
            raise ModelLoadError(f"{path}: cannot be read: {e.strerror}", file=str(path)) from e
        self.data: UInt8Array = np.frombuffer(self._map, np.uint8)

    def drop_pages(self) -> None:
        """Give back the memory of what has been looked at. Views stay valid: they read the file again, which the
        system most likely still has in its cache."""
        self._map.madvise(mmap.MADV_DONTNEED)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredTensor:
    """One tensor of a file. `data` is a read-only view of the mapped file: nothing is read until it is looked at."""

    name: str
    """Its name in the file."""
    type: TensorType
    shape: tuple[int, ...]
    """Outermost axis first; the last one is contiguous."""
    data: UInt8Array
    """uint8 [rows * type.row_nbytes(shape[-1])]; rows can be picked and permuted without decoding them."""
    file: Path
    mapped: MappedFile | None = None
    """What `data` is a view of, None if it has been copied out of the file."""
