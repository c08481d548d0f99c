"""Grammars through a router, prefill and decode workers: the first token is masked by one worker, the rest by another.

The model is random and knows no JSON: whatever is right about its output is the grammar's doing.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import openai
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM

from pdserve.client import AsyncClient
from pdserve.config import Config
from pdserve.errors import InvalidRequestError
from pdserve.model.source import open_model
from pdserve.testing.cluster import InProcessCluster, test_config
from pdserve.testing.http_rig import openai_client
from pdserve.testing.json_schemas import json_schemas, read_json
from pdserve.testing.reference import MIN_GAP
from pdserve.testing.tiny_models import TinyOptions, make_tiny_kv
from pdserve.testing.tiny_tokenizers import CHAT_TEMPLATE
from pdserve.testing.worker_client import ScriptedRouter
from pdserve.tokenizer import Tokenizer, load_tokenizer
from pdserve.types import FinishReason, GenerationJob, Grammar, GrammarKind, SamplingParams

CHAT: list[Any] = [{"role": "user", "content": "Answer in JSON."}]
PROMPT = "Once upon a time there was a prompt of several blocks, which is split between two workers"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_kv(tmp_path_factory.mktemp("tiny-kv") / "model", options=TinyOptions(chat_template=CHAT_TEMPLATE))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(open_model(str(model)))


def make_config(redis_url: str, cluster_name: str, model: Path, kind: str = "torch") -> Config:
    return test_config(
        redis_url,
        cluster_name,
        model={"path": str(model)},
        engine={"kind": kind, "threads": 1},
        router={"listen": "127.0.0.1:0", "http_port": 0},
        kv={"num_blocks": 600},
    )


@pytest.fixture(params=["torch", "cpu"])
async def cluster(
    request: pytest.FixtureRequest, redis_url: str, cluster_name: str, model: Path
) -> AsyncIterator[InProcessCluster]:
    config = make_config(redis_url, cluster_name, model, request.param)
    async with InProcessCluster(config, decode=2, router=True) as cluster:
        yield cluster
        await cluster.quiet()


@pytest.fixture
async def http(cluster: InProcessCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    assert cluster.router is not None
    async with openai_client(cluster.router.http_address) as client:
        yield client


@pytest.fixture
async def grpc_client(cluster: InProcessCluster) -> AsyncIterator[AsyncClient]:
    assert cluster.router is not None
    async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
        yield client


def random_schemas(count: int) -> list[dict[str, Any]]:
    """The same ones each time."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(json_schemas())
    def collect(schema: dict[str, Any]) -> None:
        found.append(schema)

    collect()
    return found


async def test_schemas_made_at_random_validate_at_a_high_temperature(http: openai.AsyncOpenAI) -> None:
    """Two outputs of each, all together in one batch, half of them streamed."""

    async def ask(number: int, schema: Mapping[str, Any]) -> list[tuple[str, str]]:
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "made_up", "schema": schema, "strict": True}}
        options: dict[str, Any] = {"model": "model", "messages": CHAT, "temperature": 1.5, "max_tokens": 150}
        if number % 2:
            stream = await http.chat.completions.create(
                **options, response_format=wanted, n=2, seed=number, stream=True
            )
            texts, reasons = ["", ""], ["", ""]
            async for chunk in stream:
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
                    reasons[choice.index] = choice.finish_reason or ""
            return list(zip(texts, reasons, strict=True))
        answer = await http.chat.completions.create(**options, response_format=wanted, n=2, seed=number)
        return [(choice.message.content or "", choice.finish_reason) for choice in answer.choices]

    schemas = random_schemas(16)
    answers = await asyncio.gather(*(ask(i, schema) for i, schema in enumerate(schemas)))
    num_complete = 0
    for schema, outputs in zip(schemas, answers, strict=True):
        for text, reason in outputs:
            if reason == "stop":
                jsonschema_rs.validate(schema, read_json(text))
                num_complete += 1
            else:
                assert reason == "length"
    # The others hold texts without a bound.
    assert num_complete > len(schemas)


class Pet(BaseModel):
    name: str = Field(max_length=8)
    legs: int = Field(ge=0, le=8)
    tags: list[str] = Field(max_length=1)


async def test_openais_client_parses_what_it_asked_for(http: openai.AsyncOpenAI) -> None:
    answer = await http.chat.completions.parse(
        model="model", messages=CHAT, temperature=1.5, seed=7, max_tokens=900, response_format=Pet
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    pet = choice.message.parsed
    assert isinstance(pet, Pet)
    assert 0 <= pet.legs <= 8


WAYS: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "[A-F]{3}-[0-9]{2,4}"}}, r"[A-F]{3}-[0-9]{2,4}"),
    ({"structured_outputs": {"choice": ["yes", "no", "maybe not"], "json": None}}, "yes|no|maybe not"),
    ({"structured_outputs": {"grammar": 'start: "<" ("a" | "b") ">"'}}, "<[ab]>"),
    ({"structured_outputs": {"json": {"const": [1, "é"]}}}, r'\[\s*1\s*,\s*"é"\s*\]'),
    ({"guided_json": '{"enum": [true, null]}'}, "true|null"),
    ({"guided_regex": "(ab){2}"}, "abab"),
    ({"guided_choice": ["left", "right"]}, "left|right"),
    ({"guided_grammar": 'start: /[0-9]/ "%"'}, "[0-9]%"),
    ({"response_format": {"type": "json_object", "schema": {"const": 5}}}, "5"),
    ({"response_format": {"type": "text"}, "guided_choice": ["up"]}, "up"),
]


async def test_every_way_to_ask(http: openai.AsyncOpenAI) -> None:
    async def ask(fields: dict[str, Any], pattern: str) -> None:
        answer = await http.completions.create(
            model="model", prompt=PROMPT, max_tokens=250, temperature=1.0, seed=1, extra_body=fields
        )
        assert answer.choices[0].finish_reason == "stop"
        assert re.fullmatch(pattern, answer.choices[0].text), answer.choices[0].text

    await asyncio.gather(*(ask(fields, pattern) for fields, pattern in WAYS))


async def test_any_object_is_an_object_or_unfinished(http: openai.AsyncOpenAI) -> None:
    answer = await http.completions.create(
        model="model", prompt=PROMPT, max_tokens=80, temperature=1.5, seed=5, n=4,
        extra_body={"response_format": {"type": "json_object"}},
    )  # fmt: skip
    for choice in answer.choices:
        assert choice.text.startswith("{")
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.text), dict)


@pytest.mark.parametrize("cluster", ["torch"], indirect=True)
async def test_tokens_and_log_probabilities_are_those_of_a_masked_softmax_in_transformers(
    grpc_client: AsyncClient, model: Path, tokenizer: Tokenizer
) -> None:
    """Greedy, against a loop over the logits of transformers. Log-probabilities stay those of the model, masks or not;
    a bias counts before the mask."""
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    (eos,) = tokenizer.eos_token_ids
    prompt = tokenizer.encode(PROMPT)
    bias = {tokenizer.encode("c")[0]: 1.0, tokenizer.encode("!")[0]: 50.0}
    text, output, logprobs, gap = b"", list[int](), list[float](), 100.0
    with torch.inference_mode():
        while not output or output[-1] != eos:
            logits = reference(torch.tensor([[*prompt, *output]])).logits[0, -1].double()
            allowed = [
                i
                for i in range(tokenizer.vocab_size)
                if i not in tokenizer.special_token_ids
                and re.fullmatch(b"[a-m ]{1,12}", text + tokenizer.id_to_bytes(i))
            ]
            allowed += [eos] if len(text) >= 4 else []
            best, *others = sorted(((float(logits[i]) + bias.get(i, 0.0), i) for i in allowed), reverse=True)
            if others:
                gap = min(gap, best[0] - others[0][0])
            output.append(best[1])
            logprobs.append(float(torch.log_softmax(logits, -1)[output[-1]]))
            text += tokenizer.id_to_bytes(output[-1])
    assert gap >= MIN_GAP, "no step is a near tie"
    answer = await grpc_client.generate(
        token_ids=prompt, temperature=0.0, max_tokens=40, regex="[a-m ]{4,12}", logprobs=2, logit_bias=bias
    )
    assert list(answer.token_ids) == output
    assert answer.finish_reason is FinishReason.STOP
    assert [entry.logprob for entry in answer.logprobs] == pytest.approx(logprobs, abs=1e-4)


async def test_the_same_over_grpc_and_http_alone_and_among_others(
    http: openai.AsyncOpenAI, grpc_client: AsyncClient
) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    alone = [
        await grpc_client.generate(PROMPT, json_schema=schema, temperature=1.0, seed=i, max_tokens=60) for i in range(4)
    ]
    many, *plain = await asyncio.gather(
        http.completions.create(
            model="model", prompt=PROMPT, temperature=1.0, seed=0, n=4, max_tokens=60,
            extra_body={"guided_json": schema},
        ),
        *(grpc_client.generate(PROMPT, temperature=1.0, seed=9, max_tokens=30) for _ in range(6)),
    )  # fmt: skip
    assert [choice.text for choice in many.choices] == [answer.text for answer in alone]
    assert [choice.finish_reason for choice in many.choices] == [answer.finish_reason.value for answer in alone]
    assert len({answer.text for answer in plain}) == 1


async def test_min_tokens_goes_on_where_the_grammar_does_and_ends_where_it_ends(grpc_client: AsyncClient) -> None:
    longer = await grpc_client.generate(PROMPT, regex="[ab]{1,30}", min_tokens=20, max_tokens=60, seed=3)
    assert longer.usage.completion_tokens > 20
    assert longer.finish_reason is FinishReason.STOP
    shorter = await grpc_client.generate(PROMPT, regex="[ab]{3}", min_tokens=20, max_tokens=60, seed=3)
    assert re.fullmatch("[ab]{3}", shorter.text)
    assert shorter.usage.completion_tokens <= 4
    assert shorter.finish_reason is FinishReason.STOP


async def test_max_tokens_and_stop_strings_end_an_output_wherever_it_is(grpc_client: AsyncClient) -> None:
    cut = await grpc_client.generate(PROMPT, regex="[ab]{500}", max_tokens=6, seed=3)
    assert cut.finish_reason is FinishReason.LENGTH
    assert cut.usage.completion_tokens == 6
    stopped = await grpc_client.generate(PROMPT, regex="[ab]+c[ab]+", max_tokens=200, seed=3, stop=["c"])
    if stopped.finish_reason is FinishReason.STOP:
        assert re.fullmatch("[ab]+", stopped.text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}},
        "response_format.json_schema.schema",
    ),
    ({"structured_outputs": {"regex": "a(", "choice": None}}, "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: x"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


async def test_what_cannot_be_followed_is_refused_by_name(http: openai.AsyncOpenAI) -> None:
    for fields, param in REFUSED:
        with pytest.raises(openai.BadRequestError) as caught:
            await http.completions.create(model="model", prompt=PROMPT, max_tokens=6, extra_body=fields)
        assert caught.value.param == param
        assert param in caught.value.message


async def test_refused_over_grpc_by_the_names_of_its_own_request(grpc_client: AsyncClient) -> None:
    with pytest.raises(InvalidRequestError, match=r"grammar\.regex: ") as caught:
        await grpc_client.generate(PROMPT, regex="a(", max_tokens=6)
    assert caught.value.field == "grammar.regex"
    with pytest.raises(InvalidRequestError, match="excludes a grammar"):
        await grpc_client.generate(PROMPT, regex="a", ignore_eos=True, max_tokens=6)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_lost_decode_worker_changes_nothing(redis_url: str, cluster_name: str, model: Path, n: int) -> None:
    """The next one makes the state of the grammar out of the tokens that are known."""
    config = make_config(redis_url, cluster_name, model)
    numbers = "[0-9]{1,2}(,[0-9]{1,2}){60,80}"
    options: Any = {"regex": numbers, "temperature": 1.5, "seed": 4, "max_tokens": 400, "n": n}
    async with InProcessCluster(config, prefill=2, decode=2, router=True) as cluster:
        assert cluster.router is not None
        async with AsyncClient(cluster.router.address, timeout_s=60.0) as client:
            undisturbed = await client.generate(PROMPT, **options)
            assert all(re.fullmatch(numbers, output.text) for output in undisturbed.outputs)
            async with client.stream(PROMPT, request_id="disturbed", **options) as stream:
                num_tokens = 0
                while num_tokens < 20 * n:
                    num_tokens += len((await anext(stream)).token_ids)
                name = (await client.get_request("disturbed")).decode_worker
                await cluster.kill(next(w for w in cluster.decode if w.host.worker_id == name))
                disturbed = await stream.result()
    assert len(disturbed.outputs) == n
    for output, expected in zip(disturbed.outputs, undisturbed.outputs, strict=True):
        assert output.placement.attempts == 2
        assert output.token_ids == expected.token_ids
        assert output.text == expected.text


async def test_a_grammar_that_fails_at_a_worker_ends_its_request_and_no_other(
    redis_url: str, cluster_name: str, model: Path, tokenizer: Tokenizer
) -> None:
    """One that does not compile there, which its router should have seen, and one that becomes too complex on the way.
    Neither is worth another try."""
    config = make_config(redis_url, cluster_name, model)
    prompt = tuple(tokenizer.encode(PROMPT))

    (a,) = tokenizer.encode("a")

    def job(name: str, grammar: Grammar | None, bias: float = 0.0) -> GenerationJob:
        return GenerationJob(
            request_id=name,
            attempt=1,
            router_id="r",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            max_new_tokens=400,
            stop_token_ids=tokenizer.eos_token_ids,
            sampling=SamplingParams(temperature=0.0, logit_bias=((a, bias),)),
            grammar=grammar,
        )

    ambiguous = Grammar(GrammarKind.LARK, 'start: x\nx: "a" | x x | x x x | "a" x "a" | x "a" x')
    async with InProcessCluster(config) as cluster:
        sessions = [("prefill", cluster.prefill[0].host.info.address), ("decode", cluster.decode[0].host.info.address)]
        async with ScriptedRouter(*sessions, router_id="r") as router:
            targets = [cluster.target()]
            plain = await router.submit(job("plain", None), targets)
            wrong = await router.submit(job("wrong", Grammar(GrammarKind.REGEX, "a(")), targets)
            complex_ = await router.submit(job("complex", ambiguous, bias=100.0), targets)
            right = await router.submit(job("right", Grammar(GrammarKind.REGEX, "(ab){20}")), targets)
            await router.finished(plain, wrong, complex_, right, timeout_s=60.0)
            for key in (wrong, complex_):
                failure = router.failure(key)
                assert failure is not None
                assert (failure.code, failure.retryable) == ("invalid_request", False)
                assert "grammar" in failure.message
            assert not router.tokens(wrong)
            written = tokenizer.decode(router.output(complex_))
            assert len(written) > 5
            assert set(written) == {"a"}
            assert router.failure(plain) is router.failure(right) is None
            assert len(router.output(plain)) == 400
            assert tokenizer.decode(router.output(right), skip_special_tokens=True) == "ab" * 20
