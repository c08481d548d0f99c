"""KV pools in eight bits, through engines and whole workers: the same bits however a request is computed and wherever
it goes on, close to float16, and half the bytes to send."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pdserve.config import Config
from pdserve.engine import Engine, SequenceChunk, build_batch, load_engine
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.errors import ConfigError
from pdserve.model.endless import with_window
from pdserve.model.source import ModelSource, open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import generate
from pdserve.testing.tiny_families import make_tiny_family
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.tokenizer.loader import load_tokenizer
from pdserve.types import Fork, GenerationJob, HandoffId, SamplingParams
from pdserve.worker.model import LoadedModel, load_model

pytestmark = pytest.mark.timeout(400)  # Whichever test comes first compiles the kernels if nobody has.

DATA = Path(__file__).parent.parent / "data"
TEXTS = ("shakespeare", "gsm8k", "mt_bench", "humaneval")
TEXT_TOKENS = 256

MIN_TOP1 = 0.97
"""Share of tokens with the same most likely successor as with KV in float16."""
MAX_PERPLEXITY_CHANGE = 0.01

NUM_NEW_TOKENS = 10


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "llama"
    options = {"hidden_size": 288, "head_dim": 64, "num_attention_heads": 9, "num_key_value_heads": 3}
    return make_tiny_family(directory, "llama", **options)


def all_logits(engine: Engine, token_ids: Sequence[int], cuts: Sequence[int] = ()) -> npt.NDArray[np.float32]:
    """Logits after every token of one sequence, computed in chunks that end at `cuts`; [tokens, vocab_size]."""
    size = engine.layout.block_size
    table = range(1, 1 + -(-len(token_ids) // size))
    rows = []
    for begin, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
        chunk = SequenceChunk(token_ids=token_ids[begin:end], start_position=begin, block_table=table)
        batch = build_batch([chunk], size)
        logit_rows = np.arange(end - begin, dtype=np.int32)
        rows.append(engine.forward_logits(dataclasses.replace(batch, logit_rows=logit_rows)))
    return np.concatenate(rows)


def prompts_of(source: ModelSource, lengths: Sequence[int], seed: int = 5) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, source.config.vocab_size, n).tolist() for n in lengths]


# --- engines --------------------------------------------------------------------------------------------------------


def test_chunks_threads_and_batches_do_not_change_a_bit(model: Path) -> None:
    source = open_model(str(model))
    engines = [load_cpu_engine(source, num_blocks=60, num_threads=n, kv_dtype="int8") for n in (1, 2)]
    prompt, *others = prompts_of(source, (150, 33, 70))
    alone = all_logits(engines[0], prompt)
    for engine in engines:
        for cuts in ([1], [16, 33, 128], list(range(1, 150, 7))):
            assert all_logits(engine, prompt, cuts).tobytes() == alone.tobytes()
    outputs = [generate(engines[0], [p], NUM_NEW_TOKENS)[0] for p in (prompt, *others)]
    assert generate(engines[1], [prompt, *others], NUM_NEW_TOKENS, budget_tokens=40, block_seed=3) == outputs


def test_the_block_size_does_not_change_a_bit(model: Path) -> None:
    source = open_model(str(model))
    (prompt,) = prompts_of(source, (150,))
    results = [
        all_logits(load_cpu_engine(source, num_blocks=20, num_threads=1, kv_dtype="int8", block_size=size), prompt)
        for size in (16, 64)
    ]
    assert results[0].tobytes() == results[1].tobytes()


def test_windows_and_sinks_see_the_same_keys_in_eight_bits(model: Path) -> None:
    source = with_window(open_model(str(model)), 48, 4, None)
    (prompt,) = prompts_of(source, (130,))
    plain, coded = (
        load_cpu_engine(source, weights="f32", num_blocks=20, num_threads=1, kv_dtype=d) for d in (None, "int8")
    )
    logits = all_logits(coded, prompt)
    assert all_logits(coded, prompt, [20, 21, 90]).tobytes() == logits.tobytes()
    assert np.corrcoef(all_logits(plain, prompt).ravel(), logits.ravel())[0, 1] > 0.999


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3"])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_torch_in_eight_bits_is_close_to_torch(model: Path, kv_dtype: str, attention: str) -> None:
    source = open_model(str(model))
    (prompt,) = prompts_of(source, (45,))
    exact = all_logits(load_engine(source, num_blocks=8), prompt)
    coded = all_logits(load_engine(source, num_blocks=8, kv_dtype=kv_dtype, attention=attention), prompt, [16, 30])
    correlation = np.corrcoef(exact.ravel(), coded.ravel())[0, 1]
    assert (exact != coded).any()
    assert correlation > (0.999 if kv_dtype == "int8" else 0.985), correlation


@pytest.mark.parametrize("kv_dtype", ["int8", "float8_e4m3"])
def test_a_single_kv_head_in_eight_bits(tmp_path: Path, kv_dtype: str) -> None:
    """As each of two ranks has it of a model with two."""
    options = {"hidden_size": 64, "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    source = open_model(str(make_tiny_family(tmp_path / "llama", "llama", **options)))
    (prompt,) = prompts_of(source, (45,))
    sdpa, reference = (
        all_logits(load_engine(source, num_blocks=8, kv_dtype=kv_dtype, attention=name), prompt, [30])
        for name in ("sdpa", "reference")
    )
    np.testing.assert_allclose(sdpa, reference, rtol=1e-3, atol=1e-3)


def test_both_engines_mean_the_same_by_int8(model: Path) -> None:
    """KV that one has written and the transfer layer has brought into the order of the other is read alike."""
    source = open_model(str(model))
    (prompt,) = prompts_of(source, (60,))
    cpu = all_logits(load_cpu_engine(source, weights="f32", num_blocks=8, num_threads=1, kv_dtype="int8"), prompt)
    torch_logits = all_logits(load_engine(source, num_blocks=8, kv_dtype="int8"), prompt)
    assert np.corrcoef(cpu.ravel(), torch_logits.ravel())[0, 1] > 0.9999


def test_text_is_as_likely_as_with_kv_in_float16() -> None:
    """SmolLM2 on verse, arithmetic, questions and code. docs/quantised-kv.md has the figures of more text."""
    source = open_model("smollm2-135m-instruct")
    tokenizer = load_tokenizer(source)
    plain, coded = (load_cpu_engine(source, num_blocks=18, num_threads=1, kv_dtype=d) for d in ("float16", "int8"))
    same, losses = [], []
    for name in TEXTS:
        ids = tokenizer.encode((DATA / f"{name}.txt").read_text("utf-8"))[:TEXT_TOKENS]
        both = [torch.from_numpy(all_logits(engine, ids)).log_softmax(-1) for engine in (plain, coded)]
        same.append((both[0].argmax(-1) == both[1].argmax(-1)).float())
        following = torch.tensor(ids[1:])[:, None]
        losses.append(torch.stack([-rows[:-1].gather(1, following)[:, 0] for rows in both]))
    top1 = float(torch.cat(same).mean())
    means = torch.cat(losses, dim=1).double().mean(1)
    change = float(torch.exp(means[1] - means[0])) - 1
    print(f"top-1 {top1:.4f}, perplexity {change:+.5f}")  # Shown with -rP.
    assert top1 >= MIN_TOP1
    assert abs(change) <= MAX_PERPLEXITY_CHANGE


def test_a_pool_of_the_same_memory_holds_1_94_times_the_tokens(model: Path) -> None:
    source = open_model(str(model))
    plain, coded = (
        load_cpu_engine(source, kv_cache_bytes=4 << 20, num_threads=1, kv_dtype=d).num_blocks for d in (None, "int8")
    )
    assert coded / plain == pytest.approx(128 / 66, rel=0.02)


# --- workers --------------------------------------------------------------------------------------------------------

Kind = Literal["cpu", "torch"]


def make_config(redis_url: str, cluster_name: str, model: Path, kind: Kind = "cpu", **kv: object) -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": kind, "threads": 1},
        kv={"num_blocks": 100, **kv},
        prefill={"max_batch_tokens": 64},
        # Small chunks, so that a hand-off is many of them.
        transfer={"chunk_bytes": 16384},
    )


def job(name: str, prompt: Sequence[int], num_forks: int = 0) -> GenerationJob:
    return GenerationJob(
        request_id=name,
        attempt=1,
        router_id="r",
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        max_new_tokens=NUM_NEW_TOKENS,
        sampling=SamplingParams(temperature=0.0),
        forks=tuple(Fork(request_id=f"{name}-{i}", attempt=1, seed=i) for i in range(num_forks)),
    )


async def ask(cluster: InProcessCluster, jobs: Sequence[GenerationJob]) -> list[list[int]]:
    """Outputs of all branches of `jobs`, sent at once."""
    keys = [HandoffId(branch.request_id, branch.attempt) for job in jobs for branch in job.branches]
    sessions = [("prefill", cluster.prefill[0].host.info.address), ("decode", cluster.decode[0].host.info.address)]
    async with ScriptedRouter(*sessions, router_id="r") as router:
        for one in jobs:
            await router.submit(one, [cluster.target()])
        await router.finished(*keys, timeout_s=60.0)
        return [router.output(key) for key in keys]


async def test_prefill_and_decode_workers_in_int8_equal_one_process(
    redis_url: str, cluster_name: str, model: Path
) -> None:
    """Also from the prefix cache, and for outputs that share a prompt; half the bytes go over."""
    source = open_model(str(model))
    prompts = prompts_of(source, (1, 16, 17, 64, 150))
    alone = load_cpu_engine(source, num_blocks=100, num_threads=1, kv_dtype="int8")
    expected = [list(o) for o in generate(alone, prompts, NUM_NEW_TOKENS)]
    assert alone.layout.dtype == "int8"
    sent = {}
    for dtype in ("int8", "auto"):
        config = make_config(redis_url, f"{cluster_name}-{dtype}", model, dtype=dtype)
        async with InProcessCluster(config) as cluster:
            outputs = await ask(cluster, [job(f"a{i}", p) for i, p in enumerate(prompts)])
            sent[dtype] = cluster.decode[0].stats().kv_bytes_total
            if dtype == "int8":
                assert outputs == expected
                forked = await ask(cluster, [job("b", prompts[-1], num_forks=2)])
                assert forked == [expected[-1]] * 3
                assert cluster.prefill[0].stats().cached_tokens_total >= 144
                assert cluster.decode[0].stats().prefill_tokens_total == 0
                assert cluster.decode[0].stats().blocks_cached > 0
    assert sent["int8"] / sent["auto"] == pytest.approx(66 / 128)


@pytest.mark.parametrize("kind", ["cpu", "torch"])
@pytest.mark.parametrize("coded_side", ["prefill", "decode"])
async def test_workers_may_differ_in_the_dtype_of_their_pools(
    redis_url: str, cluster_name: str, model: Path, kind: Kind, coded_side: str
) -> None:
    """What was rounded on the way is decoded to the end, and never found as a prefix by anybody else."""
    source = open_model(str(model))
    prompts = prompts_of(source, (17, 64, 150), seed=8)
    config = make_config(redis_url, cluster_name, model, kind)

    def coded(config: Config) -> LoadedModel:
        return load_model(config.model_copy(update={"kv": config.kv.model_copy(update={"dtype": "int8"})}))

    engines = {"prefill_engines": [load_model], "decode_engines": [load_model], f"{coded_side}_engines": [coded]}
    async with InProcessCluster(config, **engines) as cluster:  # type: ignore[arg-type]
        dtypes = [w.host.info.kv_layout.dtype for w in (cluster.prefill[0], cluster.decode[0])]
        assert dtypes.index("int8") == ["prefill", "decode"].index(coded_side)
        assert dtypes.count("int8") == 1
        outputs = await ask(cluster, [job(f"a{i}", p) for i, p in enumerate(prompts)])
        assert [len(output) for output in outputs] == [NUM_NEW_TOKENS] * len(prompts)
        stats = cluster.decode[0].stats()
        assert stats.prefill_tokens_total == 0
        assert stats.blocks_cached == 0, "what the worker would have computed itself is something else"
        assert cluster.prefill[0].stats().blocks_cached > 0
    plain = (
        load_cpu_engine(source, num_blocks=100, num_threads=1) if kind == "cpu" else load_engine(source, num_blocks=100)
    )
    exact = generate(plain, prompts, NUM_NEW_TOKENS)
    assert [o[0] for o in outputs] == [e[0] for e in exact], "rounding does not decide the first token of these"


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_cannot_work_together_is_refused_with_the_reason(model: Path) -> None:
    source = open_model(str(model))
    with pytest.raises(ConfigError, match=r"float16 or int8, not in float8_e4m3, which needs engine.kind: torch"):
        load_cpu_engine(source, num_blocks=4, kv_dtype="float8_e4m3")
    with pytest.raises(ConfigError, match=r"kv_dtype: .* int8 or float8_e4m3, not in float64"):
        load_engine(source, num_blocks=4, kv_dtype="float64")
    with pytest.raises(ValueError, match=r"kv.dtype: fp8 needs engine.kind torch"):
        Config.model_validate({"kv": {"dtype": "fp8"}, "engine": {"kind": "cpu"}})
    with pytest.raises(ValueError, match=r"transfer.codec: int8 would round KV again"):
        Config.model_validate({"kv": {"dtype": "int8"}, "transfer": {"codec": "int8"}})
    automatic = Config.model_validate({"model": {"path": str(model)}, "kv": {"dtype": "fp8"}})
    with pytest.raises(ConfigError, match=r"kv.dtype: fp8 needs engine.kind: torch"):
        load_model(automatic)
