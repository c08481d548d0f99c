"""The torch engine gives the tokens of transformers: on a random model where any wrong K/V shows, and on a real one.

Prompts with a near tie in the reference are left out (see `pdserve.testing.reference`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.engine import Engine, SampleRequest, SequenceChunk, build_batch, load_engine
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.reference import generate, greedy_reference, transformers_model
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.types import SamplingParams

NUM_NEW_TOKENS = 10
BORDERS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 256, 257, 300)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Rig:
    """A model with prompts whose greedy continuation is known and clear."""

    source: ModelSource
    prompts: list[list[int]]
    expected: list[tuple[int, ...]]

    def engine(self, **settings: str | int) -> Engine:
        """An engine with room for all prompts."""
        return load_engine(self.source, num_blocks=24 * len(self.prompts), **settings)  # type: ignore[arg-type]

    def of_lengths(self, lengths: tuple[int, ...]) -> Rig:
        """One prompt of each length."""
        chosen = [next(i for i, p in enumerate(self.prompts) if len(p) == n) for n in lengths]
        return Rig(self.source, [self.prompts[i] for i in chosen], [self.expected[i] for i in chosen])


def make_rig(directory: Path, lengths: list[int], *, shape: TinyShape | None = None, seed: int = 0) -> Rig:
    model = make_tiny_kv(directory, seed=seed, shape=shape)
    source = open_model(str(model))
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(0, source.config.vocab_size, size=n).tolist() for n in lengths]
    outputs = greedy_reference(model, prompts, NUM_NEW_TOKENS)
    clear = [i for i, output in enumerate(outputs) if output.is_clear]
    return Rig(source, [prompts[i] for i in clear], [outputs[i].ids for i in clear])


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    # Several prompts of each border length, as some have a near tie.
    lengths = [*BORDERS * 6, *np.random.default_rng(1).integers(1, 301, size=210).tolist()]
    rig = make_rig(tmp_path_factory.mktemp("tiny-kv") / "model", lengths)
    assert len(rig.prompts) >= 200
    assert set(BORDERS) <= {len(p) for p in rig.prompts}
    return rig


def test_the_reference_outputs_are_varied(rig: Rig) -> None:
    """A model that repeats itself would prove little."""
    assert np.mean([len(set(ids)) for ids in rig.expected]) > NUM_NEW_TOKENS * 0.7


def test_all_prompts_in_mixed_batches_equal_transformers(rig: Rig) -> None:
    """O-SCH-2, staggered: prefill chunks of new prompts among the decode rows of earlier ones."""
    start_steps = [i // 12 for i in range(len(rig.prompts))]
    assert generate(rig.engine(), rig.prompts, NUM_NEW_TOKENS, start_steps=start_steps) == rig.expected


def test_prompts_alone_equal_transformers(rig: Rig) -> None:
    """O-SCH-2, one by one."""
    engine = rig.engine()
    some = rig.of_lengths(BORDERS)
    assert [generate(engine, [p], NUM_NEW_TOKENS)[0] for p in some.prompts] == some.expected


@pytest.mark.parametrize("budget_tokens", [16, 17, 64, 100, 512])
def test_any_chunk_budget_equals_transformers(rig: Rig, budget_tokens: int) -> None:
    """O-SCH-1, one at a time and four at once."""
    engine = rig.engine()
    some = rig.of_lengths((255, 256, 257, 16, 33, 300))
    for prompt, expected in zip(some.prompts, some.expected, strict=True):
        assert generate(engine, [prompt], NUM_NEW_TOKENS, budget_tokens=budget_tokens) == [expected]
    together = generate(engine, some.prompts[:4], NUM_NEW_TOKENS, budget_tokens=budget_tokens)
    assert together == some.expected[:4]


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_any_block_size_equals_transformers(rig: Rig, block_size: int) -> None:
    some = rig.of_lengths((1, 15, 16, 17, 33, 256))
    engine = load_engine(rig.source, num_blocks=700, block_size=block_size)
    assert generate(engine, some.prompts, NUM_NEW_TOKENS, block_seed=3) == some.expected


def test_blocks_that_held_other_requests_do_not_show(rig: Rig) -> None:
    """The same pool, used again and again with other block tables."""
    some = rig.of_lengths((17, 33, 257, 300, 2))
    engine = load_engine(rig.source, num_blocks=64)
    for block_seed in range(6):
        assert generate(engine, some.prompts, NUM_NEW_TOKENS, block_seed=block_seed) == some.expected


def test_reference_attention_equals_transformers(rig: Rig) -> None:
    some = rig.of_lengths((1, 16, 17))
    assert generate(rig.engine(attention="reference"), some.prompts, NUM_NEW_TOKENS) == some.expected


@pytest.mark.parametrize(
    "shape",
    [
        TinyShape(tie_word_embeddings=True),
        TinyShape(num_heads=8, num_kv_heads=1, head_dim=32, rope_theta=1e6),
        TinyShape(num_heads=3, num_kv_heads=3, hidden_size=96, intermediate_size=100),
    ],
    ids=["tied head", "one KV head, wide heads", "no grouping, odd sizes"],
)
def test_other_shapes_of_llama_equal_transformers(tmp_path: Path, shape: TinyShape) -> None:
    other = make_rig(tmp_path / "model", [1, 5, 16, 17, 33, 64, 100, 130] * 2, shape=shape, seed=4)
    assert len(other.prompts) >= 6
    assert generate(other.engine(), other.prompts, NUM_NEW_TOKENS) == other.expected


def test_damaged_kv_changes_the_tokens(rig: Rig) -> None:
    """The control of all the above: with one block of one of four layers zeroed after prefill, other tokens follow."""
    some = rig.of_lengths((31, 32, 33, 47, 48, 49))
    greedy = SampleRequest(params=SamplingParams(temperature=0.0))
    table = range(4)
    for prompt, expected in zip(some.prompts, some.expected, strict=True):
        engine = load_engine(rig.source, num_blocks=4)
        chunk = SequenceChunk(token_ids=prompt, start_position=0, block_table=table, samples=(greedy,))
        ids = engine.forward(build_batch([chunk], 16)).token_ids.tolist()
        assert ids[0] == expected[0]
        engine.store.write([0], 2, 3, memoryview(bytes(engine.layout.layer_nbytes)))
        while len(ids) < NUM_NEW_TOKENS:
            start = len(prompt) + len(ids) - 1
            chunk = SequenceChunk(token_ids=ids[-1:], start_position=start, block_table=table, samples=(greedy,))
            ids += engine.forward(build_batch([chunk], 16)).token_ids.tolist()
        assert tuple(ids) != expected


def test_seeded_tokens_do_not_depend_on_neighbours_order_or_arrival(rig: Rig) -> None:
    """O-SAM-3."""
    engine = rig.engine()
    prompts = rig.of_lengths((33, 2, 100 if any(len(p) == 100 for p in rig.prompts) else 49, 17, 256)).prompts
    seeded = SamplingParams(temperature=1.0, seed=42)
    neighbours = [SamplingParams(temperature=1.0, seed=2**63 + i, top_p=0.9) for i in range(4)]
    (alone,) = generate(engine, prompts[:1], 32, sampling=[seeded])
    first = generate(engine, prompts, 32, sampling=[seeded, *neighbours], block_seed=1)[0]
    last = generate(engine, [*prompts[1:], prompts[0]], 32, sampling=[*neighbours, seeded], start_steps=[0, 1, 2, 3, 9])
    chunked = generate(engine, prompts, 32, sampling=[seeded, *neighbours], budget_tokens=16)[0]
    assert first == last[-1] == chunked == alone
    assert generate(engine, prompts[:1], 32, sampling=[SamplingParams(temperature=1.0, seed=43)])[0] != alone


def test_a_sampled_sequence_resumed_from_any_prefix_goes_on_alike(rig: Rig) -> None:
    """What a replay on another worker relies on: noise belongs to the position."""
    engine = rig.engine()
    params = [SamplingParams(temperature=0.8, top_k=50, seed=7)]
    prompt = rig.of_lengths((33,)).prompts[0]
    (whole,) = generate(engine, [prompt], 24, sampling=params)
    for done in (1, 8, 23):
        (rest,) = generate(
            load_engine(rig.source, num_blocks=8), [[*prompt, *whole[:done]]], 24 - done, sampling=params
        )
        assert rest == whole[done:]


def test_logits_are_those_of_transformers(rig: Rig) -> None:
    some = rig.of_lengths((1, 17, 256))
    request = SampleRequest(params=SamplingParams())
    chunks = [
        SequenceChunk(token_ids=p, start_position=0, block_table=range(20 * i, 20 * i + 20), samples=(request,))
        for i, p in enumerate(some.prompts)
    ]
    logits = rig.engine().forward_logits(build_batch(chunks, 16))
    model = transformers_model(rig.source)
    with torch.inference_mode():
        expected = [model(torch.tensor([p])).logits[0, -1].numpy() for p in some.prompts]
    np.testing.assert_allclose(logits, np.stack(expected), atol=2e-4)
