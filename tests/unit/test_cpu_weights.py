"""Packing of weights: nothing is lost or moved, and quantisers are as good as those of the `gguf` package."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from pdserve.engine.cpu import weights as weights_module
from pdserve.engine.cpu.attention_tile import QUERY_STRIDE
from pdserve.engine.cpu.formats import F16, F32, Q4_0, Q4_1, Q8_0, ROWS, STRIP
from pdserve.engine.cpu.shape import MATRICES_PER_LAYER, MAX_HEAD_DIM, ModelShape
from pdserve.engine.cpu.weights import (
    PackedMatrix,
    PackedModel,
    WeightFormat,
    pack_float,
    pack_model,
    pack_stored,
    packed_nbytes,
    quantize_q4_1,
    quantize_q8_0,
)
from pdserve.engine.select import why_not_cpu
from pdserve.errors import ModelLoadError
from pdserve.model.quants import dequantize
from pdserve.model.source import ModelSource, open_model
from pdserve.model.tensors import StoredTensor
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
    steps = 8 if packed.kind == Q8_0 else 4
    out = np.empty((packed.tiles, ROWS, k), np.float64)
    at = 0
    for strip in range(0, packed.tiles, STRIP):
        width = min(STRIP, packed.tiles - strip)
        for b in range(k // 32):
            scales = packed.data[at : at + 64].view(np.float16).astype(np.float64).reshape(STRIP, ROWS)
            assert not scales[width:].any()
            at += 64
            pairs = packed.data[at : at + 64 * width].view(np.int16).astype(np.int64).reshape(width, ROWS, 2)
            at += 64 * width
            quants = packed.data[at : at + 64 * steps * width].reshape(steps, width, ROWS, 4)
            at += 64 * steps * width
            for tile, row in np.ndindex(width, ROWS):
                codes = quants[:, tile, row].reshape(-1).astype(np.int64)
                if packed.kind != Q8_0:
                    codes = np.concatenate([codes & 15, codes >> 4])
                unit = 1 if packed.kind == Q8_0 else 64
                minimum, total = pairs[tile, row]
                whole = unit * codes + minimum
                assert total == whole.sum()
                out[strip + tile, row, 32 * b : 32 * b + 32] = scales[tile, row] * whole / unit
    assert at == packed.data.nbytes
    return out.reshape(n, k).astype(np.float32)


def gguf_rows(weights: Float32, name: str) -> UInt8:
    """As the `gguf` package stores them, [N, blocks, block bytes]."""
    rows: UInt8 = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[name])
    return rows.reshape(len(weights), weights.shape[1] // 32, -1)


def decoded(rows: UInt8, name: str) -> Float32:
    values: Float32 = gguf.quants.dequantize(rows.reshape(len(rows), -1), gguf.GGMLQuantizationType[name])
    return values


def random_weights(n: int, k: int, seed: int = 0) -> Float32:
    return (np.random.default_rng(seed).standard_normal((n, k)) * 0.1).astype(np.float32)


def steps_of(rows: UInt8) -> Float32:
    """The step of each value of Q4_1 rows, [N, K]."""
    d = np.ascontiguousarray(rows[..., :2]).view(np.float16).astype(np.float32)
    return np.repeat(np.abs(d), 32, axis=-1).reshape(len(rows), -1)


@pytest.mark.parametrize(("name", "kind"), [("Q4_0", Q4_0), ("Q4_1", Q4_1), ("Q8_0", Q8_0)])
@pytest.mark.parametrize("n", [1, 16, 32, 37, 70])
def test_stored_rows_are_packed_as_they_are(name: str, kind: int, n: int) -> None:
    """But for the minimum of a Q4_1 block, which is rounded to 1 / 64 of its step."""
    rows = gguf_rows(random_weights(n, 96), name)
    packed = pack_stored(kind, rows)
    values = unpacked(packed)
    expected = decoded(rows, name)
    slack = steps_of(rows) / 128 * 1.001 if kind == Q4_1 else np.zeros_like(expected)
    assert (np.abs(values[:n] - expected) <= slack + 1e-7 * np.abs(expected)).all()
    assert (packed.kind, packed.tiles, packed.inputs) == (kind, -(-n // 16), 96)
    assert not values[n:].any(), "rows that fill the last tile are zeros"


@pytest.mark.parametrize("value", [0.0, 1.0, -0.25, 3.0, 60000.0, -(2.0**-14)])
def test_q4_1_blocks_of_equal_values_stay_exact(value: float) -> None:
    """They are stored with a step of 0, in which no minimum can be counted. Codes mean nothing there."""
    rows = gguf_rows(random_weights(3, 96), "Q4_1")
    rows[1, 1, :2] = 0
    rows[1, 1, 2:4] = np.array([value], np.float16).view(np.uint8)
    packed = pack_stored(Q4_1, rows)
    assert packed.kind == Q4_1
    np.testing.assert_array_equal(unpacked(packed)[1, 32:64], np.full(32, value, np.float32))
    np.testing.assert_array_equal(unpacked(packed)[1, 32:64], decoded(rows, "Q4_1")[1, 32:64])


@pytest.mark.parametrize("steps_away", [-600.0, -17.0, 20.0, 512.0, 1e7, -3e7, 4e8])
def test_a_matrix_with_a_q4_1_block_far_from_zero_becomes_q8_0(steps_away: float) -> None:
    """One block decides: a matrix has one format. Ratios beyond 32 bits are noticed as well as those beyond 16."""
    rows = gguf_rows(random_weights(20, 96), "Q4_1")
    step = np.float16(2.0**-12 if abs(steps_away) < 1e4 else 2.0**-24)
    far = np.array([step, np.float16(float(step) * steps_away)], np.float16)
    rows[7, 2, :4] = far.view(np.uint8)
    rows[7, 2, 4:] = 0 if steps_away < 0 else 0xFF
    assert np.isfinite(far).all()
    packed = pack_stored(Q4_1, rows)
    assert packed.kind == Q8_0
    expected = decoded(rows, "Q4_1")
    # Half a step of Q8_0, and the rounding of its scale to float16, which is absolute for the smallest.
    largest = np.repeat(np.abs(expected.reshape(20, 3, 32)).max(axis=2), 32, axis=1)
    assert (np.abs(unpacked(packed)[:20] - expected) <= largest / 254 + largest / 2048 + 127 * 2.0**-25).all()


@pytest.mark.parametrize(("codes", "minimum", "kind"), [(0, -1023, Q4_1), (0, -1024, Q8_0), (15, 63, Q4_1),
                                                       (15, 64, Q8_0)])  # fmt: skip
def test_a_q4_1_block_may_lie_as_far_from_zero_as_16_bits_hold(codes: int, minimum: int, kind: int) -> None:
    """The sum of 32 values, counted in 1 / 64 of a step."""
    rows = np.full((16, 1, 20), 17 * codes, np.uint8)
    rows[..., :4] = np.array([1, minimum / 64], np.float16).view(np.uint8)
    assert pack_stored(Q4_1, rows).kind == kind


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


def matrix_of(packed: PackedModel, index: int) -> tuple[int, Float32]:
    """Format and values of one matrix, from the arena of the whole model."""
    kind, offset, tiles, inputs, _ = packed.matrices[index].tolist()
    strips, last = divmod(tiles, STRIP)
    if kind in (F32, F16):
        nbytes = {F32: 64, F16: 32}[kind] * tiles * inputs
    else:
        of_tile = 64 + 64 * (8 if kind == Q8_0 else 4)
        nbytes = (strips * (64 + STRIP * of_tile) + (64 + of_tile) * last) * inputs // 32
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
    packed = pack_model(source, ModelShape(source.config, 16), weights)
    for index in (0, 1, 3, MATRICES_PER_LAYER + 6):
        layer, position = divmod(index, MATRICES_PER_LAYER)
        actual, values = matrix_of(packed, index)
        expected = source.tensor(f"model.layers.{layer}.{names[position]}.weight")
        assert actual == kind
        # Of the largest value: half a step and what float16 adds; of Q4_1 that is kept, half of 1 / 64 step.
        share = (1 / 900 if kind == Q4_1 else 1e-7) if lossless else 1 / 100 if kind == Q8_0 else 1 / 8
        tolerance = np.abs(expected).max() * share
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


WEIGHTS: tuple[WeightFormat, ...] = ("auto", "q8_0", "q4_1", "f16", "f32")
ODD = TinyShape(hidden_size=80, intermediate_size=208, num_heads=5, num_kv_heads=1)
"""Matrices with a single tile in the last strip, and rows that are no whole number of blocks."""


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("stored", ["Q4_1", "HF"])
def test_packing_in_pieces_gives_the_arena_of_one_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: str, weights: WeightFormat
) -> None:
    """Large matrices are packed some rows at a time. Pieces are whole strips."""
    source = source_of(tmp_path, stored, ODD if stored == "HF" else None)
    shape = ModelShape(source.config, 16)
    pieces = []
    pack_tensor = weights_module.pack_tensor

    def counted(piece: StoredTensor, weights: WeightFormat) -> PackedMatrix:
        pieces.append(piece.shape)
        return pack_tensor(piece, weights)

    monkeypatch.setattr(weights_module, "pack_tensor", counted)
    whole = pack_model(source, shape, weights)
    num_matrices = len(whole.matrices)
    assert len(pieces) == num_matrices
    pieces.clear()
    monkeypatch.setattr(weights_module, "_PIECE_ELEMS", 1)
    small = pack_model(source, shape, weights)
    assert max(rows for rows, _ in pieces) == STRIP * ROWS
    assert len(pieces) > 2 * num_matrices
    np.testing.assert_array_equal(small.matrices, whole.matrices)
    # Not the arenas, as what lies between matrices was never written.
    for index in range(num_matrices):
        np.testing.assert_array_equal(matrix_of(small, index)[1], matrix_of(whole, index)[1])


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("stored", ["Q4_0", "Q4_1", "HF"])
def test_the_size_told_beforehand_is_that_of_the_packed_model(
    tmp_path: Path, stored: str, weights: WeightFormat
) -> None:
    """Or a little more: a last single tile counts as two."""
    source = source_of(tmp_path, stored, ODD if stored == "HF" else None)
    used = pack_model(source, ModelShape(source.config, 16), weights).arena.nbytes
    told = packed_nbytes(source, weights)
    assert used <= told <= (1.35 if stored == "HF" else 1.01) * used


@pytest.mark.parametrize("piece_elems", [1, 1 << 20], ids=["in pieces", "in one piece"])
@pytest.mark.parametrize("index", [0, MATRICES_PER_LAYER + 5], ids=["first matrix", "last but one"])
def test_one_block_far_from_zero_makes_its_whole_matrix_q8_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, index: int, piece_elems: int
) -> None:
    """The pieces before it have been packed as Q4_1 by then; matrices behind move up, in an arena that has the room."""
    monkeypatch.setattr(weights_module, "_PIECE_ELEMS", piece_elems)
    source = source_of(tmp_path, "Q4_1")
    layer, position = divmod(index, MATRICES_PER_LAYER)
    name = f"model.layers.{layer}.{('self_attn.q_proj', None, None, None, None, 'mlp.up_proj')[position]}.weight"
    stored = source.packed(name)
    rows = stored.data.reshape(stored.shape[0], -1, 20).copy()
    rows[-1, -1, :4] = np.array([2.0**-12, 0.25], np.float16).view(np.uint8)
    changed = dataclasses.replace(stored, data=rows.reshape(-1))
    edited = source_with(source, {name: changed})
    packed = pack_model(edited, ModelShape(edited.config, 16), "auto")
    kinds = packed.matrices[:, 0].tolist()
    assert kinds[index] == Q8_0
    assert kinds[:index] + kinds[index + 1 :] == [Q4_1] * (len(kinds) - 1)
    unchanged = pack_model(source, ModelShape(source.config, 16), "auto")
    for i in range(len(kinds)):
        values, expected = matrix_of(packed, i)[1], matrix_of(unchanged, i)[1]
        if i != index:
            np.testing.assert_array_equal(values, expected)
        else:
            wanted = dequantize(changed)
            error = np.abs(values[: len(wanted), : wanted.shape[1]] - wanted)
            assert error.max() <= np.abs(wanted).max() / 200


def mixed_source(base: ModelSource, other: ModelSource, suffixes: tuple[str, ...]) -> ModelSource:
    """`base` with those matrices of `other` whose name ends so."""
    names = [name for name in base.tensor_names() if name.removesuffix(".weight").endswith(suffixes)]
    return source_with(base, {name: other.packed(name) for name in names})


def source_with(base: ModelSource, tensors: dict[str, StoredTensor]) -> ModelSource:
    """`base` with other tensors of these names."""
    return ModelSource(
        name=base.name,
        path=base.path,
        config=base.config,
        tensors={name: base.packed(name) for name in base.tensor_names()} | tensors,
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


@pytest.mark.parametrize("head_dim", [24, 257, 272, 512])
def test_a_head_size_that_the_kernels_cannot_run_is_refused(tmp_path: Path, head_dim: int) -> None:
    """No whole number of vectors, or more than the scratch memory of attention has room for. `engine.kind: auto` then
    takes torch."""
    config = dataclasses.replace(source_of(tmp_path, "HF").config, head_dim=head_dim)
    with pytest.raises(ModelLoadError, match=rf"head_dim is {head_dim}.*multiple of 16 up to 256.*torch") as caught:
        ModelShape(config, 16)
    assert caught.value.field == "head_dim"
    obstacle = why_not_cpu(config, device="cpu", block_size=16)
    assert obstacle is not None
    assert f"head_dim {head_dim}" in obstacle


def test_the_largest_head_size_is_accepted(tmp_path: Path) -> None:
    config = dataclasses.replace(source_of(tmp_path, "HF").config, head_dim=MAX_HEAD_DIM)
    assert ModelShape(config, 16).config.head_dim == MAX_HEAD_DIM <= QUERY_STRIDE
    assert why_not_cpu(config, device="cpu", block_size=16) is None
