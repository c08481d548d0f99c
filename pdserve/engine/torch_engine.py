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
from pdserve.engine.block_pool import BlockPool, CudaStaging, StagedBlockStore
from pdserve.engine.device import to_host, upload
from pdserve.engine.engine import LayerWatch
from pdserve.engine.graphs import StepGraphs
from pdserve.engine.host_store import HostBlockStore
from pdserve.engine.llama import Llama, StepInputs
from pdserve.engine.logprobs import raw_logprobs
from pdserve.engine.output import Logprobs, StepOutput
from pdserve.engine.sampler import sample
from pdserve.kv_layout import KvBlockStore, KvLayout
from pdserve.model.config import ModelConfig

SCORED_ROWS = 128
"""Rows of logits at a time for log-probabilities of a prompt: 64 MiB with a vocabulary of 128 Ki."""


class TorchEngine:
    """Implements `Engine`."""

    def __init__(
        self,
        config: ModelConfig,
        model: Llama,
        pool: BlockPool,
        attention: AttentionBackend,
        graphs: StepGraphs | None = None,
    ) -> None:
        """`graphs` are of this model and pool; the last block of the pool, and no other, is scratch for them."""
        assert graphs is None or graphs.scratch_block == pool.num_blocks - 1, "no such scratch block"
        self._config = config
        self._graphs = graphs
        self._model = model
        self._pool = pool
        self._attention = attention
        self._device = pool.kv.device
        self._staging = CudaStaging(self._device) if self._device.type == "cuda" else None
        self._store: KvBlockStore = (
            HostBlockStore(pool.layout, pool.words.numpy())
            if self._staging is None
            else StagedBlockStore(pool, self._staging)
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
        return self._pool.num_blocks if self._graphs is None else self._graphs.scratch_block

    @property
    def store(self) -> KvBlockStore:
        """The KV pool as bytes."""
        return self._store

    @torch.inference_mode()
    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
        """See `Engine.forward`. One device-to-host copy, of the tokens (more if `sample` draws a row again), and one
        for each of the two kinds of log-probabilities if anybody asked for it."""
        num_drawn = len(batch.logit_rows)
        hidden = self._compute(batch, watch)
        logits = self._model.logits(hidden[:num_drawn])
        rows = batch.sampling.logprob_rows
        # A copy of their rows, as `sample` edits the logits.
        raw = logits[upload(rows, self._device)] if len(rows) else None
        token_ids = sample(logits, batch.sampling)
        logprobs = None
        if raw is not None:
            num_top = int(batch.sampling.num_logprobs.max())
            logprobs = raw_logprobs([raw], token_ids[rows], num_top, self._device)
        return StepOutput(
            token_ids=token_ids, logprobs=logprobs, prompt_logprobs=self._score(hidden[num_drawn:], batch)
        )

    @torch.inference_mode()
    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """See `Engine.forward_logits`."""
        return to_host(self._model.logits(self._compute(batch)[: len(batch.logit_rows)]))

    def _score(self, hidden: torch.Tensor, batch: Batch) -> Logprobs | None:
        scoring = batch.scoring
        if len(scoring) == 0:
            return None
        slices = (self._model.logits(hidden[i : i + SCORED_ROWS]) for i in range(0, len(hidden), SCORED_ROWS))
        return raw_logprobs(slices, scoring.target_ids, int(scoring.num_top.max()), self._device)

    def _compute(self, batch: Batch, watch: LayerWatch | None = None) -> torch.Tensor:
        check_batch(batch, self._config, self._model.num_positions, self.num_blocks * self.layout.block_size)
        progress = StepProgress(watch or NOBODY, self._staging)
        hidden = None
        # A graph tells nobody how far it has come.
        if self._graphs is not None and (watch is None or watch.layers in ((), (self._config.num_layers,))):
            rows = self._graphs.run(batch)
            hidden = None if rows is None else rows[upload(batch.output_rows, self._device)]
        if hidden is None:
            inputs = StepInputs.upload(batch, self.layout.block_size, self._device)
            step_attention = self._attention.plan(batch, self.layout.block_size, self._device)
            hidden = self._model.forward(inputs, self._pool, step_attention, progress.after_layers)
        progress.submitted(self._config.num_layers)
        return hidden


def check_batch(batch: Batch, config: ModelConfig, num_positions: int, num_slots: int) -> None:
    """Assert that all that the batch points to exists: on a GPU an index out of range kills the context, and with it
    every request."""
    assert batch.token_ids.min() >= 0 and batch.token_ids.max() < config.vocab_size, "no such token id"
    assert batch.positions.max() < num_positions, "no such position"
    assert batch.slot_mapping.max() < num_slots, "no such block"


class StepProgress:
    """Tells whoever watches a step when layers are complete, which on a GPU is long after they were submitted."""

    def __init__(self, watch: LayerWatch, staging: CudaStaging | None) -> None:
        self._watch = watch
        self._staging = staging
        self._marks: list[tuple[int, torch.cuda.Event]] = []

    def after_layers(self, num_layers: int) -> None:
        """The first `num_layers` layers are submitted, on a CPU computed."""
        if num_layers not in self._watch.layers:
            return
        if self._staging is None:
            self._watch.on_done(num_layers)
        else:
            self._marks.append((num_layers, self._staging.mark()))

    def submitted(self, num_layers: int) -> None:
        """All `num_layers` layers are, and nothing after them."""
        if self._staging is None:
            return
        # Transfers that begin now wait for the last mark that the staging knows. It learns of this step's only when
        # what comes before has been told: else the first layers would wait for all of them.
        for number, mark in self._marks:
            if number < num_layers:
                mark.synchronize()
                self._watch.on_done(number)
        self._staging.computation_submitted()
        if num_layers in self._watch.layers:
            self._watch.on_done(num_layers)


NOBODY = LayerWatch((), lambda _: None)
