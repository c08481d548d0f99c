"""Chunks of streamed answers: `chat.completion.chunk` and `text_completion`, as server-sent events.

Written once per token and client, so nothing is built but the parts that differ: what all chunks of a stream have in
common is one string, made at its beginning.
"""

from __future__ import annotations

import json
import json.encoder
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from pdserve.tokenizer import Tokenizer
from pdserve.types import TokenLogprobs
from router.http.answers import completion_logprobs, echoed_text, finish_reason, stop_reason
from router.http.generation import Choice
from router.http.logprobs import CompletionLogprobs, TokenNames, chat_logprobs, joined
from router.http.tools import call_field
from router.stream import Delta, Summary
from router.tools.output import ToolOutput

DONE: Final = b"data: [DONE]\n\n"
KEEP_ALIVE: Final = b": keep-alive\n\n"
"""A comment. Clients drop it, as long as no event has an `id`: with one, OpenAI's own client takes the empty line after
the comment for an event."""
KEEP_ALIVE_NUMBERED: Final = b": keep-alive\n"
"""For streams with ids: the comment alone, which is part of whatever event comes next."""

_NOT_YET: Final = '"finish_reason":null'

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

encode_text: Final[Callable[[str], str]] = json.encoder.encode_basestring
"""What `_encode` is for a text."""


class Frame:
    """What is around the choice in every chunk of one stream."""

    def __init__(self, *, request_id: str, object_name: str, created: int, model: str, include_usage: bool) -> None:
        self._begin = (
            f'data: {{"id":{_encode(request_id)},"object":"{object_name}","created":{created},'
            f'"model":{_encode(model)},"choices":['
        )
        self._usage = ',"usage":null' if include_usage else ""

    def chunk(self, index: int, fields: str, usage: str | None) -> str:
        """One choice; `fields` and `usage` are JSON."""
        shown = self._usage if usage is None else f',"usage":{usage}'
        return f'{self._begin}{{"index":{index},{fields}}}]{shown}}}\n\n'

    def around(self, index: int, fields: tuple[str, str]) -> tuple[str, str]:
        """What is before and after the JSON text in chunks of nothing else; see ChoiceChunks.plain."""
        before, after = fields
        return f'{self._begin}{{"index":{index},{before}', f"{after}}}]{self._usage}}}\n\n"

    def usage(self, usage: str) -> str:
        """The last chunk, of no choice."""
        return f'{self._begin}],"usage":{usage}}}\n\n'


class ChoiceChunks(Protocol):
    """Chunks of one choice: `open`, then any number of `more`, then `close`. Each gives the fields of the choice in no,
    one or several chunks."""

    object_name: str

    def open(self) -> Sequence[str]:
        """Before anything has come."""

    def more(self, delta: Delta) -> Sequence[str]:
        """What is to be shown of new output."""

    def close(self, summary: Summary) -> Sequence[str]:
        """At last the finish reason."""

    @property
    def plain(self) -> tuple[str, str] | None:
        """If from now on `more` is one chunk for any new text, and none without: what is before and after the JSON of
        the text in it. Else None."""


class ChatChunks:
    """See ChoiceChunks."""

    object_name = "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        choice: Choice,
        *,
        token_ids: bool,
        names_are_ids: bool = False,
        tools: ToolOutput | None = None,
    ) -> None:
        """`tools`: what finds calls of functions; None: there are none to be found."""
        self._choice = choice
        self._token_ids = token_ids
        self._tools = tools
        self._names: TokenNames | None = None
        if choice.spec.num_logprobs is not None:
            self._names = TokenNames(
                tokenizer, skip_special_tokens=choice.spec.skip_special_tokens, as_ids=names_are_ids
            )

    def open(self) -> Sequence[str]:
        """The role."""
        ids = f',"prompt_token_ids":{_encode(self._choice.spec.prompt_ids)}' if self._token_ids else ""
        return (f'"delta":{{"role":"assistant","content":""}},"logprobs":null,{_NOT_YET}{ids}',)

    def more(self, delta: Delta) -> Sequence[str]:
        """See ChoiceChunks."""
        if not delta.text and not delta.token_ids:
            return ()
        text_only = self._names is None and not self._token_ids
        if self._tools is not None:
            shown = self._parsed(self._tools, delta.text)
        else:
            shown = f'"content":{_encode(delta.text)}' if delta.text or not text_only else ""
        if text_only:
            return (f'"delta":{{{shown}}},"logprobs":null,{_NOT_YET}',) if shown else ()
        logprobs = "null"
        if self._names is not None:
            logprobs = f'{{"content":{_encode(chat_logprobs(self._names, delta.logprobs))},"refusal":null}}'
        ids = f',"token_ids":{_encode(delta.token_ids)}' if self._token_ids else ""
        return (f'"delta":{{{shown}}},"logprobs":{logprobs},{_NOT_YET}{ids}',)

    def close(self, summary: Summary) -> Sequence[str]:
        """See ChoiceChunks. What a text was held back of that might have become a call comes before."""
        shown = "" if self._tools is None else self._parsed(self._tools, "", last=True)
        rest = (f'"delta":{{{shown}}},"logprobs":null,{_NOT_YET}',) if shown else ()
        return (*rest, f'"delta":{{}},"logprobs":null,{_ending(summary, self._tools)}')

    @property
    def plain(self) -> tuple[str, str] | None:
        """See ChoiceChunks."""
        if self._names is not None or self._token_ids or self._tools is not None:
            return None
        return '"delta":{"content":', f'}},"logprobs":null,{_NOT_YET}'

    def _parsed(self, tools: ToolOutput, text: str, *, last: bool = False) -> str:
        parsed = tools.push(text, last=last)
        parts = [f'"content":{_encode(parsed.content)}'] if parsed.content else []
        if parsed.calls:
            calls = [{"index": call.index, **call_field(tools, call)} for call in parsed.calls]
            parts.append(f'"tool_calls":{_encode(calls)}')
        return ",".join(parts)


class CompletionChunks:
    """See ChoiceChunks. An echoed prompt is the first chunk, together with all of its log-probabilities."""

    object_name = "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, choice: Choice, *, echo: bool, token_ids: bool, names_are_ids: bool = False
    ) -> None:
        self._choice = choice
        self._token_ids = token_ids
        self._echo = echoed_text(tokenizer, choice) if echo else None
        self._opened = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._lists: CompletionLogprobs | None = None
        if choice.spec.num_logprobs is not None:
            self._lists = completion_logprobs(tokenizer, choice, echo=echo, as_ids=names_are_ids)

    def open(self) -> Sequence[str]:
        """The prompt, unless its log-probabilities are still to come."""
        return () if self._choice.spec.num_prompt_logprobs is not None else self._open()

    def more(self, delta: Delta) -> Sequence[str]:
        """See ChoiceChunks."""
        self._prompt_logprobs += delta.prompt_logprobs
        if not delta.text and not (delta.token_ids and (self._lists is not None or self._token_ids)):
            return ()
        # All that there is to know of the prompt comes before the first token, and its offsets before the output's.
        opening = self._open()
        logprobs = "null" if self._lists is None else _encode(self._lists.of(delta.logprobs))
        ids = f',"token_ids":{_encode(delta.token_ids)}' if self._token_ids else ""
        return (*opening, f'"text":{_encode(delta.text)},"logprobs":{logprobs},{_NOT_YET}{ids}')

    def close(self, summary: Summary) -> Sequence[str]:
        """See ChoiceChunks."""
        return (*self._open(), f'"text":"","logprobs":null,{_ending(summary)}')

    @property
    def plain(self) -> tuple[str, str] | None:
        """See ChoiceChunks."""
        if not self._opened or self._lists is not None or self._token_ids:
            return None
        return '"text":', f',"logprobs":null,{_NOT_YET}'

    def _open(self) -> Sequence[str]:
        if self._opened:
            return ()
        self._opened = True
        prompt_ids = self._choice.spec.prompt_ids
        if self._echo is None and not self._token_ids:
            return ()
        logprobs = "null"
        if self._echo is not None and self._lists is not None:
            logprobs = _encode(joined([self._lists.first(prompt_ids[0]), self._lists.of(self._prompt_logprobs)]))
        ids = f',"prompt_token_ids":{_encode(prompt_ids)}' if self._token_ids else ""
        return (f'"text":{_encode(self._echo or "")},"logprobs":{logprobs},{_NOT_YET}{ids}',)


def _ending(summary: Summary, tools: ToolOutput | None = None) -> str:
    ending = summary.ending
    return f'"finish_reason":"{finish_reason(ending, tools)}","stop_reason":{_encode(stop_reason(ending))}'
