"""What the flight recorder of a router shows of the latest outputs."""

from __future__ import annotations

import os
from collections.abc import Iterable

from pdserve.telemetry.chrome import ChromeTrace, Slice
from router.story import Story

_FOLLOWS = {
    "received": "tokenize",
    "taken_over": "queue",
    "tokenized": "queue",
    "dispatched": "prefill queue",
    "prefill_started": "prefill",
    "first_token": "transfer",
    "handed_off": "decode",
    "decode_tokens": "decode",
    "migrated": "decode",
    "retry": "queue",
}
"""What an output is in after a moment."""


def trace_of(stories: Iterable[Story], router_id: str) -> ChromeTrace:
    """Each output is a slice, with what it was in below."""
    trace = ChromeTrace(router_id, os.getpid())
    trace.add_groups("outputs", (_slices(story) for story in stories))
    return trace


def _slices(story: Story) -> list[Slice]:
    whole = Slice(
        story.request_id,
        story.received_at,
        story.ended_at,
        {
            "state": story.state.value,
            "error_code": story.error_code,
            "attempts": story.num_attempts,
            "migrations": story.num_migrations,
            "prompt_tokens": story.num_prompt_tokens,
            "output_tokens": story.num_output_tokens,
            "prefill_worker": story.prefill_worker,
            "decode_worker": story.decode_worker,
        },
    )
    slices = [whole]
    for moment, following in zip(story.moments, (*story.moments[1:], None), strict=True):
        name = _FOLLOWS.get(moment.name)
        if name is not None:
            end = story.ended_at if following is None else following.at
            details = {"attempt": moment.attempt, "worker": moment.worker, "cause": moment.cause}
            slices.append(Slice(name, moment.at, end, details))
    return slices
