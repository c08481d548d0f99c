"""The torch engine: any supported model, dtype and device; on CPU also the readable reference of faster engines.

Same request, other batch: matrix products may differ in the last bits with the number of rows, so in float32 tokens are
the same wherever the two best logits are not nearly tied, and no more is promised.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.attention import AttentionBackend
from pdserve.engine.batch import Batch
from pdserve.engine.block_pool import BlockPool, CudaStaging, HostBlockStore, StagedBlockStore
from pdserve.engine.device import to_host
from pdserve.engine.llama import Llama, StepInputs
from pdserve.engine.sampler import sample
from pdserve.kv_layout import KvBlockStore, KvLayout
from pdserve.model.config import ModelConfig


class TorchEngine:
    """Implements `Engine`."""

    def __init__(self, config: ModelConfig, model: Llama, pool: BlockPool, attention: AttentionBackend) -> None:
        self._config = config
        self._model = model
        self._pool = pool
        self._attention = attention
        self._device = pool.kv.device
        self._staging = CudaStaging(self._device) if self._device.type == "cuda" else None
        self._store: KvBlockStore = (
            HostBlockStore(pool) if self._staging is None else StagedBlockStore(pool, self._staging)
        )

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self._config

    @property
    def layout(self) -> KvLayout:
        """Geometry of the KV blocks."""
        return self._pool.layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool."""
        return self._pool.num_blocks

    @property
    def store(self) -> KvBlockStore:
        """The KV pool as bytes."""
        return self._store

    @torch.inference_mode()
    def forward(self, batch: Batch) -> npt.NDArray[np.int64]:
        """See `Engine.forward`. One device-to-host copy, of the tokens (two if `sample` draws a row again)."""
        return sample(self._compute(batch), batch.sampling)

    @torch.inference_mode()
    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """See `Engine.forward_logits`."""
        return to_host(self._compute(batch))

    def _compute(self, batch: Batch) -> torch.Tensor:
        # On a GPU an index out of range kills the context, and with it every request.
        assert batch.token_ids.min() >= 0 and batch.token_ids.max() < self._config.vocab_size, "no such token id"
        assert batch.slot_mapping.max() < self.num_blocks * self.layout.block_size, "no such block"
        inputs = StepInputs.upload(batch, self.layout.block_size, self._device)
        step_attention = self._attention.plan(batch, self.layout.block_size, self._device)
        logits = self._model.forward(inputs, self._pool, step_attention)
        if self._staging is not None:
            self._staging.computation_submitted()
        return logits
