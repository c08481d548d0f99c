"""A second model that drafts: whatever it says, outputs are those without it; and where it says the right thing, they
take fewer steps."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest

from decode_worker.draft_driver import DraftDriver
from pdserve.client import AsyncClient, Generation
from pdserve.config import Config
from pdserve.engine.cpu import loader as cpu_loader
from pdserve.engine.cpu.isa import selected_isa
from pdserve.errors import ConfigError
from pdserve.grammar import sequences
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.metrics import Scrape
from pdserve.testing.tiny_models import TinyOptions, TinyShape, make_script_b, make_tiny_kv
from pdserve.testing.waiting import eventually
from pdserve.types import WorkerStats
from pdserve.worker.draft_model import load_decode_model
from pdserve.worker.model import LoadedModel, load_model

SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
REQUESTS: dict[str, tuple[int, dict[str, Any]]] = {
    "greedy": (100, {"temperature": 0.0}),
    "seeded": (70, SAMPLED | {"top_p": 0.9}),
    "same beginning": (100, SAMPLED | {"seed": 9, "top_k": 20}),
    "penalties": (90, SAMPLED | {"repetition_penalty": 1.1, "presence_penalty": 0.2, "logit_bias": {7: 2.0}}),
    "logprobs": (50, {"temperature": 0.0, "logprobs": 2}),
    "grammar": (45, SAMPLED | {"regex": "([0-9]{3},){9}", "max_tokens": 60}),
    "several": (61, SAMPLED | {"n": 3}),
    "none, please": (33, {"temperature": 0.0, "max_draft_tokens": 0}),
    "one at a time": (34, {"temperature": 0.0, "max_draft_tokens": 1}),
}
"""Length of the prompt and options, by name. Prompts begin alike."""
NUM_TOKENS = 24
MAX_ROUNDS = 20


@pytest.fixture(autouse=True)
def masks_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is: without its mask a draft is given up, and there would be nothing to look at."""
    monkeypatch.setattr(sequences, "MAX_WAIT_FOR_DRAFT_S", 10.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model of the same vocabulary that knows nothing of the other one."""
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-draft") / "model", seed=7, shape=TinyShape(num_layers=1))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """One for each of REQUESTS."""
    tokens = np.random.default_rng(11).integers(10, 300, size=100).tolist()
    return [tokens[:length] for length, _ in REQUESTS.values()]


def make_config(redis_url: str, name: str, model: Path, draft: Path | None, **more: Any) -> Config:
    speculation = {"method": "off"} if draft is None else {"method": "draft", "draft_model": str(draft)}
    decode = {
        "speculation": speculation | {"max_draft_tokens": 4},
        "metrics_listen": "127.0.0.1:0",
        **more.pop("decode", {}),
    }
    sections: dict[str, Any] = {"engine": {"kind": "torch", "threads": 1}, "kv": {"num_blocks": 200}, **more}
    return test_config(
        redis_url, name, model={"path": str(model)}, router={"listen": "127.0.0.1:0"}, decode=decode, **sections
    )


async def answers(
    config: Config,
    prompts: Sequence[Sequence[int]],
    *,
    num_prefill: int = 1,
    until: Callable[[WorkerStats], bool] = lambda _: True,
) -> tuple[dict[str, Generation], DraftDriver | None, WorkerStats]:
    """To all of REQUESTS, what drafted for them, and the decode worker's counters at the end, when nothing is left.
    They are asked again, with the same answers, `until` that has come about which depends on how they meet."""

    async def ask(client: AsyncClient, prompt: Sequence[int], options: dict[str, Any]) -> Generation:
        more = {} if "regex" in options else {"ignore_eos": True}
        return await client.generate(token_ids=prompt, **{"max_tokens": NUM_TOKENS, **more, **options})

    async with InProcessCluster(config, prefill=num_prefill, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            pairs = list(zip(prompts, (options for _, options in REQUESTS.values()), strict=True))
            worker = cluster.decode[0]
            found = await asyncio.gather(*[ask(client, prompt, options) for prompt, options in pairs])
            for _ in range(MAX_ROUNDS):
                if until(worker.stats()):
                    break
                again = await asyncio.gather(*[ask(client, prompt, options) for prompt, options in pairs])
                assert [[o.token_ids for o in g.outputs] for g in again] == [
                    [o.token_ids for o in g.outputs] for g in found
                ]
        await cluster.quiet()
        assert worker.host.metrics_address is not None
        scrape = await Scrape.of(worker.host.metrics_address)
        drafts = worker._drafts
        if drafts is not None:
            for kind, number in drafts.counts().items():
                assert scrape.value("pdserve_worker_draft_model_tokens_total", kind=kind) == number > 0
        return dict(zip(REQUESTS, found, strict=True)), drafts, worker.stats()


def tokens_of(found: dict[str, Generation]) -> dict[str, list[tuple[int, ...]]]:
    return {name: [output.token_ids for output in generation.outputs] for name, generation in found.items()}


def drafts_of(found: dict[str, Generation]) -> dict[str, tuple[int, int]]:
    """Accepted and rejected."""
    return {
        name: (
            sum(output.usage.accepted_draft_tokens for output in generation.outputs),
            sum(output.usage.rejected_draft_tokens for output in generation.outputs),
        )
        for name, generation in found.items()
    }


@pytest.fixture(scope="module")
def plain(redis_url: str, model: Path, prompts: list[list[int]]) -> dict[str, list[tuple[int, ...]]]:
    config = make_config(redis_url, "drafting-plain", model, None)
    found, drafts, _ = asyncio.run(answers(config, prompts))
    assert drafts is None
    return tokens_of(found)


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["hand-off", "computed here"])
async def test_draft_model_that_is_the_model_itself_is_always_right(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]], plain: Any, num_prefill: int
) -> None:
    decode = {"local_prefill_tokens_per_step": 0 if num_prefill else 24, "max_batch_tokens": 64}
    config = make_config(redis_url, cluster_name, model, model, decode=decode)
    found, drafts, stats = await answers(config, prompts, num_prefill=num_prefill)
    assert tokens_of(found) == plain
    counted = drafts_of(found)
    assert counted.pop("none, please") == (0, 0)
    # There are no drafts beside prompts that are computed here.
    assert all(accepted >= 4 for accepted, _ in counted.values()), counted
    assert sum(accepted for accepted, _ in counted.values()) > 100, counted
    # In other batches rounding may decide otherwise between two tokens.
    assert sum(rejected for _, rejected in counted.values()) <= 3, counted
    assert counted["one at a time"][0] <= NUM_TOKENS // 2
    assert drafts is not None and drafts.num_drafted >= stats.accepted_draft_tokens_total > 0
    num_known = sum(len(prompt) for prompt in prompts) + sum(len(o) for os in plain.values() for o in os)
    assert drafts.num_caught_up < 1.3 * num_known, "nothing is computed over and over"
    if num_prefill:
        assert stats.prefill_tokens_total == 0, "what the draft model computes is no prefill"


async def test_draft_model_that_is_always_wrong_changes_nothing(
    redis_url: str, cluster_name: str, model: Path, stranger: Path, prompts: list[list[int]], plain: Any
) -> None:
    found, drafts, _ = await answers(make_config(redis_url, cluster_name, model, stranger), prompts)
    assert tokens_of(found) == plain
    counted = drafts_of(found)
    rejected = sum(rejected for _, rejected in counted.values())
    accepted = sum(counted[name][0] for name in counted if name != "grammar")
    assert rejected > 80 and accepted < 0.1 * rejected, counted
    assert drafts is not None and drafts.num_drafted >= rejected


@pytest.mark.skipif(selected_isa() is None, reason="the CPU engine does not run on this CPU")
async def test_cpu_engine_accepts_every_token_of_its_own_draft(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]]
) -> None:
    """Its numbers do not depend on the batch."""
    engine = {"kind": "cpu", "threads": 1}
    without, _, _ = await answers(make_config(redis_url, f"{cluster_name}-0", model, None, engine=engine), prompts)
    found, _, _ = await answers(make_config(redis_url, f"{cluster_name}-1", model, model, engine=engine), prompts)
    assert tokens_of(found) == tokens_of(without)
    counted = drafts_of(found)
    assert {rejected for _, rejected in counted.values()} == {0}, counted


async def test_drafts_go_on_after_sequences_had_to_give_way(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]], plain: Any
) -> None:
    """O-PRE-2, with a draft model: what it had in blocks that were taken away is computed again."""
    config = make_config(redis_url, cluster_name, model, model, kv={"num_blocks": 12}, decode={"reserve_tokens": 0})
    found, _, stats = await answers(config, prompts, until=lambda stats: stats.preemptions_total > 0)
    assert tokens_of(found) == plain
    assert stats.preemptions_total > 0 and stats.accepted_draft_tokens_total > 0
    assert sum(rejected for _, rejected in drafts_of(found).values()) <= 3


async def test_stream_goes_on_without_drafts_when_the_draft_model_fails(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]], plain: Any
) -> None:
    class Broken:
        """Refuses to compute after a while."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine
            self.num_left = 6

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def forward(self, *args: Any) -> Any:
            self.num_left -= 1
            if self.num_left < 0:
                raise RuntimeError("broken on purpose")
            return self._engine.forward(*args)

    def load(config: Config) -> LoadedModel:
        loaded = load_decode_model(config)
        return replace(loaded, draft=Broken(loaded.draft))

    config = make_config(redis_url, cluster_name, model, model)
    async with InProcessCluster(config, router=True, decode_engines=[load]) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            result = await client.generate(
                token_ids=prompts[0], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
        assert [result.token_ids] == plain["greedy"]
        await cluster.quiet()


async def test_what_the_draft_model_computes_beside_a_step_that_fails_ends_with_it(
    redis_url: str,
    cluster_name: str,
    model: Path,
    prompts: list[list[int]],
    plain: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_beside = threading.Event()
    begin, draft = DraftDriver.begin_catching_up, DraftDriver.draft
    was_beside: list[bool] = []

    def begin_and_tell(driver: DraftDriver) -> None:
        begin(driver)
        if driver._catching_up is not None:
            is_beside.set()

    async def look_and_draft(driver: DraftDriver, *args: Any) -> None:
        was_beside.append(driver._catching_up is not None)
        await draft(driver, *args)

    async def nothing(driver: DraftDriver) -> bool:
        return False

    monkeypatch.setattr(DraftDriver, "begin_catching_up", begin_and_tell)
    monkeypatch.setattr(DraftDriver, "draft", look_and_draft)
    monkeypatch.setattr(DraftDriver, "catch_up", nothing)

    class Failing:
        """Fails its first step, when the draft model is to compute something beside it."""

        def __init__(self, engine: Any) -> None:
            self._engine = engine
            self.has_failed = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._engine, name)

        def forward(self, *args: Any) -> Any:
            if not self.has_failed:
                self.has_failed = True
                assert is_beside.wait(60.0)
                raise RuntimeError("broken on purpose")
            return self._engine.forward(*args)

    def load(config: Config) -> LoadedModel:
        loaded = load_decode_model(config)
        return replace(loaded, engine=Failing(loaded.engine))

    config = make_config(redis_url, cluster_name, model, model)
    async with InProcessCluster(config, router=True, decode_engines=[load]) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            result = await client.generate(
                token_ids=prompts[0], max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True
            )
        assert result.placement.attempts > 1 and [result.token_ids] == plain["greedy"]
        await cluster.quiet()
    assert is_beside.is_set() and was_beside and not any(was_beside)


async def test_stream_whose_worker_dies_goes_on_with_drafts_elsewhere(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]]
) -> None:
    """O-REC-1, with a draft model."""
    options: dict[str, Any] = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
    config = make_config(redis_url, cluster_name, model, model)
    async with InProcessCluster(config, decode=2, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            received: list[int] = []
            async with client.stream(token_ids=prompts[0], **options) as stream:
                async for delta in stream:
                    received += delta.token_ids
                    if len(received) > 20 and len(cluster.decode) == 2:
                        worker = next(w for w in cluster.decode if w.stats().num_running)
                        cluster.decode.remove(worker)
                        await cluster.kill(worker)
                result = await stream.result()
            wanted = await client.generate(token_ids=prompts[0], **options, max_draft_tokens=0)
            assert tuple(received) == result.token_ids == wanted.token_ids
            assert result.placement.attempts > 1
            assert cluster.decode[0].stats().accepted_draft_tokens_total > 0
            await eventually(lambda: cluster.decode[0].stats().num_running == 0, "the other one is done")


def test_both_pools_share_the_memory_of_the_configuration(model: Path, stranger: Path) -> None:
    tree = {"model": {"path": str(model)}, "engine": {"kind": "torch", "threads": 1}, "kv": {"pool_bytes": 8 << 20}}
    alone = load_model(Config.model_validate(tree)).engine
    speculation = {"speculation": {"method": "draft", "draft_model": str(stranger)}}
    loaded = load_decode_model(Config.model_validate({**tree, "decode": speculation}))
    assert loaded.draft is not None and loaded.draft.num_blocks == loaded.engine.num_blocks < alone.num_blocks
    nbytes = loaded.engine.num_blocks * (loaded.engine.layout.block_nbytes + loaded.draft.layout.block_nbytes)
    assert 0.98 * (8 << 20) < nbytes <= 8 << 20


@pytest.mark.parametrize("kind", ["torch", "cpu"])
def test_memory_has_to_hold_both_pools(model: Path, stranger: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """No memory of the first one is taken when the second one is made."""
    if kind == "cpu" and selected_isa() is None:
        pytest.skip("the CPU engine does not run on this CPU")
    num_blocks = 12000

    def load() -> LoadedModel:
        speculation = {"speculation": {"method": "draft", "draft_model": str(stranger)}}
        tree = {
            "model": {"path": str(model)},
            "engine": {"kind": kind, "threads": 1},
            "kv": {"num_blocks": num_blocks},
            "decode": speculation,
        }
        return load_decode_model(Config.model_validate(tree))

    loaded = load()
    assert loaded.draft is not None
    pools = [num_blocks * engine.layout.block_nbytes for engine in (loaded.engine, loaded.draft)]
    room = (cpu_loader.WORKING_NBYTES if kind == "cpu" else 0) + (16 << 20)

    def have(free: int) -> None:
        monkeypatch.setattr(cpu_loader, "available_memory", lambda: free)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))

    assert min(pools) > 20 << 20
    have(sum(pools) + room)
    load()
    have(max(pools) + room)
    with pytest.raises(ConfigError, match=r"^num_blocks: .* beside one of .* do not fit"):
        load()


@pytest.mark.parametrize("what", ["vocabulary", "rows"])
def test_draft_model_of_another_vocabulary_is_refused_at_start(model: Path, tmp_path: Path, what: str) -> None:
    if what == "rows":
        other = make_script_b(tmp_path / "other", start="a", script=["Hello"]).directory
    else:
        other = make_tiny_kv(tmp_path / "other", options=TinyOptions(eos_tokens=()))
        path = other / "tokenizer.json"
        tree = json.loads(path.read_text())
        vocabulary = tree["model"]["vocab"]
        vocabulary["on"], vocabulary["es"] = vocabulary["es"], vocabulary["on"]
        path.write_text(json.dumps(tree))
    speculation = {"speculation": {"method": "auto", "draft_model": str(other)}}
    config = Config.model_validate({"model": {"path": str(model)}, "engine": {"kind": "torch"}, "decode": speculation})
    with pytest.raises(ConfigError, match=r"decode\.speculation\.draft_model: a draft model needs the same vocabulary"):
        load_decode_model(config)
