"""One attempt of one request on one pair of workers: who has what of it, and who must be told when it ends."""

from __future__ import annotations

from pdserve.errors import InternalError, UnavailableError
from pdserve.types import GenerationJob
from router.events import SubmitJob
from router.worker import Charge, Consumer, Worker
from router.worker_pool import Placement


class Attempt:
    """Load is charged and events are routed from `dispatch` until `close` or `cancel`."""

    def __init__(self, job: GenerationJob, placement: Placement, consumer: Consumer) -> None:
        self.job = job
        self.prefill = placement.prefill
        self.decode: Worker | None = None
        """The decode worker that has the reservation, once known."""
        self.handed_off = False
        """Whether the prefill worker has reported the hand-off."""
        self.decoding = False
        """Whether the decode worker has sent tokens."""
        self._first_token_seen = False
        self._offered = placement.decode
        self._candidates = list(placement.decode)
        """Decode workers that may still turn out to be the one."""
        self._consumer = consumer

    def dispatch(self) -> None:
        """Send the job. Raises UnavailableError, with nothing left charged, if the prefill worker cannot be reached."""
        request_id = self.job.request_id
        self.prefill.attach(request_id, self._consumer)
        self.prefill.charge(request_id, Charge(tokens=self.job.num_known_tokens, sequences=1))
        for worker in self._candidates:
            worker.attach(request_id, self._consumer)
        self._candidates[0].charge(request_id, self._decode_charge())
        try:
            self.prefill.send(SubmitJob(self.job, tuple(worker.info.target for worker in self._candidates)))
        except UnavailableError:
            self.close()
            raise

    def started(self, decode_worker: str) -> None:
        """The prefill worker computes, and `decode_worker` holds the reservation; empty if none is needed.

        Raises InternalError if that worker was not offered.
        """
        if not decode_worker:
            self._settle(None)
            return
        for worker in self._candidates:
            if worker.info.worker_id == decode_worker:
                self._settle(worker)
                return
        raise InternalError(
            f"prefill worker {self.prefill.info.worker_id} chose {decode_worker!r}, which it was not given"
        )

    def first_token(self) -> None:
        """The prompt is computed: the prefill worker has no more to compute of it."""
        self._first_token_seen = True
        self.prefill.discharge(self.job.request_id)

    def tokens_from(self, worker: Worker) -> None:
        """A decode worker has sent tokens, possibly before anything was heard of the hand-off."""
        self.decoding = True
        if self.decode is None:
            self._settle(worker)

    def hand_off_reported(self) -> None:
        """The prefill worker has nothing of the request any more."""
        self.handed_off = True
        self.prefill.detach(self.job.request_id)

    def survives_loss_of(self, worker: Worker) -> bool:
        """Whether the attempt can go on without `worker`, which is lost."""
        if worker is self.prefill:
            # The first token comes from the prefill worker alone: without it there is a hole in the output.
            return self._first_token_seen and (self.handed_off or self.decoding)
        if worker is self.decode:
            return False
        if worker in self._candidates:
            self._candidates.remove(worker)
        return bool(self._candidates)

    def worker_named(self, worker_id: str) -> Worker | None:
        """The worker of this attempt with that id."""
        return next((w for w in (self.prefill, *self._offered) if w.info.worker_id == worker_id), None)

    def cancel(self) -> None:
        """Tell every worker that may have something of the request to stop, and be done with them."""
        if not self.handed_off:
            self.prefill.cancel(self.job.request_id, self.job.attempt)
        for worker in self._candidates:
            worker.cancel(self.job.request_id, self.job.attempt)
        self.close()

    def close(self) -> None:
        """Take no more events and no more load."""
        self.prefill.detach(self.job.request_id)
        for worker in self._candidates:
            worker.detach(self.job.request_id)

    def _settle(self, chosen: Worker | None) -> None:
        """The decode worker is `chosen`, or none is needed; the others have nothing to do with the request."""
        for worker in self._candidates:
            if worker is not chosen:
                worker.detach(self.job.request_id)
        self._candidates = [] if chosen is None else [chosen]
        self.decode = chosen
        if chosen is not None:
            chosen.charge(self.job.request_id, self._decode_charge())

    def _decode_charge(self) -> Charge:
        return Charge(tokens=self.job.max_total_tokens, sequences=1)
