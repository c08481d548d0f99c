"""HTTP clients that lose a stream and continue it behind any of its events, and bodies that are sent twice."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from pdserve.rpc.v1 import common_pb2
from pdserve.store.client import Store
from pdserve.testing.http_rig import (
    RawClient,
    events_of,
    http_client,
    make_chat_model,
    openai_client,
    request_bytes,
)
from pdserve.testing.router_rig import MODEL, PROMPT, RouterRig, RouterRigs, ask, expected
from pdserve.testing.waiting import eventually

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def rigs(store: Store, redis_url: str, model_path: Path) -> RouterRigs:
    return RouterRigs(store, redis_url, model_path)


def events(stream: str) -> list[tuple[str, str]]:
    """(last event id, data) of each event, as the standard has it read: line by line, with ids that stay."""
    found, last_id, data = [], "", ""
    for line in stream.split("\n"):
        if line.startswith("id: "):
            last_id = line.removeprefix("id: ")
        elif line.startswith("data: "):
            data = line.removeprefix("data: ")
        elif not line and data:
            found.append((last_id, data))
            data = ""
        else:
            assert not line or line.startswith(":"), f"neither event nor comment: {line!r}"
    return found


def by_choice(stream: list[tuple[str, str]]) -> dict[int, list[Any]]:
    """What each choice shows, and under -1 the rest. Choices come in any order, and their usage so far with them."""
    found: dict[int, list[Any]] = {}
    for _, data in stream:
        chunk: Any = data if data == "[DONE]" else json.loads(data)
        choices = [] if data == "[DONE]" else chunk.pop("choices")
        if not choices:
            found.setdefault(-1, []).append(chunk)
        for choice in choices:
            chunk.pop("usage", None)
            found.setdefault(choice["index"], []).append((chunk, choice))
    return found


async def resumed(client: httpx2.AsyncClient, name: str, last_id: str = "") -> str:
    headers = {"Last-Event-ID": last_id} if last_id else {}
    answer = await client.get(f"/v1/requests/{name}/events", headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    return answer.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": MESSAGES, "max_tokens": 8}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5, "n": 3, **USAGE}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        (COMPLETIONS, {"prompt": list(PROMPT), "max_tokens": 8, "stop_token_ids": [expected(5)[4]]}),
        (COMPLETIONS, {"prompt": list(PROMPT), "max_tokens": 4, "echo": True, "logprobs": 1, **USAGE}),
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 0, "echo": True, "logprobs": 1, **USAGE}),
        (COMPLETIONS, {"prompt": ["hello", [7, 8]], "max_tokens": 3, "n": 2, "echo": True, **USAGE}),
    ],
)
async def test_behind_any_event_come_exactly_those_that_came_behind_it_at_first(
    rigs: RouterRigs, path: str, body: dict[str, Any]
) -> None:
    async with rigs.start(seeded=True) as rig, http_client(rig.router.http_address) as client:
        body = {**body, "stream": True, "resumable": True, "request_id": "x", "seed": 3}
        whole = (await client.post(path, json=body)).text
        first = events(whole)
        assert first[-1][1] == "[DONE]"
        ids = [last_id for last_id, _ in first[:-1]]
        assert len(set(ids)) == len(ids)
        assert all(ids)
        for number, last_id in enumerate(["", *ids]):
            rest = events(await resumed(client, "x", last_id))
            assert by_choice(rest) == by_choice(first[number:])
            if "n" not in body and not isinstance(body.get("prompt"), list):
                assert [event for event in rest if event[1] != "[DONE]"] == first[number:-1]


async def test_a_stop_string_that_is_held_back_does_not_shift_events(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        text = (await rig.client.generate(ask(8))).text
        for number, stop in enumerate((text[3:6], text[2:4] + "never", text[6:8] + "never")):
            name = f"x{number}"
            body = {"prompt": list(PROMPT), "max_tokens": 8, "temperature": 0, "stop": [stop], "request_id": name}
            whole = (await client.post(COMPLETIONS, json={**body, "stream": True, "resumable": True})).text
            first = events(whole)
            shown = "".join(json.loads(data)["choices"][0]["text"] for _, data in first[:-1])
            assert shown == text.partition(stop)[0]
            for number, (last_id, _) in enumerate(first[:-2], start=1):
                assert [data for _, data in events(await resumed(client, name, last_id))] == [
                    data for _, data in first[number:]
                ]


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_a_cut_client_continues_while_the_request_runs(rigs: RouterRigs, num_choices: int) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        decode = rig.fleet.decode["d0"]
        for num_tokens in (1, 4, 7):
            decode.before_step.let_pass((num_tokens - 1) * num_choices)
            name = f"cut-{num_tokens}"
            body = {"messages": MESSAGES, "max_tokens": 9, "temperature": 0, "n": num_choices}
            body |= {"stream": True, "resumable": True, "request_id": name}
            async with RawClient.connect(rig.router.http_address) as raw:
                await raw.send(request_bytes(CHAT, body))
                await rig.wait_tokens(name, num_tokens * num_choices)
                got = b""
                # The role, and one event for each token.
                for _ in range((num_tokens + 1) * num_choices):
                    got += (await raw.read_until(b"\n\n")).rpartition(b"\r\n")[2]
                raw.leave()
            before = events(got.decode())
            decode.before_step.release()
            after = events(await resumed(client, name, before[-1][0]))
            assert by_choice(before + after) == by_choice(events(await resumed(client, name)))
            assert after[-1][1] == "[DONE]"


async def test_the_stream_of_a_request_is_there_however_it_was_made(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, http_client(rig.router.http_address) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 5, "temperature": 0, "request_id": "plain"}
        plain = (await client.post(COMPLETIONS, json=body)).json()
        await rig.client.generate(ask(5, request_id="typed"))
        for name in ("plain", "typed"):
            *chunks, mark = [data for _, data in events(await resumed(client, name))]
            assert mark == "[DONE]"
            parsed = [json.loads(chunk) for chunk in chunks]
            assert {(chunk["id"], chunk["object"], chunk["model"]) for chunk in parsed} == {
                (name, "text_completion", MODEL)
            }
            texts = [choice["text"] for chunk in parsed for choice in chunk["choices"]]
            assert "".join(texts) == plain["choices"][0]["text"]
        assert parsed[-1]["usage"]["completion_tokens"] == 5


async def test_only_a_resumable_stream_has_ids_and_its_heartbeat_is_no_event(rigs: RouterRigs) -> None:
    async with rigs.start(http_heartbeat_s=0.2) as rig, http_client(rig.router.http_address) as client:
        decode = rig.fleet.decode["d0"]
        body = {"prompt": list(PROMPT), "max_tokens": 3, "temperature": 0, "stream": True}
        assert "id: " not in (await client.post(COMPLETIONS, json=body)).text
        decode.before_step.hold()
        async with RawClient.connect(rig.router.http_address) as raw:
            await raw.send(request_bytes(COMPLETIONS, {**body, "resumable": True}))
            await raw.read_until(b"\r\n: keep-alive\n\r\n")
            decode.before_step.release()
            await raw.read_until(b"[DONE]\n\n")
        # OpenAI's client takes an empty line for an event once it has seen an id.
        decode.before_step.hold()
        async with openai_client(rig.router.http_address) as sdk:
            stream = await sdk.completions.create(
                model=MODEL,
                prompt=list(PROMPT),
                max_tokens=3,
                temperature=0,
                stream=True,
                extra_body={"resumable": True},
            )
            chunks = aiter(stream)
            ids = [(await anext(chunks)).choices[0].text]
            await asyncio.sleep(0.5)  # a pause with heartbeats in it, not a wait for something
            decode.before_step.release()
            ids += [chunk.choices[0].text async for chunk in chunks]
        assert "".join(ids) == (await rig.client.generate(ask(3))).text


async def test_the_same_body_again_gets_the_same_answer_and_another_one_a_conflict(rigs: RouterRigs) -> None:
    async with rigs.start(seeded=True) as rig, http_client(rig.router.http_address) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 6, "request_id": "whole"}
        first, second = [(await client.post(COMPLETIONS, json=body)).text for _ in range(2)]
        assert first == second
        streamed = {**body, "stream": True, "request_id": "streamed", **USAGE}
        prefill = rig.fleet.prefill["p0"]
        prefill.before_first_token.hold()
        running = [asyncio.create_task(client.post(COMPLETIONS, json=streamed)) for _ in range(2)]
        await eventually(lambda: prefill.before_first_token.num_waiting == 1, "it waits")
        prefill.before_first_token.release()
        one, other = [events_of((await answer).text) for answer in running]
        texts = ["".join(c["text"] for e in answer[:-1] for c in e["choices"]) for answer in (one, other)]
        assert texts[0] == texts[1]
        assert one[-2] == other[-2]
        assert len(prefill.jobs) == 2
        for change in ({"max_tokens": 7}, {"stream": True}, {"seed": 1}, {"user": "me"}):
            refused = await client.post(COMPLETIONS, json=body | change)
            assert (refused.status_code, refused.json()["error"]["param"]) == (409, "request_id")
        assert (await rig.client.error(ask(6, request_id="whole"))).code == "already_exists"


async def test_a_reader_that_does_not_keep_up_is_let_go_alone_and_may_come_back(rigs: RouterRigs) -> None:
    async with rigs.start(max_unread_tokens=50) as rig, http_client(rig.router.http_address) as client:
        decode = rig.fleet.decode["d0"]
        decode.before_step.hold()
        fast = asyncio.create_task(rig.client.generate(ask(4000, request_id="x", logprobs=0)))
        await rig.wait_state("x", "DECODING")
        async with RawClient.connect(rig.router.http_address) as slow:
            await slow.send(b"GET /v1/requests/x/events HTTP/1.1\r\nHost: x\r\n\r\n")
            await slow.read_until(b"\n\n")
            decode.before_step.release()
            assert (await fast).token_ids == expected(4000)
            assert b"tokens unread" in await slow.read_until(b'"code":"overloaded"}}\n\n')
        assert await rig.client.state_of("x") == "FINISHED"
        assert len(events(await resumed(client, "x"))) == 4000 + 4


async def test_what_cannot_be_continued_says_why(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, rigs.router() as (other, _), http_client(rig.router.http_address) as client:
        body = {"prompt": list(PROMPT), "max_tokens": 2, "request_id": "x"}
        await client.post(COMPLETIONS, json=body)
        for last_id in ("3", "1,1", "x", "0.x"):
            answer = await client.get("/v1/requests/x/events", headers={"Last-Event-ID": last_id})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Last-Event-ID")
        assert (await client.get("/v1/requests/never/events")).status_code == 404
        assert (await client.get("/v1/requests/n%20o/events")).status_code == 400
        async with http_client(other.http_address) as elsewhere:

            async def answered() -> bool:
                answer = await elsewhere.get("/v1/requests/x/events")
                return bool(answer.status_code == 421 and rig.router.router_id in answer.json()["error"]["message"])

            await eventually(answered, "the other router knows where it is")


async def test_a_failure_is_the_end_of_every_stream_of_its_request(rigs: RouterRigs) -> None:
    async with rigs.start(max_attempts=1) as rig, http_client(rig.router.http_address) as client:
        rig.fleet.decode["d0"].before_step.let_pass(1)
        body = {"prompt": list(PROMPT), "max_tokens": 9, "temperature": 0, "request_id": "x", "stream": True}
        running = asyncio.create_task(client.post(COMPLETIONS, json=body | {"resumable": True}))
        await rig.wait_tokens("x", 2)
        await rig.fleet.kill("d0")
        first = events((await running).text)
        assert json.loads(first[-1][1])["error"]["code"] == "worker_lost"
        assert events(await resumed(client, "x")) == first
        last = await client.get("/v1/requests/x/events", headers={"Last-Event-ID": first[-2][0]})
        assert (last.status_code, last.json()["error"]["code"]) == (503, "worker_lost")


async def test_a_client_that_leaves_while_it_continues_is_waited_for_again(rigs: RouterRigs) -> None:
    async with rigs.start(resume_s=0.5) as rig:
        await leave_while_it_decodes(rig, "x", resumable=True)
        assert await rig.client.state_of("x") == "DECODING"
        async with RawClient.connect(rig.router.http_address) as raw:
            await raw.send(b"GET /v1/requests/x/events HTTP/1.1\r\nHost: x\r\n\r\n")
            await raw.read_until(b"\n\n")
            raw.leave()
        await rig.wait_state("x", "CANCELLED")
        await leave_while_it_decodes(rig, "y", resumable=False)
        await rig.wait_state("y", "CANCELLED")


async def leave_while_it_decodes(rig: RouterRig, name: str, *, resumable: bool) -> None:
    rig.fleet.decode["d0"].before_step.hold()
    body = {"prompt": list(PROMPT), "max_tokens": 9, "stream": True, "request_id": name, "resumable": resumable}
    async with RawClient.connect(rig.router.http_address) as raw:
        await raw.send(request_bytes(COMPLETIONS, body))
        await raw.read_until(b"\n\n")
        await rig.wait_state(name, "DECODING")
        raw.leave()


async def test_openais_client_reads_what_is_continued(rigs: RouterRigs) -> None:
    async with rigs.start() as rig, openai_client(rig.router.http_address) as client:
        await rig.client.generate(ask(5, request_id="x", sampling=common_pb2.SamplingParams(temperature=0)))
        stream = await client.get(
            "/requests/x/events",
            cast_to=openai.types.Completion,
            stream=True,
            stream_cls=openai.AsyncStream[openai.types.Completion],
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        assert text == (await rig.client.generate(ask(5))).text
