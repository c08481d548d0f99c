"""What a request would cost on each worker, in seconds: less is better.

Seconds compose: a second of waiting at a prefill worker, of computing, of moving KV, and of slower steps at a decode
worker are added up, and workers of different speeds are compared with no further weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, Protocol

import numpy as np

from router.cost import NUM_SIZES, size_of
from router.placement.fleet import Fleet, Floats
from router.placement.view import PlacementRequest, WorkerKey

HORIZON_TOKENS: Final = 64
"""Steps for which the load of a decode worker is taken to stay what it is: outputs are longer than that more often than
not, but by then others have come and gone."""
ROOM_S: Final = 0.05
"""What half a pool that is in use costs. Grows as k / (1 - k): a worker that has run out of blocks preempts, and then
computes again."""
TIGHT: Final = 0.95
"""Where that becomes a straight line, because more can be promised than there is: outputs end before their bound."""


class Scorer(Protocol):
    """One part of the cost."""

    def seconds(self, request: PlacementRequest, fleet: Fleet) -> Floats:
        """By row."""


class Steps:
    """What the output takes on a decode worker, with this request in its batch."""

    def seconds(self, request: PlacementRequest, fleet: Fleet) -> Floats:
        """See Scorer."""
        num_steps = min(request.max_total_tokens - request.num_known_tokens, HORIZON_TOKENS)
        return (fleet.next_step_s + fleet.step_per_token * request.num_known_tokens) * num_steps


class Room:
    """How little of a decode worker's pool would be left."""

    def seconds(self, request: PlacementRequest, fleet: Fleet) -> Floats:
        """See Scorer."""
        used = fleet.pool_used + fleet.pool_per_token * request.max_total_tokens
        if not len(used) or used[used.argmax()] <= TIGHT:
            return ROOM_S * (used / (1.0 - used))
        below = np.minimum(used, TIGHT)
        # The line goes on with the slope that the curve has there.
        return ROOM_S * (below / (1.0 - below) + (used - below) / (1.0 - TIGHT) ** 2)


class Prompt(NamedTuple):
    """The prompt of a request on each worker, by row."""

    lacking: Floats
    """Tokens whose KV it has not got, at least 1: the logits of the newest token are needed."""
    queue_s: Floats
    """Waiting for prompts that are not longer than that."""
    alone_s: Floats
    """Computing those tokens with nobody else there."""


def prompt_of(request: PlacementRequest, fleet: Fleet) -> Prompt:
    """What is the same whoever computes it, and wherever."""
    num_tokens, cached = request.num_known_tokens, _expected(request)
    if cached:
        lacking = _lacking(num_tokens, cached, fleet)
        waits = fleet.waits[np.minimum(np.frexp(lacking)[1] - 1, NUM_SIZES - 1), fleet.rows]
    else:
        lacking = fleet.nothing + num_tokens
        waits = fleet.waits[size_of(num_tokens)]
    return Prompt(lacking, waits + fleet.overhead_s, _compute_s(num_tokens, lacking, fleet))


def _expected(request: PlacementRequest) -> Mapping[WorkerKey, int]:
    return request.cached if request.expected is None else request.expected


def _lacking(num_tokens: int, cached: Mapping[WorkerKey, int], fleet: Fleet) -> Floats:
    return np.maximum(num_tokens - fleet.column(cached), 1.0)


def _compute_s(num_tokens: int, lacking: Floats, fleet: Fleet) -> Floats:
    """Computing the last `lacking` of so many tokens; see PrefillModel."""
    per_token = fleet.prefill_per_token + fleet.prefill_per_square * (2.0 * num_tokens - lacking)
    return fleet.prefill_fixed + per_token * lacking


class Prefill(NamedTuple):
    """Parts of the time to first token, by row."""

    queue_s: Floats
    fetch_s: Floats
    prefill_s: Floats
    ttft_s: Floats
    """Their sum."""


def lacking_now(request: PlacementRequest, prompt: Prompt, fleet: Fleet) -> Floats:
    """As `Prompt.lacking`, without what workers are only about to compute."""
    if _expected(request) is request.cached:
        return prompt.lacking
    return _lacking(request.num_known_tokens, request.cached, fleet)


class RemotePrefill:
    """On a prefill worker, which computes what it lacks or gets KV from whoever has the most of it."""

    def parts(self, request: PlacementRequest, prompt: Prompt, now: Floats, fleet: Fleet) -> Prefill:
        """Means something for prefill workers only. `now` is what workers lack now, by row."""
        lacking, alone_s = prompt.lacking, prompt.alone_s
        computed = Prefill(prompt.queue_s, fleet.nothing, alone_s, prompt.queue_s + alone_s)
        if not request.cached or not fleet.any_fetches:
            return computed
        num_tokens = request.num_known_tokens
        left = lacking
        for kind in fleet.prefill_kinds:
            reachable = np.where(fleet.sources(kind) & fleet.usable, now, num_tokens)
            # Means nothing for workers of other kinds, whose turn comes, or which do not fetch.
            of_kind = np.minimum(lacking, reachable[reachable.argmin()])
            left = of_kind if len(fleet.prefill_kinds) == 1 else np.where(fleet.kind == kind, of_kind, left)
        moved = lacking - left
        if not np.count_nonzero(moved):
            return computed
        fetch_s = fleet.fetch_fixed + fleet.fetch_per_token * moved
        per_token = fleet.prefill_per_token + fleet.prefill_per_square * (2.0 * num_tokens - lacking - left)
        saved_s = per_token * moved
        # A worker that has not made the fetches expected of it is not expected to make this one.
        odds = fleet.fetch_odds * (fetch_s < saved_s)
        fetch_s = odds * fetch_s
        prefill_s = alone_s - odds * saved_s
        return Prefill(prompt.queue_s, fetch_s, prefill_s, prompt.queue_s + fetch_s + prefill_s)


class LocalPrefill:
    """On a decode worker, in chunks beside the steps of the sequences that run there."""

    def parts(self, request: PlacementRequest, prompt: Prompt, fleet: Fleet) -> Prefill:
        """Infinite where a worker computes no prompts."""
        num_chunks = np.ceil(
            np.maximum(
                prompt.lacking / np.maximum(fleet.chunk_tokens, 1.0),
                (prompt.alone_s - fleet.prefill_fixed) / fleet.chunk_pause_s,
            )
        )
        prefill_s = prompt.alone_s + num_chunks * fleet.step_s * (fleet.num_sequences > 0.0)
        prefill_s = np.where(fleet.computes_prompts, prefill_s, np.inf)
        return Prefill(prompt.queue_s, fleet.nothing, prefill_s, prompt.queue_s + prefill_s)


class Disturbance:
    """How much the streams of a decode worker are delayed by a prompt that it computes, all together."""

    def __init__(self, stream_weight: float) -> None:
        """What a second by which one stream is delayed counts."""
        self._weight = stream_weight

    def seconds(self, prompt: Prompt, fleet: Fleet) -> Floats:
        """By row."""
        return self._weight * fleet.num_sequences * prompt.alone_s
