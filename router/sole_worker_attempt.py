"""An attempt that has one worker, which decodes."""

from __future__ import annotations

from pdserve.types import GenerationJob
from router.attempt import Attempt
from router.placement import Estimate
from router.worker import Consumer, Worker


class SoleWorkerAttempt(Attempt):
    """With that worker it stands and falls."""

    handed_off = True

    def __init__(
        self,
        job: GenerationJob,
        estimate: Estimate,
        worker: Worker,
        consumer: Consumer,
        *,
        num_outputs: int = 1,
        leads: bool = True,
    ) -> None:
        """See Attempt."""
        super().__init__(job, estimate, consumer, num_outputs=num_outputs, leads=leads)
        self._worker = worker

    @property
    def first_worker(self) -> Worker:
        """See Attempt."""
        return self._worker

    @property
    def decode(self) -> Worker | None:
        """See Attempt."""
        return self._worker

    def survives_loss_of(self, worker: Worker) -> bool:
        """See Attempt."""
        return worker is not self._worker

    def worker_named(self, worker_id: str) -> Worker | None:
        """See Attempt."""
        return self._worker if self._worker.info.worker_id == worker_id else None

    def cancel(self) -> None:
        """See Attempt."""
        self._worker.cancel(self.job.request_id, self.job.attempt)
        self.close()

    def close(self) -> None:
        """See Attempt."""
        self._worker.detach(self.job.request_id)
