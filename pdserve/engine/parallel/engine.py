"""The engine of a tensor-parallel worker, on rank 0: tells the followers what to compute, and computes its own part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from pdserve.engine.batch import Batch
from pdserve.engine.block_pool import CudaStaging
from pdserve.engine.device import to_host
from pdserve.engine.engine import LayerWatch
from pdserve.engine.output import Logprobs, StepOutput
from pdserve.engine.parallel.batch_codec import batch_to_arrays, no_masks
from pdserve.engine.parallel.draw import decide, whole_rows
from pdserve.engine.parallel.messages import Array, Kind
from pdserve.engine.parallel.partition import Part
from pdserve.engine.parallel.rank_model import RankModel
from pdserve.engine.parallel.scores import merge_scores
from pdserve.engine.sampler import sample
from pdserve.engine.torch_engine import NOBODY, StepProgress, check_batch
from pdserve.kv_layout import KvBlockStore, KvLayout
from pdserve.model.config import ModelConfig


class Followers(Protocol):
    """The other ranks."""

    def tell(self, kind: Kind, arrays: Sequence[Array] = ()) -> None:
        """Send the same to all of them. Raises EngineLostError."""

    def unison(self) -> AbstractContextManager[None]:
        """Where all ranks have to do the same: whatever goes wrong inside leaves them at different places, so the group
        is lost, and the error becomes an EngineLostError."""


class TensorParallelEngine:
    """Implements `Engine`."""

    def __init__(
        self,
        config: ModelConfig,
        rank: RankModel,
        parts: Sequence[Part],
        store: KvBlockStore,
        followers: Followers,
        staging: CudaStaging | None,
    ) -> None:
        """`config` and `store` are of the whole model, `rank` is rank 0 of `parts`. `staging`: of its pool on a GPU."""
        self._config = config
        self._rank = rank
        self._parts = parts
        self._store = store
        self._followers = followers
        self._staging = staging

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        return self._config

    @property
    def layout(self) -> KvLayout:
        """Geometry of the KV blocks, of all ranks together."""
        return self._store.layout

    @property
    def num_blocks(self) -> int:
        """Blocks in the KV pool: every rank has its heads of each of them."""
        return self._rank.pool.num_blocks

    @property
    def store(self) -> KvBlockStore:
        """The KV pools of all ranks as bytes."""
        return self._store

    @torch.inference_mode()
    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
        """See `Engine.forward`. Raises EngineLostError, and does so ever after, when a rank does not follow."""
        num_rows, sampling = len(batch.logit_rows), batch.sampling
        has_masks = len(sampling.masked_rows) > 0
        self._begin(batch)
        if num_rows and not has_masks:
            # Now, so that followers need not wait for it.
            self._followers.tell(Kind.DRAW, [no_masks()])
        self._compute(batch, watch)
        token_ids = np.empty(0, np.int64)
        if num_rows:
            masks = no_masks()
            if has_masks:
                masks = sampling.masks()
                self._followers.tell(Kind.DRAW, [masks])
            token_ids = self._draw(batch, masks)
        return StepOutput(
            token_ids=token_ids,
            logprobs=self._score_drawn(batch, token_ids),
            prompt_logprobs=self._score_prompt(batch),
        )

    @torch.inference_mode()
    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """See `Engine.forward_logits`."""
        self._begin(batch)
        self._compute(batch, None)
        if len(batch.logit_rows) == 0:
            return np.empty((0, self._config.vocab_size), np.float32)
        return to_host(self._whole(Kind.GATHER_RAW, (), self._rank.gather_raw))

    def _begin(self, batch: Batch) -> None:
        check_batch(batch, self._config, self._rank.num_positions, self.num_blocks * self.layout.block_size)
        self._followers.tell(Kind.FORWARD, batch_to_arrays(batch))

    def _compute(self, batch: Batch, watch: LayerWatch | None) -> None:
        progress = StepProgress(watch or NOBODY, self._staging)
        with self._followers.unison():
            self._rank.forward(batch, progress.after_layers)
            progress.submitted(self._config.num_layers)

    def _draw(self, batch: Batch, masks: Array) -> npt.NDArray[np.int64]:
        with self._followers.unison():
            proposals = self._rank.draw(masks)
        token_ids, undecided = decide(proposals, batch.sampling, self._rank.vocabulary)
        if undecided.any():
            rows = np.flatnonzero(undecided)
            logits = self._whole(Kind.GATHER, [rows], lambda: self._rank.gather(rows))
            token_ids[undecided] = sample(logits, whole_rows(batch.sampling, undecided))
        return token_ids

    def _whole(self, kind: Kind, arrays: Sequence[Array], gather: Callable[[], list[torch.Tensor]]) -> torch.Tensor:
        """Logits [N, V] of all tokens, by the pieces that `gather` brings when the followers have been told `kind`."""
        self._followers.tell(kind, arrays)
        with self._followers.unison():
            pieces = gather()
        spans = [part.vocab for part in self._parts]
        return torch.cat([piece[:, : end - begin] for piece, (begin, end) in zip(pieces, spans, strict=True)], dim=1)

    def _score_drawn(self, batch: Batch, token_ids: npt.NDArray[np.int64]) -> Logprobs | None:
        rows = batch.sampling.logprob_rows
        if len(rows) == 0:
            return None
        drawn = token_ids[rows]
        self._followers.tell(Kind.SCORE_DRAWN, [drawn])
        with self._followers.unison():
            parts = self._rank.score_drawn(drawn)
        return merge_scores(parts, drawn, int(batch.sampling.num_logprobs.max()))

    def _score_prompt(self, batch: Batch) -> Logprobs | None:
        scoring = batch.scoring
        if len(scoring) == 0:
            return None
        self._followers.tell(Kind.SCORE_PROMPT)
        with self._followers.unison():
            slices = self._rank.score_prompt()
        ends = np.cumsum([len(parts[0]) for parts in slices])
        targets = np.split(scoring.target_ids, ends[:-1])
        num_top = int(scoring.num_top.max())
        return Logprobs.concatenate(
            [merge_scores(parts, ids, num_top) for parts, ids in zip(slices, targets, strict=True)]
        )
