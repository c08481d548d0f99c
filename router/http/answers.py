"""Whole answers: `chat.completion` and `text_completion`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

from pdserve.tokenizer import Tokenizer
from pdserve.types import FinishReason
from router.generation import Generation
from router.http.generation import Choice, choices_of, shown
from router.http.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, joined
from router.http.plans import Plan
from router.http.tools import call_field
from router.http.usage import UsageMeter
from router.output import Ending
from router.reader import Reader
from router.stream import Delta
from router.tools.output import ToolOutput


class AnswerShape(Protocol):
    """How one endpoint shows a choice."""

    object_name: str

    def choice(self, choice: Choice, got: Delta, ending: Ending) -> dict[str, Any]:
        """Without index and stop reason, which all endpoints have."""


async def whole_answer(generation: Generation, reader: Reader, plan: Plan, shape: AnswerShape, *, model: str) -> bytes:
    """Wait for all choices. Raises the error of the first one that fails."""
    choices = choices_of(generation)
    meter = UsageMeter(choices)
    shown_choices = []
    for choice, response in zip(choices, await reader.rest(), strict=True):
        # Tokens that are not shown are not counted either.
        response = shown(plan, response)
        summary = response.summary
        assert summary is not None, "read to the end"
        meter.reached(choice.index, response.num_tokens)
        meter.ended(choice.index, summary)
        fields = {
            "index": choice.index,
            **shape.choice(choice, response.delta, summary.ending),
            "stop_reason": stop_reason(summary.ending),
        }
        if plan.token_ids:
            fields |= {"prompt_token_ids": list(choice.spec.prompt_ids), "token_ids": list(response.delta.token_ids)}
        shown_choices.append(fields)
    answer = {
        "id": plan.request_id,
        "object": shape.object_name,
        "created": generation.created,
        "model": model,
        "choices": shown_choices,
        "usage": meter.as_dict(),
    }
    return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode()


class ChatShape:
    """POST /v1/chat/completions."""

    object_name = "chat.completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_output: Callable[[Choice], ToolOutput | None],
        *,
        names_are_ids: bool = False,
    ) -> None:
        """`tool_output`: what finds calls of functions in a choice; None: there are none to be found.
        `names_are_ids`: tokens in log-probabilities are shown as their ids."""
        self._tokenizer = tokenizer
        self._names_are_ids = names_are_ids
        self._tool_output = tool_output

    def choice(self, choice: Choice, got: Delta, ending: Ending) -> dict[str, Any]:
        """See AnswerShape."""
        logprobs = None
        if choice.spec.num_logprobs is not None:
            names = TokenNames(
                self._tokenizer,
                skip_special_tokens=choice.spec.skip_special_tokens,
                as_ids=self._names_are_ids,
            )
            logprobs = {"content": chat_logprobs(names, got.logprobs), "refusal": None}
        tools = self._tool_output(choice)
        message: dict[str, Any] = {"role": "assistant", "content": got.text, "refusal": None}
        if tools is not None:
            parsed = tools.push(got.text, last=True)
            message["content"] = parsed.content
            if parsed.calls:
                message["content"] = parsed.content or None
                message["tool_calls"] = [call_field(tools, call) for call in parsed.calls]
        return {"message": message, "logprobs": logprobs, "finish_reason": finish_reason(ending, tools)}


class CompletionShape:
    """POST /v1/completions."""

    object_name = "text_completion"

    def __init__(self, tokenizer: Tokenizer, *, echo: bool, names_are_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._names_are_ids = names_are_ids
        self._echo = echo

    def choice(self, choice: Choice, got: Delta, ending: Ending) -> dict[str, Any]:
        """See AnswerShape."""
        text = got.text
        if self._echo:
            text = echoed_text(self._tokenizer, choice) + text
        logprobs = None
        if choice.spec.num_logprobs is not None:
            lists = completion_logprobs(self._tokenizer, choice, echo=self._echo, as_ids=self._names_are_ids)
            prompt = [lists.first(choice.spec.prompt_ids[0]), lists.of(got.prompt_logprobs)] if self._echo else []
            logprobs = joined([*prompt, lists.of(got.logprobs)])
        return {"text": text, "logprobs": logprobs, "finish_reason": finish_reason(ending)}


def echoed_text(tokenizer: Tokenizer, choice: Choice) -> str:
    """The prompt as the client wrote it, or the text of its tokens."""
    if choice.prompt_text is not None:
        return choice.prompt_text
    return tokenizer.decode(choice.spec.prompt_ids, choice.spec.skip_special_tokens)


def completion_logprobs(tokenizer: Tokenizer, choice: Choice, *, echo: bool, as_ids: bool) -> CompletionLogprobs:
    """For one choice."""
    return CompletionLogprobs(
        tokenizer,
        choice.spec.prompt_ids,
        echo=echo,
        skip_special_tokens=choice.spec.skip_special_tokens,
        as_ids=as_ids,
    )


def finish_reason(ending: Ending, tools: ToolOutput | None = None) -> str:
    """As OpenAI has it: an output with calls that ends by itself is waiting for their results."""
    if tools is not None and tools.has_calls and ending.reason is FinishReason.STOP:
        return "tool_calls"
    return ending.reason.value


def stop_reason(ending: Ending) -> int | str | None:
    """The stop string or token that ended the output; None if the length did."""
    return ending.stop_string if ending.stop_string is not None else ending.stop_token_id
