"""Every block of the pool is in use, cached or free, whatever came and went."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.testing.process_cluster import ProcessCluster, wait_until
from pdserve.testing.reference import check_greedy
from pdserve.testing.tiny_models import ScriptModel

pytestmark = pytest.mark.timeout(240)

NUM_BLOCKS = 64
BLOCK_SIZE = 16
NUM_REQUESTS = 300
NUM_AT_ONCE = 8
MAX_TOKENS = 4
SHARED = list(range(100, 100 + 3 * BLOCK_SIZE))


def test_after_hundreds_of_requests_one_that_needs_the_whole_pool_gets_it(
    script_b: ProcessCluster, script_b_model: ScriptModel
) -> None:
    """O-PFX-3: half of them share three blocks, and a tenth is cancelled."""
    rng = random.Random(3)
    prompts = [
        (SHARED if number % 2 else []) + [rng.randrange(3, 280) for _ in range(rng.randint(1, 60))]
        for number in range(NUM_REQUESTS)
    ]

    def serve(number: int) -> list[int] | None:
        """Its output; None if it was cancelled."""
        leaves = number % 10 == 3
        options: dict[str, Any] = {"token_ids": prompts[number], "temperature": 0.0, "ignore_eos": True}
        with script_b.client.stream(max_tokens=200 if leaves else MAX_TOKENS, **options) as stream:
            ids: list[int] = []
            for event in stream:
                ids.extend(event.token_ids)
                if leaves:
                    return None
        return ids

    over = threading.Event()
    wrong: list[str] = []

    def count() -> None:
        while not over.wait(0.05):
            for name, stats in script_b.stats().items():
                if not 0 <= stats.blocks_in_use <= stats.blocks_in_use + stats.blocks_cached <= stats.blocks_total:
                    wrong.append(f"{name}: {stats}")

    counting = threading.Thread(target=count)
    counting.start()
    try:
        with ThreadPoolExecutor(NUM_AT_ONCE) as threads:
            outputs = list(threads.map(serve, range(NUM_REQUESTS)))
    finally:
        over.set()
        counting.join()
    assert wrong == []
    script_b.assert_quiet()
    for name, stats in script_b.stats().items():
        assert (stats.blocks_total, stats.blocks_in_use) == (NUM_BLOCKS, 0), name
        assert stats.cached_tokens_total > 50 * len(SHARED), f"control: {name} has shared the prefix"

    whole = [rng.randrange(3, 280) for _ in range(60 * BLOCK_SIZE - 8)]
    last = script_b.client.generate(token_ids=whole, max_tokens=8, temperature=0.0, ignore_eos=True, timeout_s=30.0)
    script_b.assert_quiet()

    torch.set_num_threads(1)
    reference: Any = AutoModelForCausalLM.from_pretrained(script_b_model.directory, dtype=torch.float32).eval()
    served = [number for number, output in enumerate(outputs) if output is not None]
    assert len(served) == NUM_REQUESTS * 9 // 10
    checked = [(prompts[number], outputs[number] or []) for number in served]
    checks = check_greedy(reference, [*(p for p, _ in checked), whole], [*(o for _, o in checked), last.token_ids])
    assert [check.wrong_step for check in checks] == [None] * (len(served) + 1)
    wait_until(lambda: script_b.client.status().num_active_requests == 0, "nobody is served")
