"""Rotary position embedding as numbers: the one place where every engine gets its angles from.

Element i of a head is paired with element i + head_dim / 2 (the half-split order of Hugging Face). The pair is turned
by the angle `position * frequency[i]`:

    out[i]                = x[i] * cos - x[i + head_dim / 2] * sin
    out[i + head_dim / 2] = x[i + head_dim / 2] * cos + x[i] * sin

Frequencies are computed in float64 and rounded once; an angle is the float32 product of a position and a frequency, as
in the code models are trained with; its cosine and sine are computed in float64 and rounded once. So the tables are
the same on every machine, whatever its vector units, and for every table length.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from pdserve.model.rope_scaling import FrequencyFactors, LinearScaling, Llama3Scaling, YarnScaling
from pdserve.model.tensors import Float32Array

if TYPE_CHECKING:
    from pdserve.model.config import ModelConfig

Float64Array = npt.NDArray[np.float64]

_CHUNK_POSITIONS = 4096  # Bounds the float64 temporaries of long tables.


class RopeTables(NamedTuple):
    """Cosines and sines by position, any attention factor of the scaling included."""

    cos: Float32Array
    """[num_positions, head_dim / 2]"""
    sin: Float32Array
    """[num_positions, head_dim / 2]"""


def rope_tables(config: ModelConfig, num_positions: int) -> RopeTables:
    """Tables for positions 0 ... num_positions - 1, C-contiguous. A row does not depend on `num_positions`."""
    frequencies = rope_frequencies(config)
    scale = np.float32(attention_factor(config))
    shape = (num_positions, len(frequencies))
    tables = RopeTables(cos=np.empty(shape, np.float32), sin=np.empty(shape, np.float32))
    for begin in range(0, num_positions, _CHUNK_POSITIONS):
        end = min(begin + _CHUNK_POSITIONS, num_positions)
        angles = (np.arange(begin, end, dtype=np.float32)[:, None] * frequencies).astype(np.float64)
        tables.cos[begin:end] = np.cos(angles)
        tables.sin[begin:end] = np.sin(angles)
    if scale != 1:
        np.multiply(tables.cos, scale, out=tables.cos)
        np.multiply(tables.sin, scale, out=tables.sin)
    return tables


def rope_frequencies(config: ModelConfig) -> Float32Array:
    """Radians per position of each pair of a head, scaling applied, fastest first: [head_dim / 2]."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    plain = np.float64(config.rope_theta) ** -exponents
    scaling = config.rope_scaling
    match scaling:
        case None:
            scaled = plain
        case LinearScaling():
            scaled = plain / scaling.factor
        case FrequencyFactors():
            scaled = plain / np.array(scaling.factors, dtype=np.float64)
        case Llama3Scaling():
            scaled = _llama3(plain, scaling)
        case YarnScaling():
            scaled = _yarn(plain, scaling, config.rope_theta, config.head_dim)
    return scaled.astype(np.float32)


def attention_factor(config: ModelConfig) -> float:
    """What cosines and sines are multiplied by: 1 except with YaRN."""
    scaling = config.rope_scaling
    return scaling.attention_factor if isinstance(scaling, YarnScaling) else 1.0


def default_yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The attention factor that YaRN's authors recommend for a stretch by `factor`."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(plain: Float64Array, scaling: Llama3Scaling) -> Float64Array:
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    band = scaling.high_freq_factor - scaling.low_freq_factor
    keep = np.clip((turns - scaling.low_freq_factor) / band, 0.0, 1.0)
    return _blend(plain, scaling.factor, keep)


def _yarn(plain: Float64Array, scaling: YarnScaling, theta: float, head_dim: int) -> Float64Array:
    def dimension(turns: float) -> float:
        """Index, not whole, of the frequency that turns so often in the original context."""
        wavelength = scaling.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(theta))

    begin, end = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, head_dim - 1)
    width = end - begin if end != begin else 0.001
    keep = 1.0 - np.clip((np.arange(len(plain)) - begin) / width, 0.0, 1.0)
    return _blend(plain, scaling.factor, keep)


def _blend(plain: Float64Array, factor: float, keep: Float64Array) -> Float64Array:
    """Between the frequencies as they are (`keep` 1) and divided by `factor` (`keep` 0)."""
    blended: Float64Array = plain * keep + plain / factor * (1.0 - keep)
    return blended
