"""A cluster without prefill workers is an ordinary server, and outlives one of its workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.client import Generation
from pdserve.testing.process_cluster import ProcessCluster
from pdserve.testing.reference import check_greedy
from pdserve.types import Role

pytestmark = pytest.mark.timeout(300)

NUM_TOKENS = 60


def test_decode_workers_alone_serve_exactly_and_outlive_one_of_them(tiny_model: Path, reference_model: Any) -> None:
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 300, n).tolist() for n in (20, 150, 90, 40)]
    settings: dict[str, Any] = {
        "decode__local_prefill_tokens_per_step": 32,
        "local__prefill_workers": 0,
        "local__decode_workers": 2,
    }
    with ProcessCluster(tiny_model, **settings) as cluster:
        options: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
        answers: list[Generation] = [cluster.client.generate(token_ids=prompt, **options) for prompt in prompts[:-1]]
        assert {a.placement.prefill_worker for a in answers} == {""}
        assert all(a.placement.local_prefill and a.placement.kv_bytes == 0 for a in answers)
        assert [a.placement.decode_local_prefill_tokens for a in answers] == [20, 150, 90]
        assert sum(stats.prefill_tokens_total for stats in cluster.stats_of(Role.DECODE)) == 260
        with cluster.client.stream(token_ids=prompts[-1], request_id="disturbed", **options) as stream:
            next(iter(stream))
            cluster.local.kill(cluster.client.get_request("disturbed").decode_worker)
            answers.append(stream.result())
        assert answers[-1].placement.attempts == 2
        checks = check_greedy(reference_model, prompts, [list(a.token_ids) for a in answers])
        assert [c.wrong_step for c in checks if c.wrong_step is not None] == []
        cluster.assert_quiet()
