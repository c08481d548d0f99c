"""Decoding of stored tensors against the `gguf` package."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ModelLoadError
from pdserve.model.gguf_types import TENSOR_TYPES
from pdserve.model.quants import check_supported, dequantize
from pdserve.model.tensors import StoredTensor

QUANTISABLE = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"]
"""Types that the `gguf` package can also write."""
SUPPORTED = [*QUANTISABLE, "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
BY_NAME = {t.name: t for t in TENSOR_TYPES.values()}


def stored(type_name: str, shape: tuple[int, ...], raw: bytes) -> StoredTensor:
    data = np.frombuffer(raw, np.uint8)
    return StoredTensor(name="w", type=BY_NAME[type_name], shape=shape, data=data, file=Path("model.gguf"))


def test_type_table_is_that_of_the_format() -> None:
    ours = {i: (t.name, t.block_elems, t.block_nbytes) for i, t in TENSOR_TYPES.items()}
    theirs = {t.value: (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType}
    assert {i: ours[i] for i in theirs if i in ours} == {i: theirs[i] for i in theirs if i in ours}
    assert set(SUPPORTED) < {t.name for t in TENSOR_TYPES.values()}


@pytest.mark.parametrize("type_name", QUANTISABLE)
def test_quantised_weights_decode_bit_for_bit(type_name: str) -> None:
    w = np.random.default_rng(1).standard_normal((48, 96), dtype=np.float32)
    kind = gguf.GGMLQuantizationType[type_name]
    packed = gguf.quants.quantize(w, kind)
    got = dequantize(stored(type_name, w.shape, packed.tobytes()))
    expected = gguf.quants.dequantize(packed, kind)
    assert got.dtype == np.float32
    assert got.shape == w.shape
    assert got.tobytes() == expected.tobytes()


@pytest.mark.parametrize("type_name", SUPPORTED)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), blocks=st.integers(1, 4))
def test_arbitrary_bytes_decode_as_the_reference_does(type_name: str, seed: int, rows: int, blocks: int) -> None:
    """Covers bit patterns that a quantiser never writes: negative scales, subnormals, infinities, NaN."""
    kind = gguf.GGMLQuantizationType[type_name]
    elems = max(32, BY_NAME[type_name].block_elems) * blocks
    row_nbytes = BY_NAME[type_name].row_nbytes(elems)
    raw = np.random.default_rng(seed).integers(0, 256, (rows, row_nbytes), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).reshape(rows, elems)
        got = dequantize(stored(type_name, (rows, elems), raw.tobytes()))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("type_name", SUPPORTED)
def test_tensors_of_many_blocks_decode_as_the_reference_does(type_name: str) -> None:
    """More elements than are decoded at a time, and not a multiple of that."""
    kind = gguf.GGMLQuantizationType[type_name]
    raw = np.random.default_rng(2).integers(0, 256, (333, BY_NAME[type_name].row_nbytes(1024)), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind).reshape(333, 1024)
        got = dequantize(stored(type_name, (333, 1024), raw.tobytes()))
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("type_name", SUPPORTED)
def test_result_is_writable_and_leaves_the_file_alone(type_name: str) -> None:
    raw = bytes(BY_NAME[type_name].row_nbytes(256))
    tensor = stored(type_name, (1, 256), raw)
    got = dequantize(tensor)
    got += 1.0
    assert got.flags.c_contiguous
    assert tensor.data.tobytes() == raw


def test_known_type_without_a_decoder_is_refused_by_name() -> None:
    tensor = stored("IQ4_NL", (1, 32), bytes(18))
    with pytest.raises(ModelLoadError, match=r"model\.gguf: tensor 'w' has type IQ4_NL.*Q8_0"):
        check_supported(tensor)
    with pytest.raises(ModelLoadError, match="IQ4_NL"):
        dequantize(tensor)
