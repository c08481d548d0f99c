"""GET /v1/requests/{request_id}/timeline, and what the flight recorder of the router remembers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from router.core import RouterCore
from router.flight import trace_of
from router.http.call_limits import client_of
from router.spans import PHASES, seconds_of
from router.story import Moment, Story


class TimelineEndpoints:
    """One method for each."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core

    async def timeline(self, request: Request) -> Response:
        """Where the time of a request went, also while it runs. Raises NotFoundError."""
        name = request.path_params["request_id"]
        caller = self._core.limiter.caller(*client_of(request.scope))
        stories = self._core.stories_of(name, caller)
        return _json(timeline_of(name, stories))

    async def flight(self, request: Request) -> Response:
        """The latest outputs as a Chrome trace: those that the caller may know of."""
        core = self._core
        caller = core.limiter.caller(*client_of(request.scope))
        stories = [story for story in core.history if core.may_know(caller, story.tenant)]
        return _json(trace_of(stories, core.table.router_id).as_json())


def timeline_of(name: str, stories: Sequence[Story]) -> dict[str, Any]:
    """Of a request with these outputs. Its own phases are those of the output that has taken longest."""
    longest = max(stories, key=lambda story: story.ended_at)
    return {
        "id": name,
        "object": "request.timeline",
        "received_at": round(longest.received_unix, 6),
        **_times(longest),
        "outputs": [_output(story) for story in stories],
    }


def _times(story: Story) -> dict[str, Any]:
    phases = story.phases
    return {
        "state": story.state.value,
        "e2e_s": phases.e2e_s,
        "ttft_s": phases.ttft_s,
        "phases": {name: seconds_of(story, name) for name in PHASES},
        "parts": {"fetch": phases.fetch_s, "recovery": phases.recovery_s},
    }


def _output(story: Story) -> dict[str, Any]:
    return {
        "id": story.request_id,
        **_times(story),
        "error_code": story.error_code or None,
        "attempts": story.num_attempts,
        "migrations": story.num_migrations,
        "prefill_worker": story.prefill_worker,
        "decode_worker": story.decode_worker,
        "transport": story.transport,
        "kv_bytes": story.kv_bytes,
        "prompt_tokens": story.num_prompt_tokens,
        "cached_tokens": story.num_cached_tokens,
        "completion_tokens": story.num_output_tokens,
        "trace_id": None if story.span is None else f"{story.span.trace_id:032x}",
        "moments": [_moment(moment, story.received_at) for moment in story.moments],
    }


def _moment(moment: Moment, since: float) -> dict[str, Any]:
    return {
        "at_s": round(moment.at - since, 6),
        "name": moment.name,
        "attempt": moment.attempt,
        "worker": moment.worker or None,
        "cause": moment.cause or None,
    }


def _json(value: object) -> Response:
    return Response(
        json.dumps(value, separators=(",", ":")), media_type="application/json", headers={"Cache-Control": "no-store"}
    )
