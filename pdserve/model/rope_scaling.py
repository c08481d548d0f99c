"""Ways to stretch rotary embedding beyond the context a model was first trained with.

Every number is resolved: what a file leaves out has been filled in by its reader. How they change the angles is the
business of `pdserve.model.rope`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Position interpolation (Chen et al., 2023, arXiv:2306.15595): every frequency is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: high frequencies stay, low ones are divided by `factor`, those between are interpolated.

    A frequency is high if it turns more than `high_freq_factor` times in the original context, low if less than
    `low_freq_factor` times.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    """Context of the first training, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): as Llama 3.1 with a ramp over dimensions, and a sharper attention."""

    factor: float
    original_max_position_embeddings: int
    """Context of the first training, in tokens."""
    beta_fast: float = 32.0
    """Frequencies that turn more often than this in the original context stay as they are."""
    beta_slow: float = 1.0
    """Frequencies that turn less often than this are divided by `factor`."""
    truncate: bool = True
    """The ramp starts and ends at whole dimensions."""
    attention_factor: float
    """Multiplies cosines and sines, hence attention scores by its square."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequencyFactors:
    """One divisor per frequency, fastest first: how GGUF files store the result of Llama 3.1's rule."""

    factors: tuple[float, ...]
    """head_dim / 2 numbers above zero."""


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling | FrequencyFactors
