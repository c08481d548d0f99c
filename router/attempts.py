"""The attempts of one request, one after another: on which workers, what becomes of each, and who is to blame for it.

An attempt waits for its turn, is placed and dispatched, perhaps moves, and ends with the request or is followed by
another one. What a request may try, and without whom, is decided here; that it ends is said by `fail`.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import Final

from pdserve.errors import (
    DrainingError,
    InternalError,
    OverloadedError,
    PdServeError,
    UnavailableError,
    WorkerLostError,
)
from pdserve.lifecycle import Action, RequestEvent, RequestState
from router.admission import Waiting
from router.attempt import Attempt
from router.crashes import Crashes
from router.events import Migrated, MigrationFailed, MigrationWanted
from router.jobs import job_of
from router.local_attempt import LocalAttempt
from router.migrating_attempt import MigratingAttempt
from router.placement import PlacementRequest
from router.placer import Placer
from router.progress import Progress
from router.remote_attempt import RemoteAttempt
from router.request_services import RequestServices
from router.timers import Timers
from router.worker import Consumer, Worker
from router.worker_pool import Placement

log = logging.getLogger(__name__)

RETRY_SPREAD_S: Final = 0.02
MAX_RETRY_SPREAD_S: Final = 1.0
"""Outputs of one prompt that have lost a worker try again one by one: all within so much for each of them, and within
that in all. The first finds its workers at once, and the others find its prompt in a prefix cache."""


class Attempts:
    """Of one request, which is at one of them at most."""

    def __init__(
        self,
        progress: Progress,
        services: RequestServices,
        timers: Timers,
        consumer: Consumer,
        fail: Callable[[PdServeError], None],
    ) -> None:
        """Workers report to `consumer`. `timers` are the request's, which stops them at its end. `fail` ends it."""
        self._progress = progress
        self._services = services
        self._timers = timers
        self._consumer = consumer
        self._fail = fail
        self.current: Attempt | None = None
        """The one that workers have."""
        self.dispatched_at = progress.received_at
        """When that was sent."""
        self.recovered_from: PdServeError | None = None
        """What ended the one before it."""
        self._placer = self.new_placer(self._dispatch, self.no_worker)
        self._turn: Waiting | None = None
        """The request's place in the queue of this router, or what that was. It waits there once: later attempts do
        not."""
        self._leave_group: Callable[[], None] | None = None
        """Set while a group waits, and looks for workers, for the request."""
        self._max_attempts = services.config.max_attempts
        self._has_paid = False
        """For an attempt that waits for its time."""
        self._crashes = Crashes()

    @property
    def running(self) -> Attempt:
        """The current one. Call it while there is one."""
        assert self.current is not None, "no attempt"
        return self.current

    def accepts(self, number: int) -> bool:
        """Whether events of the attempt of that number are still of interest."""
        if self._progress.lifecycle.accepts(number):
            return True
        return isinstance(self.current, MigratingAttempt) and self.current.new_attempt == number

    def allow_more(self, number: int = 1) -> None:
        """So many are no tries: they say nothing about the request."""
        self._max_attempts += number

    def apply(self, event: RequestEvent) -> None:
        """Take a transition, do what it demands towards the workers, and note it."""
        progress, served = self._progress, self._progress.served
        before = (progress.state, progress.attempt_number, served.prefill_worker, served.decode_worker)
        now = time.monotonic()
        action = progress.lifecycle.apply(event, now)
        attempt = self.current
        if attempt is not None and attempt.decode is not None:
            served.decode_worker = attempt.decode.info.worker_id
        if action is not Action.NONE and attempt is not None:
            progress.migrations.ended(attempt)
            attempt.cancel()
            self.current = None
        after = (progress.state, progress.attempt_number, served.prefill_worker, served.decode_worker)
        if event is RequestEvent.DISPATCHED or before != after:
            progress.note()
        progress.note_moment(event, before=before[0], attempt=before[1], now=now)

    # Placement.

    def place(self) -> None:
        """Find workers for the current attempt, the first time when it is its turn; `_dispatch` goes on. Harmless if
        the request has ended."""
        if self._progress.ended:
            return
        self._has_paid = False
        if self._turn is not None:
            self._placer.search(self.needs)
            return
        self._turn = turn = self.new_turn()
        entering = True

        def search() -> None:
            # Its turn may be at once; if it had to wait, others may have got some of what it needs meanwhile.
            self._placer.search(turn.needs if entering else self.needs)

        self._services.admission.enter(turn, search, self._fail)
        entering = False

    def place_taken_over(self, *, num_outputs: int, leads: bool) -> None:
        """As `place`, for a request that has had its turn at another router. Of `num_outputs` of one prompt one
        `leads`, and the others find the prompt in a prefix cache."""
        self._turn = self.new_turn()
        self._place_again(num_outputs=num_outputs, leads=leads)

    def new_turn(self, num_outputs: int = 1) -> Waiting:
        """To wait for its turn with; see Admission."""
        progress = self._progress
        spec = progress.started_spec
        return Waiting(
            tenant=progress.tenant,
            priority=spec.priority,
            needs=self.needs,
            max_tokens=spec.max_tokens,
            num_outputs=num_outputs,
            received_at=progress.received_at,
            deadline=progress.deadline,
        )

    @property
    def needs(self) -> PlacementRequest:
        """What the current attempt needs, and who has got some of it."""
        services, progress = self._services, self._progress
        spec, num_output_tokens = progress.started_spec, progress.num_output_tokens
        names = progress.names_upto(num_output_tokens)
        held = services.prefixes.held(names)
        return PlacementRequest(
            num_known_tokens=len(spec.prompt_ids) + num_output_tokens,
            max_total_tokens=len(spec.prompt_ids) + spec.max_tokens,
            cached=held,
            expected=services.prefixes.expected(names, held),
        )

    def new_placer(self, on_placed: Callable[[Placement], None], on_give_up: Callable[[], None]) -> Placer:
        """Looks for workers as long as the configuration says, see Placer."""
        services = self._services
        return Placer(services.pool, wait_s=services.config.worker_wait_s, on_placed=on_placed, on_give_up=on_give_up)

    def placed_by_group(self, turn: Waiting, leave: Callable[[], None]) -> None:
        """Others wait for `turn`, and then look for workers, for the request. `leave` is called if it ends before
        `attempt_on`."""
        self._turn = turn
        self._leave_group = leave

    def attempt_on(self, placement: Placement, *, num_outputs: int = 1, leads: bool = True) -> Attempt:
        """The attempt that is due, on these workers; see Attempt. The caller dispatches it and says what came of it."""
        progress, services = self._progress, self._services
        scores = progress.prompt_scores
        self._leave_group = None
        if leads:
            computing = placement.prefill or placement.decode[0]
            services.prefixes.placed(computing.key, progress.names_upto(progress.num_output_tokens))
        progress.served.prefill_worker = placement.prefill.info.worker_id if placement.prefill is not None else ""
        progress.served.decode_worker = ""
        job = job_of(
            progress.started_spec,
            request_id=progress.request_id,
            attempt=progress.attempt_number,
            router_id=services.router_id,
            output=progress.started_output.tokens,
            # What the client has got already need not cost another attempt its prefix cache.
            scores_prompt=scores is not None and not scores.complete,
            deadline=progress.deadline,
            traceparent=progress.new_attempt_span(),
        )
        way = LocalAttempt if placement.prefill is None else RemoteAttempt
        return way(job, placement, self._consumer, num_outputs=num_outputs, leads=leads)

    def dispatched(self, attempt: Attempt) -> None:
        """The workers have it."""
        self.dispatched_at = time.monotonic()
        if self.recovered_from is None:
            self._services.retry_budget.earned()
        self._services.metrics.dispatched(local=not self._progress.served.prefill_worker)
        self.current = attempt
        self.apply(RequestEvent.DISPATCHED)

    def not_dispatched(self, attempt: Attempt, error: UnavailableError) -> None:
        """The worker that was to compute its prompt cannot be reached."""
        self.retry_or_fail(error, attempt.first_worker, attempt)

    def no_worker(self) -> None:
        """No worker was found for it in time."""
        self._fail(
            UnavailableError(
                f"no usable workers for {self._services.config.worker_wait_s:g} s: {self._services.pool.missing}",
                retry_after_s=1.0,
            )
        )

    def _dispatch(self, placement: Placement) -> None:
        attempt = self.attempt_on(placement)
        try:
            attempt.dispatch()
        except UnavailableError as error:
            self.not_dispatched(attempt, error)
            return
        self.dispatched(attempt)

    def first_token(self) -> None:
        """Its prompt is computed, so that others may have their turn."""
        self.running.first_token()
        if self._turn is not None and self._progress.attempt_number == 1:
            self._services.admission.first_token(self._turn)
        else:
            self._services.admission.nudge()

    # Retries and blame.

    def kills(self, worker: Worker, attempt: Attempt) -> tuple[str, ...]:
        """The names of those that have died while they computed this request, if the loss of `worker` is one death too
        many; else nobody."""
        progress, pool = self._progress, self._services.pool
        computing = {
            RequestState.PREFILLING: attempt.first_worker,
            RequestState.TRANSFERRING: attempt.decode,
            RequestState.DECODING: attempt.decode,
        }.get(progress.state)
        if progress.output_complete or worker is not computing or worker.leaving or not pool.has_crashed(worker):
            return ()
        too_many = self._crashes.add(worker.key, progress.num_output_tokens, pool.is_connected)
        return self._crashes.workers if too_many else ()

    def retry_without(self, error: PdServeError, worker_id: str) -> None:
        """Try again without a worker of the current attempt; with the same ones if it has no such worker."""
        attempt = self.running
        blamed = attempt.worker_named(worker_id)
        if blamed is not None and isinstance(error, DrainingError):
            blamed.begins_to_drain()
        self.retry_or_fail(error, blamed, attempt)

    def retry_or_fail(self, error: PdServeError, blamed: Worker | None, attempt: Attempt) -> None:
        """`attempt` has ended with `error`. Try again without `blamed`, if there is to be another one."""
        progress = self._progress
        planned = isinstance(error, DrainingError) or (
            blamed is not None and blamed.leaving and not isinstance(error, InternalError)
        )
        if planned:
            # However many workers are restarted in its time: that says nothing about the request.
            self.allow_more()
        if blamed is not None:
            self._placer.exclude(blamed.key)
            # Also if there is to be no other attempt: the next request is to be spared that worker.
            if attempt.leads and not planned and blamed.connected and not isinstance(error, OverloadedError):
                blamed.has_failed()
        if progress.output_complete or progress.attempt_number >= self._max_attempts:
            self._fail(error)
            return
        wait_s = 0.0 if planned else self._pay_for_another(error)
        if wait_s is None:
            return
        # What fails for several outputs of one prompt together is said once.
        level = logging.DEBUG if not attempt.leads else logging.INFO if planned else logging.WARNING
        log.log(level, "attempt failed: %s", error.message, extra=progress.facts())
        progress.error_code = error.code
        self.apply(RequestEvent.RETRY)
        progress.error_code = ""
        progress.timeline.attempt_failed(time.monotonic())
        self._services.metrics.retried(error)
        self.recovered_from = error
        progress.started_output.start_over()
        self._place_again(num_outputs=attempt.num_outputs, leads=attempt.leads, wait_s=wait_s)

    def _pay_for_another(self, error: PdServeError) -> float | None:
        """In how many seconds the router can afford another attempt; None, and the request has failed, if not in the
        time that it may wait for workers, or before its deadline."""
        services = self._services
        budget, now = services.retry_budget, time.monotonic()
        wait_s = budget.take(now, max(0.0, min(services.config.worker_wait_s, self._progress.deadline - now)))
        if wait_s is None:
            services.metrics.not_retried(error)
            affordable_s = budget.available_in_s(now)
            self._fail(
                UnavailableError(
                    f"{error.message}; it is not tried again, as too many requests of this router had to be "
                    "(router.retry_budget)",
                    retry_after_s=affordable_s if math.isfinite(affordable_s) else None,
                )
            )
        self._has_paid = wait_s is not None
        return wait_s

    def _place_again(self, *, num_outputs: int, leads: bool, wait_s: float = 0.0) -> None:
        """After `wait_s`, and some time after the one of so many outputs of its prompt that leads."""
        if leads and not wait_s:
            self.place()
            return
        spread_s = 0.0 if leads else min(RETRY_SPREAD_S * num_outputs, MAX_RETRY_SPREAD_S)
        self._timers.set("retry", wait_s + random.uniform(0.0, spread_s), self.place)  # noqa: S311

    # Migration.

    def migrate(self, worker: Worker, event: MigrationWanted) -> None:
        """`worker` wants the stream to go elsewhere."""
        progress, attempt, target = self._progress, self.running, None
        if progress.state is RequestState.DECODING and not progress.output_complete:
            target = progress.migrations.target_for(event, attempt, worker, self.needs)
        if target is None:
            progress.migrations.decline(event, worker)
            return
        # The number is no further try.
        self.allow_more()
        number = progress.lifecycle.issue_attempt()
        self.current = progress.migrations.begin(event, attempt, number, target, self._consumer)
        # Should another router take the request over, its attempts are to have higher numbers.
        progress.note()

    def migration_failed(self, event: MigrationFailed) -> None:
        """The stream goes on where it was."""
        self.current = self._progress.migrations.failed(event, self.running)

    def arrived(self, event: Migrated | None) -> None:
        """The stream runs where it was to go; without `event` by the word of its new worker alone."""
        progress, attempt = self._progress, self.running
        assert isinstance(attempt, MigratingAttempt), "it did not move"
        target, tokens = attempt.target, progress.started_output.tokens
        self.current = progress.migrations.arrived(attempt, (*progress.started_spec.prompt_ids, *tokens), event)
        self.apply(RequestEvent.MIGRATED)
        if self.current is None:
            error = WorkerLostError(
                f"decode worker {target.info.worker_id} was lost with a stream that had just moved there",
                worker=target.info.worker_id,
            )
            self.retry_or_fail(error, target, attempt)

    def end(self) -> None:
        """The request has ended: let go of workers, of its place in the queue, and of what it has paid for."""
        if self._has_paid:
            self._has_paid = False
            self._services.retry_budget.give_back()
        if self.current is not None:
            self.current.close()
            self.current = None
        self._placer.stop()
        if self._leave_group is not None:
            self._leave_group()
            self._leave_group = None
        elif self._turn is not None:
            self._services.admission.leave(self._turn)
        if self._turn is not None:
            self._services.admission.output_ended(self._turn, self._progress.num_output_tokens)
