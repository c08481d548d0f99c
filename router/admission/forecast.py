"""What the cluster could do for a request now. The seam between admission and the models of placement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from router.placement import PlacementRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """If it were dispatched now. Times are seconds."""

    wait_s: float
    """In front of it on the worker that would compute it: only what that worker would do first, so not what is longer
    than this prompt."""
    prefill_s: float
    """Then, to the first token."""
    overhead_s: float
    """Beside both, however little there is to do: messages on their way, a reservation. Neither waiting nor work."""
    num_prefill: float
    """Workers that compute prompts like this one at the same time."""
    step_s: float
    """From one token of an output to the next."""
    token_work_s: float
    """By so much a token of one more output lengthens the steps of one decode worker."""
    num_decode: float
    """Decode workers."""
    has_room: bool
    """Whether some decode worker has KV room for it."""
    measured: bool
    """Whether this worker's speed has been measured, and is not a guess."""

    @property
    def ttft_s(self) -> float:
        """From dispatch to the first token."""
        return self.wait_s + self.prefill_s + self.overhead_s

    def slowed(self, factor: float) -> Forecast:
        """If everything before the first token takes `factor` times as long."""
        return replace(self, wait_s=self.wait_s * factor, prefill_s=self.prefill_s * factor)


class Predictor(Protocol):
    """Pure: answers from what is known already."""

    @property
    def usable(self) -> bool:
        """Whether there are workers at all that can serve a request from beginning to end."""

    @property
    def missing(self) -> str:
        """What kind of worker there is none of, as a clause."""

    def forecast(self, needs: PlacementRequest) -> Forecast | None:
        """None: no worker that is there now could take it, even if it had nothing else to do."""
