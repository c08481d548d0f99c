"""Workers whose KV blocks have different sizes work together, and the tokens are exact."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.client import Generation
from pdserve.testing.process_cluster import ProcessCluster
from pdserve.testing.reference import check_greedy
from pdserve.types import Role

pytestmark = pytest.mark.timeout(240)


def test_blocks_of_16_32_and_64_tokens_in_one_cluster(tiny_model: Path, reference_model: Any) -> None:
    """O-KVT-4 (a), by conversion instead of refusal: prefill 16 and 64, decode 16 and 32."""
    rng = np.random.default_rng(3)
    with ProcessCluster(tiny_model, model__served_name="tiny") as cluster:
        cluster.add_worker(Role.DECODE, "decode-32", kv__block_size=32)
        cluster.add_worker(Role.PREFILL, "prefill-64", kv__block_size=64)
        prompts = [
            rng.integers(3, 300, length).tolist() for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128) * 2
        ]

        def generate(prompt: list[int]) -> Generation:
            return cluster.client.generate(token_ids=prompt, max_tokens=12, temperature=0.0, ignore_eos=True)

        # Several at once, so that all workers have something to do.
        with ThreadPoolExecutor(6) as threads:
            results = list(threads.map(generate, prompts))
        checks = check_greedy(reference_model, prompts, [result.token_ids for result in results])
        assert [check.wrong_step for check in checks if check.wrong_step is not None] == []
        used = {(result.placement.prefill_worker, result.placement.decode_worker) for result in results}
        assert {prefill for prefill, _ in used} == {"prefill-0", "prefill-64"}, used
        assert {decode for _, decode in used} == {"decode-0", "decode-32"}, used
