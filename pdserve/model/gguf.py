"""GGUF files: metadata and tensors, by mapping the file and walking its header once.

Format (little-endian): magic, version, number of tensors, number of key-value pairs, the pairs, one info per tensor,
padding to `general.alignment`, tensor data. Strings are a 64-bit length and UTF-8; an array is an element type, a
64-bit length and the elements. Nothing in a file is trusted: each length is compared with what is left of the file
before anything is allocated or looped over, so a damaged or hostile file costs no more than its own size and ends in
a ModelLoadError.

Knows nothing of models: which keys and tensors there must be is for the readers above it.
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np

from pdserve.errors import ModelLoadError
from pdserve.model.gguf_types import TENSOR_TYPES
from pdserve.model.tensors import MappedFile, StoredTensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # 1 had 32-bit lengths and has not been written since 2023.
_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""GGUF value type -> numpy dtype."""
_MIN_ELEMENT_NBYTES = {_STRING: 8, _ARRAY: 12} | {t: np.dtype(d).itemsize for t, d in _SCALARS.items()}
_MIN_TENSOR_INFO_NBYTES = 8 + 4 + 8 + 4 + 8
_MIN_PAIR_NBYTES = 8 + 4 + 1
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    """An opened file. Tensor data is mapped, not read."""

    path: Path
    version: int
    metadata: Mapping[str, object]
    """Scalars as bool, int, float or str; arrays of numbers as numpy arrays; arrays of strings or arrays as lists."""
    tensors: Mapping[str, StoredTensor]
    """By name, in the order of the file."""


def read_gguf(path: Path) -> GgufFile:
    """Open a GGUF file of version 2 or 3.

    Raises ModelLoadError, naming the file and the field at fault, if it cannot be read or is not a sound GGUF file.
    """
    return _Parser(path, MappedFile(path)).parse()


class _Parser:
    """One walk over the header. `_where` names the field being read, for the error message."""

    def __init__(self, path: Path, file: MappedFile) -> None:
        self._path = path
        self._file = file
        self._view = file.data.data
        self._size = len(file.data)
        self._pos = 0
        self._where = "header"

    def parse(self) -> GgufFile:
        version, num_tensors, num_pairs = self._parse_header()
        metadata: dict[str, object] = {}
        for i in range(num_pairs):
            self._where = f"metadata key {i}"
            key = self._string()
            self._where = key
            if key in metadata:
                self._fail("appears twice")
            metadata[key] = self._value(self._u32(), depth=0)
        infos = [self._tensor_info(i) for i in range(num_tensors)]
        return GgufFile(
            path=self._path, version=version, metadata=metadata, tensors=self._locate(infos, self._alignment(metadata))
        )

    def _parse_header(self) -> tuple[int, int, int]:
        if bytes(self._view[:4]) != _MAGIC:
            self._where = "magic"
            self._fail(f"is {bytes(self._view[:4])!r}, not {_MAGIC!r}: not a GGUF file")
        self._pos = 4
        self._where = "version"
        version = self._u32()
        if version not in _VERSIONS:
            if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
                self._fail("is in big-endian order; only little-endian files are supported")
            self._fail(f"is {version}; supported are {' and '.join(map(str, _VERSIONS))}")
        self._where = "tensor count"
        num_tensors = self._count(_MIN_TENSOR_INFO_NBYTES)
        self._where = "metadata count"
        return version, num_tensors, self._count(_MIN_PAIR_NBYTES)

    def _tensor_info(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        self._where = f"tensor info {index}"
        name = self._string()
        self._where = f"tensor {name!r}"
        num_dims = self._u32()
        if not 1 <= num_dims <= _MAX_DIMS:
            self._fail(f"has {num_dims} dimensions; from 1 to {_MAX_DIMS} are possible")
        # The file lists the contiguous dimension first; we list it last, as numpy does.
        shape = tuple(self._u64() for _ in range(num_dims))[::-1]
        return name, shape, self._u32(), self._u64()

    def _alignment(self, metadata: Mapping[str, object]) -> int:
        self._where = "general.alignment"
        alignment = metadata.get("general.alignment", 32)
        if (
            not isinstance(alignment, int)
            or isinstance(alignment, bool)
            or alignment < 1
            or alignment & (alignment - 1)
        ):
            self._fail(f"must be a power of two, got {alignment!r:.80}")
        return alignment

    def _locate(self, infos: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, StoredTensor]:
        base = -(-self._pos // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        spans: list[tuple[int, int, str]] = []
        for name, shape, type_id, offset in infos:
            self._where = f"tensor {name!r}"
            if name in tensors:
                self._fail("appears twice")
            tensor_type = TENSOR_TYPES.get(type_id)
            if tensor_type is None:
                self._fail(f"has the unknown type {type_id}")
            if 0 in shape:
                self._fail(f"has no elements: its shape is {list(shape)}")
            if shape[-1] % tensor_type.block_elems:
                self._fail(
                    f"has rows of {shape[-1]} elements; {tensor_type.name} has blocks of {tensor_type.block_elems}"
                )
            nbytes = math.prod(shape[:-1]) * tensor_type.row_nbytes(shape[-1])
            if offset % alignment:
                self._fail(f"starts at offset {offset}, not a multiple of the alignment of {alignment}")
            begin, end = base + offset, base + offset + nbytes
            if end > self._size:
                self._fail(f"ends at byte {end}, but the file has {self._size}: it is truncated or damaged")
            spans.append((begin, end, name))
            data = self._file.data[begin:end]
            tensors[name] = StoredTensor(
                name=name, type=tensor_type, shape=shape, data=data, file=self._path, mapped=self._file
            )
        spans.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
            if begin < end:
                self._where = f"tensor {other!r}"
                self._fail(f"overlaps tensor {name!r}")
        return tensors

    def _value(self, type_id: int, depth: int) -> object:
        dtype = _SCALARS.get(type_id)
        if dtype is not None:
            return self._numbers(type_id, dtype, 1)[0].item()
        if type_id == _STRING:
            return self._string()
        if type_id != _ARRAY:
            self._fail(f"has the unknown value type {type_id}")
        return self._array(depth + 1)

    def _array(self, depth: int) -> object:
        if depth > _MAX_ARRAY_DEPTH:
            self._fail(f"nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        type_id = self._u32()
        if type_id not in _MIN_ELEMENT_NBYTES:
            self._fail(f"is an array of the unknown value type {type_id}")
        length = self._count(_MIN_ELEMENT_NBYTES[type_id])
        dtype = _SCALARS.get(type_id)
        if dtype is not None:
            return self._numbers(type_id, dtype, length)
        if type_id == _STRING:
            return self._strings(length)
        return [self._array(depth + 1) for _ in range(length)]

    def _numbers(self, type_id: int, dtype: str, length: int) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        data = self._file.data[self._pos : self._advance(length * np.dtype(dtype).itemsize)]
        if type_id != _BOOL:
            return data.view(dtype)
        if length and data.max() > 1:
            self._fail("has a boolean that is neither 0 nor 1")
        return data.view(np.bool_)

    def _strings(self, length: int) -> list[str]:
        # Vocabularies have 10^5 of these, so this loop works on locals instead of calling _string.
        view, size, pos, unpack = self._view, self._size, self._pos, _U64.unpack_from
        strings: list[str] = []
        try:
            for _ in range(length):
                begin = pos + 8
                pos = begin + unpack(view, pos)[0]
                if pos > size:
                    self._fail_truncated(pos)
                strings.append(str(view[begin:pos], "utf-8"))
        except struct.error:
            self._fail_truncated(pos + 8)
        except UnicodeDecodeError:
            self._fail(f"is not valid UTF-8 (string {len(strings) + 1} of {length})")
        self._pos = pos
        return strings

    def _string(self) -> str:
        return self._strings(1)[0]

    def _count(self, min_nbytes: int) -> int:
        """A number of things that take at least `min_nbytes` each in what is left of the file."""
        count = self._u64()
        if count * min_nbytes > self._size - self._pos:
            self._fail(f"announces {count} elements, more than the rest of the file can hold")
        return count

    def _u32(self) -> int:
        begin = self._pos
        self._advance(4)
        return int(_U32.unpack_from(self._view, begin)[0])

    def _u64(self) -> int:
        begin = self._pos
        self._advance(8)
        return int(_U64.unpack_from(self._view, begin)[0])

    def _advance(self, nbytes: int) -> int:
        """Move on by `nbytes`, which must be there; returns the new position."""
        if self._pos + nbytes > self._size:
            self._fail_truncated(self._pos + nbytes)
        self._pos += nbytes
        return self._pos

    def _fail_truncated(self, needed: int) -> NoReturn:
        self._fail(f"reaches to byte {needed}, but the file has {self._size}: it is truncated or damaged")

    def _fail(self, problem: str) -> NoReturn:
        # Names come out of the file, so they may be anything and of any length.
        where = self._where if len(self._where) <= 100 and self._where.isprintable() else repr(self._where[:100])
        raise ModelLoadError(f"{self._path}: {where} {problem}", field=where, file=str(self._path))
