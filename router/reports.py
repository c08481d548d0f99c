"""What workers report of one request: each kind of event, and what it means for output, attempt and story."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from pdserve.errors import (
    InternalError,
    InvalidRequestError,
    PdServeError,
    StaleAttemptError,
    WrongRouterError,
    error_from_code,
)
from pdserve.lifecycle import RequestEvent, RequestState
from pdserve.types import FinishReason, TokenLogprobs
from router.attempt import Attempt
from router.attempts import Attempts
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
from router.migrating_attempt import MigratingAttempt
from router.progress import Progress
from router.request_services import RequestServices
from router.stream import OutputLog
from router.timers import Timers
from router.worker import Worker

REPORT_WAIT_S: Final = 0.25
"""How long the last response waits for the prefill worker's report of the hand-off. The two workers' streams are not
ordered with each other, and a short output may be complete before the report of its hand-off is here."""


class TokenFlow:
    """What `Reports.take` does with the tokens of a request in its steady state, and nothing more; see Flow."""

    __slots__ = ("_journal", "_log", "_metrics", "_num_local_prefill_tokens", "_progress", "_request_id", "_timeline")

    def __init__(
        self,
        progress: Progress,
        log: OutputLog,
        services: RequestServices,
    ) -> None:
        self._progress = progress
        self._request_id = progress.request_id
        self._timeline = progress.timeline
        self._log = log
        self._metrics = services.metrics
        self._journal = services.journal
        self._num_local_prefill_tokens = 0
        """By the latest word."""

    def take(self, index: int, token_id: int, num_local_prefill_tokens: int, now: float) -> bool:
        """See Flow."""
        output = self._progress.output
        assert output is not None, "tokens of a request that has not started"
        text = output.add_next(index, token_id)
        if text is None:
            return False
        if num_local_prefill_tokens != self._num_local_prefill_tokens:
            self._num_local_prefill_tokens = num_local_prefill_tokens
            self._progress.served.computed_by_decode(num_local_prefill_tokens)
        self._metrics.tokens(1, self._timeline.tokens(1, now), first=False)
        self._journal.tokens(self._request_id, (token_id,))
        self._log.push_token(token_id, text)
        # May end this very request.
        self._log.check_readers()
        return True


class Reports:
    """Takes those of the current attempt."""

    def __init__(
        self,
        progress: Progress,
        attempts: Attempts,
        log: OutputLog,
        services: RequestServices,
        timers: Timers,
        *,
        fail: Callable[[PdServeError], None],
        complete: Callable[[RequestEvent], None],
    ) -> None:
        """Tokens go to `log`. `timers` are the request's, which stops them at its end. `fail` and `complete` are its
        ends; the latter gets the event that the output ends with."""
        self._progress = progress
        self._attempts = attempts
        self._log = log
        self._services = services
        self._timers = timers
        self._fail = fail
        self._complete = complete
        self._flow = TokenFlow(progress, log, services)

    def take(self, worker: Worker, event: WorkerEvent) -> None:
        """May end the request. Raises InternalError for what makes no sense, WorkerLostError where another attempt is
        due."""
        progress, attempt = self._progress, self._attempts.running
        first_of_output = attempt.job.first_output_index == 0 and attempt.job.attempt == event.attempt
        match event:
            case PrefillStarted():
                attempt.started(event.decode_worker)
                progress.timeline.prefill_started(time.monotonic())
                self._attempts.apply(RequestEvent.PREFILL_STARTED)
            case PromptLogprobs():
                if progress.prompt_scores is None:
                    raise InternalError("a worker sent log-probabilities of the prompt, which nobody asked for")
                self._log.push_prompt(progress.prompt_scores.add(event.first_index, event.tokens))
            case FirstToken():
                self._first_token(worker, event, first_of_output=first_of_output)
            case StepTokens():
                attempt.tokens_from(worker)
                if attempt.exact:
                    progress.decoder = worker.key
                progress.served.computed_by_decode(event.num_local_prefill_tokens)
                progress.served.drafted(event)
                if first_of_output and event.first_step_s:
                    progress.timeline.first_step(event.first_step_s)
                self._tokens(
                    event.first_index,
                    event.token_ids,
                    event.finish_reason,
                    event.logprobs,
                    RequestEvent.DECODE_TOKENS,
                )
                if self._is_steady(attempt):
                    worker.flows(progress.request_id, event.attempt, self._flow)
            case HandedOff():
                attempt.hand_off_reported(event.decode_worker)
                self._services.metrics.handed_off(event.transport, event.kv_bytes, leads=attempt.leads)
                progress.served.handed_off(event)
                if first_of_output:
                    progress.timeline.transferred(event.transfer_s)
                self._attempts.apply(RequestEvent.HANDED_OFF)
                if progress.output_complete:
                    self._complete(RequestEvent.FINISHED)
            case MigrationWanted():
                self._attempts.migrate(worker, event)
            case Migrated():
                self._attempts.arrived(event)
            case MigrationFailed():
                self._attempts.migration_failed(event)
            case JobFailed():
                self._job_failed(event)

    def _is_steady(self, attempt: Attempt) -> bool:
        """Whether the next tokens of the same attempt can do without `take`: they change the output and nothing
        else."""
        progress = self._progress
        return (
            progress.state is RequestState.DECODING
            and attempt is self._attempts.current
            and not isinstance(attempt, MigratingAttempt)
            and progress.started_spec.num_logprobs is None
            and not progress.started_spec.stop_strings
            and not progress.output_complete
        )

    def _first_token(self, worker: Worker, event: FirstToken, *, first_of_output: bool) -> None:
        progress, attempt, services = self._progress, self._attempts.running, self._services
        if progress.prompt_scores is not None and not progress.prompt_scores.complete:
            raise InternalError("a worker sent the first token before all log-probabilities of the prompt")
        self._attempts.first_token()
        if first_of_output:
            progress.timeline.prefilled(event.prefill_s, event.fetch_s)
            progress.served.prompt_computed(event, attempt.estimate, progress.num_prompt_tokens)
            if attempt.leads:
                services.metrics.prompt_computed(
                    num_tokens=progress.num_prompt_tokens,
                    num_cached=progress.served.num_cached_tokens,
                    num_fetched=progress.served.num_fetched_tokens,
                    estimate=attempt.estimate,
                    took_s=time.monotonic() - self._attempts.dispatched_at,
                )
        if attempt.leads:
            services.prefixes.served(worker.key, progress.names_upto(progress.num_output_tokens))
        if attempt.local and attempt.leads:
            progress.served.computed_by_decode(attempt.job.num_known_tokens - event.num_cached_tokens)
        # A decode worker that has computed the prompt goes on with it: there is nothing to hand over.
        reached = RequestEvent.DECODE_TOKENS if attempt.local else RequestEvent.FIRST_TOKEN
        self._tokens(event.index, (event.token_id,), event.finish_reason, event.logprobs, reached)

    def _tokens(
        self,
        first_index: int,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...],
        event: RequestEvent,
    ) -> None:
        progress, attempt = self._progress, self._attempts.running
        output = progress.started_output
        if progress.output_complete:
            raise InternalError("a worker sent tokens after the end of the output")
        new, texts = output.add(first_index, token_ids, finish, logprobs)
        new_logprobs = output.take_logprobs(len(new)) if progress.started_spec.num_logprobs is not None else ()
        waited_s = progress.timeline.tokens(len(new), time.monotonic())
        self._services.metrics.tokens(len(new), waited_s, first=output.num_tokens == len(new))
        self._services.journal.tokens(progress.request_id, new)
        self._log.push(new, texts, new_logprobs)
        if output.ending is None:
            self._attempts.apply(event)
            # May end this very request, so there is nothing to be done after it.
            self._log.check_readers()
        elif output.ending.stop_string is not None:
            self._complete(RequestEvent.STOPPED)
        elif attempt.decoding and not attempt.handed_off:
            self._attempts.apply(event)
            self._timers.set("report", REPORT_WAIT_S, lambda: self._complete(RequestEvent.FINISHED))
        else:
            self._complete(RequestEvent.FINISHED)

    def _job_failed(self, event: JobFailed) -> None:
        attempt = self._attempts.running
        if isinstance(attempt, MigratingAttempt) and attempt.has_arrived and event.attempt == attempt.job.attempt:
            # It does not know that the stream has arrived.
            self._attempts.arrived(None)
            return
        error = error_from_code(event.code, event.message)
        if isinstance(error, StaleAttemptError):
            # Of ours this attempt is the newest one. So its client has sent the request to another router as well, at a
            # time when one of the two had no answer from redis, and that one is ahead.
            error = WrongRouterError(
                f"request_id: {self._progress.request_id!r} runs at another router, which has got further with it; ask "
                "that one",
                field="request_id",
            )
        if event.retryable:
            self._attempts.retry_without(error, event.blame)
        elif attempt.num_outputs > 1 and isinstance(error, InvalidRequestError):
            # All outputs together are too much for this worker, for which this one has not used up an attempt.
            self._attempts.allow_more()
            self._attempts.retry_or_fail(error, None, attempt)
        else:
            self._fail(error)
