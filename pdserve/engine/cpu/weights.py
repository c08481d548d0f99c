"""Packing of a model's weights into the layout the kernels read.

All matrices lie in one byte arena; each is cut into tiles of sixteen output rows, and quantised tiles alternate in
pairs (strips), block by block:

  quantised   per strip and block of 32 inputs: 16 d (float16) of each tile | 16 pairs of int16 (M, sum) of each tile |
              vectors of codes u, the first of each tile, the second of each tile ... A weight is d (u + M), and sum is
              that of u + M over the block.
      Q8_0    8 vectors of 64 bytes: for each row, elements 4j..4j+3 as u = q + 128; M = -128
      Q4_0,   4 vectors of 64 bytes. Vector j holds, for each row, bytes 4j..4j+3 of the block: elements 4j+i in the
      Q4_1    low nibbles and 16+4j+i in the high ones, which is how ggml pairs them already; u = q. M is -8 (Q4_0), or
              m / d (Q4_1); both it and the sum are counted in 1 / Q4_FINENESS
  F16, F32    per input: one vector of sixteen rows, tile by tile

so that a kernel reads its weights front to back. Rows and inputs are padded with zeros to whole tiles and blocks.

What is stored as Q4_0, Q4_1 or Q8_0 is taken as it is, but that the minimum of a Q4_1 block is rounded to 1 / 64 of
its step. (A matrix with blocks that lie so far from zero that this does not fit 16 bits is made into Q8_0.) Everything
else is converted once.
What that costs, on 1,024 tokens of the texts of the quality test with SmolLM2 (stored as Q4_1), as KL divergence from
float32 in nats: as stored 0.0012, made into Q8_0 0.0022, into Q4_1 again 0.057, into F16 less than 0.00001.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pdserve.engine.cpu.formats import (
    BLOCK,
    F16,
    F32,
    HEAD_NBYTES,
    PAIRS_NBYTES,
    Q4_0,
    Q4_1,
    Q4_FINENESS,
    Q4_NBYTES,
    Q8_0,
    Q8_NBYTES,
    ROWS,
    STRIP,
)
from pdserve.engine.cpu.shape import MATRICES_PER_LAYER, ModelShape, padded
from pdserve.model.config import ModelConfig
from pdserve.model.names import EMBEDDING, FINAL_NORM, LM_HEAD
from pdserve.model.quants import dequantize
from pdserve.model.source import ModelSource
from pdserve.model.tensors import StoredTensor

Bytes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]

WeightFormat = Literal["auto", "q8_0", "q4_1", "f16", "f32"]
"""`auto` keeps what can be run as it is stored, and converts the rest to Q8_0."""

_STORED_AS = {"Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0}
_FORMATS = {"q8_0": Q8_0, "q4_1": Q4_1, "f16": F16, "f32": F32}
_ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vector."""
_PIECE_ELEMS = 1 << 20
"""Elements of a matrix that are packed at a time: each takes some twenty bytes meanwhile."""

_LAYER_MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip
assert len(_LAYER_MATRICES) == MATRICES_PER_LAYER


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """One matrix ready for the arena."""

    kind: int
    data: Bytes
    """uint8, flat."""
    tiles: int
    inputs: int
    """Padded length of a row of activations."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PackedModel:
    """Everything of a model that the kernels read."""

    arena: Bytes
    matrices: Int64
    """[layers * MATRICES_PER_LAYER + 1, 5]: format, byte offset in the arena, tiles, padded inputs, offset of the bias
    in `floats` or -1. The last row is the LM head."""
    floats: Float32
    """Norm weights and biases, one after the other, each padded like the rows it is applied to."""
    norms: Int64
    """[layers + 1, 4]: offsets in `floats` of the norms before attention and MLP, and of queries and keys or -1. The
    last row starts with the final norm."""
    embedding: StoredTensor
    """As stored: rows are decoded when they are looked up."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed weights, without the embedding, which stays in the mapped file."""
        return self.arena.nbytes + self.floats.nbytes


def packed_nbytes(source: ModelSource, weights: WeightFormat) -> int:
    """Size of the arena of `pack_model` before anything is packed, if every matrix can keep its format."""
    nbytes = 0
    for name in _matrix_names(source.config):
        rows, inputs = source.shape(name)
        strips = padded(rows, STRIP * ROWS) // (STRIP * ROWS)
        nbytes += padded(strips * _strip_nbytes(_packed_kind(source.packed(name), weights), inputs), _ALIGNMENT)
    return nbytes


def _strip_nbytes(kind: int, inputs: int) -> int:
    if kind <= F16:
        return STRIP * ROWS * padded(inputs, BLOCK) * (2 if kind == F16 else 4)
    codes_nbytes = Q8_NBYTES if kind == Q8_0 else Q4_NBYTES
    return padded(inputs, BLOCK) // BLOCK * (HEAD_NBYTES + STRIP * (PAIRS_NBYTES + codes_nbytes))


def pack_model(source: ModelSource, shape: ModelShape, weights: WeightFormat) -> PackedModel:
    """Pack all weights of `source`.

    In pieces of some rows, straight into the arena, and pages of the file are let go layer by layer: the peak is the
    packed model and little more.
    """
    config = source.config
    floats = _Floats()
    norms = np.full((config.num_layers + 1, 4), -1, np.int64)
    # Memory that is never written costs nothing: there is room for every matrix to become Q8_0.
    arena = _aligned(max(packed_nbytes(source, weights), packed_nbytes(source, "q8_0")))
    matrices = np.empty((config.num_layers * MATRICES_PER_LAYER + 1, 5), np.int64)
    offset = 0
    for i, name in enumerate(_matrix_names(config)):
        layer, matrix = divmod(i, MATRICES_PER_LAYER)
        if matrix == 0:
            source.drop_pages()
            _add_norms(source, shape, layer, floats, norms)
        kind, tiles, inputs, end = _pack_into(arena, offset, source.packed(name), weights)
        bias = name.removesuffix("weight") + "bias"
        has_bias = layer < config.num_layers and _has_bias(config, _LAYER_MATRICES[matrix])
        matrices[i] = kind, offset, tiles, inputs, floats.add(source.tensor(bias), tiles * ROWS) if has_bias else -1
        offset = padded(end, _ALIGNMENT)
    source.drop_pages()
    return PackedModel(
        arena=arena[:offset],
        matrices=matrices,
        floats=floats.joined(),
        norms=norms,
        embedding=source.packed(EMBEDDING),
    )


def _matrix_names(config: ModelConfig) -> list[str]:
    """All matrices in the order of `PackedModel.matrices`."""
    layers = [f"model.layers.{i}.{name}.weight" for i in range(config.num_layers) for name in _LAYER_MATRICES]
    return [*layers, EMBEDDING if config.tie_word_embeddings else LM_HEAD]


def _add_norms(source: ModelSource, shape: ModelShape, layer: int, floats: _Floats, norms: Int64) -> None:
    """Norms of a layer, or the final one after the last layer."""
    config = source.config
    if layer == config.num_layers:
        norms[layer, 0] = floats.add(source.tensor(FINAL_NORM), shape.hidden_padded)
        return
    name = f"model.layers.{layer}"
    norms[layer, 0] = floats.add(source.tensor(f"{name}.input_layernorm.weight"), shape.hidden_padded)
    norms[layer, 1] = floats.add(source.tensor(f"{name}.post_attention_layernorm.weight"), shape.hidden_padded)
    if config.qk_norm:
        norms[layer, 2] = floats.add(source.tensor(f"{name}.self_attn.q_norm.weight"), config.head_dim)
        norms[layer, 3] = floats.add(source.tensor(f"{name}.self_attn.k_norm.weight"), config.head_dim)


def _pack_into(arena: Bytes, offset: int, stored: StoredTensor, weights: WeightFormat) -> tuple[int, int, int, int]:
    """Pack a matrix at `offset` of the arena; gives its format, tiles, padded inputs, and where it ends."""
    rows, inputs = stored.shape
    # Whole strips.
    step = padded(max(1, _PIECE_ELEMS // inputs), STRIP * ROWS)
    end, tiles = offset, 0
    kinds = set()
    for begin in range(0, rows, step):
        piece = pack_tensor(_rows(stored, begin, begin + step), weights)
        kinds.add(piece.kind)
        if len(kinds) > 1:
            # Some rows do not fit the format, and a matrix has one.
            return _pack_into(arena, offset, stored, "q8_0")
        arena[end : end + piece.data.nbytes] = piece.data
        end += piece.data.nbytes
        tiles += piece.tiles
    return piece.kind, tiles, piece.inputs, end


def _rows(stored: StoredTensor, begin: int, end: int) -> StoredTensor:
    """Rows [begin, end) of a matrix, or those that there are."""
    rows = stored.data.reshape(stored.shape[0], -1)[begin:end]
    return dataclasses.replace(stored, shape=(len(rows), stored.shape[1]), data=rows.reshape(-1))


def pack_tensor(stored: StoredTensor, weights: WeightFormat) -> PackedMatrix:
    """Pack a matrix in its own format or the one asked for."""
    kind = _packed_kind(stored, weights)
    if kind == _STORED_AS.get(stored.type.name):
        return pack_stored(kind, stored.data.reshape(stored.shape[0], -1, stored.type.block_nbytes))
    return pack_float(kind, dequantize(stored))


def _packed_kind(stored: StoredTensor, weights: WeightFormat) -> int:
    if weights == "auto":
        return _STORED_AS.get(stored.type.name, Q8_0)
    return _FORMATS[weights]


def pack_stored(kind: int, rows: Bytes) -> PackedMatrix:
    """Pack ggml rows, uint8 [N, blocks, block bytes], without decoding them unless a minimum of Q4_1 does not fit."""
    scale_nbytes = 4 if kind == Q4_1 else 2
    cut: Bytes = _tiles(rows).astype(np.uint8, copy=False)
    tiles, _, blocks, _ = cut.shape
    d = _halves(cut, 0)
    codes = cut[..., scale_nbytes:]
    if kind == Q8_0:
        codes = codes ^ np.uint8(0x80)
        minimum = np.full(d.shape, -128, np.int32)
        sums = codes.sum(axis=-1, dtype=np.int32) - 128 * BLOCK
    else:
        ratio = np.full(d.shape, -8, np.float32)
        if kind == Q4_1:
            m = _halves(cut, 2)
            # Blocks of equal values: another step, of which the minimum is a whole number.
            constant = d == 0
            codes = np.where(constant[..., None], 0, codes).astype(np.uint8)
            d = np.where(constant, m / 8, d).astype(np.float32)
            ratio = np.divide(m, d, out=np.zeros_like(m), where=d != 0)
        # What does not fit 16 bits must not overflow 32 bits before that is noticed.
        minimum = np.rint((Q4_FINENESS * ratio).clip(-(2**20), 2**20)).astype(np.int32)
        of_codes = (codes & 15).sum(axis=-1, dtype=np.int32) + (codes >> 4).sum(axis=-1, dtype=np.int32)
        sums = Q4_FINENESS * of_codes + BLOCK * minimum
        if max(np.abs(minimum).max(initial=0), np.abs(sums).max(initial=0)) > np.iinfo(np.int16).max:
            return pack_float(Q8_0, _decode_q4_1(rows))
    steps = codes.shape[-1] // 4
    scales = np.ascontiguousarray(d.transpose(0, 2, 1), np.float16).view(np.uint8)
    pairs = np.ascontiguousarray(np.stack([minimum, sums], axis=-1).transpose(0, 2, 1, 3), np.int16)
    quants = codes.reshape(tiles, ROWS, blocks, steps, 4).transpose(0, 2, 3, 1, 4)
    parts = [
        scales[..., None, :],
        pairs.view(np.uint8).reshape(tiles, blocks, 1, -1),
        quants.reshape(tiles, blocks, steps, -1),
    ]
    return PackedMatrix(kind, _strips(parts), tiles, blocks * BLOCK)


def _strips(parts: list[Bytes]) -> Bytes:
    """Parts [tiles, blocks, vectors, bytes], scales first: block by block, each vector of all tiles of a strip."""
    tiles, blocks = parts[0].shape[:2]
    out = []
    for begin, end, width in ((0, tiles // STRIP * STRIP, STRIP), (tiles // STRIP * STRIP, tiles, tiles % STRIP)):
        if begin < end:
            cut = [
                p[begin:end]
                .reshape(-1, width, *p.shape[1:])
                .transpose(0, 2, 3, 1, 4)
                .reshape((end - begin) // width * blocks, -1)
                for p in parts
            ]
            filling = np.zeros((len(cut[0]), HEAD_NBYTES - cut[0].shape[1]), np.uint8)
            out.append(np.concatenate([cut[0], filling, *cut[1:]], axis=1).reshape(-1))
    return np.concatenate(out)


def _halves(rows: Bytes, begin: int) -> Float32:
    """The float16 at byte `begin` of each block."""
    return np.ascontiguousarray(rows[..., begin : begin + 2]).view(np.float16)[..., 0].astype(np.float32)


def _decode_q4_1(rows: Bytes) -> Float32:
    codes = np.concatenate([rows[..., 4:] & 15, rows[..., 4:] >> 4], axis=-1).astype(np.float32)
    return (_halves(rows, 0)[..., None] * codes + _halves(rows, 2)[..., None]).reshape(len(rows), -1)


def pack_float(kind: int, weights: Float32) -> PackedMatrix:
    """Pack float32 [N, K] in the given format."""
    n, k = weights.shape
    if k % BLOCK:
        weights = np.concatenate([weights, np.zeros((n, padded(k, BLOCK) - k), np.float32)], axis=1)
    if kind == Q8_0:
        return pack_stored(kind, quantize_q8_0(weights))
    if kind == Q4_1:
        return pack_stored(kind, quantize_q4_1(weights))
    columns = _tiles(weights).transpose(0, 2, 1)
    values = np.ascontiguousarray(columns, dtype=np.float16 if kind == F16 else np.float32)
    return PackedMatrix(kind, values.reshape(-1).view(np.uint8), len(columns), weights.shape[1])


def quantize_q8_0(weights: Float32) -> Bytes:
    """[N, K] float32 to ggml Q8_0 rows, uint8 [N, K / 32, 34]: d = max|w| / 127, q = round(w / d)."""
    blocks = weights.reshape(len(weights), -1, BLOCK)
    d = (np.abs(blocks).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16)
    quants = np.rint(_divide(blocks, d)).clip(-127, 127).astype(np.int8)
    return np.concatenate([d.view(np.uint8), quants.view(np.uint8)], axis=-1)


def quantize_q4_1(weights: Float32) -> Bytes:
    """[N, K] float32 to ggml Q4_1 rows, uint8 [N, K / 32, 20]: m = min, d = (max - m) / 15, q = round((w - m) / d)."""
    blocks = weights.reshape(len(weights), -1, BLOCK)
    m = blocks.min(axis=-1, keepdims=True).astype(np.float16)
    d = ((blocks.max(axis=-1, keepdims=True) - m.astype(np.float32)) / np.float32(15)).astype(np.float16)
    quants = np.rint(_divide(blocks - m.astype(np.float32), d)).clip(0, 15).astype(np.uint8)
    return np.concatenate([d.view(np.uint8), m.view(np.uint8), quants[..., :16] | (quants[..., 16:] << 4)], axis=-1)


def _divide(values: Float32, d: npt.NDArray[np.float16]) -> Float32:
    """values / d by the scale as it is stored, 0 where that is 0."""
    scale = d.astype(np.float32)
    quotient: Float32 = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0)
    return quotient


def _has_bias(config: ModelConfig, matrix: str) -> bool:
    if matrix == "self_attn.o_proj":
        return config.output_bias
    return config.qkv_bias and matrix.startswith("self_attn.")


def _tiles(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """[N, ...] to [tiles, ROWS, ...], with rows of zeros at the end."""
    n = padded(len(rows), ROWS)
    if n != len(rows):
        rows = np.concatenate([rows, np.zeros((n - len(rows), *rows.shape[1:]), rows.dtype)])
    return rows.reshape(n // ROWS, ROWS, *rows.shape[1:])


def _aligned(size: int) -> Bytes:
    """Uninitialised bytes that start at a cache line."""
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % _ALIGNMENT
    return memory[skip : skip + size]


class _Floats:
    """Vectors of one kind, laid one after the other."""

    def __init__(self) -> None:
        self._parts: list[Float32] = []
        self._size = 0

    def add(self, values: Float32, length: int) -> int:
        """Append `values` and zeros up to `length`; gives where they start."""
        part = np.zeros(length, np.float32)
        part[: len(values)] = values
        self._parts.append(part)
        self._size += length
        return self._size - length

    def joined(self) -> Float32:
        return np.concatenate(self._parts)
