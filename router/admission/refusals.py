"""Why a request is not served, in words for people and a reason for machines, and when to try again."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from pdserve.errors import CapacityError, PdServeError, UnavailableError
from router.admission.waiting import Waiting

SHORTEST_RETRY_S: Final = 1.0
LONGEST_RETRY_S: Final = 60.0


class Reason(enum.StrEnum):
    """Label of metrics, and `reason` in the details of the error."""

    QUEUE_FULL = "queue_full"
    """Too many wait, and its tenant has the most of them."""
    ROUTER_FULL = "router_full"
    """Too many are in progress, and none of them has more than its share of what waits."""
    TTFT = "ttft"
    """Its first token would be later than `router.admission.max_ttft_s`."""
    DEADLINE = "deadline"
    """It would be later than its deadline allows."""
    DECODE_ROOM = "decode_room"
    """No decode worker had room for its KV in time."""
    NO_WORKERS = "no_workers"
    """There were no workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A request that will not be served."""

    waiting: Waiting
    reason: Reason
    message: str
    retry_after_s: float

    @property
    def error(self) -> PdServeError:
        """For its client."""
        if self.reason is Reason.NO_WORKERS:
            return UnavailableError(self.message, retry_after_s=self.retry_after_s, reason=self.reason.value)
        return CapacityError(self.message, retry_after_s=self.retry_after_s, reason=self.reason.value)


def retry_after(seconds: float) -> float:
    """`seconds`, as far as it is good to ask a client to wait."""
    return min(LONGEST_RETRY_S, max(SHORTEST_RETRY_S, seconds))
