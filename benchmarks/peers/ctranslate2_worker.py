"""CTranslate2 as a peer, `python ctranslate2_worker.py CONVERTED_MODEL THREADS float32|int8_float32`."""

from __future__ import annotations

import sys
import time

import ctranslate2  # type: ignore[import-not-found]

from benchmarks.peers.ctranslate2_model import token_name
from benchmarks.peers.worker_protocol import random_prompts, serve


class CTranslate2Engine:
    """Implements `PeerEngine`."""

    def __init__(self, model: str, threads: int, compute_type: str) -> None:
        self._generator = ctranslate2.Generator(
            model, device="cpu", inter_threads=1, intra_threads=threads, compute_type=compute_type
        )

    def prefill(self, tokens: int) -> float:
        """See `PeerEngine`."""
        began = time.perf_counter()
        self._generate(1, tokens, 1)
        return tokens / (time.perf_counter() - began)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """See `PeerEngine`: from the last stream's first token on."""
        times = self._generate(batch, context, steps + 1)
        begin, end = max(t[0] for t in times), min(t[-1] for t in times)
        return sum(begin < t <= end for stream in times for t in stream) / (end - begin)

    def _generate(self, batch: int, context: int, tokens: int) -> list[list[float]]:
        """When each token of each stream came out."""
        times: list[list[float]] = [[] for _ in range(batch)]

        def came_out(step: ctranslate2.GenerationStepResult) -> bool:
            times[step.batch_id].append(time.perf_counter())
            return False

        prompts = [[token_name(token) for token in prompt] for prompt in random_prompts(batch, context)]
        self._generator.generate_batch(
            prompts, max_length=tokens, min_length=tokens, sampling_topk=1, beam_size=1, include_prompt_in_result=False,
            callback=came_out, max_batch_size=0,
        )  # fmt: skip
        return times


if __name__ == "__main__":
    serve(CTranslate2Engine(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
