"""An attempt on a pair of workers: one computes the prompt, and hands it over to the other."""

from __future__ import annotations

from pdserve.errors import InternalError, WorkerLostError
from pdserve.types import GenerationJob
from router.attempt import Attempt
from router.events import SubmitJob
from router.worker import Charge, Consumer, Worker
from router.worker_pool import Placement


class RemoteAttempt(Attempt):
    """All decode workers offered to the prefill worker stay attached until one is known to have the request: the one
    first announced only holds a reservation, and the prefill worker may still hand over to another.
    """

    def __init__(
        self, job: GenerationJob, placement: Placement, consumer: Consumer, *, num_outputs: int = 1, leads: bool = True
    ) -> None:
        """See Attempt. The prompt's KV is moved once, too."""
        assert placement.prefill is not None, "a local placement"
        super().__init__(job, placement.estimate, consumer, num_outputs=num_outputs, leads=leads)
        self._holders = placement.holders
        self._prefill = placement.prefill
        self.handed_off = False
        self.decoding = False
        self._first_token_seen = False
        self._offered = placement.decode
        self._candidates = list(placement.decode)
        """Decode workers that may still turn out to be the one."""
        self._expected: Worker | None = None
        """The candidate that has the reservation, as far as known."""
        self._settled = False
        """Whether the choice is final: `_expected` has the request, or none is needed."""

    @property
    def first_worker(self) -> Worker:
        """See Attempt."""
        return self._prefill

    @property
    def decode(self) -> Worker | None:
        """See Attempt."""
        return self._expected

    @property
    def local(self) -> bool:
        """See Attempt."""
        return False

    @property
    def exact(self) -> bool:
        """See Attempt."""
        return self._prefill.info.codecs == ("none",)

    def started(self, decode_worker: str) -> None:
        """See Attempt."""
        if not decode_worker:
            self._settle(None)
            return
        worker = self._offered_worker(decode_worker)
        if self._settled:
            # Tokens have overtaken this report.
            if worker is not self._expected:
                self._give_up_reservation(worker)
            return
        self._expect(self._still_there(worker))

    def first_token(self) -> None:
        """See Attempt."""
        self._first_token_seen = True
        self._prefill.discharge(self.job.request_id)

    def tokens_from(self, worker: Worker) -> None:
        """See Attempt."""
        self.decoding = True
        if not self._settled:
            self._settle(worker)

    def hand_off_reported(self, decode_worker: str) -> None:
        """See Attempt."""
        self.handed_off = True
        self._prefill.detach(self.job.request_id)
        worker = self._offered_worker(decode_worker)
        if not self._settled:
            self._settle(self._still_there(worker))
        elif worker is not self._expected:
            raise InternalError(f"two decode workers have attempt {self.job.attempt}, one of them {decode_worker!r}")

    def survives_loss_of(self, worker: Worker) -> bool:
        """See Attempt."""
        if worker is self._prefill:
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
        """See Attempt."""
        return next((w for w in (self._prefill, *self._offered) if w.info.worker_id == worker_id), None)

    def cancel(self) -> None:
        """See Attempt."""
        if not self.handed_off:
            self._prefill.cancel(self.job.request_id, self.job.attempt)
        for worker in self._candidates:
            worker.cancel(self.job.request_id, self.job.attempt)
        self.close()

    def close(self) -> None:
        """See Attempt."""
        self._prefill.detach(self.job.request_id)
        for worker in self._candidates:
            worker.detach(self.job.request_id)

    def open(self) -> None:
        """See Attempt."""
        request_id = self.job.request_id
        self._prefill.attach(request_id, self._consumer)
        self._prefill.charge(request_id, Charge(num_sequences=1 if self.leads else 0, prompt=self._prompt_charge()))
        for worker in self._candidates:
            worker.attach(request_id, self._consumer)
        self._candidates[0].charge(request_id, self._decode_charge())

    def send(self, job: GenerationJob) -> None:
        """See Attempt."""
        targets = tuple(worker.info.target for worker in self._offered)
        self._prefill.send(SubmitJob(job, targets, self._holders))

    def _offered_worker(self, worker_id: str) -> Worker:
        for worker in self._offered:
            if worker.info.worker_id == worker_id:
                return worker
        name = self._prefill.info.worker_id
        raise InternalError(f"prefill worker {name} chose {worker_id!r}, which it was not given")

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
                    self._give_up_reservation(worker)
                worker.detach(self.job.request_id)
        self._candidates = [] if chosen is None else [chosen]
        self._expected = None
        if chosen is not None:
            self._expect(chosen)
        self._settled = True

    def _give_up_reservation(self, worker: Worker) -> None:
        """The prefill worker has moved away from `worker`, perhaps because it cannot reach it: only we can tell it."""
        worker.cancel(self.job.request_id, self.job.attempt)

    def _decode_charge(self) -> Charge:
        return Charge(held_tokens=self._held_tokens, num_sequences=1)
