"""One request in all the ways there are: over gRPC and HTTP, streamed and not. Whoever asks gets the one answer, or an
error that says who has got another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import openai

from pdserve.client import AsyncClient, Generation
from pdserve.testing.process_cluster import CALL_TIMEOUT_S, ProcessCluster

WAYS: Final = ("gRPC", "gRPC streamed", "HTTP", "HTTP streamed")


@dataclass(frozen=True)
class Ask:
    """A request in the words of both APIs. Most fields have one name, so they stand once."""

    prompt: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    """Over HTTP a chat completion, and a plain one for the other two."""
    token_ids: Sequence[int] | None = None
    common: Mapping[str, Any] = field(default_factory=dict)
    http: Mapping[str, Any] = field(default_factory=dict)
    grpc: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class OutputSeen:
    """One output as a client has it at the end."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True)
class Answer:
    """What all ways agree on, and what each has seen of it."""

    outputs: tuple[OutputSeen, ...]
    prompt_tokens: int
    completion_tokens: int
    """Of all outputs."""
    cached_tokens: int = field(compare=False)
    """Of the way that came last: the others have filled the caches for it."""
    deltas: tuple[tuple[str, ...], ...] = field(default=(), compare=False)
    """Pieces of text of each output, in the order they came; empty for an answer that came whole."""

    @property
    def only(self) -> OutputSeen:
        """The output of a request for one."""
        (output,) = self.outputs
        return output


class BothApis:
    """Clients of one cluster."""

    def __init__(self, grpc: AsyncClient, http: openai.AsyncOpenAI, model: str) -> None:
        self.grpc = grpc
        self.http = http
        self._model = model

    @classmethod
    @contextlib.asynccontextmanager
    async def of(cls, cluster: ProcessCluster) -> AsyncIterator[BothApis]:
        """Open while the context is."""
        address = cluster.local.http_address
        assert address is not None, "HTTP is on"
        async with (
            AsyncClient(cluster.address, timeout_s=CALL_TIMEOUT_S) as grpc,
            openai.AsyncOpenAI(
                base_url=f"http://{address}/v1", api_key="unused", max_retries=0, timeout=CALL_TIMEOUT_S
            ) as http,
        ):
            yield cls(grpc, http, (await grpc.models())[0].id)

    async def ask(self, ask: Ask, *, at_once: bool = False) -> Answer:
        """The answer, after asking in every way. Raises AssertionError if two of them differ, whatever one way raises
        otherwise. `at_once`: the ways do not wait for each other."""
        ways = [
            self._over_grpc(ask),
            self._over_grpc_streamed(ask),
            self._over_http(ask),
            self._over_http_streamed(ask),
        ]
        answers = list(await asyncio.gather(*ways)) if at_once else [await way for way in ways]
        for way, answer in zip(WAYS, answers, strict=True):
            assert answer == answers[0], f"{way}: {answer}, but {WAYS[0]}: {answers[0]}"
        streams = [answer.deltas for answer in answers if answer.deltas]
        return Answer(
            outputs=answers[0].outputs,
            prompt_tokens=answers[0].prompt_tokens,
            completion_tokens=answers[0].completion_tokens,
            cached_tokens=answers[-1].cached_tokens,
            deltas=tuple(delta for stream in streams for delta in stream),
        )

    async def _over_grpc(self, ask: Ask) -> Answer:
        return _of_generation(await self.grpc.generate(ask.prompt, **_grpc_options(ask)))

    async def _over_grpc_streamed(self, ask: Ask) -> Answer:
        deltas: dict[int, list[str]] = {}
        async with self.grpc.stream(ask.prompt, **_grpc_options(ask)) as stream:
            async for delta in stream:
                deltas.setdefault(delta.index, []).append(delta.text)
            answer = _of_generation(await stream.result(), deltas)
        assert ["".join(deltas[i]) for i in sorted(deltas)] == [output.text for output in answer.outputs]
        return answer

    async def _over_http(self, ask: Ask) -> Answer:
        whole = await self._create(ask)
        outputs = tuple(
            OutputSeen(
                text=choice.text if ask.messages is None else choice.message.content or "",
                token_ids=tuple(choice.model_dump()["token_ids"]),
                finish_reason=choice.finish_reason,
            )
            for choice in whole.choices
        )
        return _answer(outputs, whole.usage)

    async def _over_http_streamed(self, ask: Ask) -> Answer:
        deltas: dict[int, list[str]] = {}
        ids: dict[int, tuple[int, ...]] = {}
        ends: dict[int, str] = {}
        usage = None
        async for chunk in await self._create(ask, stream=True, stream_options={"include_usage": True}):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text = choice.text if ask.messages is None else choice.delta.content
                deltas.setdefault(choice.index, []).append(text or "")
                ids[choice.index] = ids.get(choice.index, ()) + tuple(choice.model_dump().get("token_ids") or ())
                if choice.finish_reason is not None:
                    assert choice.index not in ends, f"output {choice.index} ends twice"
                    ends[choice.index] = choice.finish_reason
        outputs = tuple(OutputSeen("".join(deltas[i]), ids[i], ends[i]) for i in sorted(ends))
        return _answer(outputs, usage, deltas)

    async def _create(self, ask: Ask, **arguments: Any) -> Any:
        # What OpenAI's client has no argument for goes in this way, so everything does.
        body = {**ask.common, **ask.http, "return_token_ids": True}
        if ask.messages is not None:
            messages: Any = list(ask.messages)
            return await self.http.chat.completions.create(
                model=self._model, messages=messages, extra_body=body, **arguments
            )
        prompt: Any = ask.prompt if ask.token_ids is None else list(ask.token_ids)
        return await self.http.completions.create(model=self._model, prompt=prompt, extra_body=body, **arguments)


def _grpc_options(ask: Ask) -> Any:
    given = {"messages": ask.messages, "token_ids": ask.token_ids}
    return {**{name: value for name, value in given.items() if value is not None}, **ask.common, **ask.grpc}


def _of_generation(generation: Generation, deltas: Mapping[int, Sequence[str]] | None = None) -> Answer:
    outputs = tuple(OutputSeen(o.text, tuple(o.token_ids), o.finish_reason.value) for o in generation.outputs)
    return Answer(
        outputs=outputs,
        prompt_tokens=generation.usage.prompt_tokens,
        completion_tokens=generation.usage.completion_tokens,
        cached_tokens=generation.usage.cached_tokens,
        deltas=_in_order(deltas),
    )


def _answer(
    outputs: tuple[OutputSeen, ...],
    usage: openai.types.CompletionUsage | None,
    deltas: Mapping[int, list[str]] | None = None,
) -> Answer:
    assert usage is not None, "an answer has its usage"
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    details = usage.prompt_tokens_details
    return Answer(
        outputs=outputs,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=0 if details is None else details.cached_tokens or 0,
        deltas=_in_order(deltas),
    )


def _in_order(deltas: Mapping[int, Sequence[str]] | None) -> tuple[tuple[str, ...], ...]:
    return () if deltas is None else tuple(tuple(deltas[i]) for i in sorted(deltas))
