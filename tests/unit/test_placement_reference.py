"""Placement on columns chooses what placement in plain Python chooses, one worker after the other."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from pdserve.types import Role
from router.cost import Backlog, size_of
from router.placement import (
    MAX_DECODE,
    Fleet,
    Holdings,
    LeastTimePlacement,
    LocalLimits,
    PlacementRequest,
    WorkerGroup,
    WorkerKey,
    WorkerView,
)
from router.placement.pick import MAX_HOLDERS, NEAR_PART, NEAR_S
from router.placement.scorers import HORIZON_TOKENS, ROOM_S, TIGHT

Relation = set[tuple[int, int]]
LIMITS = LocalLimits()
Chosen = tuple[WorkerKey | None, tuple[WorkerKey, ...], tuple[tuple[WorkerKey, int], ...]]


@dataclass(frozen=True)
class Reference:
    """The rules of docs/decisions/0023, worker by worker."""

    request: PlacementRequest
    views: list[WorkerView]
    never: Relation
    never_fetches: Relation

    def choose(self) -> Chosen | None:
        decodes = [v for v in self.views if self._able(v) and v.role is Role.DECODE]
        if not decodes:
            return None
        shared_s = min(map(self._decode_s, decodes))
        remote = self._remote(decodes, shared_s)
        bound = LIMITS.max_tokens_ahead if remote else math.inf
        local = {
            v: self._decode_s(v) + self._local_s(v)
            for v in decodes
            if v.chunk_tokens
            and v.pool_tokens >= self.request.num_known_tokens
            and v.prefill_tokens + self._lacking(v) <= bound
        }
        if not local:
            return remote[1] if remote else None
        best = _least(local, shared_s)
        if remote and remote[0] < local[best]:
            return remote[1]
        return None, (best.key,), ()

    def _remote(self, decodes: list[WorkerView], shared_s: float) -> tuple[float, Chosen] | None:
        prefills = [v for v in self.views if self._able(v) and v.role is Role.PREFILL]
        costs: dict[WorkerView, float] = {}
        for p in prefills:
            partners = [d for d in decodes if (p.kind, d.kind) not in self.never]
            usual_s = sum(_token_s(v) for v in prefills) / len(prefills)
            if partners:
                d = min(partners, key=lambda d: self._decode_s(d) + usual_s * self._lacking(d))
                costs[p] = self._ttft_s(p) + self._decode_s(d) + _handover_s(p, self._lacking(d))
        if not costs:
            return None
        p = _least(costs, shared_s)
        reached = {
            d: self._decode_s(d) + _handover_s(p, self._lacking(d))
            for d in decodes
            if (p.kind, d.kind) not in self.never
        }
        targets = sorted(reached, key=lambda d: (reached[d], d.spent_s, d.key))[:MAX_DECODE]
        holders = [
            v
            for v in self.views
            if v.usable and (v.kind, p.kind) not in self.never_fetches and self._lacking(v) < self._lacking(p)
        ]
        holders.sort(key=lambda v: (self._lacking(v), v.spent_s, v.key))
        total_s = self._ttft_s(p) + reached[targets[0]]
        named = tuple((v.key, self.request.cached[v.key]) for v in holders[:MAX_HOLDERS])
        return total_s, (p.key, tuple(d.key for d in targets), named)

    def _able(self, v: WorkerView) -> bool:
        needed = self.request.max_total_tokens if v.role is Role.DECODE else self.request.num_known_tokens
        return v.usable and v.max_kv_tokens >= needed and v.key not in self.request.excluded

    def _lacking(self, v: WorkerView) -> int:
        return max(1, self.request.num_known_tokens - self.request.cached.get(v.key, 0))

    def _compute_s(self, v: WorkerView, lacking: int) -> float:
        assert v.prefill is not None
        a, b, c = v.prefill
        n = self.request.num_known_tokens
        return a + b * lacking + c * (n**2 - (n - lacking) ** 2)

    def _ttft_s(self, v: WorkerView) -> float:
        lacking = self._lacking(v)
        wait_s, alone_s = v.waits[size_of(lacking)], self._compute_s(v, lacking)
        sources = [h for h in self.views if h.usable and (h.kind, v.kind) not in self.never_fetches]
        left = min([lacking, *map(self._lacking, sources)])
        assert v.fetch is not None
        fetched_s = v.fetch[0] + v.fetch[1] * v.fetch_nbytes * (lacking - left)
        gained_s = alone_s - self._compute_s(v, left) - fetched_s
        return wait_s + alone_s - (v.fetch_odds * gained_s if left < lacking and gained_s > 0.0 else 0.0)

    def _local_s(self, v: WorkerView) -> float:
        assert v.step is not None
        lacking = self._lacking(v)
        alone_s = self._compute_s(v, lacking)
        step_s = v.step[0] + v.step[1] * v.held_tokens + v.step[2] * v.num_sequences
        beside_s = math.ceil(lacking / v.chunk_tokens) * step_s if v.num_sequences else 0.0
        disturbed_s = LIMITS.stream_weight * v.num_sequences * alone_s
        return v.waits[size_of(lacking)] + alone_s + beside_s + disturbed_s

    def _decode_s(self, v: WorkerView) -> float:
        assert v.step is not None
        n, most = self.request.num_known_tokens, self.request.max_total_tokens
        step_s = v.step[0] + v.step[1] * (v.held_tokens + n) + v.step[2] * (v.num_sequences + 1)
        used = (v.held_tokens + most) / v.pool_tokens
        below = min(used, TIGHT)
        room_s = ROOM_S * (below / (1.0 - below) + (used - below) / (1.0 - TIGHT) ** 2)
        return min(most - n, HORIZON_TOKENS) * step_s + room_s


def _token_s(v: WorkerView) -> float:
    assert v.handover is not None
    return v.handover[1] * v.handover_nbytes


def _handover_s(v: WorkerView, num_tokens: int) -> float:
    assert v.handover is not None
    return v.handover[0] + _token_s(v) * num_tokens


def _least(costs: dict[WorkerView, float], shared_s: float) -> WorkerView:
    lowest = min(costs.values())
    near = [v for v, cost in costs.items() if cost <= lowest + NEAR_S + NEAR_PART * (lowest - shared_s)]
    return min(near, key=lambda v: (v.spent_s, v.key))


def some_worker(draw: random.Random, name: str, *, equal: bool) -> WorkerView:
    """One of a fleet of equals, or any."""

    def about(value: float) -> float:
        return value if equal else value * draw.uniform(0.5, 2.0)

    waiting = Backlog()
    for _ in range(draw.choice((0, 0, 1, 4))):
        num_tokens = draw.randrange(1, 30_000)
        waiting.add(num_tokens, 1e-4 * num_tokens)
    role = draw.choice(list(Role))
    pool_tokens = draw.choice((5_000, 20_000, 1_000_000))
    return WorkerView(
        key=WorkerKey(name, "1"),
        role=role,
        usable=draw.random() < 0.9,
        kind=2 * draw.randrange(2) + (role is Role.DECODE),
        max_kv_tokens=draw.choice((2_000, 130_000)),
        pool_tokens=pool_tokens,
        held_tokens=draw.choice((0, draw.randrange(pool_tokens * 11 // 10))),
        num_sequences=draw.choice((0, draw.randrange(1, 100))),
        prefill_tokens=waiting.num_tokens,
        waits=waiting.waits(),
        prefill=(about(1e-2), about(1e-4), about(1e-9)),
        step=(about(1e-2), about(1e-7), about(1e-4)),
        handover=(about(2e-3), about(1e-10)),
        handover_nbytes=65_536.0,
        fetch=(about(2e-3), about(1e-10)),
        fetch_nbytes=65_536.0,
        fetch_odds=draw.choice((0.0, 0.5, 1.0)),
        chunk_tokens=draw.choice((0, 256)) if role is Role.DECODE else 0,
        spent_s=draw.choice((0.0, draw.random())),
    )


def some_request(draw: random.Random, keys: list[WorkerKey]) -> PlacementRequest:
    """With a prompt of which some have a part, in groups as the index has them."""
    num_tokens = draw.choice((1, 100, 1_000, 8_192, 30_000))
    shuffled = draw.sample(keys, len(keys))
    groups = []
    for num_cached in sorted(draw.choices(range(1, num_tokens + 1), k=draw.choice((0, 1, 2, 20)))):
        cut = draw.randrange(len(shuffled) + 1)
        group, shuffled = shuffled[:cut], shuffled[cut:]
        if group:
            groups.append((WorkerGroup(tuple(group)), num_cached))
    return PlacementRequest(
        num_known_tokens=num_tokens,
        max_total_tokens=num_tokens + draw.choice((0, 1, 50, 500)),
        cached=Holdings(groups),
        excluded=frozenset(key for key in keys if draw.random() < 0.05),
    )


def some_pairs(draw: random.Random, share: float) -> Relation:
    return {(a, b) for a in range(4) for b in range(4) if draw.random() < share}


def test_columns_choose_what_the_rules_say() -> None:
    """Idle and busy, alike and not, with and without partners, prefixes, and workers that come, change and leave."""
    num_chosen = num_remote = 0
    for seed in range(250):
        draw = random.Random(seed)
        never, never_fetches = some_pairs(draw, 0.15), some_pairs(draw, 0.3)
        fleet = Fleet(
            may_hand_over=lambda a, b, never=never: (a, b) not in never,  # type: ignore[misc]
            may_fetch=lambda a, b, never=never_fetches: (a, b) not in never,  # type: ignore[misc]
        )
        equal = draw.random() < 0.5
        views = [some_worker(draw, f"w{draw.random()}", equal=equal) for _ in range(draw.choice((1, 2, 5, 12, 40)))]
        for view in views:
            fleet.put(replace(view, held_tokens=7, usable=not view.usable))
            fleet.put(view)
        for _ in range(4):
            request = some_request(draw, [*(view.key for view in views), WorkerKey("gone", "1")])
            choice = LeastTimePlacement(LIMITS).choose(request, fleet)
            chosen = None if choice is None else (choice.prefill, choice.decode, choice.holders)
            assert chosen == Reference(request, views, never, never_fetches).choose(), seed
            num_chosen += chosen is not None
            num_remote += choice is not None and not choice.local
        if len(views) > 1:
            fleet.remove(views.pop(0).key)
            request = some_request(draw, [view.key for view in views])
            choice = LeastTimePlacement(LIMITS).choose(request, fleet)
            chosen = None if choice is None else (choice.prefill, choice.decode, choice.holders)
            assert chosen == Reference(request, views, never, never_fetches).choose(), seed
    assert num_remote > 200 and num_chosen - num_remote > 100
