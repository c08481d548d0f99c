"""What a worker needs of an engine. Imports no compute library: schedulers and fakes depend on this alone."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdserve.engine.batch import Batch
from pdserve.engine.output import StepOutput
from pdserve.kv_layout import KvBlockStore, KvLayout
from pdserve.model.config import ModelConfig


class Engine(Protocol):
    """A loaded model with its KV pool.

    `forward` and `forward_logits` are called by one thread at a time. `store` may be used by other threads meanwhile,
    for blocks that are in no running batch.
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

    def forward(self, batch: Batch) -> StepOutput:
        """Write the K/V of the batch into its slots, draw one token for each of its R logit rows, and report the
        log-probabilities that were asked for.

        On return the K/V of the batch is readable through `store`. With no logit rows there are no tokens.
        """

    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As `forward`, but gives the raw logits [R, vocab_size] instead of drawing."""
