"""Packing of weights: nothing is lost or moved, and quantisers are as good as those of the `gguf` package."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from pdserve.engine.cpu.formats import F16, F32, Q4_0, Q4_1, Q8_0, ROWS
from pdserve.engine.cpu.shape import MATRICES_PER_LAYER, ModelShape
from pdserve.engine.cpu.weights import (
    PackedMatrix,
    WeightFormat,
    pack_float,
    pack_model,
    pack_stored,
    quantize_q4_1,
    quantize_q8_0,
)
from pdserve.errors import ModelLoadError
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.tiny_families import make_tiny_family
from pdserve.testing.tiny_gguf import write_gguf
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv

Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]


def unpacked(packed: PackedMatrix) -> Float32:
    """Values [tiles * ROWS, inputs], element by element from the documented layout."""
    n, k = packed.tiles * ROWS, packed.inputs
    if packed.kind in (F32, F16):
        columns = packed.data.view(np.float32 if packed.kind == F32 else np.float16).reshape(packed.tiles, k, ROWS)
        return columns.transpose(0, 2, 1).reshape(n, k).astype(np.float32)
    scales = 2 if packed.kind == Q4_1 else 1
    steps = 8 if packed.kind == Q8_0 else 4
    blocks = packed.data.reshape(packed.tiles, k // 32, 32 * (scales + 1) + 64 * steps)
    out = np.empty((packed.tiles, ROWS, k), np.float32)
    for tile in range(packed.tiles):
        for b in range(k // 32):
            block = blocks[tile, b]
            d = block[:32].view(np.float16).astype(np.float32)
            m = block[32:64].view(np.float16).astype(np.float32) if scales == 2 else None
            sums = block[32 * scales : 32 * (scales + 1)].view(np.float16)
            quants = block[32 * (scales + 1) :].reshape(steps, ROWS, 4)
            for row in range(ROWS):
                of_row = quants[:, row].reshape(-1)
                if packed.kind == Q8_0:
                    q = of_row.view(np.int8).astype(np.float32)
                else:
                    q = np.concatenate([of_row & 15, of_row >> 4]).astype(np.float32)
                    q -= 8 if packed.kind == Q4_0 else 0
                values = d[row] * q + (0 if m is None else m[row])
                out[tile, row, 32 * b : 32 * b + 32] = values
                # float16 of a float32 sum whose terms may cancel.
                assert (
                    abs(float(sums[row]) - values.sum()) <= 2.0**-11 * abs(values.sum()) + 1e-5 * np.abs(values).sum()
                )
    return out.reshape(n, k)


def gguf_rows(weights: Float32, name: str) -> UInt8:
    """As the `gguf` package stores them, [N, blocks, block bytes]."""
    rows: UInt8 = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    return rows.reshape(len(weights), weights.shape[1] // 32, -1)


def decoded(rows: UInt8, name: str) -> Float32:
    values: Float32 = gguf.quants.dequantize(rows.reshape(len(rows), -1), gguf.GGMLQuantizationType[name])
    return values


def random_weights(n: int, k: int, seed: int = 0) -> Float32:
    return (np.random.default_rng(seed).standard_normal((n, k)) * 0.1).astype(np.float32)


@pytest.mark.parametrize(("name", "kind"), [("Q4_0", Q4_0), ("Q4_1", Q4_1), ("Q8_0", Q8_0)])
@pytest.mark.parametrize("n", [1, 16, 37])
def test_stored_rows_are_packed_as_they_are(name: str, kind: int, n: int) -> None:
    rows = gguf_rows(random_weights(n, 96), name)
    packed = pack_stored(kind, rows)
    values = unpacked(packed)
    np.testing.assert_array_equal(values[:n], decoded(rows, name))
    assert (packed.kind, packed.tiles, packed.inputs) == (kind, -(-n // 16), 96)
    assert not values[n:].any(), "rows that fill the last tile are zeros"


@pytest.mark.parametrize("kind", [F32, F16])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 32), (37, 75)])
def test_float_rows_are_packed_as_they_are(kind: int, n: int, k: int) -> None:
    weights = random_weights(n, k)
    values = unpacked(pack_float(kind, weights))
    assert values.shape == (-(-n // 16) * 16, -(-k // 32) * 32)
    np.testing.assert_array_equal(values[:n, :k], weights if kind == F32 else weights.astype(np.float16))
    assert not values[n:].any()
    assert not values[:, k:].any()


@pytest.mark.parametrize(("name", "kind"), [("Q8_0", Q8_0), ("Q4_1", Q4_1)])
def test_quantisers_agree_with_those_of_gguf(name: str, kind: int) -> None:
    """Scales of both are the same to the last bit or so; a value on the border between two steps may go either way."""
    weights = random_weights(64, 256)
    ours = (quantize_q8_0 if kind == Q8_0 else quantize_q4_1)(weights)
    theirs = gguf_rows(weights, name)
    assert ours.shape == theirs.shape
    scale_bytes = 4 if kind == Q4_1 else 2
    np.testing.assert_allclose(
        np.ascontiguousarray(ours[..., :scale_bytes]).view(np.float16).astype(np.float32),
        np.ascontiguousarray(theirs[..., :scale_bytes]).view(np.float16).astype(np.float32),
        rtol=2e-3,
    )
    error, their_error = (np.sqrt(np.mean((decoded(r, name) - weights) ** 2)) for r in (ours, theirs))
    assert error <= their_error * 1.001
    assert np.mean(ours != theirs) < 0.02


@pytest.mark.parametrize(("name", "kind"), [("Q8_0", Q8_0), ("Q4_1", Q4_1)])
def test_quantised_values_are_within_half_a_step(name: str, kind: int) -> None:
    weights = random_weights(8, 64)
    weights[0] = 0
    weights[1] = 5
    weights[2] = -5
    weights[3] *= 1e-9  # A scale that float16 rounds to 0.
    rows = (quantize_q8_0 if kind == Q8_0 else quantize_q4_1)(weights)
    blocks = weights.reshape(8, 2, 32)
    span = np.abs(blocks).max(axis=2) if kind == Q8_0 else np.ptp(blocks, axis=2)
    step = span / (127 if kind == Q8_0 else 15)
    # d and m are float16, whose error grows with the code: up to 127 d / 2**11, or 15 d / 2**11 + |m| / 2**11.
    slack = np.abs(blocks).max(axis=2) * 2.0**-10
    error = np.abs(decoded(rows, name).reshape(8, 2, 32) - blocks).max(axis=2)
    assert np.all(error <= 0.5 * step + slack + 1e-8)
    assert np.isfinite(decoded(rows, name)).all()


def test_float_weights_are_padded_before_they_are_quantised() -> None:
    """A row whose length is no whole number of blocks."""
    weights = random_weights(5, 40)
    for kind in (Q8_0, Q4_1):
        values = unpacked(pack_float(kind, weights))
        assert values.shape == (16, 64)
        np.testing.assert_allclose(values[:5, :40], weights, atol=0.025)


def source_of(tmp_path: Path, weight_type: str, shape: TinyShape | None = None) -> ModelSource:
    directory = make_tiny_kv(tmp_path / "model", shape=shape)
    if weight_type == "HF":
        return open_model(str(directory))
    return open_model(str(write_gguf(directory, tmp_path / "m.gguf", weight_type=weight_type)))


def matrix_of(source: ModelSource, weights: WeightFormat, index: int) -> tuple[int, Float32]:
    """Format and values of one matrix, from the arena of the whole model."""
    packed = pack_model(source, ModelShape(source.config, 16), weights)
    kind, offset, tiles, inputs, _ = packed.matrices[index].tolist()
    nbytes = {F32: 64 * 32, F16: 32 * 32, Q8_0: 576, Q4_0: 320, Q4_1: 352}[kind] * tiles * inputs // 32
    return kind, unpacked(PackedMatrix(kind, packed.arena[offset : offset + nbytes], tiles, inputs))


@pytest.mark.parametrize(
    ("stored", "weights", "kind"),
    [
        ("Q4_0", "auto", Q4_0),
        ("Q4_1", "auto", Q4_1),
        ("Q8_0", "auto", Q8_0),
        ("Q8_0", "q8_0", Q8_0),
        ("Q4_1", "q8_0", Q8_0),
        ("Q8_0", "q4_1", Q4_1),
        ("Q5_1", "auto", Q8_0),
        ("F16", "auto", Q8_0),
        ("HF", "auto", Q8_0),
        ("F16", "f16", F16),
        ("Q4_0", "f32", F32),
        ("HF", "f32", F32),
    ],
)
def test_the_format_follows_the_setting(tmp_path: Path, stored: str, weights: WeightFormat, kind: int) -> None:
    """And each matrix is found where the kernels look for it."""
    source = source_of(tmp_path, stored)
    names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
    lossless = kind in (F32, F16) or stored == {Q4_0: "Q4_0", Q4_1: "Q4_1", Q8_0: "Q8_0"}[kind]
    for index in (0, 1, 3, MATRICES_PER_LAYER + 6):
        layer, position = divmod(index, MATRICES_PER_LAYER)
        actual, values = matrix_of(source, weights, index)
        expected = source.tensor(f"model.layers.{layer}.{names[position]}.weight")
        assert actual == kind
        tolerance = 0 if lossless else np.abs(expected).max() / (100 if kind == Q8_0 else 8)
        np.testing.assert_allclose(values[: len(expected), : expected.shape[1]], expected, rtol=0, atol=tolerance)


def test_matrices_of_a_layer_may_differ_in_format(tmp_path: Path) -> None:
    """As in published files, where values and down projections often have more bits than the rest."""
    four, eight = source_of(tmp_path / "a", "Q4_1"), source_of(tmp_path / "b", "Q8_0")
    mixed = mixed_source(four, eight, ("v_proj", "down_proj"))
    packed = pack_model(mixed, ModelShape(mixed.config, 16), "auto")
    kinds = packed.matrices[:MATRICES_PER_LAYER, 0].tolist()
    assert kinds == [Q4_1, Q4_1, Q8_0, Q4_1, Q4_1, Q4_1, Q8_0]
    # Each starts on a cache line.
    assert not np.any(packed.matrices[:, 1] % 64)
    assert packed.arena.ctypes.data % 64 == 0


def mixed_source(base: ModelSource, other: ModelSource, suffixes: tuple[str, ...]) -> ModelSource:
    """`base` with those matrices of `other` whose name ends so."""
    tensors = {
        name: (other if name.removesuffix(".weight").endswith(suffixes) else base).packed(name)
        for name in base.tensor_names()
    }
    return ModelSource(
        name=base.name,
        path=base.path,
        config=base.config,
        tensors=tensors,
        gguf_metadata=None,
        hf_dir=None,
        interleaved_rotary=False,  # `packed` has put the rows in order.
    )


def test_norms_and_biases_are_found_and_padded(tmp_path: Path) -> None:
    """Qwen2 has biases on three projections, Qwen3 norms of queries and keys."""
    for family in ("qwen2", "qwen3"):
        source = open_model(str(make_tiny_family(tmp_path / family, family)))
        shape = ModelShape(source.config, 16)
        packed = pack_model(source, shape, "f32")
        for layer in (0, 2):
            base = f"model.layers.{layer}"
            for column, name in enumerate(("input_layernorm", "post_attention_layernorm")):
                at = packed.norms[layer, column]
                np.testing.assert_array_equal(packed.floats[at : at + 256], source.tensor(f"{base}.{name}.weight"))
            for column, name in enumerate(("q_norm", "k_norm"), start=2):
                at = packed.norms[layer, column]
                assert (at >= 0) == (family == "qwen3")
                if at >= 0:
                    expected = source.tensor(f"{base}.self_attn.{name}.weight")
                    np.testing.assert_array_equal(packed.floats[at : at + len(expected)], expected)
            for position, name in enumerate(("q_proj", "k_proj", "v_proj", "o_proj")):
                at = packed.matrices[layer * MATRICES_PER_LAYER + position, 4]
                assert (at >= 0) == (family == "qwen2" and name != "o_proj")
                if at >= 0:
                    expected = source.tensor(f"{base}.self_attn.{name}.bias")
                    np.testing.assert_array_equal(packed.floats[at : at + len(expected)], expected)


def test_a_head_size_that_fills_no_vectors_is_refused(tmp_path: Path) -> None:
    config = source_of(tmp_path, "HF").config
    with pytest.raises(ModelLoadError, match=r"head_dim is 24.*torch"):
        ModelShape(dataclasses.replace(config, head_dim=24), 16)
