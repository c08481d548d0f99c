"""One active request: from its admission to its only end.

Everything here runs in the event loop and returns at once: events of workers, news from the pool, timers and the client
change the state, and whatever has to be said to workers, client and journal is said in the same step. So there is no
moment in which a request is half cancelled, and no task that could be left behind.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.errors import (
    CancelledError,
    DeadlineExceededError,
    DrainingError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PdServeError,
    PoisonedRequestError,
    UnavailableError,
    WorkerLostError,
    error_from_code,
)
from pdserve.lifecycle import Action, RequestEvent, RequestLifecycle, RequestState
from pdserve.store.requests import RequestRecord
from pdserve.telemetry.context import TraceContext
from pdserve.types import FinishReason, TokenLogprobs
from router.admission import Waiting, class_of
from router.attempt import Attempt
from router.crashes import Crashes
from router.events import (
    FirstToken,
    HandedOff,
    JobFailed,
    Migrated,
    MigrationFailed,
    MigrationWanted,
    PrefillStarted,
    PromptLogprobs,
    StepTokens,
    WorkerEvent,
)
from router.index import PrefixNames
from router.jobs import finish_reason, job_of, output_of
from router.local_attempt import LocalAttempt
from router.migrating_attempt import MigratingAttempt
from router.migrations import Migrations
from router.output import Output, PromptScores
from router.placement import PlacementRequest, WorkerKey
from router.placer import Placer
from router.remote_attempt import RemoteAttempt
from router.request_services import RequestServices
from router.served import Served
from router.status import RequestStatus
from router.story import QUIET_EVENTS, Moment, Story, Trail
from router.stream import OutputLog
from router.timeline import Timeline
from router.timers import Timers
from router.validation import GenerationSpec
from router.worker import Worker
from router.worker_pool import Placement

log = logging.getLogger(__name__)

REPORT_WAIT_S: Final = 0.25
"""How long the last response waits for the prefill worker's report of the hand-off. The two workers' streams are not
ordered with each other, and a short output may be complete before the report of its hand-off is here."""

RETRY_SPREAD_S: Final = 0.02
MAX_RETRY_SPREAD_S: Final = 1.0
"""Outputs of one prompt that have lost a worker try again one by one: all within so much for each of them, and within
that in all. The first finds its workers at once, and the others find its prompt in a prefix cache."""

TOKENS_AT_ONCE: Final = 256
"""Of an output that is gone through once more: about a millisecond."""

DEADLINE_SLACK_S: Final = 0.05
"""A client's own deadline cancels its call a little before or after ours; both mean the deadline."""


class Request:
    """Made at admission; `begin` once the prompt is tokenized and checked."""

    def __init__(
        self,
        request_id: str,
        services: RequestServices,
        *,
        received_at: float,
        deadline: float,
        unique: bool,
        tenant: bytes,
        on_end: Callable[[Request], None],
        client_trace: TraceContext | None = None,
    ) -> None:
        """Times are `time.monotonic()`. `unique`: this router has drawn the id, so nobody else can have it. `tenant`:
        see Ask; so is `client_trace`. `on_end` is called once, whatever the end is."""
        self.request_id = request_id
        self._unique = unique
        self.log = OutputLog()
        self._services = services
        self._received_at = received_at
        self._deadline = deadline
        self._tenant = tenant
        self._on_end = on_end
        self._lifecycle = RequestLifecycle(request_id, received_at)
        self._timeline = Timeline(received_at)
        self._trail = Trail(received_at)
        tracing = services.tracing
        self._spans = tracing.root(client_trace) if tracing is not None else None
        """Its own span and the client's, if it is traced."""
        self._spec: GenerationSpec | None = None
        self._output: Output | None = None
        self._names: PrefixNames | None = None
        """Of the blocks of prompt and output, as far as they were needed."""
        self._prompt_scores: PromptScores | None = None
        """None until the request begins, and if nobody asked for them."""
        self._attempt: Attempt | None = None
        self._placer = self.new_placer(self._dispatch, self.no_worker)
        self._turn: Waiting | None = None
        """Its place in the queue of this router, or what that was. It waits there once: later attempts do not."""
        self._leave_group: Callable[[Request], None] | None = None
        """Set while a group waits, and looks for workers, for it."""
        self._migrations = Migrations(services.pool, services.metrics)
        self._max_attempts = services.config.max_attempts
        self._crashes = Crashes()
        self._served = Served()
        self._decoder: WorkerKey | None = None
        """The latest worker that has sent tokens of it and has exact KV of them."""
        self._error_code = ""
        self._dispatched_at = received_at
        """When the current attempt was sent."""
        self._recovered_from: PdServeError | None = None
        """What ended the attempt before the current one."""
        self._timers = Timers()
        self._timers.set("deadline", deadline - time.monotonic(), self._on_deadline)

    @property
    def state(self) -> RequestState:
        """Where it is."""
        return self._lifecycle.state

    @property
    def attempt_number(self) -> int:
        """From 1."""
        return self._lifecycle.attempt

    @property
    def num_prompt_tokens(self) -> int:
        """0 until the prompt is tokenized."""
        return len(self._spec.prompt_ids) if self._spec is not None else 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return self._output.num_tokens if self._output is not None else 0

    @property
    def received_at(self) -> float:
        """`time.monotonic()`."""
        return self._received_at

    @property
    def tenant(self) -> bytes:
        """Whose it is, see Ask."""
        return self._tenant

    @property
    def status(self) -> RequestStatus:
        """Where it is, for whoever asks."""
        return RequestStatus(
            request_id=self.request_id,
            state=self.state,
            attempt=self.attempt_number,
            router_id=self._services.router_id,
            prefill_worker=self._served.prefill_worker,
            decode_worker=self._served.decode_worker,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            error_code=self._error_code if self.state is RequestState.FAILED else "",
        )

    async def begin(self, spec: GenerationSpec, resume: bytes) -> None:
        """Claim the request id and dispatch; `resume` is for the journal. Raises AlreadyExistsError if another router
        has the id."""
        await self.claim(spec, resume)
        self.use_names(await self.name_prompt())
        self.place()

    async def claim(self, spec: GenerationSpec, resume: bytes = b"") -> None:
        """Claim the request id; after that it can be placed. Raises AlreadyExistsError if another router has the id."""
        # From here on the journal hears of the end, also of one that comes while it claims the id.
        self._spec = spec
        await self._services.journal.admit(
            self.request_id,
            model=self._services.model,
            num_prompt_tokens=len(spec.prompt_ids),
            unique=self._unique,
            resume=resume,
        )
        if self._lifecycle.terminal:
            return
        self._make_output(spec)
        self._is_tokenized("tokenized")

    def _is_tokenized(self, name: str) -> None:
        now = time.monotonic()
        self._timeline.tokenized(now)
        self._trail.note(Moment(at=now, name=name, attempt=self.attempt_number))

    def _make_output(self, spec: GenerationSpec) -> None:
        self._output = output_of(spec, self._services.tokenizer)
        if spec.num_prompt_logprobs is not None:
            self._prompt_scores = PromptScores(len(spec.prompt_ids))

    async def name_prompt(self) -> PrefixNames:
        """By what names workers know the blocks of the prompt."""
        spec = self._started_spec
        return await self._services.prefixes.names(spec.prompt_ids, spec.cache_salt)

    async def restore(
        self, spec: GenerationSpec, record: RequestRecord, resume: bytes, *, num_outputs: int, leads: bool
    ) -> None:
        """Instead of `begin`: go on with what another router has left, from the tokens that it has noted. `record` has
        just been taken over; `resume` goes back into the journal. Of `num_outputs` of one prompt one `leads`, and the
        others find the prompt in a prefix cache."""
        self._spec = spec
        # Log-probabilities are noted nowhere, so with them everything is generated once more.
        scored = spec.num_logprobs is not None or spec.num_prompt_logprobs is not None
        tokens = () if scored else record.output_token_ids
        self._services.journal.adopt(record, num_kept=len(tokens), resume=resume)
        self._lifecycle = RequestLifecycle(self.request_id, self._received_at, attempt=record.attempt)
        self._max_attempts += record.attempt - 1
        self._make_output(spec)
        self._is_tokenized("taken_over")
        await self._recall(tokens, finish_reason(spec, tokens))
        if self._lifecycle.terminal:
            return
        if self._output_complete:
            self._lifecycle = RequestLifecycle(
                self.request_id, self._received_at, attempt=record.attempt, state=RequestState.FINISHED
            )
            self._note()
            self._succeed()
            return
        self.use_names(await self.name_prompt())
        if self._lifecycle.terminal:
            return
        # It has had its turn at the other router.
        self._turn = self.new_turn()
        if leads:
            self.place()
        else:
            self._place_later(num_outputs)

    async def _recall(self, tokens: Sequence[int], finish: FinishReason | None) -> None:
        """Take tokens that were given out before; others have their turn in between."""
        output = self._started_output
        for begin in range(0, len(tokens), TOKENS_AT_ONCE):
            end = begin + TOKENS_AT_ONCE
            new, texts = output.add(begin, tokens[begin:end], finish if end >= len(tokens) else None)
            self.log.push(new, texts)
            self._timeline.tokens(len(new), time.monotonic())
            if output.ending is not None:
                return
            await asyncio.sleep(0)
            if self._lifecycle.terminal:
                return

    def use_names(self, names: PrefixNames) -> None:
        """`names` are those of the prompt. Call it before the request is placed."""
        self._names = names

    def cancel(self, reason: str) -> None:
        """Stop for good. Harmless if it has ended."""
        self.fail(CancelledError(reason))

    def client_gone(self) -> None:
        """The client's call is over. Harmless if the request is, too."""
        if time.monotonic() >= self._deadline - DEADLINE_SLACK_S:
            self._on_deadline()
        else:
            self.fail(CancelledError("the client has gone", reason="disconnect"))

    def fail(self, error: PdServeError) -> None:
        """End with `error`, unless the output is complete already. Harmless if it has ended."""
        if self._lifecycle.terminal:
            return
        if self._output_complete:
            self._complete()
            return
        event = RequestEvent.FAIL
        if isinstance(error, CancelledError):
            event = RequestEvent.CANCEL
        elif isinstance(error, DeadlineExceededError):
            event = RequestEvent.DEADLINE
        self._error_code = error.code
        self._apply(event)
        self.log.fail(error)
        self._services.metrics.failed(error)
        if event is not RequestEvent.CANCEL:
            self._services.metrics.judged_failed(self._class)
        self._finish_up()

    # What workers report.

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """See Consumer."""
        if not self._accepts(event.attempt):
            worker.num_stale_events += 1
            return
        try:
            self._handle(worker, event)
        except WorkerLostError as error:
            self._retry_without(error, error.details["worker"])
        except PdServeError as error:
            self.fail(error)

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """See Consumer."""
        attempt = self._attempt
        if attempt is None or self._lifecycle.terminal:
            return
        if isinstance(attempt, MigratingAttempt) and attempt.is_settled_without(worker, self._started_output.has_gap):
            self._arrived(None)
            return
        if self._kills(worker, attempt):
            names = " and ".join(self._crashes.workers)
            self.fail(
                PoisonedRequestError(
                    f"request {self.request_id}: workers {names} have died while they computed it, at the same place; "
                    "it is not given to another one"
                )
            )
            return
        if self._output_complete or not attempt.survives_loss_of(worker):
            error = WorkerLostError(
                f"{worker.info.role.value} worker {worker.info.worker_id} was lost: {reason}",
                worker=worker.info.worker_id,
            )
            self._retry_or_fail(error, worker, attempt)

    def _kills(self, worker: Worker, attempt: Attempt) -> bool:
        """Whether the loss of `worker` is one death too many among those that computed this request."""
        computing = {
            RequestState.PREFILLING: attempt.first_worker,
            RequestState.TRANSFERRING: attempt.decode,
            RequestState.DECODING: attempt.decode,
        }.get(self.state)
        pool = self._services.pool
        if self._output_complete or worker is not computing or worker.leaving or not pool.has_crashed(worker):
            return False
        return self._crashes.add(worker.key, self.num_output_tokens, pool.is_connected)

    def on_bug(self, error: Exception) -> None:
        """See Consumer."""
        self.fail(InternalError(f"internal error in request {self.request_id}: {type(error).__name__}"))

    def _handle(self, worker: Worker, event: WorkerEvent) -> None:
        attempt = self._current_attempt
        first_of_output = attempt.job.first_output_index == 0 and attempt.job.attempt == event.attempt
        match event:
            case PrefillStarted():
                attempt.started(event.decode_worker)
                self._timeline.prefill_started(time.monotonic())
                self._apply(RequestEvent.PREFILL_STARTED)
            case PromptLogprobs():
                if self._prompt_scores is None:
                    raise InternalError("a worker sent log-probabilities of the prompt, which nobody asked for")
                self.log.push_prompt(self._prompt_scores.add(event.first_index, event.tokens))
            case FirstToken():
                if self._prompt_scores is not None and not self._prompt_scores.complete:
                    raise InternalError("a worker sent the first token before all log-probabilities of the prompt")
                attempt.first_token()
                if self._turn is not None and self.attempt_number == 1:
                    self._services.admission.first_token(self._turn)
                else:
                    self._services.admission.nudge()
                if first_of_output:
                    self._timeline.prefilled(event.prefill_s, event.fetch_s)
                    self._served.prompt_computed(event, attempt.estimate, self.num_prompt_tokens)
                    if attempt.leads:
                        self._services.metrics.prompt_computed(
                            num_tokens=self.num_prompt_tokens,
                            num_cached=self._served.num_cached_tokens,
                            num_fetched=self._served.num_fetched_tokens,
                            estimate=attempt.estimate,
                            took_s=time.monotonic() - self._dispatched_at,
                        )
                if attempt.leads:
                    self._services.prefixes.served(worker.key, self._names_upto(self.num_output_tokens))
                if attempt.local and attempt.leads:
                    self._served.computed_by_decode(attempt.job.num_known_tokens - event.num_cached_tokens)
                # A decode worker that has computed the prompt goes on with it: there is nothing to hand over.
                reached = RequestEvent.DECODE_TOKENS if attempt.local else RequestEvent.FIRST_TOKEN
                self._take(event.index, (event.token_id,), event.finish_reason, event.logprobs, reached)
            case StepTokens():
                attempt.tokens_from(worker)
                if attempt.exact:
                    self._decoder = worker.key
                self._served.computed_by_decode(event.num_local_prefill_tokens)
                self._served.drafted(event)
                if first_of_output and event.first_step_s:
                    self._timeline.first_step(event.first_step_s)
                self._take(
                    event.first_index,
                    event.token_ids,
                    event.finish_reason,
                    event.logprobs,
                    RequestEvent.DECODE_TOKENS,
                )
            case HandedOff():
                attempt.hand_off_reported(event.decode_worker)
                self._services.metrics.handed_off(event.transport, event.kv_bytes, leads=attempt.leads)
                self._served.handed_off(event)
                if first_of_output:
                    self._timeline.transferred(event.transfer_s)
                self._apply(RequestEvent.HANDED_OFF)
                if self._output_complete:
                    self._complete()
            case MigrationWanted():
                self._migrate(worker, event)
            case Migrated():
                self._arrived(event)
            case MigrationFailed():
                self._attempt = self._migrations.failed(event, attempt)
            case JobFailed():
                self._job_failed(event)

    def _accepts(self, attempt_number: int) -> bool:
        if self._lifecycle.accepts(attempt_number):
            return True
        attempt = self._attempt
        return isinstance(attempt, MigratingAttempt) and attempt.new_attempt == attempt_number

    def _migrate(self, worker: Worker, event: MigrationWanted) -> None:
        attempt, target = self._current_attempt, None
        if self.state is RequestState.DECODING and not self._output_complete:
            target = self._migrations.target_for(event, attempt, worker, self.needs)
        if target is None:
            self._migrations.decline(event, worker)
            return
        # The number is no further try.
        self._max_attempts += 1
        number = self._lifecycle.issue_attempt()
        self._attempt = self._migrations.begin(event, attempt, number, target, self)
        # Should another router take the request over, its attempts are to have higher numbers.
        self._note()

    def _arrived(self, event: Migrated | None) -> None:
        """The stream runs where it was to go."""
        attempt = self._current_attempt
        assert isinstance(attempt, MigratingAttempt), "it did not move"
        target, tokens = attempt.target, self._started_output.tokens
        self._attempt = self._migrations.arrived(attempt, (*self._started_spec.prompt_ids, *tokens), event)
        self._apply(RequestEvent.MIGRATED)
        if self._attempt is None:
            error = WorkerLostError(
                f"decode worker {target.info.worker_id} was lost with a stream that had just moved there",
                worker=target.info.worker_id,
            )
            self._retry_or_fail(error, target, attempt)

    def _take(
        self,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...],
        event: RequestEvent,
    ) -> None:
        output, attempt = self._started_output, self._current_attempt
        if self._output_complete:
            raise InternalError("a worker sent tokens after the end of the output")
        new, texts = output.add(first_index, token_ids, finish, logprobs)
        new_logprobs = output.take_logprobs(len(new)) if self._started_spec.num_logprobs is not None else ()
        waited_s = self._timeline.tokens(len(new), time.monotonic())
        self._services.metrics.tokens(len(new), waited_s, first=output.num_tokens == len(new))
        self._services.journal.tokens(self.request_id, new)
        self.log.push(new, texts, new_logprobs)
        if output.ending is None:
            self._apply(event)
            # May end this very request, so there is nothing to be done after it.
            self.log.check_readers()
        elif output.ending.stop_string is not None:
            self._apply(RequestEvent.STOPPED)
            self._succeed()
        elif attempt.decoding and not attempt.handed_off:
            self._apply(event)
            self._timers.set("report", REPORT_WAIT_S, self._complete)
        else:
            self._complete()

    def _job_failed(self, event: JobFailed) -> None:
        attempt = self._current_attempt
        if isinstance(attempt, MigratingAttempt) and attempt.has_arrived and event.attempt == attempt.job.attempt:
            # It does not know that the stream has arrived.
            self._arrived(None)
            return
        error = error_from_code(event.code, event.message)
        if event.retryable:
            self._retry_without(error, event.blame)
        elif self._current_attempt.num_outputs > 1 and isinstance(error, InvalidRequestError):
            # All outputs together are too much for this worker, for which this one has not used up an attempt.
            self._max_attempts += 1
            self._retry_or_fail(error, None, self._current_attempt)
        else:
            self.fail(error)

    # Placement and attempts.

    @property
    def ended(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self._lifecycle.terminal

    def place(self) -> None:
        """Find workers for the current attempt, the first time when it is its turn; `_dispatch` goes on. Harmless if it
        has ended."""
        if self.ended:
            return
        if self._turn is not None:
            self._placer.search(self.needs)
            return
        self._turn = turn = self.new_turn()
        entering = True

        def search() -> None:
            # Its turn may be at once; if it had to wait, others may have got some of what it needs meanwhile.
            self._placer.search(turn.needs if entering else self.needs)

        self._services.admission.enter(turn, search, self.fail)
        entering = False

    def new_turn(self, num_outputs: int = 1) -> Waiting:
        """To wait for its turn with; see Admission."""
        spec = self._started_spec
        return Waiting(
            tenant=self._tenant,
            priority=spec.priority,
            needs=self.needs,
            max_tokens=spec.max_tokens,
            num_outputs=num_outputs,
            received_at=self._received_at,
            deadline=self._deadline,
        )

    @property
    def needs(self) -> PlacementRequest:
        """What the current attempt needs, and who has got some of it."""
        services, spec = self._services, self._started_spec
        names = self._names_upto(self.num_output_tokens)
        held = services.prefixes.held(names)
        return PlacementRequest(
            num_known_tokens=len(spec.prompt_ids) + self.num_output_tokens,
            max_total_tokens=len(spec.prompt_ids) + spec.max_tokens,
            cached=held,
            expected=services.prefixes.expected(names, held),
        )

    def new_placer(self, on_placed: Callable[[Placement], None], on_give_up: Callable[[], None]) -> Placer:
        """Looks for workers as long as the configuration says, see Placer."""
        services = self._services
        return Placer(services.pool, wait_s=services.config.worker_wait_s, on_placed=on_placed, on_give_up=on_give_up)

    def placed_by_group(self, turn: Waiting, leave: Callable[[Request], None]) -> None:
        """Others wait for `turn`, and then look for workers, for it. `leave` is called if it ends before
        `attempt_on`."""
        self._turn = turn
        self._leave_group = leave

    def attempt_on(self, placement: Placement, *, num_outputs: int = 1, leads: bool = True) -> Attempt:
        """The attempt that is due, on these workers; see Attempt. The caller dispatches it and says what came of it."""
        spec, output = self._started_spec, self._started_output
        scores = self._prompt_scores
        self._leave_group = None
        if leads:
            computing = placement.prefill or placement.decode[0]
            self._services.prefixes.placed(computing.key, self._names_upto(self.num_output_tokens))
        self._served.prefill_worker = placement.prefill.info.worker_id if placement.prefill is not None else ""
        self._served.decode_worker = ""
        job = job_of(
            spec,
            request_id=self.request_id,
            attempt=self.attempt_number,
            router_id=self._services.router_id,
            output=output.tokens,
            # What the client has got already need not cost another attempt its prefix cache.
            scores_prompt=scores is not None and not scores.complete,
            deadline=self._deadline,
            traceparent=self._new_attempt_span(),
        )
        way = LocalAttempt if placement.prefill is None else RemoteAttempt
        return way(job, placement, self, num_outputs=num_outputs, leads=leads)

    def _new_attempt_span(self) -> str:
        """Under what name the workers know whose child their work is; empty if it is not traced."""
        if self._spans is None:
            return ""
        context = self._spans[0].child()
        self._trail.sent_as(self.attempt_number, context)
        return context.header

    def dispatched(self, attempt: Attempt) -> None:
        """The workers have it."""
        self._dispatched_at = time.monotonic()
        self._services.metrics.dispatched(local=not self._served.prefill_worker)
        self._attempt = attempt
        self._apply(RequestEvent.DISPATCHED)

    def not_dispatched(self, attempt: Attempt, error: UnavailableError) -> None:
        """The worker that was to compute its prompt cannot be reached."""
        self._retry_or_fail(error, attempt.first_worker, attempt)

    def _dispatch(self, placement: Placement) -> None:
        attempt = self.attempt_on(placement)
        try:
            attempt.dispatch()
        except UnavailableError as error:
            self.not_dispatched(attempt, error)
            return
        self.dispatched(attempt)

    def no_worker(self) -> None:
        """No worker was found for it in time."""
        self.fail(
            UnavailableError(
                f"no usable workers for {self._services.config.worker_wait_s:g} s: {self._services.pool.missing}",
                retry_after_s=1.0,
            )
        )

    def _retry_without(self, error: PdServeError, worker_id: str) -> None:
        """Try again without a worker of the current attempt; with the same ones if it has no such worker."""
        attempt = self._current_attempt
        blamed = attempt.worker_named(worker_id)
        if blamed is not None and isinstance(error, DrainingError):
            blamed.begins_to_drain()
        self._retry_or_fail(error, blamed, attempt)

    def _retry_or_fail(self, error: PdServeError, blamed: Worker | None, attempt: Attempt) -> None:
        planned = isinstance(error, DrainingError) or (
            blamed is not None and blamed.leaving and not isinstance(error, InternalError)
        )
        if planned:
            # However many workers are restarted in its time: that says nothing about the request.
            self._max_attempts += 1
        if self._output_complete or self.attempt_number >= self._max_attempts:
            self.fail(error)
            return
        if blamed is not None:
            self._placer.exclude(blamed.key)
            if attempt.leads and not planned and blamed.connected and not isinstance(error, OverloadedError):
                blamed.has_failed()
        # What fails for several outputs of one prompt together is said once.
        level = logging.DEBUG if not attempt.leads else logging.INFO if planned else logging.WARNING
        log.log(level, "attempt failed: %s", error.message, extra=self._facts())
        self._error_code = error.code
        self._apply(RequestEvent.RETRY)
        self._error_code = ""
        self._timeline.attempt_failed(time.monotonic())
        self._services.metrics.retried(error)
        self._recovered_from = error
        self._started_output.start_over()
        if attempt.leads:
            self.place()
        else:
            self._place_later(attempt.num_outputs)

    def _place_later(self, num_outputs: int) -> None:
        """After the one of so many outputs of its prompt that leads."""
        spread_s = min(RETRY_SPREAD_S * num_outputs, MAX_RETRY_SPREAD_S)
        self._timers.set("retry", random.uniform(0.0, spread_s), self.place)  # noqa: S311

    def _on_deadline(self) -> None:
        self.fail(DeadlineExceededError(f"request {self.request_id}: the deadline has passed"))

    # The end.

    def _complete(self) -> None:
        self._apply(RequestEvent.FINISHED)
        self._succeed()

    def _succeed(self) -> None:
        output = self._started_output
        assert output.ending is not None, "finished without an ending"
        self._migrations.ended(self._attempt)
        if self._attempt is not None and not self._attempt.decoding:
            # The prefill worker's token was the last one; whoever had a reservation for the rest did nothing.
            self._served.decode_worker = ""
        summary = self._served.summary(
            output.ending,
            self._timeline.phases(time.monotonic()),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=output.num_tokens,
            num_attempts=self._lifecycle.newest_attempt - self._migrations.num_issued,
            num_migrations=self._migrations.num_done,
        )
        self.log.finish(summary)
        metrics, slo = self._services.metrics, self._services.config.slo
        metrics.finished(summary, self._recovered_from)
        metrics.judged(
            self._class,
            ttft_met=summary.phases.ttft_s <= slo.ttft_s,
            tpot_met=summary.phases.tpot_s <= slo.tpot_s,
        )
        self._finish_up()

    def _finish_up(self) -> None:
        """After the last transition: let go of everything."""
        assert self._lifecycle.terminal, "not at an end"
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._placer.stop()
        self._timers.cancel_all()
        if self._leave_group is not None:
            self._leave_group(self)
            self._leave_group = None
        elif self._turn is not None:
            self._services.admission.leave(self._turn)
        if self._turn is not None:
            self._services.admission.output_ended(self._turn, self.num_output_tokens)
        self._on_end(self)
        # After the readers, whose clients wait for the end.
        asyncio.get_running_loop().call_soon(self._note_for_later)

    def _note_for_later(self) -> None:
        if self._decoder is not None:
            # The newest token has not been computed.
            self._services.prefixes.served(self._decoder, self._names_upto(self.num_output_tokens - 1))
        self._services.history.add(self.story)
        log.info("request ended", extra=self._facts())

    # Bookkeeping.

    def _apply(self, event: RequestEvent) -> None:
        """Take a transition, do what it demands towards the workers, and note it."""
        before = (self.state, self.attempt_number, self._served.prefill_worker, self._served.decode_worker)
        now = time.monotonic()
        action = self._lifecycle.apply(event, now)
        attempt = self._attempt
        if attempt is not None and attempt.decode is not None:
            self._served.decode_worker = attempt.decode.info.worker_id
        if action is not Action.NONE and attempt is not None:
            self._migrations.ended(attempt)
            attempt.cancel()
            self._attempt = None
        after = (self.state, self.attempt_number, self._served.prefill_worker, self._served.decode_worker)
        if event is RequestEvent.DISPATCHED or before != after:
            self._note()
        if event not in QUIET_EVENTS or before[0] is not after[0]:
            self._note_moment(event, before[1], now)

    def _note_moment(self, event: RequestEvent, attempt: int, now: float) -> None:
        served = self._served
        prefills = event in (RequestEvent.DISPATCHED, RequestEvent.PREFILL_STARTED) and served.prefill_worker
        self._trail.note(
            Moment(
                at=now,
                name=event.value,
                attempt=attempt,
                worker=served.prefill_worker if prefills else served.decode_worker or served.prefill_worker,
                cause=self._error_code,
            )
        )

    @property
    def story(self) -> Story:
        """What has become of it so far."""
        now, served = time.monotonic(), self._served
        end = self._trail.moments[-1].at if self.ended else now
        return Story(
            request_id=self.request_id,
            tenant=self._tenant,
            state=self.state,
            error_code=self._error_code if self.state is RequestState.FAILED else "",
            ended_at=end,
            ended_unix=time.time() - (now - end),
            phases=self._timeline.phases(end, complete=self.state is RequestState.FINISHED),
            moments=self._trail.moments,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=served.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_attempts=self._lifecycle.newest_attempt - self._migrations.num_issued,
            num_migrations=self._migrations.num_done,
            prefill_worker=served.prefill_worker,
            decode_worker=served.decode_worker,
            transport=served.transport,
            kv_bytes=served.kv_bytes,
            span=None if self._spans is None else self._spans[0],
            parent=None if self._spans is None else self._spans[1],
            contexts=self._trail.contexts,
        )

    def _note(self) -> None:
        if self._spec is None:
            # It ended before the journal had it.
            return
        self._services.journal.transition(
            self.request_id,
            self.state,
            attempt=self._lifecycle.newest_attempt,
            prefill_worker=self._served.prefill_worker,
            decode_worker=self._served.decode_worker,
            error_code=self._error_code if self.state is RequestState.FAILED else None,
        )

    @property
    def _class(self) -> str:
        return class_of(self._spec.priority if self._spec is not None else 0).label

    @property
    def _output_complete(self) -> bool:
        return self._output is not None and self._output.ending is not None

    @property
    def _current_attempt(self) -> Attempt:
        assert self._attempt is not None, "no attempt"
        return self._attempt

    @property
    def _started_spec(self) -> GenerationSpec:
        assert self._spec is not None, "not started"
        return self._spec

    @property
    def _started_output(self) -> Output:
        assert self._output is not None, "not started"
        return self._output

    def _names_upto(self, num_output_tokens: int) -> PrefixNames:
        """Names of the blocks of the prompt and so many tokens of the output."""
        assert self._names is not None, "its blocks have no names yet"
        prompt_ids = self._started_spec.prompt_ids
        if num_output_tokens > 0:
            prompt_ids = (*prompt_ids, *self._started_output.tokens[:num_output_tokens])
        self._names.use(prompt_ids)
        return self._names

    def _facts(self) -> dict[str, object]:
        return {
            "request_id": self.request_id,
            "state": self.state.value,
            "attempt": self.attempt_number,
            "prefill_worker": self._served.prefill_worker,
            "decode_worker": self._served.decode_worker,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "error_code": self._error_code,
            "duration_ms": round((time.monotonic() - self._received_at) * 1000),
        }
