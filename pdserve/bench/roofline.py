"""What this machine could do at most, and what prefill and decode of a model ask of it.

Bandwidth: all cores sum a large array. Arithmetic: a float32 matrix product of numpy's BLAS on all cores. Kernels on
8-bit integers can exceed that roof where the processor has instructions for them; the share then comes out above 1.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from pdserve.model.config import ModelConfig
from pdserve.model.source import open_model

BUFFER_NBYTES = 256 * 2**20
"""Many times the largest cache."""
MATRIX_SIZE = 1536
REPETITIONS = 5
"""The best counts: others on the machine only ever make it slower."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofs:
    """Of the machine that runs this, not of a server elsewhere."""

    bytes_per_s: float
    flop_per_s: float

    @property
    def ridge(self) -> float:
        """FLOP per byte from which arithmetic is the bound."""
        return self.flop_per_s / self.bytes_per_s

    @classmethod
    def measure(cls) -> Roofs:
        """Takes about two seconds, on an idle machine."""
        threads = len(os.sched_getaffinity(0))
        parts = np.array_split(np.ones(BUFFER_NBYTES // 8, np.int64), threads)
        a = np.ones((MATRIX_SIZE, MATRIX_SIZE), np.float32)
        read_s, multiply_s = [], []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(REPETITIONS + 1):
                began = time.perf_counter()
                # numpy lets go of the GIL in reductions of numbers.
                for _part in pool.map(np.sum, parts):
                    pass
                read_s.append(time.perf_counter() - began)
        for _ in range(REPETITIONS + 1):
            began = time.perf_counter()
            a @ a
            multiply_s.append(time.perf_counter() - began)
        return cls(bytes_per_s=BUFFER_NBYTES / min(read_s), flop_per_s=2 * MATRIX_SIZE**3 / min(multiply_s))


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Arithmetic and memory traffic of one forward pass, caches of the processor aside."""

    flop: float
    nbytes: float

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.nbytes

    def share(self, roofs: Roofs, elapsed_s: float) -> tuple[float, float]:
        """Achieved shares of the arithmetic roof and of the bandwidth roof."""
        return self.flop / elapsed_s / roofs.flop_per_s, self.nbytes / elapsed_s / roofs.bytes_per_s


class ModelWork:
    """Counts what a model's passes take. KV is of two bytes a number."""

    def __init__(self, config: ModelConfig, weight_nbytes: int) -> None:
        """`weight_nbytes` as stored in the model's file: what one pass reads at least."""
        self._config = config
        self._weight_nbytes = weight_nbytes
        attention = config.hidden_size * (2 * config.q_size + 2 * config.kv_size)
        feed_forward = 3 * config.hidden_size * config.intermediate_size
        self._layer_weights = config.num_layers * (attention + feed_forward)
        self._head_weights = config.vocab_size * config.hidden_size
        self._kv_nbytes = 2 * 2 * config.num_layers * config.kv_size

    @classmethod
    def of(cls, path_or_name: str) -> ModelWork:
        """Of a model on this machine. Raises ModelLoadError."""
        source = open_model(path_or_name)
        return cls(source.config, sum(source.packed(name).data.nbytes for name in source.tensor_names()))

    def prefill(self, num_tokens: int) -> Work:
        """One prompt, alone; logits of its last token only. Causal: each token attends to half of them on average."""
        c = self._config
        attention = 4 * c.num_layers * c.q_size * num_tokens * (num_tokens + 1) / 2
        return Work(
            flop=2 * (self._layer_weights * num_tokens + self._head_weights) + attention,
            nbytes=self._weight_nbytes + 2 * self._kv_nbytes * num_tokens,
        )

    def decode(self, batch: int, context: int) -> Work:
        """One step of `batch` sequences of `context` tokens each."""
        c = self._config
        attention = 4 * c.num_layers * c.q_size * context
        return Work(
            flop=batch * (2 * (self._layer_weights + self._head_weights) + attention),
            nbytes=self._weight_nbytes + batch * self._kv_nbytes * (context + 1),
        )
