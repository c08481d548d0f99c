"""An attempt whose stream moves from one decode worker to another, and what it is after that.

While it moves both workers send tokens, the first under the number of the attempt that it goes on with, the other under
the new one. Which of them owns it is theirs to settle, and the first one's to say; until then the loss of the first one
is the loss of the attempt.
"""

from __future__ import annotations

import dataclasses

from pdserve.errors import InternalError
from pdserve.types import GenerationJob
from router.attempt import Attempt
from router.sole_worker_attempt import SoleWorkerAttempt
from router.worker import Charge, Consumer, Worker


class MigratedAttempt(SoleWorkerAttempt):
    """The stream runs on a decode worker that has got it from another one."""

    decoding = True

    def __init__(self, before: Attempt, job: GenerationJob, worker: Worker, consumer: Consumer) -> None:
        """`before` is the attempt that it goes on with, `job` is that as `worker` knows it. Open already."""
        super().__init__(job, before.estimate, worker, consumer)
        self._exact = before.exact
        self._local = before.local

    @property
    def local(self) -> bool:
        """See Attempt."""
        return self._local

    @property
    def exact(self) -> bool:
        """See Attempt."""
        return self._exact

    def started(self, decode_worker: str) -> None:
        """See Attempt."""
        raise InternalError(f"decode worker {self._worker.info.worker_id} computes the prompt of a stream that runs")

    def first_token(self) -> None:
        """See Attempt."""
        raise InternalError(f"decode worker {self._worker.info.worker_id} sent another first token")

    def tokens_from(self, worker: Worker) -> None:
        """See Attempt."""

    def hand_off_reported(self, decode_worker: str) -> None:
        """See Attempt."""
        raise InternalError(f"a hand-off to {decode_worker!r} was reported of a stream that had been handed over")

    def open(self) -> None:
        """See Attempt."""
        request_id = self.job.request_id
        self._worker.attach(request_id, self._consumer)
        self._worker.charge(request_id, Charge(held_tokens=self.job.max_total_tokens, num_sequences=1))

    def send(self, job: GenerationJob) -> None:
        """See Attempt. Its workers do that among themselves."""
        raise InternalError("a stream that moves is not sent by its router")


class MigratingAttempt(Attempt):
    """On its way: all that `before` is, and the other worker beside it."""

    def __init__(self, before: Attempt, new_attempt: int, target: Worker, consumer: Consumer, cause: str) -> None:
        """`before` is open, and stays so until `arrived` or the end."""
        super().__init__(before.job, before.estimate, consumer, num_outputs=before.num_outputs, leads=before.leads)
        self.before = before
        self.handed_off = before.handed_off
        self.decoding = before.decoding
        self.new_attempt = new_attempt
        self.target = target
        self.cause = cause
        self.has_arrived = False
        """Whether the target has sent tokens."""
        self._target_is_lost = False

    @property
    def first_worker(self) -> Worker:
        """See Attempt."""
        return self.before.first_worker

    @property
    def decode(self) -> Worker | None:
        """See Attempt."""
        return self.target if self.has_arrived else self.before.decode

    @property
    def local(self) -> bool:
        """See Attempt."""
        return self.before.local

    @property
    def exact(self) -> bool:
        """See Attempt."""
        return self.before.exact

    def started(self, decode_worker: str) -> None:
        """See Attempt."""
        self.before.started(decode_worker)

    def first_token(self) -> None:
        """See Attempt."""
        self.before.first_token()

    def tokens_from(self, worker: Worker) -> None:
        """See Attempt."""
        if worker is self.target:
            self.has_arrived = True

    def hand_off_reported(self, decode_worker: str) -> None:
        """See Attempt."""
        self.before.hand_off_reported(decode_worker)

    def survives_loss_of(self, worker: Worker) -> bool:
        """See Attempt. What the first worker had computed before it was lost may not have been sent."""
        if worker is not self.target:
            return self.before.survives_loss_of(worker)
        self._target_is_lost = True
        return not self.has_arrived

    def is_settled_without(self, worker: Worker, has_gap: bool) -> bool:
        """Whether the stream is at the target for good, although `worker` is lost and cannot say so: tokens of the
        target are here, and none is missing before them (`has_gap`)."""
        return worker is self.before.decode and self.has_arrived and not has_gap

    def worker_named(self, worker_id: str) -> Worker | None:
        """See Attempt."""
        return self.target if self.target.info.worker_id == worker_id else self.before.worker_named(worker_id)

    def cancel(self) -> None:
        """See Attempt."""
        self.called_off()
        self.before.cancel()

    def close(self) -> None:
        """See Attempt."""
        self.target.detach(self.job.request_id)
        self.before.close()

    def open(self) -> None:
        """See Attempt: only the target is not yet."""
        self.target.attach(self.job.request_id, self._consumer)
        self.target.charge(self.job.request_id, Charge(held_tokens=self.job.max_total_tokens, num_sequences=1))

    def send(self, job: GenerationJob) -> None:
        """See Attempt. Its workers do that among themselves."""
        raise InternalError("a stream that moves is not sent by its router")

    def called_off(self) -> None:
        """The target has, or will have, nothing of it."""
        self.target.cancel(self.job.request_id, self.new_attempt)
        self.target.detach(self.job.request_id)

    def arrived(self, token_ids: tuple[int, ...]) -> MigratedAttempt | None:
        """The target owns the stream, of which `token_ids` are out. None if it is lost by now."""
        self.before.close()
        if self._target_is_lost:
            return None
        job = dataclasses.replace(self.job, attempt=self.new_attempt, token_ids=token_ids)
        return MigratedAttempt(self.before, job, self.target, self._consumer)
