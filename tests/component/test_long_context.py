"""Prompts many times longer than what a model was first trained for, stretched as its files say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdserve.model.source import open_model
from pdserve.testing.cluster import test_config
from pdserve.testing.long_prompts import long_answer, make_long_model
from pdserve.testing.reference import check_greedy, transformers_model

NUM_PROMPT = 2000
NUM_TOKENS = 6


@pytest.mark.parametrize("rope", ["yarn", "llama3"])
async def test_stretched_context_gets_the_tokens_of_transformers(
    redis_url: str, cluster_name: str, tmp_path: Path, rope: str
) -> None:
    """The long form, with 32k tokens, is in tests/chaos."""
    model = make_long_model(tmp_path / "model", rope, trained=512, factor=4.0)
    config = test_config(
        redis_url, cluster_name, model={"path": str(model)}, engine={"kind": "torch", "threads": 1},
        kv={"num_blocks": 260}, router={"listen": "127.0.0.1:0"}, prefill={"max_batch_tokens": 1024},
    )  # fmt: skip
    prompt = np.random.default_rng(2).integers(10, 300, NUM_PROMPT).tolist()
    first, again, _ = await long_answer(config, prompt, NUM_TOKENS)
    (check,) = check_greedy(transformers_model(open_model(str(model))), [prompt], [first.token_ids])
    assert check.wrong_step is None
    assert again.usage.cached_tokens >= NUM_PROMPT - 32
