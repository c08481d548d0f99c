"""transformers as a peer, `python transformers_worker.py MODEL THREADS fp32|int8`.

int8 is torch's dynamic quantisation of every linear layer. The loop is that of greedy generation, without the checks
that `generate` makes between steps.
"""

from __future__ import annotations

import sys
import time
import warnings
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.peers.worker_protocol import random_prompts, serve
from pdserve.model.source import open_model
from pdserve.testing.reference import transformers_model


class TransformersEngine:
    """Implements `PeerEngine`."""

    def __init__(self, model: str, threads: int, weights: str) -> None:
        torch.set_num_threads(threads)
        self._model = transformers_model(open_model(model))
        if weights == "int8":
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                self._model = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
                    self._model, {torch.nn.Linear}, dtype=torch.qint8
                )

    def prefill(self, tokens: int) -> float:
        """See `PeerEngine`."""
        began = time.perf_counter()
        self._prompt(tokens)
        return tokens / (time.perf_counter() - began)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """See `PeerEngine`. All streams continue copies of one prompt: only their speed is looked at."""
        cache, last = self._prompt(context)
        with torch.inference_mode():
            cache.batch_repeat_interleave(batch)
            last = last.repeat(batch, 1)
            # One step that is not timed: the first one on new tensors allocates.
            last = self._step(last, cache)
            began = time.perf_counter()
            for _ in range(steps):
                last = self._step(last, cache)
            return batch * steps / (time.perf_counter() - began)

    def _prompt(self, tokens: int) -> tuple[DynamicCache, torch.Tensor]:
        """The cache of a new prompt and its first token, int64 [1, 1]."""
        with torch.inference_mode():
            cache = DynamicCache(config=self._model.config)
            return cache, self._step(torch.tensor(random_prompts(1, tokens)), cache)

    def _step(self, ids: torch.Tensor, cache: Any) -> torch.Tensor:
        """The most likely token of each sequence after `ids` [batch, n]: int64 [batch, 1]."""
        logits: torch.Tensor = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits[:, -1:].argmax(dim=-1)


if __name__ == "__main__":
    serve(TransformersEngine(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
