"""Workers whose KV blocks have different sizes work together, and the tokens are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
        used = set()
        for length in (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128):
            prompt = rng.integers(3, 300, length).tolist()
            result = cluster.client.generate(token_ids=prompt, max_tokens=12, temperature=0.0, ignore_eos=True)
            (check,) = check_greedy(reference_model, [prompt], [result.token_ids])
            assert check.wrong_step is None, length
            used.add((result.placement.prefill_worker, result.placement.decode_worker))
        assert {prefill for prefill, _ in used} == {"prefill-0", "prefill-64"}, used
        assert {decode for _, decode in used} == {"decode-0", "decode-32"}, used
