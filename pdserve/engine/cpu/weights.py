"""Packing of a model's weights into the layout the kernels read.

All matrices lie in one byte arena; each is cut into tiles of sixteen output rows:

  Q4_0, Q4_1   per tile and block of 32 inputs:  16 d | Q4_1 only: 16 m | 16 sums of the weights | 4 vectors of 64
               bytes; the first three are float16. Vector j holds, for each row, bytes 4j..4j+3 of the block: elements
               4j+i in the low nibbles and 16+4j+i in the high ones, which is how ggml pairs them already
  Q8_0         16 d | 16 sums | 8 vectors of 64 bytes: for each row, elements 4j..4j+3
  F16, F32     per input: one vector of sixteen rows

so that a kernel reads its weights front to back. Rows and inputs are padded with zeros to whole tiles and blocks.

What is stored as Q4_0, Q4_1 or Q8_0 is taken as it is, without decoding. Everything else is converted once.
What that costs, on 612 tokens of chats with SmolLM2 (stored as Q4_1), as KL divergence from float32 in nats: as stored
0.0019, made into Q8_0 0.0043, into Q4_1 again 0.050, into F16 less than 0.00001.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from pdserve.engine.cpu.formats import BLOCK, F16, F32, Q4_0, Q4_1, Q8_0, ROWS
from pdserve.engine.cpu.shape import MATRICES_PER_LAYER, ModelShape, padded
from pdserve.model.config import ModelConfig
from pdserve.model.names import EMBEDDING, FINAL_NORM, LM_HEAD
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


def pack_model(source: ModelSource, shape: ModelShape, weights: WeightFormat) -> PackedModel:
    """Pack all weights of `source`."""
    config = source.config
    floats = _Floats()
    norms = np.full((config.num_layers + 1, 4), -1, np.int64)
    packed: list[PackedMatrix] = []
    biases: list[int] = []
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        norms[i, 0] = floats.add(source.tensor(f"{layer}.input_layernorm.weight"), shape.hidden_padded)
        norms[i, 1] = floats.add(source.tensor(f"{layer}.post_attention_layernorm.weight"), shape.hidden_padded)
        if config.qk_norm:
            norms[i, 2] = floats.add(source.tensor(f"{layer}.self_attn.q_norm.weight"), config.head_dim)
            norms[i, 3] = floats.add(source.tensor(f"{layer}.self_attn.k_norm.weight"), config.head_dim)
        for name in _LAYER_MATRICES:
            packed.append(pack_tensor(source, f"{layer}.{name}.weight", weights))
            biases.append(
                floats.add(source.tensor(f"{layer}.{name}.bias"), packed[-1].tiles * ROWS)
                if _has_bias(config, name)
                else -1
            )
    norms[-1, 0] = floats.add(source.tensor(FINAL_NORM), shape.hidden_padded)
    packed.append(pack_tensor(source, EMBEDDING if config.tie_word_embeddings else LM_HEAD, weights))
    biases.append(-1)

    arena = _aligned(sum(padded(m.data.size, _ALIGNMENT) for m in packed))
    matrices = np.empty((len(packed), 5), np.int64)
    offset = 0
    for i, matrix in enumerate(packed):
        arena[offset : offset + matrix.data.size] = matrix.data
        matrices[i] = matrix.kind, offset, matrix.tiles, matrix.inputs, biases[i]
        offset += padded(matrix.data.size, _ALIGNMENT)
    return PackedModel(
        arena=arena, matrices=matrices, floats=floats.joined(), norms=norms, embedding=source.packed(EMBEDDING)
    )


def pack_tensor(source: ModelSource, name: str, weights: WeightFormat) -> PackedMatrix:
    """Pack one matrix of `source` in its own format or the one asked for."""
    stored = source.packed(name)
    kind = _STORED_AS.get(stored.type.name)
    if kind is not None and (weights == "auto" or _FORMATS[weights] == kind):
        return pack_stored(kind, stored.data.reshape(stored.shape[0], -1, stored.type.block_nbytes))
    return pack_float(_FORMATS["q8_0" if weights == "auto" else weights], source.tensor(name))


def pack_stored(kind: int, rows: Bytes) -> PackedMatrix:
    """Pack ggml rows, uint8 [N, blocks, block bytes], without decoding them."""
    scale_bytes = 4 if kind == Q4_1 else 2
    steps = 8 if kind == Q8_0 else 4
    sums = _block_sums(kind, rows).astype(np.float16).view(np.uint8).reshape(*rows.shape[:2], 2)
    # Scales, sums and quants, in the order of the kernels.
    cut = _tiles(np.concatenate([rows[..., :scale_bytes], sums, rows[..., scale_bytes:]], axis=-1))
    scale_bytes += 2
    tiles, _, blocks, _ = cut.shape
    out = np.empty((tiles, blocks, ROWS * scale_bytes + steps * 64), np.uint8)
    for i in range(0, scale_bytes, 2):
        out[:, :, ROWS * i : ROWS * (i + 2)] = cut[..., i : i + 2].transpose(0, 2, 1, 3).reshape(tiles, blocks, -1)
    quants = cut[..., scale_bytes:].reshape(tiles, ROWS, blocks, steps, 4)
    out[:, :, ROWS * scale_bytes :] = quants.transpose(0, 2, 3, 1, 4).reshape(tiles, blocks, -1)
    return PackedMatrix(kind, out.reshape(-1), tiles, blocks * BLOCK)


def _block_sums(kind: int, rows: Bytes) -> Float32:
    """Sum of the weights of each block of ggml rows, float32 [N, blocks]."""

    def half(begin: int) -> Float32:
        return np.ascontiguousarray(rows[..., begin : begin + 2]).view(np.float16)[..., 0].astype(np.float32)

    sums: Float32
    if kind == Q8_0:
        sums = half(0) * rows[..., 2:].view(np.int8).sum(axis=-1, dtype=np.int32).astype(np.float32)
        return sums
    packed = rows[..., 4 if kind == Q4_1 else 2 :]
    codes = ((packed & 15).sum(axis=-1, dtype=np.int32) + (packed >> 4).sum(axis=-1, dtype=np.int32)).astype(np.float32)
    sums = half(0) * codes + np.float32(BLOCK) * half(2) if kind == Q4_1 else half(0) * (codes - np.float32(8 * BLOCK))
    return sums


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
