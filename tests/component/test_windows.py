"""Models with a window through prefill and decode workers: the tokens of one process that keeps all KV, in less memory.

The CPU engine computes the same bits however a request is cut, moved and batched, so tokens are compared with `==`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdserve.client import AsyncClient
from pdserve.config import Config
from pdserve.engine import Engine, load_engine
from pdserve.engine.cpu.loader import load_cpu_engine
from pdserve.errors import ConfigError
from pdserve.model.endless import with_window
from pdserve.model.source import open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import generate
from pdserve.testing.tiny_families import make_tiny_family
from pdserve.testing.tiny_models import make_tiny_kv
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.types import Fork, GenerationJob, HandoffId, SamplingParams
from pdserve.worker.model import LoadedModel, load_model, max_model_len

pytestmark = pytest.mark.timeout(300)  # Whichever test comes first compiles the kernels if nobody has.

WINDOW = 40
NUM_NEW_TOKENS = 260
PROMPTS = {n: [int(i * i * 7 + 3 * i + n) % 380 + 3 for i in range(n)] for n in (5, 130, 300, 610)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mistral") / "model"
    config = {"sliding_window": WINDOW, "max_position_embeddings": 2048, "num_hidden_layers": 2}
    return make_tiny_family(directory, "mistral", **config)


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


def alone(engine: Engine, *jobs: GenerationJob) -> list[list[int]]:
    """What one process gives, which keeps all KV."""
    outputs = generate(
        engine,
        [list(job.token_ids) for job in jobs],
        NUM_NEW_TOKENS,
        sampling=[job.sampling for job in jobs],
        budget_tokens=64,
    )
    return [list(output) for output in outputs]


@pytest.fixture(scope="module")
def one_process(model: Path) -> Engine:
    return load_cpu_engine(open_model(str(model)), num_blocks=200, num_threads=1)


def make_config(redis_url: str, cluster_name: str, path: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "model": {"path": str(path)},
        "engine": {"kind": "cpu", "threads": 1},
        "kv": {"num_blocks": 120},
        "prefill": {"max_batch_tokens": 64},
        "transfer": {"chunk_bytes": 65536},
        "health": {"heartbeat_s": 0.5, "peer_timeout_s": 20.0},
        "decode": {"reserve_tokens": 16},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return test_config(redis_url, cluster_name, **tree)


def with_blocks(num_blocks: int, block_size: int = 16) -> Callable[[Config], LoadedModel]:
    """A worker with a pool of its own size."""

    def load(config: Config) -> LoadedModel:
        kv = config.kv.model_copy(update={"num_blocks": num_blocks, "block_size": block_size})
        return load_model(config.model_copy(update={"kv": kv}))

    return load


def job(name: str, prompt: list[int], **sampling: float) -> GenerationJob:
    return GenerationJob(
        request_id=name,
        attempt=1,
        router_id="r",
        token_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        max_new_tokens=NUM_NEW_TOKENS,
        sampling=SamplingParams(**{"temperature": 0.0, **sampling}),  # type: ignore[arg-type]
    )


def most_blocks(block_size: int, window: int = WINDOW, sinks: int = 0) -> int:
    """Blocks of one stream, of which up to 128 tokens behind the window are kept and up to 32 before it are there."""
    return (sinks + window + 128 + 32) // block_size + 2


async def run(cluster: InProcessCluster, jobs: list[GenerationJob], bound: int | None = None) -> list[list[int]]:
    """Their outputs, one request after the other; the decode worker never holds more than `bound` blocks."""
    sessions = [
        *(("prefill", p.host.info.address) for p in cluster.prefill),
        *(("decode", d.host.info.address) for d in cluster.decode),
    ]
    outputs = []
    async with ScriptedRouter(*sessions, router_id="r") as router:
        for wanted in jobs:
            keys = [await router.submit(wanted, [cluster.target()], session=router.sessions[0])]
            keys += [HandoffId(fork.request_id, fork.attempt) for fork in wanted.forks]
            most = 0
            while not all(router.ended(key) for key in keys):
                most = max(most, cluster.decode[0].stats().blocks_in_use)
                await asyncio.sleep(0)
            assert bound is None or most <= bound, f"{len(wanted.token_ids)} tokens: {most} blocks"
            assert [router.failure(key) for key in keys if router.failure(key)] == []
            outputs += [router.output(key) for key in keys]
    await cluster.quiet()
    assert all(d.stats().prefill_tokens_total == 0 for d in cluster.decode)
    return outputs


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 16), (64, 16), (16, 128)])
async def test_a_small_pool_decodes_what_one_process_does(
    redis_url: str, cluster_name: str, model: Path, one_process: Engine, prefill_block: int, decode_block: int
) -> None:
    """Prompts and answers longer than the pool of the decode worker, greedy and seeded. Only what the window shows is
    sent, whatever the sizes of the blocks."""
    jobs = [job(f"g{n}", prompt) for n, prompt in PROMPTS.items()]
    jobs.append(job("s", PROMPTS[300], temperature=1.0, seed=5))
    async with InProcessCluster(
        make_config(redis_url, cluster_name, model),
        prefill_engines=[with_blocks(640 // prefill_block, prefill_block)],
        decode_engines=[with_blocks(512 // decode_block, decode_block)],
    ) as cluster:
        outputs = await run(cluster, jobs, bound=most_blocks(decode_block))
        assert outputs == alone(one_process, *jobs)
        layout = cluster.prefill[0].host.info.kv_layout
        most_sent = sum(min(len(j.token_ids), WINDOW + 128) + 2 * 128 for j in jobs)
        sent = cluster.decode[0].stats().kv_bytes_total
        assert sent < most_sent * layout.block_nbytes // layout.block_size


async def test_a_stream_that_gave_way_computes_its_kv_again_in_the_same_bound(
    redis_url: str, cluster_name: str, model: Path, one_process: Engine
) -> None:
    """Three streams that arrive with little and grow, in a pool for two: what is computed again is longer than it."""
    jobs = [job(f"{i}", [i, *PROMPTS[300]]) for i in range(3)]
    async with InProcessCluster(
        make_config(redis_url, cluster_name, model), decode_engines=[with_blocks(20)]
    ) as cluster:
        sessions = [("prefill", cluster.prefill[0].host.info.address), ("decode", cluster.decode[0].host.info.address)]
        async with ScriptedRouter(*sessions, router_id="r") as router:
            keys = [await router.submit(j, [cluster.target()], session=router.sessions[0]) for j in jobs]
            await router.finished(*keys, timeout_s=60.0)
            assert [router.output(key) for key in keys] == alone(one_process, *jobs)
        assert cluster.decode[0].stats().preemptions_total > 0
        await cluster.quiet()


async def test_branches_and_a_second_turn_share_what_they_see(
    redis_url: str, cluster_name: str, model: Path, one_process: Engine
) -> None:
    """Three outputs of one prompt, and then the text of the first one with more behind it, whose beginning both workers
    find in their caches without what lies behind the window."""
    first = replace(
        job("a", PROMPTS[300], temperature=1.0, seed=1),
        forks=tuple(Fork(request_id=f"a{i}", attempt=1, seed=1 + i) for i in (1, 2)),
    )
    async with InProcessCluster(make_config(redis_url, cluster_name, model)) as cluster:
        outputs = await run(cluster, [first])
        expected = alone(one_process, *(job("", PROMPTS[300], temperature=1.0, seed=1 + i) for i in range(3)))
        assert outputs == expected
        second = job("b", [*PROMPTS[300], *outputs[0], *range(20, 60)])
        found = [worker.stats().cached_tokens_total for worker in (cluster.prefill[0], cluster.decode[0])]
        assert await run(cluster, [second]) == alone(one_process, second)
        now = [worker.stats().cached_tokens_total for worker in (cluster.prefill[0], cluster.decode[0])]
        assert now[0] - found[0] == 288, "all full blocks of the first prompt"
        assert now[1] - found[1] >= 544, "what was generated, too"


async def test_a_stream_moves_with_what_it_sees(
    redis_url: str, cluster_name: str, model: Path, one_process: Engine
) -> None:
    config = make_config(
        redis_url, cluster_name, model, decode={"migrate": "always", "drain_timeout_s": 0.05, "reserve_tokens": 16},
        router={"listen": "127.0.0.1:0", "max_attempts": 1},
    )  # fmt: skip
    async with InProcessCluster(config, decode=2, router=True, decode_engines=[with_blocks(32)] * 2) as cluster:
        assert cluster.router is not None
        options: Any = {"token_ids": PROMPTS[300], "max_tokens": NUM_NEW_TOKENS, "temperature": 0.0, "ignore_eos": True}
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client, client.stream(**options) as stream:
            drain: asyncio.Task[None] | None = None
            num_seen = 0
            async for delta in stream:
                num_seen += len(delta.token_ids)
                if drain is None and num_seen >= 12:
                    decoding = next(worker for worker in cluster.decode if worker.stats().num_running)
                    drain = asyncio.create_task(decoding.drain())
            result = await stream.result()
            assert drain is not None
            await drain
        assert result.placement.migrations == 1
        assert [list(result.token_ids)] == alone(one_process, job("", PROMPTS[300]))
        assert sum(worker.stats().recomputed_tokens_total for worker in cluster.decode) == 0


# Streams without end --------------------------------------------------------------------------------------------------


async def test_a_model_without_a_window_streams_beyond_its_context(
    redis_url: str, cluster_name: str, plain_model: Path
) -> None:
    """`engine.attention_window` on a model with a context of 2,048 tokens, in a pool of a quarter of that."""
    trained = open_model(str(plain_model)).config.max_position_embeddings
    assert trained == 2048
    config = make_config(
        redis_url,
        cluster_name,
        plain_model,
        model={"path": str(plain_model), "max_model_len": 2 * trained},
        engine={"kind": "cpu", "threads": 1, "attention_window": 64, "attention_sinks": 4},
        router={"listen": "127.0.0.1:0"},
    )
    options: Any = {"token_ids": PROMPTS[300], "max_tokens": trained, "temperature": 0.0, "ignore_eos": True}
    async with InProcessCluster(config, decode_engines=[with_blocks(32)], router=True) as cluster:
        assert cluster.router is not None
        most, output = 0, list[int]()
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client, client.stream(**options) as stream:
            async for delta in stream:
                output += delta.token_ids
                most = max(most, cluster.decode[0].stats().blocks_in_use)
        assert most <= most_blocks(16, 64, sinks=128)
        assert len(output) == trained
        assert len(set(output[-100:])) > 10, "it goes on saying different things"
        # Other workers would not understand its KV.
        info = cluster.decode[0].host.info
        other = replace(info, kv_layout=replace(info.kv_layout, window=replace(info.kv_layout.window, size=65)))
        assert "kv_layout.window" in info.incompatibilities(other)[0]


@pytest.mark.parametrize("kind", ["cpu", "torch"])
def test_engines_agree_on_sinks(plain_model: Path, kind: str) -> None:
    """Against the reference attention of the torch engine: angles, sinks and windows in every layer."""
    source = with_window(open_model(str(plain_model)), 20, 4, 1000)
    prompts = [PROMPTS[130][:40]]

    def tokens(engine: Engine) -> list[tuple[int, ...]]:
        return generate(engine, prompts, 12, budget_tokens=30)

    if kind == "cpu":
        engine: Engine = load_cpu_engine(source, weights="f32", num_blocks=8, num_threads=1)
    else:
        engine = load_engine(source, num_blocks=8, attention="sdpa")
    expected = tokens(load_engine(source, num_blocks=8, attention="reference"))
    assert tokens(engine) == expected
    without = load_engine(with_window(open_model(str(plain_model)), 20, 0, 1000), num_blocks=8, attention="sdpa")
    assert tokens(without) != expected, "sinks make a difference"


def test_settings_that_contradict_the_model_are_refused(model: Path, plain_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.attention_window: model has a window of its own"):
        with_window(open_model(str(model)), 64, 4, None)
    with pytest.raises(ConfigError, match=r"engine\.attention_window: 4096 tokens and 4 sinks are more than the 2048"):
        with_window(open_model(str(plain_model)), 4096, 4, None)
    config = Config.model_validate({"model": {"path": str(plain_model), "max_model_len": 4096}})
    engine = load_cpu_engine(open_model(str(plain_model)), num_blocks=8, num_threads=1)
    with pytest.raises(ConfigError, match=r"model\.max_model_len: 4096 is more than the 2048"):
        max_model_len(config, engine)
