"""What placement looks at: a request's needs and a worker's state at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.types import Role


@dataclass(frozen=True, slots=True, order=True)
class WorkerKey:
    """One process. A restarted worker has the same id and is another one."""

    worker_id: str
    incarnation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker."""

    key: WorkerKey
    role: Role
    usable: bool
    """Connected, of our model, and not draining."""
    max_kv_tokens: int
    """Tokens of the longest sequence it can hold."""
    pool_tokens: int
    """Tokens that its whole KV pool holds."""
    num_tokens: int
    """Prefill: prompt tokens not computed yet. Decode: tokens held or set aside."""
    num_sequences: int
    last_used: int
    """Grows with each dispatch of the router; 0 if it has never been used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What one attempt needs."""

    num_known_tokens: int
    """Tokens that prefill has to cover."""
    max_total_tokens: int
    """Tokens that decode sets aside room for: the prompt and the output at its longest."""
    excluded: frozenset[WorkerKey] = frozenset()
    """Workers that earlier attempts blame."""

    def kv_tokens(self, role: Role) -> int:
        """Tokens of this request that a worker of `role` must be able to hold."""
        return self.num_known_tokens if role is Role.PREFILL else self.max_total_tokens
