"""The safetensors reader against the `safetensors` package, and against damaged files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from pdserve.errors import ModelLoadError
from pdserve.model.quants import dequantize
from pdserve.model.safetensors_file import read_safetensors
from pdserve.model.tensors import StoredTensor

Parse = Callable[[bytes], dict[str, StoredTensor]]


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    def write_and_read(content: bytes) -> dict[str, StoredTensor]:
        path = tmp_path / "m.safetensors"
        path.write_bytes(content)
        return read_safetensors(path)

    return write_and_read


ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(4, dtype=np.float16)}
SOUND = save(ARRAYS, metadata={"format": "np"})


def file_bytes(header: object, data: bytes = bytes(8)) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(encoded).to_bytes(8, "little") + encoded + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def test_tensors_read_as_with_the_safetensors_package(parse: Parse) -> None:
    tensors = parse(SOUND)
    assert set(tensors) == {"a", "b"}
    for name, expected in ARRAYS.items():
        assert np.array_equal(dequantize(tensors[name]), expected)


def test_a_file_cut_anywhere_is_refused(parse: Parse) -> None:
    for length in range(len(SOUND)):
        with pytest.raises(ModelLoadError, match=r"m\.safetensors: "):
            parse(SOUND[:length])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=500, deadline=None)
@given(position=st.integers(0, len(SOUND)), new=st.binary(min_size=1, max_size=8), cut=st.integers(0, 8))
def test_spliced_files_give_at_most_a_clear_error(parse: Parse, position: int, new: bytes, cut: int) -> None:
    try:
        parse(SOUND[:position] + new + SOUND[position + cut :])
    except ModelLoadError as e:
        assert "m.safetensors" in e.message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x00\x00", "header needs 8 bytes"),
        ((2**63).to_bytes(8, "little"), "header announces 9223372036854775808 bytes"),
        (file_bytes(b"[" * 50_000), "header is not valid JSON"),
        (file_bytes(b"\xff\xff"), "header is not valid JSON"),
        (file_bytes([1]), "header is not a JSON object"),
        (file_bytes(b'{"t": 1, "t": 2}'), "header is not valid JSON .a name appears twice"),
        (file_bytes({"t": 1}), "tensor 't' is not described by a JSON object"),
        (file_bytes(entry(dtype="F7")), "tensor 't' has the unknown dtype 'F7'"),
        (file_bytes(entry(shape=[-2])), "tensor 't' has the shape"),
        (file_bytes(entry(shape=[True, 2])), "tensor 't' has the shape"),
        (file_bytes(entry(shape=[1.0])), "tensor 't' has the shape"),
        (file_bytes(entry(offsets=[0])), "tensor 't' has the data_offsets"),
        (file_bytes(entry(offsets=[8, 0])), "tensor 't' lies at bytes 8 to 0 of 8"),
        (file_bytes(entry(offsets=[0, 16])), "tensor 't' lies at bytes 0 to 16 of 8"),
        (file_bytes(entry(shape=[3])), r"tensor 't' has 8 bytes, which do not fit F32 \[3\]"),
        (file_bytes(entry() | {"u": entry()["t"]}), "tensor 'u' overlaps tensor 't'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "file",
)
def test_what_is_wrong_with_a_file_is_named(parse: Parse, content: bytes, message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"m\.safetensors: {message}"):
        parse(content)


def test_a_dtype_without_a_decoder_is_refused_by_name(parse: Parse) -> None:
    tensors = parse(file_bytes(entry(dtype="F64", shape=[1])))
    with pytest.raises(ModelLoadError, match="tensor 't' has type F64"):
        dequantize(tensors["t"])
