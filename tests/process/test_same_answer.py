"""One request, one answer: over HTTP and gRPC, streamed or not, alone or among 32 others."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pdserve.client import AsyncClient
from pdserve.testing.both_apis import Ask, BothApis
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster
from pdserve.testing.waiting import eventually

pytestmark = pytest.mark.timeout(180)

CHAT: Any = [{"role": "user", "content": "Name three primary colours."}]
PROMPT = "Once upon a time there was a cluster of"
NUM_OTHERS = 32
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}

ASKS = {
    "greedy": Ask(messages=CHAT, common={"temperature": 0, "max_tokens": 24}),
    "seeded": Ask(
        messages=CHAT,
        common={"temperature": 1.2, "top_p": 0.9, "top_k": 40, "seed": 2**63 + 5, "max_tokens": 24, "ignore_eos": True},
    ),
    "one token": Ask(messages=CHAT, common={"temperature": 1.0, "seed": 3, "max_tokens": 1}),
    "token ids": Ask(token_ids=range(5, 45), common={"temperature": 0, "max_tokens": 30, "min_tokens": 30}),
    "stop string": Ask(
        PROMPT, common={"temperature": 1.0, "seed": 11, "max_tokens": 60, "stop": ["e", "th"], "min_tokens": 3}
    ),
    "penalties": Ask(
        messages=CHAT,
        common={
            "temperature": 0.7,
            "seed": 1,
            "max_tokens": 24,
            "presence_penalty": 0.5,
            "frequency_penalty": 1.5,
            "repetition_penalty": 1.2,
            "min_p": 0.01,
        },
        http={"logit_bias": {"70": 5.0, "71": -100}},
        grpc={"logit_bias": {70: 5.0, 71: -100.0}},
    ),
    "several outputs": Ask(
        messages=CHAT, common={"temperature": 1.0, "seed": 9, "max_tokens": 20, "n": 3, "ignore_eos": True}
    ),
    "schema": Ask(
        messages=CHAT,
        common={"temperature": 1.5, "seed": 4, "max_tokens": 320},
        http={"response_format": {"type": "json_schema", "json_schema": {"name": "lamp", "schema": SCHEMA}}},
        grpc={"json_schema": SCHEMA},
    ),
    "regex": Ask(
        PROMPT,
        common={"temperature": 1.5, "seed": 4, "max_tokens": 40, "n": 2},
        http={"structured_outputs": {"regex": "(ab|cd){3,9}!"}},
        grpc={"regex": "(ab|cd){3,9}!"},
    ),
}


@contextlib.asynccontextmanager
async def others(client: AsyncClient, num: int) -> AsyncIterator[None]:
    """Requests of all lengths, one after another in `num` places. What they get is nobody's business."""

    async def one(i: int) -> None:
        while True:
            await client.generate(token_ids=range(5, 25 + 7 * i), max_tokens=20 + i, ignore_eos=True)

    async def all_there() -> bool:
        return (await client.status()).num_active_requests >= num

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(i)) for i in range(num)]
        try:
            await eventually(all_there, f"{num} requests are active", CALL_TIMEOUT_S)
            yield
        finally:
            for task in tasks:
                task.cancel()


async def test_a_request_has_one_answer(one_pair: ProcessCluster) -> None:
    async with BothApis.of(one_pair) as apis:
        alone = {name: await apis.ask(ask) for name, ask in ASKS.items()}

        async def again(name: str) -> None:
            assert await apis.ask(ASKS[name], at_once=True) == alone[name], name

        async with others(apis.grpc, NUM_OTHERS), asyncio.TaskGroup() as group:
            for name in ASKS:
                group.create_task(again(name))

    assert {name: len(a.outputs) for name, a in alone.items() if len(a.outputs) > 1} == {
        "several outputs": 3,
        "regex": 2,
    }
    assert len({output.text for output in alone["several outputs"].outputs}) == 3
    assert alone["stop string"].only.finish_reason == alone["schema"].only.finish_reason == "stop"
    assert alone["greedy"].only.finish_reason == alone["one token"].only.finish_reason == "length"
    assert alone["token ids"].completion_tokens == 30
