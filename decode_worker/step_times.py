"""How long steps take, and what of that prompts, lost KV and drafts are to blame for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from decode_worker.chunk_budget import ChunkBudget
from decode_worker.migration_cost import MigrationCost
from decode_worker.prompts import Prompts
from decode_worker.sequences import PlannedChunk, Sequence
from decode_worker.speculation.speculator import Speculator

STEP_SMOOTHING: Final = 0.1
"""Weight of the newest step in the running mean of step times."""


class StepTimes:
    """Told of every step. Times are seconds."""

    def __init__(self, prompts: Prompts, cost: MigrationCost, speculation: Speculator, budget: ChunkBudget) -> None:
        """Prompts get their part of the steps in which they were; `cost` hears how fast they are computed,
        `speculation` what drafts take, and `budget` what prompts take beside streams."""
        self._prompts = prompts
        self._cost = cost
        self._speculation = speculation
        self._budget = budget
        self._began_at: float | None = None
        """When the step before was over, or the first one after a pause was planned."""
        self.mean_s = 0.0
        """Of steps without prompts; 0 before the first one."""

    def planned(self, now: float, *, idle: bool) -> None:
        """A step begins; or there is nothing to compute: `idle`."""
        if idle:
            self._began_at = None
        elif self._began_at is None:
            self._began_at = now

    def interrupted(self) -> None:
        """The step did not come to its end."""
        self._began_at = None

    def note(self, step: Seq[tuple[Sequence, PlannedChunk]], duration_s: float, now: float) -> None:
        """A step is over. What it has taken longer because of prompts is counted as theirs, and not less than their
        part of it by tokens."""
        chunks = [chunk for _, chunk in step]
        in_chunks = [chunk for chunk in chunks if chunk.is_prompt or len(chunk.token_ids) > 1]
        if in_chunks:
            num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
            num_in_chunks = sum(len(chunk.token_ids) for chunk in in_chunks)
            longer_s = duration_s - (self.mean_s if len(in_chunks) < len(chunks) else 0.0)
            chunks_s = max(longer_s, duration_s * num_in_chunks / num_tokens)
            self._cost.computed(num_in_chunks, chunks_s)
            if len(in_chunks) < len(chunks):
                self._budget.measured(num_in_chunks, chunks_s)
            for chunk in in_chunks:
                if (prompt := self._prompts.of(chunk.key)) is not None:
                    prompt.compute_s += chunks_s * len(chunk.token_ids) / num_in_chunks
        if not in_chunks or not any(chunk.is_prompt for chunk in in_chunks):
            weight = STEP_SMOOTHING if self.mean_s else 1.0
            self.mean_s += weight * (duration_s - self.mean_s)
        # What drafts cost is seen in steps in which every sequence draws a token.
        began_at, self._began_at = self._began_at, now
        if began_at is not None and all(len(chunk.token_ids) == 1 and chunk.draws for chunk in chunks):
            num_drafted = sum(len(chunk.draft) for chunk in chunks)
            self._speculation.stepped([sequence for sequence, _ in step], num_drafted, now - began_at)
