"""Whole answers: `chat.completion` and `text_completion`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pdserve.tokenizer import Tokenizer
from pdserve.types import TokenLogprobs
from router.http.generation import Choice, Generation
from router.http.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, joined
from router.http.usage import UsageMeter
from router.output import Ending
from router.stream import Summary


@dataclass(slots=True)
class Collected:
    """All that came for one choice."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    summary: Summary | None = None

    @property
    def text(self) -> str:
        """Of the output."""
        return "".join(self.texts)


class AnswerShape(Protocol):
    """How one endpoint shows a choice."""

    object_name: str

    def choice(self, choice: Choice, got: Collected) -> dict[str, Any]:
        """Without index and what all endpoints have."""


async def whole_answer(generation: Generation, shape: AnswerShape, *, created: int, model: str) -> bytes:
    """Wait for all choices. Raises the error of the first one that fails."""
    meter = UsageMeter(generation.choices)
    collected = await _collect(generation.choices, meter)
    choices = []
    for choice, got in zip(generation.choices, collected, strict=True):
        assert got.summary is not None, "collected to the end"
        shown = {
            "index": choice.index,
            **shape.choice(choice, got),
            "finish_reason": got.summary.ending.reason.value,
            "stop_reason": stop_reason(got.summary.ending),
        }
        if generation.plan.token_ids:
            shown |= {"prompt_token_ids": list(choice.spec.prompt_ids), "token_ids": got.token_ids}
        choices.append(shown)
    answer = {
        "id": generation.plan.request_id,
        "object": shape.object_name,
        "created": created,
        "model": model,
        "choices": choices,
        "usage": meter.as_dict(),
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


class ChatShape:
    """POST /v1/chat/completions."""

    object_name = "chat.completion"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def choice(self, choice: Choice, got: Collected) -> dict[str, Any]:
        """See AnswerShape."""
        logprobs = None
        if choice.spec.num_logprobs is not None:
            names = TokenNames(self._tokenizer, skip_special_tokens=choice.spec.skip_special_tokens)
            logprobs = {"content": chat_logprobs(names, got.logprobs), "refusal": None}
        return {"message": {"role": "assistant", "content": got.text, "refusal": None}, "logprobs": logprobs}


class CompletionShape:
    """POST /v1/completions."""

    object_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, echo: bool) -> None:
        self._tokenizer = tokenizer
        self._echo = echo

    def choice(self, choice: Choice, got: Collected) -> dict[str, Any]:
        """See AnswerShape."""
        text = got.text
        if self._echo:
            text = echoed_text(self._tokenizer, choice) + text
        logprobs = None
        if choice.spec.num_logprobs is not None:
            lists = completion_logprobs(self._tokenizer, choice, echo=self._echo)
            prompt = [lists.first(choice.spec.prompt_ids[0]), lists.of(got.prompt_logprobs)] if self._echo else []
            logprobs = joined([*prompt, lists.of(got.logprobs)])
        return {"text": text, "logprobs": logprobs}


def echoed_text(tokenizer: Tokenizer, choice: Choice) -> str:
    """The prompt as the client wrote it, or the text of its tokens."""
    if choice.prompt_text is not None:
        return choice.prompt_text
    return tokenizer.decode(choice.spec.prompt_ids, choice.spec.skip_special_tokens)


def completion_logprobs(tokenizer: Tokenizer, choice: Choice, *, echo: bool) -> CompletionLogprobs:
    """For one choice."""
    return CompletionLogprobs(
        tokenizer, choice.spec.prompt_ids, echo=echo, skip_special_tokens=choice.spec.skip_special_tokens
    )


def stop_reason(ending: Ending) -> int | str | None:
    """The stop string or token that ended the output; None if the length did."""
    return ending.stop_string if ending.stop_string is not None else ending.stop_token_id


async def _collect(choices: Sequence[Choice], meter: UsageMeter) -> list[Collected]:
    if len(choices) == 1:
        return [await _collect_one(choices[0], meter)]
    tasks = [asyncio.ensure_future(_collect_one(choice, meter)) for choice in choices]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _collect_one(choice: Choice, meter: UsageMeter) -> Collected:
    got = Collected()
    while got.summary is None:
        response = await choice.next()
        meter.add(choice, response)
        got.token_ids += response.delta.token_ids
        got.texts.append(response.delta.text)
        got.logprobs += response.delta.logprobs
        got.prompt_logprobs += response.delta.prompt_logprobs
        got.summary = response.summary
    return got
