"""A tensor-parallel engine gives the tokens of transformers, alone and through hand-offs between unequal numbers of
ranks. Ranks are threads here; `test_rank_processes.py` has them as processes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from pdserve.client import AsyncClient, Generation
from pdserve.config import Config
from pdserve.engine import Engine, SampleRequest, SequenceChunk, build_batch, load_engine
from pdserve.engine.batch import ScoreRequest
from pdserve.engine.engine import LayerWatch
from pdserve.engine.parallel.collectives import join_group
from pdserve.engine.parallel.messages import Kind
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.rank_threads import WAIT_S, thread_engine
from pdserve.testing.reference import generate, greedy_reference
from pdserve.testing.tiny_models import TinyShape, make_tiny_kv
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import GenerationJob, SamplingParams
from pdserve.worker.model import LoadedModel

NUM_NEW_TOKENS = 8
SHAPES = {
    "2 KV heads": TinyShape(num_layers=2),
    "1 KV head": TinyShape(num_layers=2, num_kv_heads=1),
    "4 KV heads, tied": TinyShape(num_layers=2, num_kv_heads=4, tie_word_embeddings=True),
    "3 KV heads, 9 heads": TinyShape(num_layers=2, hidden_size=144, num_heads=9, num_kv_heads=3),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Rig:
    """A model with prompts whose greedy continuation is known and clear."""

    path: Path
    source: ModelSource
    prompts: list[list[int]]
    expected: list[tuple[int, ...]]


@pytest.fixture(scope="module")
def rigs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Rig]:
    made: dict[str, Rig] = {}

    def rig(shape: str) -> Rig:
        if shape not in made:
            path = make_tiny_kv(tmp_path_factory.mktemp("tiny") / "model", shape=SHAPES[shape])
            source = open_model(str(path))
            rng = np.random.default_rng(5)
            lengths = (1, 15, 16, 17, 33, 64, 90) * 2
            prompts = [rng.integers(0, source.config.vocab_size, size=n).tolist() for n in lengths]
            outputs = greedy_reference(path, prompts, NUM_NEW_TOKENS)
            clear = [i for i, output in enumerate(outputs) if output.is_clear]
            assert len(clear) >= 5
            made[shape] = Rig(path, source, [prompts[i] for i in clear], [outputs[i].ids for i in clear])
        return made[shape]

    return rig


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("2 KV heads", 2),
        ("2 KV heads", 4),
        ("1 KV head", 4),
        ("4 KV heads, tied", 4),
        ("4 KV heads, tied", 3),
        ("3 KV heads, 9 heads", 2),
    ],
)
def test_greedy_tokens_equal_transformers(rigs: Callable[[str], Rig], shape: str, size: int) -> None:
    """Also with chunked prompts among decode rows, and with KV heads that are shared unevenly or copied."""
    rig = rigs(shape)
    with thread_engine(rig.source, size, num_blocks=120) as (engine, _):
        starts = [i // 3 for i in range(len(rig.prompts))]
        assert generate(engine, rig.prompts, NUM_NEW_TOKENS, budget_tokens=40, start_steps=starts) == rig.expected


def test_seeded_tokens_equal_one_rank(rigs: Callable[[str], Rig]) -> None:
    rig = rigs("2 KV heads")
    rng = np.random.default_rng(1)
    sampling = [
        SamplingParams(
            temperature=float(rng.choice([0.5, 1.0])),
            top_k=int(rng.choice([0, 30])),
            top_p=float(rng.choice([1.0, 0.9])),
            seed=i,
        )
        for i in range(len(rig.prompts))
    ]
    wanted = generate(load_engine(rig.source, num_blocks=120), rig.prompts, NUM_NEW_TOKENS, sampling=sampling)
    with thread_engine(rig.source, 2, num_blocks=120) as (engine, followers):
        assert generate(engine, rig.prompts, NUM_NEW_TOKENS, sampling=sampling) == wanted
        assert Kind.GATHER not in followers.kinds, "no row was drawn from its whole logits"
    assert len(set(wanted)) == len(wanted)


@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_windows_and_kv_in_eight_bits_give_the_tokens_of_one_rank(
    rigs: Callable[[str], Rig], kv_dtype: str | None
) -> None:
    rig = rigs("4 KV heads, tied")
    config = replace(rig.source.config, layer_windows=(24, 0))
    source = rig.source.with_config(config)
    wanted = generate(load_engine(source, num_blocks=120, kv_dtype=kv_dtype), rig.prompts, NUM_NEW_TOKENS)
    with thread_engine(source, 2, num_blocks=120, kv_dtype=kv_dtype) as (engine, _):
        assert generate(engine, rig.prompts, NUM_NEW_TOKENS) == wanted
    assert wanted != rig.expected


def test_log_probabilities_and_logits_are_those_of_one_rank(rigs: Callable[[str], Rig]) -> None:
    rig = rigs("2 KV heads")
    prompt = max(rig.prompts, key=len)
    request = SampleRequest(params=SamplingParams(temperature=0.0), num_logprobs=3)
    batch = build_batch(
        [
            SequenceChunk(
                token_ids=prompt,
                start_position=0,
                block_table=range(8),
                samples=(request,),
                score=ScoreRequest(target_ids=prompt[1:], num_top=2),
            )
        ],
        16,
    )
    alone = load_engine(rig.source, num_blocks=8)
    wanted, logits = alone.forward(batch), alone.forward_logits(batch)
    with thread_engine(rig.source, 2, num_blocks=8) as (engine, _):
        found = engine.forward(batch)
        np.testing.assert_allclose(engine.forward_logits(batch), logits, atol=1e-4)
    assert found.token_ids.tolist() == wanted.token_ids.tolist()
    for ours, theirs in ((found.logprobs, wanted.logprobs), (found.prompt_logprobs, wanted.prompt_logprobs)):
        assert ours is not None
        assert theirs is not None
        assert np.array_equal(ours.top_ids, theirs.top_ids)
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
        np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, atol=1e-4)


def kv(engine: Engine, layers: int) -> bytes:
    """What the store shows of the first layers of six blocks, all heads."""
    cuts = (0, *engine.layout.head_cuts, engine.layout.num_kv_heads)
    ranges = itertools.pairwise(cuts)
    return b"".join(piece for heads in ranges for piece in engine.store.read(range(6), 0, layers, heads))


@pytest.mark.parametrize(("shape", "size"), [("2 KV heads", 2), ("2 KV heads", 4)])
def test_a_layer_that_is_reported_is_complete_on_all_ranks(rigs: Callable[[str], Rig], shape: str, size: int) -> None:
    """A chunk in the middle of a prompt has no logit rows, so the last layer sums nothing; ranks still meet."""
    rig = rigs(shape)
    prompt = max(rig.prompts, key=len)
    batch = build_batch([SequenceChunk(token_ids=prompt, start_position=0, block_table=range(6))], 16)
    with thread_engine(rig.source, size, num_blocks=6) as (engine, _):
        seen: dict[int, bytes] = {}
        engine.forward(batch, LayerWatch((1, 2), lambda n: seen.update({n: kv(engine, n)})))
        assert seen == {1: kv(engine, 1), 2: kv(engine, 2)}
        assert any(seen[1])


def test_gloo_gives_the_tokens_of_transformers(rigs: Callable[[str], Rig]) -> None:
    rig = rigs("2 KV heads")
    store = HashStore()
    with thread_engine(
        rig.source, 2, num_blocks=60, join=lambda rank: join_group(store, rank, 2, torch.device("cpu"), WAIT_S)
    ) as (engine, _):
        assert generate(engine, rig.prompts[:3], NUM_NEW_TOKENS) == rig.expected[:3]


# Through hand-offs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Engines that live as long as the test."""
    with ExitStack() as stack:
        yield stack


def factory(stack: ExitStack, rig: Rig, size: int) -> Callable[[Config], LoadedModel]:
    def make(config: Config) -> LoadedModel:
        engine: Engine = load_engine(rig.source, num_blocks=80)
        if size > 1:
            engine, _ = stack.enter_context(thread_engine(rig.source, size, num_blocks=80))
        return LoadedModel(engine=engine, name=rig.source.name, fingerprint=rig.source.fingerprint)

    return make


@pytest.mark.parametrize(
    ("shape", "prefill", "decode"),
    [
        ("4 KV heads, tied", 2, 1),
        ("4 KV heads, tied", 1, 2),
        ("4 KV heads, tied", 2, 4),
        ("4 KV heads, tied", 4, 2),
        # Fewer KV heads than ranks: copies are written to all, and read of one.
        ("2 KV heads", 4, 2),
        ("2 KV heads", 1, 4),
        ("1 KV head", 2, 4),
        ("3 KV heads, 9 heads", 2, 3),
    ],
)
async def test_hand_offs_between_unequal_numbers_of_ranks_give_the_tokens_of_one_rank(
    rigs: Callable[[str], Rig],
    stack: ExitStack,
    redis_url: str,
    cluster_name: str,
    shape: str,
    prefill: int,
    decode: int,
) -> None:
    rig = rigs(shape)
    config = test_config(
        redis_url,
        cluster_name,
        model={"path": str(rig.path)},
        prefill={"max_batch_tokens": 64},
        transfer={"chunk_bytes": 16384},
    )
    # Greedy ones are those of transformers, others those of one rank.
    prompts = rig.prompts[:5]
    sampling = [SamplingParams(temperature=0.9 * (i % 2), top_p=0.95, seed=i) for i in range(len(prompts))]
    wanted = generate(load_engine(rig.source, num_blocks=80), prompts, NUM_NEW_TOKENS, sampling=sampling)
    assert wanted[::2] == rig.expected[:5:2]
    jobs = [
        GenerationJob(
            request_id=f"q{i}",
            attempt=1,
            router_id="r",
            token_ids=tuple(prompt),
            num_prompt_tokens=len(prompt),
            max_new_tokens=NUM_NEW_TOKENS,
            sampling=sampling[i],
        )
        for i, prompt in enumerate(prompts)
    ]
    async with InProcessCluster(
        config,
        prefill_engines=[factory(stack, rig, prefill)],
        decode_engines=[factory(stack, rig, decode)],
    ) as cluster:
        sessions = [("prefill", cluster.prefill[0].host.info.address), ("decode", cluster.decode[0].host.info.address)]
        async with ScriptedRouter(*sessions, router_id="r") as router:
            keys = [await router.submit(job, [cluster.target()]) for job in jobs]
            await router.finished(*keys, timeout_s=60.0)
            assert [tuple(router.output(key)) for key in keys] == wanted
        assert cluster.decode[0].stats().prefill_tokens_total == 0


SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}
FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "ignore_eos": True},
    SAMPLED | {"repetition_penalty": 1.3, "frequency_penalty": 0.7, "logit_bias": {7: 4.0, 9: -100.0}},
    SAMPLED | {"min_tokens": 10, "stop_token_ids": list(range(0, 387, 3))},
    SAMPLED | {"logprobs": 3, "prompt_logprobs": 2, "top_k": 300},
    SAMPLED | {"regex": "[0-9]{3,6}(,[0-9]{2}){2,4}"},
    SAMPLED | {"n": 3, "top_p": 0.8},
    # Four tokens and no other, so that what was there comes again and is drafted.
    SAMPLED | {"logit_bias": dict.fromkeys(range(20, 24), 60.0), "max_tokens": 40, "ignore_eos": True},
)


async def answers_of(
    config: Config, prefill: list[Callable[[Config], LoadedModel]], decode: Callable[[Config], LoadedModel]
) -> tuple[list[Generation], int]:
    """What a cluster makes of `FEATURES`, all at once, and how many tokens it drafted."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, 300, size=n).tolist() for n in (20, 33, 61, 40, 45, 52, 5)]
    async with InProcessCluster(
        config, prefill=len(prefill), prefill_engines=prefill, decode_engines=[decode], router=True
    ) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            answers = await asyncio.gather(
                *(
                    client.generate(token_ids=prompt, **{"max_tokens": 24, **options})
                    for prompt, options in zip(prompts, FEATURES, strict=True)
                )
            )
        stats = cluster.decode[0].stats()
        return answers, stats.accepted_draft_tokens_total + stats.rejected_draft_tokens_total


@pytest.mark.parametrize("is_pair", [False, True], ids=["colocated", "pair"])
async def test_everything_that_a_request_can_ask_for_comes_out_as_from_one_rank(
    rigs: Callable[[str], Rig], stack: ExitStack, redis_url: str, cluster_name: str, is_pair: bool
) -> None:
    rig = rigs("4 KV heads, tied")
    results = []
    for size in (1, 2):
        config = test_config(
            redis_url,
            f"{cluster_name}-{size}",
            model={"path": str(rig.path)},
            router={"listen": "127.0.0.1:0"},
            decode={
                "local_prefill_tokens_per_step": 0 if is_pair else 24,
                "max_batch_tokens": 64,
                "speculation": {"method": "ngram"},
            },
        )
        prefill = [factory(stack, rig, 3 - size)] if is_pair else []
        results.append(await answers_of(config, prefill, factory(stack, rig, size)))
    (wanted, _), (answers, num_drafted) = results
    for ours, theirs in zip(answers, wanted, strict=True):
        assert [output.token_ids for output in ours.outputs] == [output.token_ids for output in theirs.outputs]
        assert [output.finish_reason for output in ours.outputs] == [output.finish_reason for output in theirs.outputs]
    assert num_drafted > 0
