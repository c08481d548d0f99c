"""What placement looks at: a request's needs and a worker's state at one moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pdserve.types import Role
from router.cost import NUM_SIZES


class WorkerKey(NamedTuple):
    """One process. A restarted worker has the same id and is another one."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker. Times are seconds; what they mean is said in `router.cost`."""

    key: WorkerKey
    role: Role
    usable: bool
    """Connected, of our model, and not draining."""
    kind: int = 0
    """Workers of one kind are alike in what decides whether KV may go from one to another; see `Fleet`."""
    max_kv_tokens: int
    """Tokens of the longest sequence it can hold."""
    pool_tokens: int
    """Tokens that its whole KV pool holds."""
    held_tokens: int = 0
    """Decode: tokens held or set aside."""
    num_sequences: int = 0
    """Decode: sequences running or on their way."""
    prefill_tokens: int = 0
    """Prompt tokens that it has still to compute."""
    waits: tuple[float, ...] = (0.0,) * NUM_SIZES
    """How long a prompt waits for those, by its size; see `Backlog`."""
    prefill: tuple[float, float, float] | None = None
    """Coefficients of its PrefillModel. None, here and below: it is thought to be like the others, see `SharedView`."""
    step: tuple[float, float, float] | None = None
    """Decode: coefficients of its StepModel."""
    handover: tuple[float, float] | None = None
    """Prefill: coefficients of its TransferModel of KV to decode workers."""
    handover_nbytes: float = 1.0
    """Prefill: bytes that it sends for a token."""
    fetch: tuple[float, float] | None = None
    """Prefill: the same for KV from another worker's cache."""
    fetch_nbytes: float = 1.0
    """Prefill: bytes that come for a token."""
    fetch_odds: float = 0.0
    """Prefill: part of the fetches that were expected of it that it has made."""
    chunk_tokens: int = 0
    """Decode: prompt tokens that it computes beside a step; 0 if it computes none."""
    chunk_pause_s: float = math.inf
    """Decode: seconds that these may take; where they would take longer it takes fewer."""
    spent_s: float = 0.0
    """Work that it has had so far: what the router expected of its own requests, and prompts of other routers. Among
    equals the least goes first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedView:
    """What all workers have in common, and those that are not known well enough are thought to have."""

    prefill: tuple[float, float, float]
    step: tuple[float, float, float]
    handover: tuple[float, float]
    fetch: tuple[float, float]
    prefill_overhead_s: float = 0.0
    """What a prompt with nobody in front takes on a prefill worker beside fetch and compute."""
    decode_overhead_s: float = 0.0
    """The same on a decode worker that computes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What one attempt needs."""

    num_known_tokens: int
    """Tokens that prefill has to cover."""
    max_total_tokens: int
    """Tokens that decode sets aside room for: the prompt and the output at its longest."""
    cached: Mapping[WorkerKey, int] = field(default_factory=dict)
    """Who has probably got the KV of how many of the first tokens."""
    expected: Mapping[WorkerKey, int] | None = None
    """The same with what they have been told to compute, which they will have when it is this request's turn. Others
    cannot fetch that yet. None: nothing more than `cached`."""
    excluded: frozenset[WorkerKey] = frozenset()
    """Workers that earlier attempts blame."""
