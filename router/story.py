"""The life of one output as it is told afterwards: what happened when, on which worker, and how long phases took."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Final

from pdserve.lifecycle import RequestEvent, RequestState
from pdserve.telemetry.context import TraceContext
from pdserve.types import SamplingParams
from router.timeline import Phases

MAX_MOMENTS: Final = 256
"""Of one output; a stream that moves more often than that has its end noted all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """One transition of the request's life."""

    at: float
    """`time.monotonic()`."""
    name: str
    """`received`, `tokenized`, or a RequestEvent."""
    attempt: int
    worker: str = ""
    """Who has done it, or is to go on."""
    cause: str = ""
    """Code of an error, or why a stream has moved."""


class Trail:
    """Collects moments. A request has about six."""

    def __init__(self, received_at: float) -> None:
        self._moments = [Moment(at=received_at, name="received", attempt=1)]
        self._contexts: dict[int, TraceContext] = {}
        """By attempt."""

    def note(self, moment: Moment) -> None:
        """It has happened."""
        if len(self._moments) == MAX_MOMENTS:
            # The newest tells how it has ended.
            del self._moments[-1]
        self._moments.append(moment)

    def sent_as(self, attempt: int, context: TraceContext) -> None:
        """Workers know the span of `attempt` by this name."""
        self._contexts[attempt] = context

    @property
    def moments(self) -> tuple[Moment, ...]:
        """In order."""
        return tuple(self._moments)

    @property
    def contexts(self) -> dict[int, TraceContext]:
        """Of the attempts that workers were told of, if the request is traced."""
        return dict(self._contexts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a client has asked for, as far as it may be told and kept: numbers, no text, nothing that is large."""

    chat: bool = False
    """Whether the prompt is messages of a chat."""
    num_outputs: int = 1
    """Of the prompt."""
    max_tokens: int | None = None
    """None, as all that follow, if the request ended before its prompt was resolved. Else every default is resolved,
    see SamplingParams."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None

    def resolved(self, sampling: SamplingParams, max_tokens: int) -> Asked:
        """The same with what is known once the prompt is."""
        return dataclasses.replace(
            self,
            max_tokens=max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Of one output, at its end or as it is now."""

    request_id: str
    tenant: bytes
    """Whose it is, see Ask."""
    state: RequestState
    error_code: str
    ended_at: float
    """`time.monotonic()`; now if it has not ended."""
    ended_unix: float
    """The same in seconds since 1970."""
    phases: Phases
    moments: tuple[Moment, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_attempts: int
    num_migrations: int
    prefill_worker: str
    decode_worker: str
    transport: str
    kv_bytes: int
    asked: Asked = Asked()
    span: TraceContext | None = None
    """None: it is not traced."""
    parent: TraceContext | None = None
    contexts: dict[int, TraceContext] = field(default_factory=dict)
    """Of its attempts."""

    @property
    def received_at(self) -> float:
        """`time.monotonic()`."""
        return self.moments[0].at

    @property
    def received_unix(self) -> float:
        """Seconds since 1970."""
        return self.ended_unix - (self.ended_at - self.received_at)


QUIET_EVENTS: Final = frozenset({RequestEvent.DECODE_TOKENS})
"""Happen again and again; only the first one of an attempt is a moment."""
