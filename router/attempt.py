"""One attempt of one request on one pair of workers: who has what of it, and who must be told when it ends."""

from __future__ import annotations

from pdserve.errors import InternalError, UnavailableError, WorkerLostError
from pdserve.types import GenerationJob
from router.events import SubmitJob
from router.worker import Charge, Consumer, Worker
from router.worker_pool import Placement


class Attempt:
    """Load is charged and events are routed from `dispatch` until `close` or `cancel`.

    All decode workers offered to the prefill worker stay attached until one is known to have the request: the one first
    announced only holds a reservation, and the prefill worker may still hand over to another.
    """

    def __init__(self, job: GenerationJob, placement: Placement, consumer: Consumer) -> None:
        self.job = job
        self._holders = placement.holders
        self.prefill = placement.prefill
        self.handed_off = False
        """Whether the prefill worker has reported the hand-off."""
        self.decoding = False
        """Whether the decode worker has sent tokens."""
        self._first_token_seen = False
        self._offered = placement.decode
        self._candidates = list(placement.decode)
        """Decode workers that may still turn out to be the one."""
        self._expected: Worker | None = None
        """The candidate that has the reservation, as far as known."""
        self._settled = False
        """Whether the choice is final: `_expected` has the request, or none is needed."""
        self._consumer = consumer

    @property
    def decode(self) -> Worker | None:
        """The decode worker that has the request or the reservation for it, once known."""
        return self._expected

    def dispatch(self) -> None:
        """Send the job. Raises UnavailableError, with nothing left charged, if the prefill worker cannot be reached."""
        request_id = self.job.request_id
        self.prefill.attach(request_id, self._consumer)
        self.prefill.charge(request_id, Charge(tokens=self.job.num_known_tokens, sequences=1))
        for worker in self._candidates:
            worker.attach(request_id, self._consumer)
        self._candidates[0].charge(request_id, self._decode_charge())
        try:
            targets = tuple(worker.info.target for worker in self._candidates)
            self.prefill.send(SubmitJob(self.job, targets, self._holders))
        except UnavailableError:
            self.close()
            raise

    def started(self, decode_worker: str) -> None:
        """The prefill worker computes, and `decode_worker` holds the reservation; empty if none is needed.

        Raises InternalError if that worker was not offered, and WorkerLostError if it is lost: little is computed yet,
        and a new attempt is cheaper than a whole prompt without a place to go.
        """
        if not decode_worker:
            self._settle(None)
            return
        worker = self._offered_worker(decode_worker)
        if self._settled:
            # Tokens have overtaken this report.
            return
        self._expect(self._still_there(worker))

    def first_token(self) -> None:
        """The prompt is computed: the prefill worker has no more to compute of it."""
        self._first_token_seen = True
        self.prefill.discharge(self.job.request_id)

    def tokens_from(self, worker: Worker) -> None:
        """A decode worker has sent tokens, possibly before anything was heard of the hand-off."""
        self.decoding = True
        if not self._settled:
            self._settle(worker)

    def hand_off_reported(self, decode_worker: str) -> None:
        """`decode_worker` has the request, and the prefill worker has nothing of it any more.

        Raises InternalError if that worker was not offered or another one decodes, WorkerLostError if it is lost.
        """
        self.handed_off = True
        self.prefill.detach(self.job.request_id)
        worker = self._offered_worker(decode_worker)
        if not self._settled:
            self._settle(self._still_there(worker))
        elif worker is not self._expected:
            raise InternalError(f"two decode workers have attempt {self.job.attempt}, one of them {decode_worker!r}")

    def survives_loss_of(self, worker: Worker) -> bool:
        """Whether the attempt can go on without `worker`, which is lost."""
        if worker is self.prefill:
            # The first token comes from the prefill worker alone: without it there is a hole in the output.
            return self._first_token_seen and (self.handed_off or self.decoding)
        if worker not in self._candidates:
            return True
        self._candidates.remove(worker)
        if worker is self._expected:
            self._expected = None
            if self._settled:
                return False
        # Until the request is handed off, the prefill worker can still move it to another candidate, and will say so.
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

    def _offered_worker(self, worker_id: str) -> Worker:
        for worker in self._offered:
            if worker.info.worker_id == worker_id:
                return worker
        raise InternalError(f"prefill worker {self.prefill.info.worker_id} chose {worker_id!r}, which it was not given")

    def _still_there(self, worker: Worker) -> Worker:
        """`worker`, unless it was lost: only that makes an offered worker no candidate before the choice is final."""
        if worker in self._candidates:
            return worker
        name = worker.info.worker_id
        raise WorkerLostError(f"decode worker {name} was lost before it had the request", worker=name)

    def _expect(self, chosen: Worker) -> None:
        """The load is now with `chosen`."""
        for worker in self._candidates:
            worker.discharge(self.job.request_id)
        chosen.charge(self.job.request_id, self._decode_charge())
        self._expected = chosen

    def _settle(self, chosen: Worker | None) -> None:
        """The decode worker is `chosen`, or none is needed; the others have nothing to do with the request."""
        for worker in self._candidates:
            if worker is not chosen:
                if worker is self._expected:
                    # The prefill worker has moved away from it, perhaps because it cannot reach it: then nobody else
                    # can tell it to give up the reservation.
                    worker.cancel(self.job.request_id, self.job.attempt)
                worker.detach(self.job.request_id)
        self._candidates = [] if chosen is None else [chosen]
        self._expected = None
        if chosen is not None:
            self._expect(chosen)
        self._settled = True

    def _decode_charge(self) -> Charge:
        return Charge(tokens=self.job.max_total_tokens, sequences=1)
