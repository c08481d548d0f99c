"""An attempt on a decode worker that computes the prompt itself: no KV moves."""

from __future__ import annotations

from pdserve.errors import InternalError
from pdserve.types import GenerationJob
from router.events import SubmitLocal
from router.sole_worker_attempt import SoleWorkerAttempt
from router.worker import Charge, Consumer, Worker
from router.worker_pool import Placement


class LocalAttempt(SoleWorkerAttempt):
    """There is one worker, and it reports everything in order."""

    def __init__(
        self, job: GenerationJob, placement: Placement, consumer: Consumer, *, num_outputs: int = 1, leads: bool = True
    ) -> None:
        """See Attempt."""
        assert placement.prefill is None, "a remote placement"
        (worker,) = placement.decode
        super().__init__(job, placement.estimate, worker, consumer, num_outputs=num_outputs, leads=leads)
        self.decoding = False

    @property
    def local(self) -> bool:
        """See Attempt."""
        return True

    @property
    def exact(self) -> bool:
        """See Attempt."""
        return True

    def started(self, decode_worker: str) -> None:
        """See Attempt."""
        if decode_worker != self._worker.info.worker_id:
            raise InternalError(f"decode worker {self._worker.info.worker_id} computes for {decode_worker!r}")

    def first_token(self) -> None:
        """See Attempt."""
        self.decoding = True

    def tokens_from(self, worker: Worker) -> None:
        """See Attempt."""
        self.decoding = True

    def hand_off_reported(self, decode_worker: str) -> None:
        """See Attempt."""
        raise InternalError(f"decode worker {self._worker.info.worker_id} reports a hand-off of its own prompt")

    def open(self) -> None:
        """See Attempt."""
        self._worker.attach(self.job.request_id, self._consumer)
        charge = Charge(held_tokens=self._held_tokens, num_sequences=1, prompt=self._prompt_charge())
        self._worker.charge(self.job.request_id, charge)

    def send(self, job: GenerationJob) -> None:
        """See Attempt."""
        self._worker.send(SubmitLocal(job))
