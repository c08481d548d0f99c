"""What the load generator asks of a server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.requests import Answer, PlannedRequest

OnTokens = Callable[[int], None]
"""So many output tokens have just come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSample:
    """Load of a whole cluster at one moment: sums over its workers, and over the classes of the router's queue."""

    at_s: float
    waiting_in_router: int
    waiting_in_workers: int
    moving: int
    """Hand-overs under way."""
    running: int
    blocks_in_use: int


class Target(Protocol):
    """A server under load. Every method raises a PdServeError when the server fails."""

    @property
    def name(self) -> str:
        """API and address, for reports."""

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Tokens of a text in the served model, without BOS and the like."""

    async def generate(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        """Run one request to its end, greedily, with its number of output tokens forced. Never tries again: a failure
        that a retry hides would look like a slow answer."""

    async def queues(self, at_s: float) -> QueueSample | None:
        """Load now, stamped `at_s`; None if the server does not tell."""

    async def close(self) -> None:
        """Close connections."""
