"""What a worker needs of an engine. Imports no compute library: schedulers and fakes depend on this alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdserve.engine.batch import Batch
from pdserve.engine.output import StepOutput
from pdserve.errors import PdServeError
from pdserve.kv_layout import KvBlockStore, KvLayout
from pdserve.model.config import ModelConfig


class EngineLostError(PdServeError):
    """Part of the engine has ended, and so it computes no more: every call from now on raises this."""

    code = "engine_lost"
    retryable = True


@dataclass(frozen=True, slots=True)
class LayerWatch:
    """Somebody who wants to know in the middle of a step how far it has come."""

    layers: tuple[int, ...]
    """After how many layers to call; ascending, each from 1 to the number of layers of the model."""
    on_done: Callable[[int], None]
    """Called with each of these numbers once the K/V of the whole batch is readable through the engine's `store` in so
    many leading layers, which the rest of the step does not change. A step that fails may have called it."""


class Engine(Protocol):
    """A loaded model with its KV pool.

    `forward` and `forward_logits` are called by one thread at a time. `store` may be used by other threads meanwhile,
    for blocks that are in no running batch, and of those that are for the layers that have been reported.
    """

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""

    @property
    def layout(self) -> KvLayout:
        """Geometry of the KV blocks."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""

    @property
    def store(self) -> KvBlockStore:
        """The KV pool as bytes, for the transfer layer."""

    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
        """Write the K/V of the batch into its slots, draw one token for each of its R logit rows, and report the
        log-probabilities that were asked for.

        On return the K/V of the batch is readable through `store`. With no logit rows there are no tokens. `watch` is
        called on the calling thread, and changes no bit of the result.
        """

    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As `forward`, but gives the raw logits [R, vocab_size] instead of drawing."""
