"""vLLM's CPU backend as a peer, `python vllm_worker.py HF_DIRECTORY`, with an interpreter that has vLLM installed."""

from __future__ import annotations

import sys
import time

from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

from benchmarks.peers.worker_protocol import random_prompts, serve


class VllmEngine:
    """Implements `PeerEngine`. Threads come from VLLM_CPU_OMP_THREADS_BIND."""

    def __init__(self, model: str) -> None:
        self._llm = LLM(
            model, dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=32,
            max_model_len=2304,
        )  # fmt: skip

    def prefill(self, tokens: int) -> float:
        """See `PeerEngine`."""
        return tokens / self._generate_s(1, tokens, 1)

    def decode(self, batch: int, context: int, steps: int) -> float:
        """See `PeerEngine`: a run with `steps` more tokens, less a run with only the first ones."""
        first_s = self._generate_s(batch, context, 1)
        return batch * steps / (self._generate_s(batch, context, steps + 1) - first_s)

    def _generate_s(self, batch: int, context: int, tokens: int) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, min_tokens=tokens, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in random_prompts(batch, context)]
        began = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began


if __name__ == "__main__":
    serve(VllmEngine(sys.argv[1]))
