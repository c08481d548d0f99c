"""How long steps take, and what of that prompts and lost KV are to blame for."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Final

from decode_worker.migration_cost import MigrationCost
from decode_worker.prompts import Prompts
from decode_worker.sequences import PlannedChunk

STEP_SMOOTHING: Final = 0.1
"""Weight of the newest step in the running mean of step times."""


class StepTimes:
    """Told of every step. Times are seconds."""

    def __init__(self, prompts: Prompts, cost: MigrationCost) -> None:
        """Prompts get their part of the steps in which they were; `cost` hears how fast they are computed."""
        self._prompts = prompts
        self._cost = cost
        self.mean_s = 0.0
        """Of steps without prompts; 0 before the first one."""

    def note(self, chunks: Seq[PlannedChunk], duration_s: float) -> None:
        """A step is over. What it has taken longer because of prompts is counted as theirs, and not less than their
        part of it by tokens."""
        in_chunks = [chunk for chunk in chunks if chunk.is_prompt or len(chunk.token_ids) > 1]
        if in_chunks:
            num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
            num_in_chunks = sum(len(chunk.token_ids) for chunk in in_chunks)
            longer_s = duration_s - (self.mean_s if len(in_chunks) < len(chunks) else 0.0)
            chunks_s = max(longer_s, duration_s * num_in_chunks / num_tokens)
            self._cost.computed(num_in_chunks, chunks_s)
            for chunk in in_chunks:
                if (prompt := self._prompts.of(chunk.key)) is not None:
                    prompt.compute_s += chunks_s * len(chunk.token_ids) / num_in_chunks
        if not any(chunk.is_prompt for chunk in chunks):
            weight = STEP_SMOOTHING if self.mean_s else 1.0
            self.mean_s += weight * (duration_s - self.mean_s)
