"""One attempt of one request: who has what of it, and who must be told when it ends.

There are two ways. On a pair of workers one computes the prompt and hands it over (`remote_attempt.py`); or a decode
worker does all of it (`local_attempt.py`). To a request they are the same.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence

from pdserve.errors import UnavailableError
from pdserve.types import Fork, GenerationJob
from router.placement import Estimate
from router.worker import Consumer, PromptCharge, Worker


class Attempt(ABC):
    """Load is charged and events are routed from `dispatch`, or `dispatch_together`, until `close` or `cancel`."""

    handed_off: bool
    """Whether nothing more is to come from whoever has computed the prompt."""
    decoding: bool
    """Whether the decode worker has sent tokens."""

    def __init__(
        self, job: GenerationJob, estimate: Estimate, consumer: Consumer, *, num_outputs: int, leads: bool
    ) -> None:
        """`job` is of this request alone. `num_outputs` have the prompt computed once for all of them, under the name
        of the one that `leads`; `estimate` is of all of them."""
        self.job = job
        self.estimate = estimate
        """What it was expected to take, with all outputs of its prompt."""
        self.num_outputs = num_outputs
        self.leads = leads
        self._consumer = consumer

    @property
    @abstractmethod
    def first_worker(self) -> Worker:
        """Who computes the prompt. It gets the job."""

    @property
    @abstractmethod
    def decode(self) -> Worker | None:
        """The decode worker that has the request or the reservation for it, once known."""

    @property
    @abstractmethod
    def local(self) -> bool:
        """Whether the decode worker computes the prompt."""

    @property
    @abstractmethod
    def exact(self) -> bool:
        """Whether the decode worker has the KV that it would compute itself."""

    def dispatch(self) -> None:
        """Send the job. Raises UnavailableError, with nothing left charged, if `first_worker` cannot be reached."""
        dispatch_together([self])

    @abstractmethod
    def started(self, decode_worker: str) -> None:
        """`first_worker` computes, and `decode_worker` holds the room for what follows; empty if none is needed.

        Raises InternalError if that worker was not offered, and WorkerLostError if it is lost: little is computed yet,
        and a new attempt is cheaper than a whole prompt without a place to go.
        """

    @abstractmethod
    def first_token(self) -> None:
        """The prompt is computed."""

    @abstractmethod
    def tokens_from(self, worker: Worker) -> None:
        """A decode worker has sent tokens, possibly before anything was heard of the hand-off."""

    @abstractmethod
    def hand_off_reported(self, decode_worker: str) -> None:
        """`decode_worker` has the request, and the prefill worker has nothing of it any more.

        Raises InternalError if that worker was not offered or another one decodes, WorkerLostError if it is lost.
        """

    @abstractmethod
    def survives_loss_of(self, worker: Worker) -> bool:
        """Whether the attempt can go on without `worker`, which is lost."""

    @abstractmethod
    def worker_named(self, worker_id: str) -> Worker | None:
        """The worker of this attempt with that id."""

    @abstractmethod
    def cancel(self) -> None:
        """Tell every worker that may have something of the request to stop, and be done with them."""

    @abstractmethod
    def close(self) -> None:
        """Take no more events and no more load."""

    @abstractmethod
    def open(self) -> None:
        """Route events and charge load; the job is sent next, or this is undone by `close`."""

    @abstractmethod
    def send(self, job: GenerationJob) -> None:
        """Give `first_worker` the job, which may have outputs of other requests. Raises UnavailableError."""

    def _prompt_charge(self) -> PromptCharge:
        estimate = self.estimate
        return PromptCharge(
            num_tokens=estimate.num_tokens,
            num_left=self._shared(estimate.num_uncached_tokens),
            seconds=(estimate.fetch_s + estimate.prefill_s) / self.num_outputs,
            fetch_expected=estimate.fetch_s > 0.0,
            leads=self.leads,
        )

    @property
    def _held_tokens(self) -> int:
        """The longest that its sequence can become at the decode worker."""
        return self._shared(self.job.num_prompt_tokens) + self.job.max_new_tokens

    def _shared(self, num_tokens: int) -> int:
        """This output's part, rounded up, of what is there once for all of them."""
        return -(-num_tokens // self.num_outputs)


def dispatch_together(attempts: Sequence[Attempt]) -> None:
    """Send one job for the attempts of several outputs of one prompt, of which the first one leads; all have the same
    placement. Raises UnavailableError, with nothing left charged, if `first_worker` cannot be reached."""
    lead, *others = attempts
    forks = (
        Fork(request_id=other.job.request_id, attempt=other.job.attempt, seed=other.job.sampling.seed)
        for other in others
    )
    for attempt in attempts:
        attempt.open()
    try:
        lead.send(dataclasses.replace(lead.job, forks=tuple(forks)) if others else lead.job)
    except UnavailableError:
        for attempt in attempts:
            attempt.close()
        raise
