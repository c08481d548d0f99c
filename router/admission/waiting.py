"""What waits: one prompt with all of its outputs, which are placed together."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from router.placement import PlacementRequest


class PriorityClass(enum.IntEnum):
    """Requests by how urgent their clients say they are. Each class has a share of the cluster, so that none starves;
    what a class does not need goes to the others."""

    HIGH = 0
    """`priority` < 0."""
    NORMAL = 1
    LOW = 2
    """`priority` > 0."""

    @property
    def label(self) -> str:
        """As people and metrics see it."""
        return self.name.lower()


def class_of(priority: int) -> PriorityClass:
    """Smaller is more urgent."""
    if priority == 0:
        return PriorityClass.NORMAL
    return PriorityClass.HIGH if priority < 0 else PriorityClass.LOW


@dataclass(eq=False, slots=True, kw_only=True)
class Waiting:
    """One prompt that wants workers. Times are `time.monotonic()` in seconds. The second half is filled in by
    `AdmissionControl`."""

    tenant: bytes
    """Whose it is. Tenants share alike, whatever each of them sends."""
    priority: int
    """Smaller is served first: between classes by their shares, and in any case among those of one tenant and class."""
    needs: PlacementRequest
    max_tokens: int
    """Bound on the tokens of each output."""
    num_outputs: int
    received_at: float
    deadline: float
    """When all outputs must have ended."""

    arrived_at: float = 0.0
    work_s: float = 0.0
    """For so long it keeps the whole cluster busy, as far as can be told: the measure of shares and of queues."""
    prefill_s: float = 0.0
    """Part of its time to first token that is not waiting."""
    token_work_s: float = 0.0
    """Part of `work_s` that each token of each output adds, where decoding is what is short; else 0."""
    expected_tokens: float = 0.0
    """Of each output."""
    first_by: float = 0.0
    """When the first token must be there."""
    measured: bool = False
    """Whether the estimates come from measurements. Nobody is refused because of a guess."""
    admitted_at: float | None = None
    """When it had its turn."""
    foretold_s: float | None = None
    """From then to its first token, as foretold; None if that is not known, or has been compared."""
    overtaken_s: float = 0.0
    """Work of those that went before it although it was its turn, because there was no place for it."""

    kind: PriorityClass = field(init=False)
    """Its class."""

    def __post_init__(self) -> None:
        self.kind = class_of(self.priority)
