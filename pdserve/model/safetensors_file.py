"""safetensors files: an 8-byte length, a JSON header, then the data of all tensors.

Read by hand rather than through the `safetensors` package because that package hands out numpy arrays only for types
numpy has, which excludes bfloat16, the type most checkpoints use. As with GGUF, nothing in the header is trusted.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import NoReturn, TypeGuard

from pdserve.errors import ModelLoadError
from pdserve.model.tensors import MappedFile, StoredTensor, TensorType

_MAX_HEADER_NBYTES = 100_000_000  # The limit of the format's reference implementation.
_TYPES = {
    name: TensorType(name, 1, nbytes)
    for nbytes, names in {
        1: ("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"),
        2: ("U16", "I16", "F16", "BF16"),
        4: ("U32", "I32", "F32"),
        8: ("U64", "I64", "F64"),
    }.items()
    for name in names
}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name, mapped and not read.

    Raises ModelLoadError, naming the file and the tensor, if it cannot be read or is not a sound safetensors file.
    """
    file = MappedFile(path)
    mapped = file.data
    if len(mapped) < 8:
        _fail(path, "header", f"needs 8 bytes, but the file has {len(mapped)}: it is truncated or damaged")
    data_begin = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    if data_begin > len(mapped) or data_begin > 8 + _MAX_HEADER_NBYTES:
        _fail(
            path,
            "header",
            f"announces {data_begin - 8} bytes, but the file has {len(mapped)}: truncated, or not safetensors",
        )
    data = mapped[data_begin:]
    tensors: dict[str, StoredTensor] = {}
    spans: list[tuple[int, int, str]] = []
    for name, entry in _read_header(path, mapped[8:data_begin].tobytes()).items():
        if name == "__metadata__":
            continue
        tensor_type, shape, begin, end = _read_entry(path, name, entry)
        if not begin <= end <= len(data):
            _fail(
                path,
                f"tensor {name!r}",
                f"lies at bytes {begin} to {end} of {len(data)}: the file is truncated or damaged",
            )
        if end - begin != math.prod(shape) * tensor_type.block_nbytes:
            _fail(
                path, f"tensor {name!r}", f"has {end - begin} bytes, which do not fit {tensor_type.name} {list(shape)}"
            )
        spans.append((begin, end, name))
        tensors[name] = StoredTensor(
            name=name, type=tensor_type, shape=shape, data=data[begin:end], file=path, mapped=file
        )
    spans.sort()
    for (_, end, name), (begin, _, other) in itertools.pairwise(spans):
        if begin < end:
            _fail(path, f"tensor {other!r}", f"overlaps tensor {name!r}")
    return tensors


def _read_header(path: Path, header: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        names = dict(pairs)
        if len(names) != len(pairs):
            raise ValueError("a name appears twice")
        return names

    try:
        decoded = json.loads(header, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        _fail(path, "header", f"is not valid JSON ({e})", cause=e)
    if not isinstance(decoded, dict):
        _fail(path, "header", "is not a JSON object")
    return decoded


def _read_entry(path: Path, name: str, entry: object) -> tuple[TensorType, tuple[int, ...], int, int]:
    where = f"tensor {name!r}"
    if not isinstance(entry, dict):
        _fail(path, where, "is not described by a JSON object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _TYPES:
        _fail(path, where, f"has the unknown dtype {dtype!r:.80}")
    if not _is_sizes(shape):
        _fail(path, where, f"has the shape {shape!r:.80}, which is not a list of sizes")
    if not _is_sizes(offsets) or len(offsets) != 2:
        _fail(path, where, f"has the data_offsets {offsets!r:.80}, which are not two offsets")
    return _TYPES[dtype], tuple(shape), offsets[0], offsets[1]


def _is_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**48 for n in value)


def _fail(path: Path, where: str, problem: str, cause: Exception | None = None) -> NoReturn:
    where = where if len(where) <= 120 else where[:117] + "..."
    raise ModelLoadError(f"{path}: {where} {problem}", field=where, file=str(path)) from cause
