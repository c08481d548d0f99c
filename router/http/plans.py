"""From a body to what is to be generated: the checked prompts, and how the answer is wanted."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.errors import InvalidRequestError, PdServeError
from pdserve.rpc.codec import grammar_to_proto
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.telemetry.context import TraceContext
from pdserve.tokenizer.chat import require_unicode
from router.core import RouterCore
from router.generation import NUM_SEEDS, Ask
from router.http.fields import ChatBody, CompletionBody, GenerationBody
from router.http.messages import chat_prompt, template_kwargs
from router.http.structured import structured_of
from router.http.tools import add_tools
from router.resume_record import Source
from router.validation import ChatInput, CheckedRequest, TextInput, check_name, check_request

_INT64 = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One body, checked."""

    request_id: str
    prompts: tuple[CheckedRequest, ...]
    num_choices: int
    """For each prompt."""
    names: FieldNames
    stream: bool
    include_usage: bool
    """In a stream: one more chunk with it."""
    continuous_usage: bool
    """In a stream: the usage so far in every chunk."""
    token_ids: bool
    """Whether the answer shows them."""
    names_are_ids: bool = False
    """Whether tokens in log-probabilities are shown as their ids."""
    resumable: bool = False
    """Whether the client may come back for the rest of a stream."""
    echo: bool = False
    """Whether the prompt comes before the output."""
    score_only: bool = False
    """The client wants nothing generated. One token is, as nothing less can be asked of workers, and is dropped."""

    def ask(self, digest: bytes, tenant: bytes, source: Source | None, client_trace: TraceContext | None = None) -> Ask:
        """What the core is to do. `digest` is of the body, `tenant` who has sent it, the others as in Ask."""
        return Ask(
            request_id=self.request_id,
            prompts=self.prompts,
            num_outputs=self.num_choices,
            resumable=self.resumable,
            digest=digest,
            tenant=tenant,
            client_trace=client_trace,
            source=source,
        )

    def names_of(self, prompt_index: int) -> FieldNames:
        """Names of fields in errors about one of the prompts."""
        return self.names.at(prompt_index) if len(self.prompts) > 1 else self.names


@dataclass(frozen=True, slots=True)
class FieldNames:
    """Errors of the core in the words of the body."""

    prompt: str = "messages"
    max_tokens: str = "max_tokens"
    logprobs: str = "logprobs"
    grammar: str = "response_format"
    """The field that says what the output must look like."""

    def at(self, prompt_index: int) -> FieldNames:
        """Those for one prompt of several."""
        return dataclasses.replace(self, prompt=f"{self.prompt}[{prompt_index}]")

    def renamed(self, error: PdServeError) -> PdServeError:
        """The same error, changed in place: fields of gRPC's request become those of the body."""
        error.message = _PROBLEM.sub(lambda found: found[1] + self._renamed(found[2]), error.message)
        error.message = _FUNCTION.sub(r"\g<0>function.", error.message)
        error.args = (error.message,)
        if error.field is not None:
            error.field = _FIELD.sub(lambda found: self._renamed(found[0]), error.field)
            error.field = _FUNCTION.sub(r"\g<0>function.", error.field)
        return error

    def _renamed(self, field: str) -> str:
        special = {
            "chat": self.prompt,
            "chat.messages": self.prompt,
            "chat.template_kwargs": "chat_template_kwargs",
            "input": self.prompt,
            "logprobs": self.logprobs,
            "prompt_logprobs": "logprobs",
            "stop.max_tokens": self.max_tokens,
            "text": self.prompt,
            "token_ids.ids": self.prompt,
        }
        if field.startswith("grammar"):
            return self.grammar
        return special.get(field) or field.removeprefix("chat.").removeprefix("sampling.").removeprefix("stop.")


_NAME = (
    r"(?:(?:chat|sampling|stop)\.[a-z_]+|token_ids\.ids|chat|grammar(?:\.[a-z_]+)?|text|input|logprobs|prompt_logprobs)"
)
_FIELD = re.compile(rf"^{_NAME}(?=[\[.]|$)")
_PROBLEM = re.compile(rf"(^|; |\()({_NAME})(?=[\[.:)])")
_FUNCTION = re.compile(r"(?<![\w.'])(?:messages\[\d+\]\.tool_calls|tools)\[\d+\]\.(?=(?:name|arguments|parameters)\b)")
"""What OpenAI's API has one level deeper."""


def chat_plan(body: ChatBody, core: RouterCore) -> Plan:
    """Raises InvalidRequestError or NotFoundError, with names of the body."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequestError("top_logprobs: needs logprobs to be true", field="top_logprobs")
    own_max = body.max_completion_tokens is not None
    names = FieldNames(max_tokens="max_completion_tokens" if own_max else "max_tokens", logprobs="top_logprobs")
    kwargs = template_kwargs(body.chat_template_kwargs)
    message = pb.GenerateRequest(chat=chat_prompt(body.messages))
    add_tools(message.chat, body)
    if body.add_generation_prompt is not None:
        message.chat.add_generation_prompt = body.add_generation_prompt
    message.chat.continue_final_message = bool(body.continue_final_message)
    max_tokens = body.max_completion_tokens if own_max else body.max_tokens
    _fill(message, body, max_tokens, (body.top_logprobs or 0) if body.logprobs else None)

    def add_template(checked: CheckedRequest) -> CheckedRequest:
        assert isinstance(checked.prompt, ChatInput), "a chat"
        return dataclasses.replace(checked, prompt=dataclasses.replace(checked.prompt, template_kwargs=kwargs))

    return _plan(body, core, [message], names, add_template)


def completion_plan(body: CompletionBody, core: RouterCore) -> Plan:
    """Raises InvalidRequestError or NotFoundError, with names of the body."""
    echo = bool(body.echo)
    score_only = echo and body.max_tokens == 0
    messages = []
    for message in _prompts(body.prompt):
        _fill(message, body, 1 if score_only else body.max_tokens, body.logprobs)
        if echo and body.logprobs is not None:
            message.prompt_logprobs = body.logprobs
        messages.append(message)
    if echo and body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("truncate_prompt_tokens: excludes echo", field="truncate_prompt_tokens")

    def finish(checked: CheckedRequest) -> CheckedRequest:
        if not isinstance(checked.prompt, TextInput):
            return checked
        special = body.add_special_tokens is not False
        return dataclasses.replace(checked, prompt=dataclasses.replace(checked.prompt, add_special_tokens=special))

    plan = _plan(body, core, messages, FieldNames(prompt="prompt"), finish)
    return dataclasses.replace(plan, echo=echo, score_only=score_only)


def _plan(
    body: GenerationBody,
    core: RouterCore,
    messages: Sequence[pb.GenerateRequest],
    names: FieldNames,
    finish: Callable[[CheckedRequest], CheckedRequest],
) -> Plan:
    num_choices = body.n or 1
    if (total := len(messages) * num_choices) > core.config.max_outputs:
        raise InvalidRequestError(
            f"n: {total} choices over all prompts, at most {core.config.max_outputs} are allowed (router.max_outputs)",
            field="n",
        )
    options = body.stream_options
    if options is not None and not body.stream:
        raise InvalidRequestError("stream_options: needs stream to be true", field="stream_options")
    structured = structured_of(body)
    if structured is not None:
        names = dataclasses.replace(names, grammar=structured.field)
    limits = core.limits()
    prompts = []
    for index, message in enumerate(messages):
        message.model = body.model or ""
        if structured is not None:
            message.grammar.CopyFrom(grammar_to_proto(structured.grammar))
        try:
            checked = check_request(message, limits, core.config)
        except PdServeError as error:
            raise (names.at(index) if len(messages) > 1 else names).renamed(error) from error
        checked = dataclasses.replace(checked, max_prompt_tokens=body.truncate_prompt_tokens)
        prompts.append(finish(checked))
    return Plan(
        request_id=_request_id(body.request_id, total),
        prompts=tuple(prompts),
        num_choices=num_choices,
        names=names,
        stream=bool(body.stream),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        token_ids=bool(body.return_token_ids),
        names_are_ids=bool(body.return_tokens_as_token_ids),
        resumable=bool(body.resumable),
    )


def _request_id(wanted: str | None, num_choices: int) -> str:
    if wanted == "":
        raise InvalidRequestError("request_id: must not be empty", field="request_id")
    return check_name(wanted or "", num_choices)


def _fill(message: pb.GenerateRequest, body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> None:
    """All fields but the prompt's. What the body leaves out stays absent, so defaults are those of gRPC."""
    sampling = common_pb2.SamplingParams(
        temperature=body.temperature,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        top_p=body.top_p,
        min_p=body.min_p,
        seed=None if body.seed is None else body.seed % NUM_SEEDS,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
    )
    message.sampling.CopyFrom(sampling)
    message.stop.CopyFrom(
        common_pb2.StopParams(
            max_tokens=max_tokens,
            min_tokens=body.min_tokens,
            ignore_eos=body.ignore_eos,
            stop_token_ids=body.stop_token_ids or (),
            stop=body.stop or (),
        )
    )
    if logprobs is not None:
        message.logprobs = logprobs
    message.skip_special_tokens = body.skip_special_tokens is not False
    message.include_stop_string = bool(body.include_stop_str_in_output)
    message.cache_salt = body.cache_salt or ""
    message.priority = body.priority or 0
    if body.max_draft_tokens is not None:
        message.max_draft_tokens = body.max_draft_tokens


def _logit_bias(bias: Mapping[str, float]) -> dict[int, float]:
    result = {}
    for name, value in bias.items():
        if not re.fullmatch(r"[0-9]{1,9}", name):
            raise InvalidRequestError(
                f"logit_bias: {name[:32]!r} is not a token id; ids are written as strings of digits", field="logit_bias"
            )
        result[int(name)] = value
    return result


def _prompts(prompt: Any) -> Iterator[pb.GenerateRequest]:
    """One message for each prompt. A list of integers is one prompt; any other list is a batch."""
    if isinstance(prompt, str):
        yield _prompt(prompt, "prompt")
    elif not isinstance(prompt, list):
        raise InvalidRequestError(
            f"prompt: must be a text, token ids, or a list of either, got {type(prompt).__name__}", field="prompt"
        )
    elif not prompt:
        raise InvalidRequestError("prompt: the prompt is empty", field="prompt")
    elif isinstance(prompt[0], str | list):
        for i, one in enumerate(prompt):
            yield _prompt(one, f"prompt[{i}]")
    else:
        yield _prompt(prompt, "prompt")


def _prompt(prompt: Any, path: str) -> pb.GenerateRequest:
    if isinstance(prompt, str):
        return pb.GenerateRequest(text=require_unicode(prompt, path))
    if not isinstance(prompt, list):
        raise InvalidRequestError(f"{path}: must be a text or a list of token ids", field=path)
    if not prompt:
        raise InvalidRequestError(f"{path}: the prompt is empty", field=path)
    # JSON's true is an int to Python, so types are compared.
    if {*map(type, prompt)} != {int} or not -_INT64 <= min(prompt) <= max(prompt) < _INT64:
        for i, token_id in enumerate(prompt):
            if type(token_id) is not int or not -_INT64 <= token_id < _INT64:
                raise InvalidRequestError(
                    f"{path}[{i}]: {str(token_id)[:32]!r} is not a token id of the vocabulary", field=f"{path}[{i}]"
                )
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt))
