"""What a forward pass gives back, for every engine: drawn tokens and, where asked for, log-probabilities.

All log-probabilities are those of the model itself: the log-softmax of its logits before bias, penalties, masks,
temperature and filters. So they can be compared between requests and with other systems (vLLM's default, too), and the
token that was drawn need not be the first of the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.engine.batch import Batch
from pdserve.types import TokenLogprobs


@dataclass(frozen=True, eq=False, kw_only=True)
class Logprobs:
    """Log-probabilities of one token and of the most likely ones, for N rows of logits."""

    token_ids: npt.NDArray[np.int64]
    """[N] the token in question: drawn, or given by the prompt."""
    logprobs: npt.NDArray[np.float32]
    """[N] of that token."""
    top_ids: npt.NDArray[np.int64]
    """[N, K] the most likely tokens, best first."""
    top_logprobs: npt.NDArray[np.float32]
    """[N, K]"""

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32], token_ids: npt.NDArray[np.int64], num_top: int) -> Logprobs:
        """From `logits` [N, V] in host memory; equal logits are listed by token id."""
        num_top = min(num_top, logits.shape[1])
        best = logits.max(axis=1, keepdims=True)
        total = best + np.log(np.exp(logits - best).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)
        top = np.argpartition(-logits, max(num_top - 1, 0), axis=1)[:, :num_top]
        top = np.take_along_axis(top, np.lexsort((top, -np.take_along_axis(logits, top, 1)), axis=1), 1)
        return cls(
            token_ids=token_ids,
            logprobs=(np.take_along_axis(logits, token_ids[:, None], 1) - total)[:, 0],
            top_ids=top,
            top_logprobs=np.take_along_axis(logits, top, 1) - total,
        )

    @classmethod
    def concatenate(cls, parts: Sequence[Logprobs]) -> Logprobs:
        """Rows of several results, one after the other; all have the same K."""
        return cls(
            token_ids=np.concatenate([p.token_ids for p in parts]),
            logprobs=np.concatenate([p.logprobs for p in parts]),
            top_ids=np.concatenate([p.top_ids for p in parts]),
            top_logprobs=np.concatenate([p.top_logprobs for p in parts]),
        )

    def tokens(self, num_top: npt.NDArray[np.int32]) -> list[TokenLogprobs]:
        """One object a row, with as many of the most likely tokens as `num_top` [N] says."""
        rows = zip(
            self.token_ids.tolist(),
            self.logprobs.tolist(),
            self.top_ids.tolist(),
            self.top_logprobs.tolist(),
            num_top.tolist(),
            strict=True,
        )
        return [
            TokenLogprobs(token_id, logprob, tuple(zip(ids[:k], values[:k], strict=True)))
            for token_id, logprob, ids, values, k in rows
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class StepOutput:
    """The result of one forward pass."""

    token_ids: npt.NDArray[np.int64]
    """[R] the token drawn for each logit row."""
    logprobs: Logprobs | None = None
    """Of the drawn tokens, for the entries of `sampling.logprob_rows`; None if there are none."""
    prompt_logprobs: Logprobs | None = None
    """Of given tokens, for the rows of `Batch.scoring`; None if there are none."""

    def drawn_logprobs(self, batch: Batch) -> dict[int, TokenLogprobs]:
        """Those of drawn tokens, by entry of `batch.logit_rows`."""
        if self.logprobs is None:
            return {}
        rows = batch.sampling.logprob_rows
        tokens = self.logprobs.tokens(batch.sampling.num_logprobs[rows])
        return dict(zip(rows.tolist(), tokens, strict=True))

    def scored_prompts(self, batch: Batch) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Those of given tokens, by index of the sequence in the batch."""
        if self.prompt_logprobs is None:
            return {}
        scoring = batch.scoring
        tokens = self.prompt_logprobs.tokens(scoring.num_top)
        sequences = np.searchsorted(batch.cu_seqlens, scoring.rows, side="right") - 1
        found, begins = np.unique(sequences, return_index=True)
        ends = [*begins[1:].tolist(), len(tokens)]
        return {s: tuple(tokens[b:e]) for s, b, e in zip(found.tolist(), begins.tolist(), ends, strict=True)}
