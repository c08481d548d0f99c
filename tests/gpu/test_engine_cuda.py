"""The torch engine on a GPU: the tokens of the CPU, transfers beside computation, and no stall inside a step."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from pdserve.engine import Engine, SampleRequest, SequenceChunk, build_batch, load_engine
from pdserve.engine.batch import ScoreRequest
from pdserve.engine.engine import LayerWatch
from pdserve.engine.logit_edits import SequenceEdits
from pdserve.engine.sampler import sample
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.reference import generate, greedy_reference
from pdserve.testing.tiny_families import ROPE_SCALINGS, make_tiny_family
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture(scope="module")
def source(model: Path) -> ModelSource:
    return open_model(str(model))


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def random_prompts(source: ModelSource, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, source.config.vocab_size, size=n).tolist() for n in lengths]


def mixed_batch_prompts(source: ModelSource) -> list[list[int]]:
    return random_prompts(source, [1, 15, 16, 17, 33, 100, 255, 256, 257] * 3)


@pytest.mark.parametrize("budget_tokens", [16, 100, 512])
def test_tokens_equal_transformers(model: Path, source: ModelSource, budget_tokens: int) -> None:
    prompts = mixed_batch_prompts(source)
    outputs = greedy_reference(model, prompts, 10)
    clear = [i for i, output in enumerate(outputs) if output.is_clear]
    assert len(clear) >= 10
    engine = load_engine(source, device="cuda", num_blocks=600)
    generated = generate(engine, [prompts[i] for i in clear], 10, budget_tokens=budget_tokens)
    assert generated == [outputs[i].ids for i in clear]


def test_draws_equal_those_of_the_cpu() -> None:
    rng = np.random.default_rng(6)
    penalised = SamplingParams(
        presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3, logit_bias=((3, 100.0), (7, 2.5))
    )
    edits = SequenceEdits(penalised, rng.integers(0, 5000, size=300).tolist(), rng.integers(0, 5000, size=50).tolist())
    logits = torch.from_numpy(rng.normal(size=(64, 5000)).astype(np.float32) * 3)
    chunks = [
        SequenceChunk(
            token_ids=[0],
            start_position=int(rng.integers(0, 5000)),
            block_table=[0],
            samples=(
                SampleRequest(
                    params=SamplingParams(
                        temperature=float(rng.choice([0.0, 0.3, 1.0])),
                        top_k=int(rng.choice([0, 40, 500])),
                        top_p=float(rng.choice([1.0, 0.9])),
                        seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
                    ),
                    forbidden_token_ids=(3, 5),
                    edits=edits.row() if i % 2 else None,
                ),
            ),
        )
        for i in range(64)
    ]
    sampling = build_batch(chunks, 1 << 20).sampling
    assert sample(logits.cuda(), sampling).tolist() == sample(logits.clone(), sampling).tolist()


def test_logprobs_equal_those_of_the_cpu(source: ModelSource) -> None:
    (prompt,) = random_prompts(source, [200])
    chunk = SequenceChunk(
        token_ids=prompt,
        start_position=0,
        block_table=range(16),
        samples=(SampleRequest(params=SamplingParams(temperature=0.0), num_logprobs=20),),
        score=ScoreRequest(target_ids=prompt[1:], num_top=5),
    )
    on_gpu, on_cpu = (
        load_engine(source, device=device, num_blocks=16).forward(build_batch([chunk], 16))
        for device in ("cuda", "cpu")
    )
    for ours, theirs in (
        (on_gpu.logprobs, on_cpu.logprobs),
        (on_gpu.prompt_logprobs, on_cpu.prompt_logprobs),
    ):
        assert ours is not None and theirs is not None
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-3)
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-3)


def decode_batch(sampling: SamplingParams, rows: int = 8) -> list[SequenceChunk]:
    return [
        SequenceChunk(
            token_ids=[3],
            start_position=20 + i,
            block_table=[4 * i, 4 * i + 1, 4 * i + 2],
            samples=(SampleRequest(params=sampling),),
        )
        for i in range(rows)
    ]


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=20, top_p=0.9)], ids=str
)
def test_a_step_waits_for_the_device_exactly_once(source: ModelSource, sampling: SamplingParams) -> None:
    assert num_waits(source, decode_batch(sampling)) == 1


@pytest.mark.parametrize(("family", "scaling"), [("qwen2", "llama3"), ("qwen3", "yarn"), ("phi3", None)])
def test_biases_norms_and_scaled_positions_compute_alike_and_never_wait(
    tmp_path: Path, family: str, scaling: str | None
) -> None:
    rope = {"rope_theta": 10000.0} | (ROPE_SCALINGS[scaling] if scaling else {"rope_type": "default"})
    source = open_model(str(make_tiny_family(tmp_path / "model", family, rope_parameters=rope)))
    assert num_waits(source, decode_batch(SamplingParams(temperature=0.0))) == 1
    (prompt,) = random_prompts(source, [200])
    request = SampleRequest(params=SamplingParams(temperature=0.0))
    chunk = SequenceChunk(token_ids=prompt, start_position=0, block_table=range(16), samples=(request,))
    on_gpu, on_cpu = (
        load_engine(source, device=device, num_blocks=16).forward_logits(build_batch([chunk], 16))
        for device in ("cuda", "cpu")
    )
    np.testing.assert_allclose(on_gpu, on_cpu, atol=1e-3)


def num_waits(source: ModelSource, chunks: list[SequenceChunk]) -> int:
    """How often the host waits for the device in a step that has run before."""
    engine = load_engine(source, device="cuda", num_blocks=64)
    batch = build_batch(chunks, 16)
    engine.forward(batch)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.forward(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return len([w for w in caught if "synchroniz" in str(w.message)])


def prefilled(source: ModelSource, prompt: list[int], dtype: str) -> Engine:
    engine = load_engine(source, device="cuda", dtype=dtype, num_blocks=16)
    engine.forward(build_batch([SequenceChunk(token_ids=prompt, start_position=0, block_table=range(16))], 16))
    return engine


def test_reported_layers_are_read_as_they_are_in_the_end(source: ModelSource) -> None:
    (prompt,) = random_prompts(source, [200])
    request = SampleRequest(params=SamplingParams(temperature=0.0))
    batch = build_batch(
        [SequenceChunk(token_ids=prompt, start_position=0, block_table=range(16), samples=(request,))], 16
    )
    engine, plain = (load_engine(source, device="cuda", num_blocks=16) for _ in range(2))

    def kv_of(engine: Engine, layers: int) -> bytes:
        return b"".join(bytes(view) for view in engine.store.read(range(13), 0, layers))

    seen: dict[int, bytes] = {}
    drawn = engine.forward(batch, LayerWatch((1, 3, 4), lambda n: seen.update({n: kv_of(engine, n)}))).token_ids
    assert drawn.tolist() == plain.forward(batch).token_ids.tolist()
    assert seen == {n: kv_of(plain, n) for n in (1, 3, 4)}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_kv_moved_through_host_memory_decodes_alike(source: ModelSource, dtype: str) -> None:
    (prompt,) = random_prompts(source, [200])
    first = prefilled(source, prompt[:-1], dtype)
    second = load_engine(source, device="cuda", dtype=dtype, num_blocks=16)
    blocks = list(range(13))
    for begin, end in ((0, 1), (1, 4)):
        data = b"".join(first.store.read(blocks, begin, end))
        second.store.write([15 - b for b in blocks], begin, end, memoryview(data))
    request = SampleRequest(params=SamplingParams(temperature=0.0))
    logits = [
        engine.forward_logits(
            build_batch(
                [SequenceChunk(token_ids=prompt[-1:], start_position=199, block_table=table, samples=(request,))], 16
            )
        )
        for engine, table in ((first, blocks), (second, [15 - b for b in blocks]))
    ]
    np.testing.assert_array_equal(logits[0], logits[1])
