"""What admission asks of the cluster, answered from the same figures and by the same choice as placement."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np

from router.admission.forecast import Forecast
from router.placement import Choice, Fleet, PlacementRequest, WorkerKey

LEAST_S: Final = 1e-6
"""Work is never nothing."""


class Cluster(Protocol):
    """What is known of the workers."""

    @property
    def fleet(self) -> Fleet:
        """As placement sees them. Read only."""

    @property
    def missing(self) -> str:
        """Why an attempt finds no workers, as a clause."""

    def choose(self, request: PlacementRequest) -> Choice | None:
        """What placement would do now."""

    def tokens_in_use(self, key: WorkerKey) -> int:
        """What the KV pool of a worker holds for requests, by its own latest count."""

    def is_timed(self, key: WorkerKey) -> bool:
        """Whether it has computed prompts, so that its speed is known."""


class WorkersPredictor:
    """See Predictor. Pure."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    @property
    def usable(self) -> bool:
        """See Predictor."""
        return self._cluster.choose(PlacementRequest(num_known_tokens=1, max_total_tokens=1)) is not None

    @property
    def missing(self) -> str:
        """See Predictor."""
        return self._cluster.missing

    def forecast(self, needs: PlacementRequest) -> Forecast | None:
        """See Predictor."""
        choice = self._cluster.choose(needs)
        if choice is None:
            return None
        fleet, estimate = self._cluster.fleet, choice.estimate
        # Those that are usable.
        decodes = fleet.decode_limit >= 0.0
        num_decode = np.count_nonzero(decodes)
        num_prefill = num_decode if choice.local else np.count_nonzero(fleet.prefill_limit >= 0.0)
        of_mean = decodes / num_decode
        context_s = float(of_mean @ fleet.step_per_token) * needs.num_known_tokens
        computing = choice.decode[0] if choice.prefill is None else choice.prefill
        overhead_s = float(fleet.overhead_s[fleet.row(computing)])
        return Forecast(
            wait_s=max(0.0, estimate.queue_s - overhead_s),
            prefill_s=max(LEAST_S, estimate.fetch_s + estimate.prefill_s),
            overhead_s=overhead_s,
            num_prefill=float(num_prefill),
            step_s=float(of_mean @ fleet.next_step_s) + context_s,
            token_work_s=float(of_mean @ fleet.step_per_sequence) + context_s,
            num_decode=float(num_decode),
            has_room=self._has_room(choice, needs),
            measured=self._cluster.is_timed(computing),
        )

    def _has_room(self, choice: Choice, needs: PlacementRequest) -> bool:
        """By what a worker has promised, or by what it really holds: outputs are shorter than they may become, and
        little has been promised since the worker counted."""
        fleet = self._cluster.fleet
        for key in choice.decode:
            row = fleet.row(key)
            held_tokens = min(fleet.held_tokens[row], self._cluster.tokens_in_use(key))
            if fleet.pool_tokens[row] - held_tokens >= needs.num_known_tokens:
                return True
        return False
