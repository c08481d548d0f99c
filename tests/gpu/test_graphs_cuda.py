"""Decode steps as CUDA graphs give the tokens of eager ones, and a pool sized by measuring leaves room for steps."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pdserve.engine import SampleRequest, SequenceChunk, build_batch, load_engine
from pdserve.engine.gpu import largest_batch
from pdserve.engine.sizes import StepLimits
from pdserve.errors import ConfigError
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.reference import generate, greedy_reference
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MAX_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture(scope="module")
def source(model: Path) -> ModelSource:
    return open_model(str(model))


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def prompts_of(source: ModelSource) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, source.config.vocab_size, size=n).tolist() for n in [1, 15, 16, 17, 33, 100, 255] * 3]


def test_tokens_equal_transformers(model: Path, source: ModelSource) -> None:
    """Sequences come and go, so steps of all sizes are replayed, mixed with eager ones that compute prompts."""
    prompts = prompts_of(source)
    outputs = greedy_reference(model, prompts, 10)
    clear = [i for i, output in enumerate(outputs) if output.is_clear]
    assert len(clear) >= 10
    engine = load_engine(source, device="cuda", num_blocks=600, graph_tokens=MAX_TOKENS)
    chosen = [prompts[i] for i in clear]
    starts = [i // 2 for i in range(len(chosen))]
    assert generate(engine, chosen, 10, budget_tokens=100, start_steps=starts) == [outputs[i].ids for i in clear]


@pytest.mark.parametrize("kv_dtype", [None, "int8", "float8_e4m3"])
def test_logits_equal_those_of_eager_steps(source: ModelSource, kv_dtype: str | None) -> None:
    """One row, rows that need padding, and drafts; twice, as a replay must not depend on the one before."""
    graphs, eager = (
        load_engine(source, device="cuda", num_blocks=64, graph_tokens=tokens, kv_dtype=kv_dtype)
        for tokens in (MAX_TOKENS, 0)
    )
    prompt = list(range(40))
    tables = [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(12)]
    fill = build_batch([SequenceChunk(token_ids=prompt, start_position=0, block_table=t) for t in tables], 16)
    for engine in (graphs, eager):
        engine.forward(fill)
    request = SampleRequest(params=GREEDY)
    for rows, drafted in ((1, 0), (5, 0), (12, 0), (3, 4), (5, 0)):
        batch = build_batch(
            [
                SequenceChunk(
                    token_ids=[7, 8, 9, 10, 11][: 1 + drafted],
                    start_position=40,
                    block_table=table,
                    samples=(request,) * (1 + drafted),
                    num_drafted=drafted,
                )
                for table in tables[:rows]
            ],
            16,
        )
        # In eight bits, what differs in the last bit of a float may be the next code.
        tolerance = 2e-3 if kv_dtype is None else 0.1
        np.testing.assert_allclose(graphs.forward_logits(batch), eager.forward_logits(batch), atol=tolerance)


def test_a_replayed_step_waits_for_the_device_exactly_once(source: ModelSource) -> None:
    engine = load_engine(source, device="cuda", num_blocks=64, graph_tokens=MAX_TOKENS)
    request = SampleRequest(params=GREEDY)
    batch = build_batch(
        [
            SequenceChunk(token_ids=[3], start_position=20 + i, block_table=[2 * i, 2 * i + 1], samples=(request,))
            for i in range(8)
        ],
        16,
    )
    engine.forward(batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) == 1


def test_kv_written_by_a_replayed_step_leaves_through_the_store(source: ModelSource) -> None:
    """The staged store waits for the replay, and the scratch block is not one of its blocks."""
    graphs, eager = (
        load_engine(source, device="cuda", num_blocks=16, graph_tokens=tokens) for tokens in (MAX_TOKENS, 0)
    )
    assert graphs.num_blocks == eager.num_blocks == 16
    chunks = [SequenceChunk(token_ids=[i + 1], start_position=0, block_table=[i]) for i in range(5)]
    contents = []
    for engine in (graphs, eager):
        engine.forward(build_batch(chunks, 16))
        data = b"".join(bytes(view) for view in engine.store.read(range(5), 0, engine.layout.num_layers))
        contents.append(np.frombuffer(data, dtype=np.float32))
    np.testing.assert_allclose(contents[0], contents[1], atol=1e-5)
    assert np.abs(contents[0]).max() > 0


LIMITS = StepLimits(max_tokens=512, max_rows=64)


def test_a_measured_pool_leaves_room_for_the_largest_step(source: ModelSource) -> None:
    free, total = torch.cuda.mem_get_info()
    fraction = 0.5 * free / total
    engine = load_engine(source, device="cuda", gpu_memory_fraction=fraction, limits=LIMITS, graph_tokens=MAX_TOKENS)
    pool_nbytes = engine.num_blocks * engine.layout.block_nbytes
    assert 0.25 * free < pool_nbytes < fraction * total
    torch.cuda.reset_peak_memory_stats()
    engine.forward(largest_batch(LIMITS, 512, 16))
    assert torch.cuda.max_memory_allocated() < fraction * total


def test_too_little_memory_is_refused_with_the_account(source: ModelSource) -> None:
    with pytest.raises(ConfigError, match="leaves no room for KV: weights take"):
        load_engine(source, device="cuda", gpu_memory_fraction=1e-6, limits=LIMITS)
