"""What admission has done so far, for metrics and status."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from router.admission.refusals import Reason
from router.admission.waiting import PriorityClass


@dataclass(slots=True)
class AdmissionCounters:
    """Prompts, each with all of its outputs. None of these decreases."""

    admitted: Counter[PriorityClass] = field(default_factory=Counter)
    """Sent on to workers."""
    refused: Counter[tuple[PriorityClass, Reason]] = field(default_factory=Counter)
    abandoned: Counter[PriorityClass] = field(default_factory=Counter)
    """Left while they waited: cancelled, or their deadline passed."""
    waited_s: defaultdict[PriorityClass, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds that those which were admitted have waited, all together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueLength:
    """Of one class, now."""

    kind: PriorityClass
    num_waiting: int
    drained_in_s: float
    """Seconds of work that wait, at the rate at which the queue drains."""
    num_admitted: int
    num_refused: int
