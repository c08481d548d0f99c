"""The torch engine on the packaged model: 64 tokens after real prompts, against transformers on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from pdserve.engine import load_engine
from pdserve.engine.engine import Engine
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.prompts import REAL_PROMPTS
from pdserve.testing.reference import check_greedy, generate, transformers_model
from pdserve.tokenizer.loader import load_tokenizer

NUM_NEW_TOKENS = 64


@dataclass(frozen=True)
class Rig:
    """The model, and prompts for it: raw text and chats in turn."""

    source: ModelSource
    prompts: list[list[int]]
    engine: Engine
    reference: Any
    """The same weights in transformers."""


@pytest.fixture(scope="module")
def rig() -> Rig:
    torch.set_num_threads(1)
    source = open_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer(source)
    prompts = [
        tokenizer.encode(text) if i % 2 else tokenizer.encode_chat([{"role": "user", "content": text}])
        for i, text in enumerate(REAL_PROMPTS)
    ]
    return Rig(source, prompts, load_engine(source, num_blocks=400), transformers_model(source))


@pytest.mark.timeout(300)  # 35 s of one core; more where the cores are shared
def test_real_prompts_equal_transformers(rig: Rig) -> None:
    outputs = generate(rig.engine, rig.prompts, NUM_NEW_TOKENS)
    assert {len(ids) for ids in outputs} == {NUM_NEW_TOKENS}
    checks = check_greedy(rig.reference, rig.prompts, outputs)
    assert [c.wrong_step for c in checks] == [None] * len(checks)
    assert sum(c.is_clear for c in checks) >= 20


def test_the_check_sees_one_wrong_token(rig: Rig) -> None:
    (ids,) = generate(rig.engine, rig.prompts[:1], 8)
    wrong = (*ids[:5], (ids[5] + 1) % rig.source.config.vocab_size, *ids[6:])
    right_check, wrong_check = check_greedy(rig.reference, [rig.prompts[0]] * 2, [ids, wrong])
    assert right_check.wrong_step is None
    assert wrong_check.wrong_step == 5
    assert not wrong_check.is_clear
