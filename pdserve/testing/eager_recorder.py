"""Stands in for CUDA graphs where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


class EagerRecorder:
    """Implements `Recorder`, but runs the work itself again: the same results from the same static buffers."""

    def __init__(self) -> None:
        self.num_recorded = 0
        self.replayed: list[int] = []
        """Which of what was recorded, in order."""

    def record(self, work: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """See `Recorder`."""
        work()
        number = self.num_recorded
        self.num_recorded += 1

        def replay() -> torch.Tensor:
            self.replayed.append(number)
            return work()

        return replay
