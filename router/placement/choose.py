"""Filters, costs and picks put together: who computes the prompt, and who decodes.

Remote: a prefill worker computes it and hands it over to one of several decode workers, best first. Local: a decode
worker computes it itself, which saves the hand-over and the queue of the prefill workers but delays its streams. The
way of the lower cost is taken.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from router.placement.choice import Choice, Estimate
from router.placement.filters import CanDecode, CanPrefill, Filter, NotExcluded
from router.placement.fleet import Bools, Fleet, Floats
from router.placement.pick import best_first, holders_of, least
from router.placement.scorers import (
    Disturbance,
    LocalPrefill,
    Prefill,
    Prompt,
    RemotePrefill,
    Room,
    Scorer,
    Steps,
    lacking_now,
    prompt_of,
)
from router.placement.view import PlacementRequest

MAX_DECODE: Final = 8
"""Decode workers named with a remote choice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLimits:
    """When a decode worker may compute prompts although there are prefill workers."""

    max_tokens_ahead: int = 2048
    """Tokens that it has to compute at most, with this prompt."""
    stream_weight: float = 1.0
    """See Disturbance."""


class _Way(NamedTuple):
    """The best of one of the two ways."""

    cost_s: float
    prefill: int | None
    decode: tuple[int, ...]
    parts: Prefill
    handover_s: float
    holders: tuple[int, ...] = ()

    @property
    def row(self) -> int:
        """Who computes the prompt."""
        return self.decode[0] if self.prefill is None else self.prefill

    @property
    def ttft_s(self) -> float:
        return float(self.parts.ttft_s[self.row])


class LeastTimePlacement:
    """See the module. Knows no worker: everything is in the fleet."""

    def __init__(self, local: LocalLimits | None = None) -> None:
        """`local` are limits of local prefill; the defaults if None."""
        self._limits = LocalLimits() if local is None else local
        self._can_prefill: Filter = CanPrefill()
        self._can_decode: Filter = CanDecode()
        self._not_excluded: Filter = NotExcluded()
        self._steps: Scorer = Steps()
        self._room: Scorer = Room()
        self._remote = RemotePrefill()
        self._local = LocalPrefill()
        self._disturbance = Disturbance(self._limits.stream_weight)

    def choose(self, request: PlacementRequest, fleet: Fleet) -> Choice | None:
        """The best way, or None if there is none now."""
        prefills = self._can_prefill.keeps(request, fleet)
        decodes = self._can_decode.keeps(request, fleet)
        if request.excluded:
            others = self._not_excluded.keeps(request, fleet)
            prefills, decodes = prefills & others, decodes & others
        if not np.count_nonzero(decodes):
            return None
        prompt = prompt_of(request, fleet)
        steps_s = self._steps.seconds(request, fleet)
        decode_s = np.where(decodes, steps_s + self._room.seconds(request, fleet), np.inf)
        least_decode_s = float(decode_s[decode_s.argmin()])
        remote = self._best_remote(request, fleet, prefills, prompt, decode_s, least_decode_s)
        local = self._best_local(request, fleet, decodes, prompt, decode_s, least_decode_s, bounded=remote is not None)
        if remote is None or (local is not None and local.cost_s <= remote.cost_s):
            way, other = local, remote
        else:
            way, other = remote, local
        if way is None:
            return None
        row = way.row
        return Choice(
            None if way.prefill is None else fleet.keys[way.prefill],
            tuple(fleet.keys[row] for row in way.decode),
            Estimate(
                num_tokens=request.num_known_tokens,
                num_cached_tokens=request.num_known_tokens - int(prompt.lacking[row]),
                queue_s=float(way.parts.queue_s[row]),
                fetch_s=float(way.parts.fetch_s[row]),
                prefill_s=float(way.parts.prefill_s[row]),
                handover_s=way.handover_s,
                decode_s=float(steps_s[way.decode[0]]),
                other_ttft_s=None if other is None else other.ttft_s,
            ),
            tuple((fleet.keys[row], request.cached[fleet.keys[row]]) for row in way.holders),
        )

    def local_up_to(self, fleet: Fleet) -> int | None:
        """Tokens of the longest prompt, unknown to every worker, that would be computed by a decode worker now. None if
        there are no prefill workers that would do it otherwise."""
        longest = int(fleet.max_kv_tokens.max()) - 1 if len(fleet) else 0
        low, high = 0, longest + 1
        while high - low > 1:
            middle = (low + high) // 2
            choice = self.choose(PlacementRequest(num_known_tokens=middle, max_total_tokens=middle + 1), fleet)
            if choice is None:
                high = middle
            elif choice.local and choice.estimate.other_ttft_s is None:
                return None
            elif choice.local:
                low = middle
            else:
                high = middle
        return low

    def _best_remote(
        self,
        request: PlacementRequest,
        fleet: Fleet,
        prefills: Bools,
        prompt: Prompt,
        decode_s: Floats,
        least_decode_s: float,
    ) -> _Way | None:
        num_prefills = np.count_nonzero(prefills)
        if not num_prefills:
            return None
        lacking, now = prompt.lacking, lacking_now(request, prompt, fleet)
        parts = self._remote.parts(request, prompt, now, fleet)
        # The link is known when the prefill worker is; until then decode workers are compared over a usual one.
        usual_s = float(np.add.reduce(fleet.handover_per_token[prefills])) / num_prefills
        reached_s = decode_s + usual_s * lacking
        cost = fleet.never
        kinds = fleet.prefill_kinds
        for kind in kinds:
            of_partners = _to_partners(reached_s, kind, fleet)
            best = int(of_partners.argmin())
            if not math.isfinite(of_partners[best]):
                continue
            moved_s = fleet.handover_fixed + fleet.handover_per_token * lacking[best]
            of_kind = prefills if len(kinds) == 1 else prefills & (fleet.kind == kind)
            cost = np.where(of_kind, parts.ttft_s + moved_s + decode_s[best], cost)
        source = least(cost, fleet, common_s=least_decode_s)
        if source is None:
            return None
        moved_s = fleet.handover_fixed[source] + fleet.handover_per_token[source] * lacking
        targets = best_first(_to_partners(decode_s + moved_s, int(fleet.kind[source]), fleet), fleet, MAX_DECODE)
        first = int(targets[0])
        handover_s = float(moved_s[first])
        total_s = float(parts.ttft_s[source] + decode_s[first]) + handover_s
        holders = holders_of(source, now, fleet) if request.cached else ()
        return _Way(total_s, source, tuple(targets.tolist()), parts, handover_s, holders)

    def _best_local(
        self,
        request: PlacementRequest,
        fleet: Fleet,
        decodes: Bools,
        prompt: Prompt,
        decode_s: Floats,
        least_decode_s: float,
        *,
        bounded: bool,
    ) -> _Way | None:
        # A prompt gets room for all of its tokens, also where a window lets the pool hold longer sequences.
        able = decodes & fleet.computes_prompts & (fleet.pool_tokens >= request.num_known_tokens)
        if bounded:
            able &= fleet.prefill_tokens + prompt.lacking <= self._limits.max_tokens_ahead
        if not np.count_nonzero(able):
            return None
        parts = self._local.parts(request, prompt, fleet)
        cost = np.where(able, decode_s + parts.ttft_s + self._disturbance.seconds(prompt, fleet), np.inf)
        row = least(cost, fleet, common_s=least_decode_s)
        if row is None:
            return None
        return _Way(float(cost[row]), None, (row,), parts, 0.0)


def _to_partners(cost: Floats, kind: int, fleet: Fleet) -> Floats:
    """`cost` of decode workers to which that kind of prefill workers may hand over."""
    partners = fleet.partners(kind)
    return cost if partners is None else np.where(partners, cost, np.inf)
