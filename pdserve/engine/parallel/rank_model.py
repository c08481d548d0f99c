"""One rank's share of a step. All ranks call the same methods, in the same order, with the same batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.attention import AttentionBackend
from pdserve.engine.batch import Batch
from pdserve.engine.block_pool import BlockPool
from pdserve.engine.device import upload
from pdserve.engine.llama import Llama, StepInputs
from pdserve.engine.parallel.collectives import Collectives
from pdserve.engine.parallel.draw import Vocabulary, propose, sampling_of_part
from pdserve.engine.parallel.messages import Array
from pdserve.engine.parallel.scores import propose_scores
from pdserve.engine.sampler import constrain

SCORED_ROWS = 128
"""Rows of logits at a time for log-probabilities of a prompt."""


class RankModel:
    """Weights, KV pool and attention of one rank.

    `forward` comes first in a step and may be called alone; the others work on what it has left. What they give is
    by rank, on rank 0 alone.
    """

    def __init__(
        self,
        model: Llama,
        pool: BlockPool,
        attention: AttentionBackend,
        vocabulary: Vocabulary,
        collectives: Collectives,
    ) -> None:
        """`model` has been made with `VocabRanks` over the same `collectives`."""
        self._model = model
        self.pool = pool
        self.vocabulary = vocabulary
        self._attention = attention
        self._collectives = collectives
        self._batch: Batch
        self._hidden: torch.Tensor
        self._logits: torch.Tensor
        self._unedited: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Of weights and pool."""
        return self.pool.kv.device

    @property
    def num_positions(self) -> int:
        """Length of the longest sequence."""
        return self._model.num_positions

    def forward(self, batch: Batch, after_layers: Callable[[int], None]) -> None:
        """Write this rank's K/V of the batch and keep its hidden states. When a layer is over, all ranks have written
        the K/V of it."""
        block_size = self.pool.layout.block_size
        inputs = StepInputs.upload(batch, block_size, self.device)
        plan = self._attention.plan(batch, block_size, self.device)
        self._batch = batch
        self._hidden = self._model.forward(inputs, self.pool, plan, after_layers)

    def draw(self, masks: Array) -> list[torch.Tensor]:
        """Propose tokens for the logit rows, of which there are some; `masks` [M, words] uint32 are of the masked
        ones. See `propose`."""
        sampling = self._batch.sampling
        self._logits = self._model.logits(self._hidden[: len(sampling)])
        # A copy of their rows, as the others are edited.
        self._unedited = self._logits[upload(sampling.logprob_rows, self.device)]
        constrain(self._logits, sampling_of_part(sampling, self.vocabulary.span, masks))
        return propose(self._logits, sampling, self.vocabulary, self._collectives)

    def gather(self, rows: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """Logits of some rows after `draw`, [len(rows), longest part of the vocabulary] float32."""
        return self._collectives.gather(self._padded(self._logits[upload(rows, self.device)]))

    def gather_raw(self) -> list[torch.Tensor]:
        """Raw logits of all logit rows, instead of `draw`."""
        return self._collectives.gather(self._padded(self._model.logits(self._hidden[: len(self._batch.logit_rows)])))

    def score_drawn(self, token_ids: npt.NDArray[np.int64]) -> list[torch.Tensor]:
        """Of the rows that want log-probabilities, `token_ids` having been drawn. See `propose_scores`."""
        num_top = int(self._batch.sampling.num_logprobs.max())
        return self._scores(self._unedited, token_ids, num_top)

    def score_prompt(self) -> list[list[torch.Tensor]]:
        """The same for the tokens of prompts that the batch names, in slices."""
        scoring = self._batch.scoring
        hidden = self._hidden[len(self._batch.logit_rows) :]
        num_top = int(scoring.num_top.max())
        return [
            self._scores(
                self._model.logits(hidden[begin : begin + SCORED_ROWS]),
                scoring.target_ids[begin : begin + SCORED_ROWS],
                num_top,
            )
            for begin in range(0, len(scoring), SCORED_ROWS)
        ]

    def _scores(self, logits: torch.Tensor, token_ids: npt.NDArray[np.int64], num_top: int) -> list[torch.Tensor]:
        return propose_scores(logits, token_ids, num_top, self.vocabulary.span[0], self._collectives)

    def _padded(self, logits: torch.Tensor) -> torch.Tensor:
        missing = self.vocabulary.longest - logits.shape[1]
        return torch.nn.functional.pad(logits, (0, missing)) if missing else logits
