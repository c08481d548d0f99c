"""Chats over two prefill workers and one decode worker: the second one fetches what the others have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdserve.client import Generation
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.model.source import open_model
from pdserve.testing.process_cluster import ProcessCluster
from pdserve.testing.prompts import REAL_PROMPTS
from pdserve.testing.reference import check_greedy, generate
from pdserve.tokenizer.loader import load_tokenizer
from pdserve.types import Role

pytestmark = pytest.mark.timeout(300)

NUM_CHATS, NUM_TURNS, NUM_NEW_TOKENS = 2, 3, 40
NUM_ASKED_TOKENS = 60
"""With the answer a hundred in a turn."""


@pytest.fixture(scope="module")
def cluster(tiny_model: Path) -> Iterator[ProcessCluster]:
    """1P+1D on TINY-KV. So small a model is computed faster than anything is fetched."""
    with ProcessCluster(tiny_model, transfer__fetch_prefixes="always") as cluster:
        yield cluster
        cluster.assert_quiet()


def ask(cluster: ProcessCluster, prompt: list[int]) -> Generation:
    return cluster.client.generate(token_ids=prompt, max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True)


def test_chats_fetch_their_earlier_turns_and_go_on_exactly(cluster: ProcessCluster, reference_model: Any) -> None:
    """A chat stays where its beginning is cached, so between turns the prefill worker is replaced by an empty one."""
    rng = np.random.default_rng(4)
    prompts: list[list[int]] = []
    outputs: list[list[int]] = []
    fetched = num_prefill_workers = 0
    for _ in range(NUM_CHATS):
        history: list[int] = []
        for turn in range(NUM_TURNS):
            history = history + rng.integers(3, 300, NUM_ASKED_TOKENS).tolist()
            result = ask(cluster, history)
            prompts.append(history)
            outputs.append(list(result.token_ids))
            usage = result.usage
            # The decode worker has all of the last turn but the newest token.
            held = (len(history) - NUM_ASKED_TOKENS - 1) // 16 * 16 if turn else 0
            assert (usage.cached_tokens, usage.fetched_tokens) == (held, held)
            assert (result.timings.fetch_ms > 0) == (turn > 0)
            assert result.timings.fetch_ms <= result.timings.queue_ms
            fetched += usage.fetched_tokens
            history = history + list(result.token_ids)
            num_prefill_workers += 1
            cluster.add_worker(Role.PREFILL, f"next-{num_prefill_workers}")
            cluster.kill_worker(result.placement.prefill_worker)
    checks = check_greedy(reference_model, prompts, outputs)
    assert [c.wrong_step for c in checks if c.wrong_step is not None] == []
    (decode,) = cluster.stats_of(Role.DECODE)
    assert fetched > 0
    assert decode.served_fetches_total == NUM_CHATS * (NUM_TURNS - 1)
    assert decode.prefill_tokens_total == 0


def test_fetching_is_faster_for_a_real_model_and_changes_no_token() -> None:
    """SmolLM2 on the CPU engine, whose bits do not depend on who computed what: left to its own judgement."""
    source = open_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer(source)
    engine = load_cpu_engine(source, num_blocks=256, num_threads=1)
    with ProcessCluster("smollm2-135m-instruct", engine__kind="cpu", local__prefill_workers=2) as cluster:
        messages = [{"role": "user", "content": " ".join(REAL_PROMPTS[:12])}]
        fetched = 0
        for turn in range(4):
            prompt = list(tokenizer.encode_chat(messages))
            result = ask(cluster, prompt)
            (expected,) = generate(engine, [prompt], NUM_NEW_TOKENS, budget_tokens=1024)
            assert list(result.token_ids) == list(expected), f"turn {turn}"
            fetched += result.usage.fetched_tokens
            messages += [
                {"role": "assistant", "content": result.text},
                {"role": "user", "content": REAL_PROMPTS[20 + turn]},
            ]
        assert fetched > 0
        assert sum(stats.fetches_total for stats in cluster.stats_of(Role.PREFILL)) > 0
