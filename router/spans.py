"""The spans of one output, made from its story once it has ended.

    chat {model}                      or text_completion {model}: the router's span; its parent is the client's
      tokenize, queue                 until the first attempt is sent
      attempt {n}                     what workers do of it; workers make their own spans below
        prefill_queue, prefill, kv_transfer, decode

Names of attributes follow OpenTelemetry's conventions for generative AI where they have one (gen_ai.*), and are
pdserve.* otherwise. No attribute has text of prompts or outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from pdserve.lifecycle import RequestState
from pdserve.telemetry.context import TraceContext
from pdserve.telemetry.spans import SpanEvent, SpanRecord, Value
from router.story import Asked, Moment, Story

PHASES: Final = ("tokenize", "queue", "prefill", "transfer", "handover", "decode")
"""Sum to the whole."""

_EVENTS: Final = frozenset({"retry", "migrated", "cancel", "deadline", "fail", "taken_over"})
"""Moments that are told at the request's own span."""

_FOLLOWS: Final = {
    "dispatched": "prefill_queue",
    "prefill_started": "prefill",
    "first_token": "kv_transfer",
    "handed_off": "decode",
    "decode_tokens": "decode",
    "migrated": "decode",
}
"""What a request is in after a moment of an attempt."""


def spans_of(story: Story, model: str) -> Iterator[SpanRecord]:
    """Parents first. The story must be of a request that is traced."""
    root = story.span
    assert root is not None, "not traced"
    yield SpanRecord(
        name=f"{_operation(story.asked)} {model}",
        context=root,
        parent=story.parent,
        start=story.received_at,
        end=story.ended_at,
        attributes=_attributes(story, model),
        events=[_event(moment) for moment in story.moments if moment.name in _EVENTS],
        error=story.error_code if story.state is RequestState.FAILED else "",
        serves=True,
    )
    for name, start, end in _before_workers(story):
        yield SpanRecord(name=name, context=root.child(), parent=root, start=start, end=end)
    for number, moments in _attempts(story.moments):
        yield from _attempt_spans(story, root, number, moments)


def _attributes(story: Story, model: str) -> dict[str, Value]:
    phases = story.phases
    found: dict[str, Value] = {
        "gen_ai.operation.name": _operation(story.asked),
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.response.id": story.request_id,
        "gen_ai.usage.input_tokens": story.num_prompt_tokens,
        "gen_ai.usage.output_tokens": story.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": story.num_cached_tokens,
        "gen_ai.response.time_to_first_chunk": phases.ttft_s,
        "pdserve.request.state": story.state.value,
        "pdserve.attempts": story.num_attempts,
        "pdserve.migrations": story.num_migrations,
        "pdserve.prefill_worker": story.prefill_worker,
        "pdserve.decode_worker": story.decode_worker,
        "pdserve.kv.transport": story.transport,
        "pdserve.kv.bytes": story.kv_bytes,
    }
    found.update(_asked(story.asked))
    for name in PHASES:
        found[f"pdserve.phase.{name}_s"] = seconds_of(story, name)
    return found


def _operation(asked: Asked) -> str:
    return "chat" if asked.chat else "text_completion"


def _asked(asked: Asked) -> Iterator[tuple[str, Value]]:
    """What the conventions want of a request: what it says and what defaults were taken. Stop strings are text."""
    values: dict[str, tuple[Value | None, Value | None]] = {
        "gen_ai.request.max_tokens": (asked.max_tokens, None),
        "gen_ai.request.temperature": (asked.temperature, None),
        "gen_ai.request.top_p": (asked.top_p, None),
        # From here on: left out if they change nothing.
        "gen_ai.request.top_k": (asked.top_k, 0),
        "gen_ai.request.presence_penalty": (asked.presence_penalty, 0.0),
        "gen_ai.request.frequency_penalty": (asked.frequency_penalty, 0.0),
        "gen_ai.request.choice.count": (asked.num_outputs, 1),
        "pdserve.request.min_p": (asked.min_p, 0.0),
        "pdserve.request.repetition_penalty": (asked.repetition_penalty, 1.0),
    }
    for name, (value, without) in values.items():
        if value is not None and value != without:
            yield name, value
    if asked.seed is not None:
        # Integers of OTLP are signed; ours has one bit more.
        yield ("gen_ai.request.seed", asked.seed) if asked.seed < 2**63 else ("pdserve.request.seed", str(asked.seed))


def seconds_of(story: Story, phase: str) -> float:
    """By the name that metrics use."""
    phases = story.phases
    return {
        "tokenize": phases.tokenize_s,
        "queue": phases.queue_s,
        "prefill": phases.prefill_s,
        "transfer": phases.transfer_s,
        "handover": phases.handover_s,
        "decode": phases.decode_s,
    }[phase]


def _event(moment: Moment) -> SpanEvent:
    details: dict[str, Value] = {"pdserve.attempt": moment.attempt}
    if moment.worker:
        details["pdserve.worker"] = moment.worker
    if moment.cause:
        details["error.type" if moment.name != "migrated" else "pdserve.cause"] = moment.cause
    return SpanEvent(moment.name, moment.at, details)


def _before_workers(story: Story) -> Iterator[tuple[str, float, float]]:
    """Name, start and end of what is done before the first attempt is sent."""
    ends = {moment.name: moment.at for moment in reversed(story.moments)}
    tokenized = ends.get("tokenized", story.ended_at)
    yield "tokenize", story.received_at, tokenized
    if "tokenized" in ends:
        yield "queue", tokenized, ends.get("dispatched", story.ended_at)


def _attempts(moments: Sequence[Moment]) -> Iterator[tuple[int, list[Moment]]]:
    """Each attempt that was sent, with its moments and the one that ends it."""
    current: list[Moment] = []
    for moment in moments:
        if moment.name == "dispatched":
            if current:
                yield current[0].attempt, current
            current = [moment]
        elif current:
            current.append(moment)
            if moment.name == "retry":
                yield current[0].attempt, current
                current = []
    if current:
        yield current[0].attempt, current


def _attempt_spans(story: Story, root: TraceContext, number: int, moments: Sequence[Moment]) -> Iterator[SpanRecord]:
    context = story.contexts.get(number) or root.child()
    last = moments[-1]
    over = last.name in ("retry", "finished", "stopped", "cancel", "deadline", "fail")
    yield SpanRecord(
        name=f"attempt {number}",
        context=context,
        parent=root,
        start=moments[0].at,
        end=last.at if over else story.ended_at,
        attributes={"pdserve.attempt": number},
        links=[story.contexts[number - 1]] if number - 1 in story.contexts else (),
        error=last.cause if last.name in ("retry", "fail") else "",
    )
    for moment, following in zip(moments, (*moments[1:], None), strict=True):
        name = _FOLLOWS.get(moment.name)
        if name is None:
            continue
        end = story.ended_at if following is None else following.at
        attributes: dict[str, Value] = {"pdserve.worker": moment.worker} if moment.worker else {}
        yield SpanRecord(
            name=name, context=context.child(), parent=context, start=moment.at, end=end, attributes=attributes
        )
