"""Penalties, bias, min_tokens and log-probabilities through a router, prefill and decode workers, on a random model.

The reference is transformers in float32: its own repetition penalty, and plain loops over its logits for the rest.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList

from pdserve.client import AsyncClient, Generation, TokenLogprobs
from pdserve.config import Config
from pdserve.engine.batch import Batch
from pdserve.engine.engine import Engine, LayerWatch
from pdserve.engine.output import StepOutput
from pdserve.errors import InvalidRequestError
from pdserve.model.source import open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.reference import MIN_GAP
from pdserve.testing.tiny_models import TinyOptions, make_tiny_kv
from pdserve.testing.tiny_tokenizers import EOS
from pdserve.testing.waiting import eventually
from pdserve.types import FinishReason
from pdserve.worker.model import LoadedModel, load_model

NUM_TOKENS = 16
Logits = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = TinyOptions(eos_tokens=(EOS, "!"))
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model", options=options)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    loaded.eval()
    return loaded


@pytest.fixture(scope="module")
def prompts(model: Path) -> list[list[int]]:
    """Long enough for several blocks and for chunks of several steps, and full of repeated tokens."""
    rng = np.random.default_rng(17)
    vocab_size = open_model(str(model)).config.vocab_size
    return [
        rng.choice(rng.integers(0, vocab_size, size=25), size=n).tolist()
        for n in (40, 80, 81, 150, 200, 33, 49, 90, 64, 63, 110, 37)
    ]


def make_config(redis_url: str, cluster_name: str, model: Path, *, num_blocks: int = 400) -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": "torch", "threads": 1},
        router={"listen": "127.0.0.1:0"},
        kv={"num_blocks": num_blocks},
        decode={"reserve_tokens": 16},
        prefill={"max_batch_tokens": 64},
    )


@pytest.fixture
async def cluster(redis_url: str, cluster_name: str, model: Path) -> AsyncIterator[InProcessCluster]:
    config = make_config(redis_url, cluster_name, model)
    # One prefill worker, so that a prompt that comes again finds its prefix.
    async with InProcessCluster(config, prefill=1, decode=2, router=True) as cluster:
        yield cluster
        assert all(d.stats().prefill_tokens_total == 0 for d in cluster.decode)


@pytest.fixture
async def client(cluster: InProcessCluster) -> AsyncIterator[AsyncClient]:
    assert cluster.router is not None
    async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
        yield client


async def ask(client: AsyncClient, prompt: Sequence[int], **options: Any) -> Generation:
    given = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **options}
    return await client.generate(token_ids=prompt, **given)


def log_softmax(reference: Any, tokens: Sequence[int]) -> Logits:
    """[len(tokens), V]: row i is the distribution of the token after tokens[: i + 1]."""
    with torch.inference_mode():
        result: Logits = torch.log_softmax(reference(torch.tensor([list(tokens)])).logits[0].double(), -1).numpy()
    return result


def greedy_with(
    reference: Any, prompt: Sequence[int], edit: Callable[[Logits, list[int]], None]
) -> tuple[list[int], bool]:
    """Greedy tokens where `edit` changes the logits, given the output so far; and whether no step was a near tie."""

    def edited(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits = scores[0].double().numpy().copy()
        edit(logits, ids[0, len(prompt) :].tolist())
        return torch.from_numpy(logits)[None]

    return reference_output(reference, prompt, logits_processor=LogitsProcessorList([edited]))


def reference_output(reference: Any, prompt: Sequence[int], **options: Any) -> tuple[list[int], bool]:
    """What transformers itself generates, and whether no step was a near tie."""
    reference.generation_config = GenerationConfig(pad_token_id=0)  # type: ignore[no-untyped-call]
    found = reference.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones((1, len(prompt)), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        output_scores=True,
        return_dict_in_generate=True,
        **options,
    )
    best = torch.stack(found.scores)[:, 0].topk(2).values
    return found.sequences[0, len(prompt) :].tolist(), bool((best[:, 0] - best[:, 1] >= MIN_GAP).all())


def presence(logits: Logits, output: list[int]) -> None:
    for token in set(output):
        logits[token] -= 2.0


def frequency(logits: Logits, output: list[int]) -> None:
    for token in output:
        logits[token] -= 1.0


@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency"])
async def test_penalties_count_the_right_tokens_cold_and_with_a_cached_prefix(
    cluster: InProcessCluster, client: AsyncClient, reference: Any, prompts: list[list[int]], kind: str
) -> None:
    """O-SAM-4."""
    options = {
        "repetition": {"repetition_penalty": 1.3},
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 1.0},
    }[kind]
    expected = [
        reference_output(reference, p, repetition_penalty=1.3)
        if kind == "repetition"
        else greedy_with(reference, p, presence if kind == "presence" else frequency)
        for p in prompts
    ]
    clear = [i for i, (_, is_clear) in enumerate(expected) if is_clear]
    assert len(clear) >= 2
    plain = await asyncio.gather(*(ask(client, p) for p in prompts))
    cold = await asyncio.gather(*(ask(client, p, **options) for p in prompts))
    warm = [await ask(client, p, **options) for p in prompts]
    for i in clear:
        assert list(cold[i].token_ids) == list(warm[i].token_ids) == expected[i][0]
        if kind != "repetition":
            assert cold[i].token_ids[0] == plain[i].token_ids[0], "the prompt must not count"
    # Positive controls.
    assert all(answer.usage.cached_tokens > 0 for answer in warm)
    assert any(a.token_ids != b.token_ids for a, b in zip(cold, plain, strict=True))


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 4])
@pytest.mark.parametrize("which", [0, 1], ids=["first EOS", "second EOS"])
async def test_a_forced_end_of_sequence_comes_right_after_min_tokens(
    client: AsyncClient, model: Path, prompts: list[list[int]], min_tokens: int, which: int
) -> None:
    """O-SAM-2."""
    eos = open_model(str(model)).config.eos_token_ids
    assert len(eos) == 2
    answer = await ask(
        client,
        prompts[1],
        ignore_eos=False,
        logit_bias={eos[which]: 100.0},
        min_tokens=min_tokens,
        max_tokens=32,
    )
    assert answer.usage.completion_tokens == min_tokens + 1
    assert answer.finish_reason is FinishReason.STOP
    assert answer.matched_stop == eos[which]
    assert not set(answer.token_ids[:min_tokens]) & set(eos)


async def test_a_bias_of_minus_100_excludes_and_stop_token_ids_end(
    client: AsyncClient, prompts: list[list[int]]
) -> None:
    plain = await ask(client, prompts[0])
    without = await ask(client, prompts[0], logit_bias={plain.token_ids[3]: -100.0})
    assert without.token_ids[:3] == plain.token_ids[:3] or plain.token_ids[3] in plain.token_ids[:3]
    assert plain.token_ids[3] not in without.token_ids
    first = plain.token_ids.index(plain.token_ids[3])
    stopped = await ask(client, prompts[0], stop_token_ids=[plain.token_ids[3]])
    assert stopped.token_ids == plain.token_ids[: first + 1]
    assert stopped.finish_reason is FinishReason.STOP


def check_logprobs(found: Sequence[TokenLogprobs], expected: Logits, tokens: Sequence[int], num_top: int) -> None:
    """`found` are those of `tokens`, whose distributions are the rows of `expected`."""
    assert [entry.token_id for entry in found] == list(tokens)
    for entry, row in zip(found, expected, strict=True):
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert len(entry.top) == num_top
        assert [value for _, value in entry.top] == pytest.approx(np.sort(row)[::-1][:num_top].tolist(), abs=1e-4)
        assert all(value == pytest.approx(row[token], abs=1e-4) for token, value in entry.top)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
@pytest.mark.parametrize("num_top", [0, 1, 3, 20])
async def test_each_token_has_its_logprob_and_the_first_ones_are_not_lost_at_the_hand_off(
    client: AsyncClient, reference: Any, prompts: list[list[int]], max_tokens: int, num_top: int
) -> None:
    """O-KVT-1, O-API-2."""
    prompt = prompts[1]
    answer = await ask(client, prompt, max_tokens=max_tokens, logprobs=num_top)
    assert answer.usage.completion_tokens == len(answer.token_ids) == len(answer.logprobs) == max_tokens
    assert answer.finish_reason is FinishReason.LENGTH
    expected = log_softmax(reference, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
    check_logprobs(answer.logprobs, expected, answer.token_ids, num_top)
    assert answer.token_ids[0] == int(expected[0].argmax())


async def test_logprobs_are_the_models_own_whatever_is_done_to_the_logits(
    client: AsyncClient, reference: Any, prompts: list[list[int]]
) -> None:
    """Neither temperature nor penalties, bias or masks show in them; nobody gets any who did not ask."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 1.5, "top_p": 0.9, "seed": 3, "logprobs": 2},
        {"frequency_penalty": 1.5, "repetition_penalty": 1.2, "logprobs": 5},
        {"logit_bias": {7: 100.0}, "logprobs": 0},
        {},
        {"ignore_eos": False, "min_tokens": NUM_TOKENS, "temperature": 0.7, "seed": 5, "logprobs": 1},
    ]
    answers = await asyncio.gather(*(ask(client, p, **kind) for p, kind in zip(prompts, kinds, strict=False)))
    for prompt, kind, answer in zip(prompts, kinds, answers, strict=False):
        expected = log_softmax(reference, [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        if "logprobs" in kind:
            check_logprobs(answer.logprobs, expected, answer.token_ids, kind["logprobs"])
        else:
            assert answer.logprobs == ()
        assert answer.prompt_logprobs == ()


@pytest.mark.parametrize("num_top", [0, 3, 20])
async def test_prompt_logprobs_are_those_of_transformers_in_chunks_and_after_a_cached_prefix(
    cluster: InProcessCluster, client: AsyncClient, reference: Any, prompts: list[list[int]], num_top: int
) -> None:
    """Steps hold 64 tokens, so the longer prompts are computed in several, and together with others."""
    await asyncio.gather(*(ask(client, p) for p in prompts))
    cached = await ask(client, prompts[3])
    assert cached.usage.cached_tokens > 0, "the prefix is in the cache"
    answers = await asyncio.gather(*(ask(client, p, prompt_logprobs=num_top, logprobs=1) for p in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = log_softmax(reference, [*prompt, *answer.token_ids])
        check_logprobs(answer.prompt_logprobs, expected[: len(prompt) - 1], prompt[1:], num_top)
        check_logprobs(answer.logprobs, expected[len(prompt) - 1 : -1], answer.token_ids, 1)
        assert answer.usage.cached_tokens == 0


async def test_a_prompt_of_one_token_has_no_logprobs(client: AsyncClient, prompts: list[list[int]]) -> None:
    answer = await ask(client, prompts[0][:1], prompt_logprobs=5)
    assert answer.prompt_logprobs == ()
    assert len(answer.token_ids) == NUM_TOKENS


EVERYTHING: dict[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logprobs": 3,
    "prompt_logprobs": 2,
}


def assert_same(one: Generation, other: Generation) -> None:
    assert one.token_ids == other.token_ids
    assert len(one.logprobs) == len(one.token_ids)
    for a, b in (
        *zip(one.logprobs, other.logprobs, strict=True),
        *zip(one.prompt_logprobs, other.prompt_logprobs, strict=True),
    ):
        assert (a.token_id, len(a.top)) == (b.token_id, len(b.top))
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)


async def test_the_same_alone_among_others_and_streamed(client: AsyncClient, prompts: list[list[int]]) -> None:
    options = [EVERYTHING | {"seed": i, "logit_bias": {i: 3.0}} for i in range(len(prompts))]
    together = await asyncio.gather(*(ask(client, p, **o) for p, o in zip(prompts, options, strict=True)))
    for prompt, kind, answer in zip(prompts, options, together, strict=True):
        async with client.stream(token_ids=prompt, max_tokens=NUM_TOKENS, ignore_eos=True, **kind) as stream:
            deltas = [delta async for delta in stream]
            assert_same(answer, await stream.result())
        assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)
        scored = [delta.seq for delta in deltas if delta.prompt_logprobs]
        assert max(scored) <= min(delta.seq for delta in deltas if delta.token_ids)


class Gate:
    """Where the engines of a test stop, so that a worker is lost at that very point."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self._free_steps = 0

    def close_after(self, steps: int) -> None:
        """Let so many more steps pass, all engines together."""
        self._free_steps = steps
        self._open.clear()

    def open(self) -> None:
        """Let them go on."""
        self._open.set()

    def load(self, config: Config) -> LoadedModel:
        """An `EngineFactory`."""
        loaded = load_model(config)
        return dataclasses.replace(loaded, engine=GatedEngine(loaded.engine, self))

    def wait(self) -> None:
        """Called by each engine before a step."""
        if not self._open.is_set() and self._free_steps > 0:
            self._free_steps -= 1
        else:
            self._open.wait()


class GatedEngine:
    """Implements `Engine`."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self.config = engine.config
        self.layout = engine.layout
        self.num_blocks = engine.num_blocks
        self.store = engine.store

    def forward(self, batch: Batch, watch: LayerWatch | None = None) -> StepOutput:
        """See `Engine.forward`."""
        self._gate.wait()
        return self._engine.forward(batch, watch)

    def forward_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """See `Engine.forward_logits`."""
        return self._engine.forward_logits(batch)


@pytest.mark.parametrize(("lost", "steps"), [("prefill", 1), ("decode", 5)])
async def test_a_request_that_is_replayed_after_a_lost_worker_ends_as_if_nothing_had_happened(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]], lost: str, steps: int
) -> None:
    """Lost after the first of three chunks of the prompt, or after six tokens of the output."""
    gate = Gate()
    engines = {f"{lost}_engines": [gate.load, gate.load]}
    config = make_config(redis_url, cluster_name, model)
    options = EVERYTHING | {"seed": 11, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with InProcessCluster(config, prefill=2, decode=2, router=True, **engines) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            undisturbed = await client.generate(token_ids=prompts[3], **options)
            gate.close_after(steps)
            async with client.stream(token_ids=prompts[3], request_id="disturbed", **options) as stream:
                num_tokens = 0
                while num_tokens < (0 if lost == "prefill" else steps + 1):
                    num_tokens += len((await anext(stream)).token_ids)
                if lost == "prefill":
                    assert (await anext(stream)).prompt_logprobs
                info = await client.get_request("disturbed")
                workers = cluster.prefill if lost == "prefill" else cluster.decode
                name = info.prefill_worker if lost == "prefill" else info.decode_worker
                kill = asyncio.create_task(cluster.kill(next(w for w in workers if w.host.worker_id == name)))

                async def replayed() -> bool:
                    return (await client.get_request("disturbed")).attempt >= 2

                try:
                    await eventually(replayed, "the request is in its second attempt")
                finally:
                    gate.open()  # Nothing stops while an engine waits.
                await kill
                disturbed = await stream.result()
            assert_same(disturbed, undisturbed)
            assert (undisturbed.placement.attempts, disturbed.placement.attempts) == (1, 2)


async def test_a_request_that_is_preempted_ends_as_if_nothing_had_happened(
    redis_url: str, cluster_name: str, model: Path, prompts: list[list[int]]
) -> None:
    """O-PRE-1: what is computed again has the penalties and the log-probabilities that it had."""
    config = make_config(redis_url, cluster_name, model, num_blocks=44)
    async with InProcessCluster(config, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            options = [EVERYTHING | {"seed": i, "max_tokens": 64} for i in range(len(prompts))]
            pairs = list(zip(prompts, options, strict=True))
            together = await asyncio.gather(*(ask(client, p, **o) for p, o in pairs))
            assert cluster.decode[0].stats().preemptions_total > 0
            for (prompt, kind), answer in zip(pairs, together, strict=True):
                assert_same(answer, await ask(client, prompt, **kind))


async def test_parameters_out_of_range_are_refused_by_name(client: AsyncClient, prompts: list[list[int]]) -> None:
    nan = float("nan")
    for options, field in (
        ({"presence_penalty": 2.5}, "sampling.presence_penalty"),
        ({"frequency_penalty": nan}, "sampling.frequency_penalty"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"repetition_penalty": nan}, "sampling.repetition_penalty"),
        ({"logit_bias": {5: 101.0}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {5: nan}}, "sampling.logit_bias[5]"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {100_000: 1.0}}, "sampling.logit_bias"),
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            await ask(client, prompts[0], **options)
        assert refused.value.field == field
    answer = await ask(client, prompts[0])
    assert dataclasses.asdict(answer.usage)["completion_tokens"] == NUM_TOKENS
