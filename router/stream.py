"""What one client gets: deltas and then exactly one end, buffered between the workers and the client's connection.

Deltas that the client has not taken are merged, so a slow reader gets fewer and larger responses, and what is kept for
it is one token list and one string.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import PdServeError
from pdserve.types import TokenLogprobs
from router.output import Ending
from router.timeline import Phases


@dataclass(frozen=True, slots=True)
class Delta:
    """More output."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of `token_ids`, if asked for."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Of further tokens of the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The last word on a request that finished."""

    ending: Ending
    phases: Phases
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_fetched_tokens: int
    prefill_worker: str
    decode_worker: str
    """Empty if the request ended with its first token."""
    transport: str
    kv_bytes: int
    num_attempts: int
    num_local_prefill_tokens: int


@dataclass(frozen=True, slots=True)
class Response:
    """One response: a delta, and with the last one the summary."""

    seq: int
    delta: Delta
    summary: Summary | None


class ClientStream:
    """Filled by the request, emptied by one reader."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._end: Summary | PdServeError | None = None
        self._changed = asyncio.Event()
        self._ended = asyncio.Event()
        self._seq = 0

    @property
    def num_unread_tokens(self) -> int:
        """Tokens that the client has not taken."""
        return len(self._token_ids)

    @property
    def ended(self) -> bool:
        """Whether `finish` or `fail` was called."""
        return self._end is not None

    def push_prompt(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Log-probabilities of further tokens of the prompt."""
        assert self._end is None, "log-probabilities after the end"
        if logprobs:
            self._prompt_logprobs.extend(logprobs)
            self._changed.set()

    def push(self, token_ids: Sequence[int], text: str, logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """More output."""
        assert self._end is None, "output after the end"
        if token_ids or text:
            self._token_ids.extend(token_ids)
            self._texts.append(text)
            self._logprobs.extend(logprobs)
            self._changed.set()

    def finish(self, summary: Summary) -> None:
        """The output is complete."""
        self._close(summary)

    def fail(self, error: PdServeError) -> None:
        """There will be no more, because of `error`. Output that was not taken yet still comes before it."""
        self._close(error)

    async def wait_ended(self) -> None:
        """Return once `finish` or `fail` was called."""
        await self._ended.wait()

    async def next(self) -> Response:
        """The next response, as soon as there is anything to say; the one with a summary is the last.

        Raises the error that the request ended with.
        """
        await self._changed.wait()
        self._changed.clear()
        if isinstance(self._end, PdServeError) and not self._token_ids:
            raise self._end
        delta = Delta(tuple(self._token_ids), "".join(self._texts), tuple(self._logprobs), tuple(self._prompt_logprobs))
        self._token_ids.clear()
        self._texts.clear()
        self._logprobs.clear()
        self._prompt_logprobs.clear()
        summary = None
        if isinstance(self._end, PdServeError):
            self._changed.set()
        else:
            summary = self._end
        response = Response(self._seq, delta, summary)
        self._seq += 1
        return response

    def _close(self, end: Summary | PdServeError) -> None:
        assert self._end is None, "ended twice"
        self._end = end
        self._ended.set()
        self._changed.set()
