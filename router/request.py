"""One active request: from its admission to its only end.

Everything here runs in the event loop and returns at once: events of workers, news from the pool, timers and the client
change the state, and whatever has to be said to workers, client and journal is said in the same step. So there is no
moment in which a request is half cancelled, and no task that could be left behind.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from pdserve.config.schema import RouterSection
from pdserve.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    OverloadedError,
    PdServeError,
    UnavailableError,
    WorkerLostError,
    error_from_code,
)
from pdserve.lifecycle import Action, RequestEvent, RequestLifecycle, RequestState
from pdserve.store.journal import RequestJournal
from pdserve.tokenizer import Tokenizer
from pdserve.types import FinishReason, GenerationJob, TokenLogprobs
from router.attempt import Attempt
from router.events import FirstToken, HandedOff, JobFailed, PrefillStarted, PromptLogprobs, StepTokens, WorkerEvent
from router.output import Output, PromptScores, TextOutput, TokenSequence
from router.placement import PlacementRequest, WorkerKey
from router.placer import Placer
from router.prefix_memory import PrefixMemory
from router.stream import ClientStream, Summary
from router.timeline import Timeline
from router.timers import Timers
from router.validation import GenerationSpec
from router.worker import Worker
from router.worker_pool import Placement, WorkerPool

log = logging.getLogger(__name__)

_T = TypeVar("_T")

REPORT_WAIT_S: Final = 0.25
"""How long the last response waits for the prefill worker's report of the hand-off. The two workers' streams are not
ordered with each other, and a short output may be complete before the report of its hand-off is here."""

DEADLINE_SLACK_S: Final = 0.05
"""A client's own deadline cancels its call a little before or after ours; both mean the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestServices:
    """What all requests of a router share."""

    router_id: str
    model: str
    """Name of the model that is served."""
    config: RouterSection
    pool: WorkerPool
    journal: RequestJournal
    tokenizer: Tokenizer
    prefixes: PrefixMemory


class Request:
    """Made at admission; `begin` once the prompt is tokenized and checked."""

    def __init__(
        self,
        request_id: str,
        services: RequestServices,
        *,
        received_at: float,
        deadline: float,
        on_end: Callable[[Request], None],
    ) -> None:
        """Times are `time.monotonic()`. `on_end` is called once, whatever the end is."""
        self.request_id = request_id
        self.stream = ClientStream()
        self._services = services
        self._received_at = received_at
        self._deadline = deadline
        self._on_end = on_end
        self._lifecycle = RequestLifecycle(request_id, received_at)
        self._timeline = Timeline(received_at)
        self._spec: GenerationSpec | None = None
        self._output: Output | None = None
        self._prompt_scores: PromptScores | None = None
        """None until the request begins, and if nobody asked for them."""
        self._attempt: Attempt | None = None
        self._placer = Placer(
            services.pool,
            wait_s=services.config.worker_wait_s,
            on_placed=self._dispatch,
            on_give_up=self._on_no_worker,
        )
        self._prefill_worker = ""
        self._decode_worker = ""
        self._transport = ""
        self._kv_bytes = 0
        self._num_cached_tokens = 0
        self._num_fetched_tokens = 0
        self._decoder: WorkerKey | None = None
        """The latest worker that has sent tokens of it and has exact KV of them."""
        self._num_local_prefill_tokens = 0
        self._error_code = ""
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
    def prefill_worker(self) -> str:
        """Id of the latest attempt's prefill worker; empty before the first dispatch."""
        return self._prefill_worker

    @property
    def decode_worker(self) -> str:
        """Id of the latest attempt's decode worker; empty until known."""
        return self._decode_worker

    @property
    def num_prompt_tokens(self) -> int:
        """0 until the prompt is tokenized."""
        return len(self._spec.prompt_ids) if self._spec is not None else 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return self._output.num_tokens if self._output is not None else 0

    async def unless_ended(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Result of `work`, which is cancelled if the request ends first; then raises what it ended with."""
        task = asyncio.ensure_future(work)
        ended = asyncio.ensure_future(self.stream.wait_ended())
        try:
            await asyncio.wait((task, ended), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                await self.stream.next()
                raise AssertionError("a request that has not started can only end with an error")
            return task.result()
        finally:
            task.cancel()
            ended.cancel()
            await asyncio.gather(task, ended, return_exceptions=True)

    async def begin(self, spec: GenerationSpec) -> None:
        """Claim the request id and dispatch. Raises AlreadyExistsError if another router has the id."""
        # From here on the journal hears of the end, also of one that comes while it claims the id.
        self._spec = spec
        await self._services.journal.admit(
            self.request_id, model=self._services.model, num_prompt_tokens=len(spec.prompt_ids)
        )
        if self._lifecycle.terminal:
            return
        self._output = Output(
            TokenSequence(spec.max_tokens),
            TextOutput(
                self._services.tokenizer,
                spec.prompt_ids,
                spec.stop_strings,
                spec.min_tokens,
                skip_special_tokens=spec.skip_special_tokens,
                include_stop_string=spec.include_stop_string,
            ),
        )
        if spec.num_prompt_logprobs is not None:
            self._prompt_scores = PromptScores(len(spec.prompt_ids))
        self._timeline.tokenized(time.monotonic())
        self._place()

    def cancel(self, reason: str) -> None:
        """Stop for good. Harmless if it has ended."""
        self.fail(CancelledError(reason))

    def client_gone(self) -> None:
        """The client's call is over. Harmless if the request is, too."""
        if time.monotonic() >= self._deadline - DEADLINE_SLACK_S:
            self._on_deadline()
        else:
            self.cancel("the client has gone")

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
        self._finish_up()
        self.stream.fail(error)

    # What workers report.

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """See Consumer."""
        if not self._lifecycle.accepts(event.attempt):
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
        if self._output_complete or not attempt.survives_loss_of(worker):
            error = WorkerLostError(
                f"{worker.info.role.value} worker {worker.info.worker_id} was lost: {reason}",
                worker=worker.info.worker_id,
            )
            self._retry_or_fail(error, worker.key)

    def on_bug(self, error: Exception) -> None:
        """See Consumer."""
        self.fail(InternalError(f"internal error in request {self.request_id}: {type(error).__name__}"))

    def _handle(self, worker: Worker, event: WorkerEvent) -> None:
        attempt = self._current_attempt
        first_of_output = attempt.job.first_output_index == 0
        match event:
            case PrefillStarted():
                attempt.started(event.decode_worker)
                self._apply(RequestEvent.PREFILL_STARTED)
            case PromptLogprobs():
                if self._prompt_scores is None:
                    raise InternalError("a worker sent log-probabilities of the prompt, which nobody asked for")
                self.stream.push_prompt(self._prompt_scores.add(event.first_index, event.tokens))
            case FirstToken():
                if self._prompt_scores is not None and not self._prompt_scores.complete:
                    raise InternalError("a worker sent the first token before all log-probabilities of the prompt")
                attempt.first_token()
                if first_of_output:
                    self._timeline.prefilled(event.prefill_s, event.fetch_s)
                    self._num_cached_tokens = min(event.num_cached_tokens, self.num_prompt_tokens)
                    self._num_fetched_tokens = min(event.num_fetched_tokens, self._num_cached_tokens)
                self._services.prefixes.note(worker.key, attempt.job.token_ids)
                tokens = (event.token_id,)
                self._take(event.index, tokens, event.finish_reason, event.logprobs, RequestEvent.FIRST_TOKEN)
            case StepTokens():
                attempt.tokens_from(worker)
                if attempt.prefill.info.codecs == ("none",):
                    self._decoder = worker.key
                # Workers send the total so far.
                self._num_local_prefill_tokens = max(self._num_local_prefill_tokens, event.num_local_prefill_tokens)
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
                self._transport = event.transport
                self._kv_bytes += event.kv_bytes
                if first_of_output:
                    self._timeline.transferred(event.transfer_s)
                self._apply(RequestEvent.HANDED_OFF)
                if self._output_complete:
                    self._complete()
            case JobFailed():
                self._job_failed(event)

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
        new, text = output.add(first_index, token_ids, finish, logprobs)
        new_logprobs = output.take_logprobs(len(new)) if self._started_spec.num_logprobs is not None else ()
        self._timeline.tokens(len(new), time.monotonic())
        self._services.journal.tokens(self.request_id, new)
        self.stream.push(new, text, new_logprobs)
        if output.ending is None:
            self._apply(event)
            if self.stream.num_unread_tokens > self._services.config.max_unread_tokens:
                raise OverloadedError(
                    f"the client has left {self.stream.num_unread_tokens} tokens unread "
                    f"(router.max_unread_tokens is {self._services.config.max_unread_tokens})"
                )
        elif output.ending.stop_string is not None:
            self._apply(RequestEvent.STOPPED)
            self._succeed()
        elif attempt.decoding and not attempt.handed_off:
            self._apply(event)
            self._timers.set("report", REPORT_WAIT_S, self._complete)
        else:
            self._complete()

    def _job_failed(self, event: JobFailed) -> None:
        error = error_from_code(event.code, event.message)
        if event.retryable:
            self._retry_without(error, event.blame)
        else:
            self.fail(error)

    # Placement and attempts.

    def _place(self) -> None:
        """Find workers for the current attempt; `_dispatch` goes on."""
        spec = self._started_spec
        self._placer.search(
            PlacementRequest(
                num_known_tokens=len(spec.prompt_ids) + self.num_output_tokens,
                max_total_tokens=len(spec.prompt_ids) + spec.max_tokens,
            )
        )

    def _dispatch(self, placement: Placement) -> None:
        spec, output = self._started_spec, self._started_output
        scores = self._prompt_scores
        job = GenerationJob(
            request_id=self.request_id,
            attempt=self.attempt_number,
            router_id=self._services.router_id,
            token_ids=(*spec.prompt_ids, *output.tokens),
            num_prompt_tokens=len(spec.prompt_ids),
            max_new_tokens=spec.max_tokens,
            min_new_tokens=spec.min_tokens,
            stop_token_ids=spec.stop_token_ids,
            sampling=spec.sampling,
            num_logprobs=spec.num_logprobs,
            # What the client has got already need not cost another attempt its prefix cache.
            num_prompt_logprobs=None if scores is None or scores.complete else spec.num_prompt_logprobs,
            deadline=self._deadline,
        )
        found = self._services.prefixes.find(job.token_ids)
        placement = dataclasses.replace(placement, holders=self._services.pool.prefix_holders(placement.prefill, found))
        attempt = Attempt(job, placement, self)
        self._prefill_worker = placement.prefill.info.worker_id
        self._decode_worker = ""
        try:
            attempt.dispatch()
        except UnavailableError as error:
            self._retry_or_fail(error, placement.prefill.key)
            return
        self._attempt = attempt
        self._apply(RequestEvent.DISPATCHED)

    def _on_no_worker(self) -> None:
        self.fail(
            UnavailableError(
                f"no usable pair of prefill and decode workers for {self._services.config.worker_wait_s:g} s",
                retry_after_s=1.0,
            )
        )

    def _retry_without(self, error: PdServeError, worker_id: str) -> None:
        """Try again without a worker of the current attempt; with the same ones if it has no such worker."""
        blamed = self._current_attempt.worker_named(worker_id)
        self._retry_or_fail(error, blamed.key if blamed is not None else None)

    def _retry_or_fail(self, error: PdServeError, blamed: WorkerKey | None) -> None:
        if self._output_complete or self.attempt_number >= self._services.config.max_attempts:
            self.fail(error)
            return
        if blamed is not None:
            self._placer.exclude(blamed)
        log.warning("attempt failed: %s", error.message, extra=self._facts())
        self._apply(RequestEvent.RETRY)
        self._started_output.start_over()
        self._place()

    def _on_deadline(self) -> None:
        self.fail(DeadlineExceededError(f"request {self.request_id}: the deadline has passed"))

    # The end.

    def _complete(self) -> None:
        self._apply(RequestEvent.FINISHED)
        self._succeed()

    def _succeed(self) -> None:
        output = self._started_output
        assert output.ending is not None, "finished without an ending"
        if self._attempt is not None and not self._attempt.decoding:
            # The prefill worker's token was the last one; whoever had a reservation for the rest did nothing.
            self._decode_worker = ""
        self._finish_up()
        self.stream.finish(
            Summary(
                ending=output.ending,
                phases=self._timeline.phases(),
                num_prompt_tokens=self.num_prompt_tokens,
                num_output_tokens=output.num_tokens,
                num_cached_tokens=self._num_cached_tokens,
                num_fetched_tokens=self._num_fetched_tokens,
                prefill_worker=self._prefill_worker,
                decode_worker=self._decode_worker,
                transport=self._transport,
                kv_bytes=self._kv_bytes,
                num_attempts=self.attempt_number,
                num_local_prefill_tokens=self._num_local_prefill_tokens,
            )
        )

    def _finish_up(self) -> None:
        """After the last transition: let go of everything."""
        assert self._lifecycle.terminal, "not at an end"
        if self._attempt is not None:
            self._attempt.close()
            self._attempt = None
        self._placer.stop()
        self._timers.cancel_all()
        if self._decoder is not None:
            # The newest token has not been computed.
            tokens = (*self._started_spec.prompt_ids, *self._started_output.tokens[:-1])
            self._services.prefixes.note(self._decoder, tokens)
        log.info("request ended", extra=self._facts())
        self._on_end(self)

    # Bookkeeping.

    def _apply(self, event: RequestEvent) -> None:
        """Take a transition, do what it demands towards the workers, and note it."""
        before = (self.state, self.attempt_number, self._prefill_worker, self._decode_worker)
        action = self._lifecycle.apply(event, time.monotonic())
        attempt = self._attempt
        if attempt is not None and attempt.decode is not None:
            self._decode_worker = attempt.decode.info.worker_id
        if action is not Action.NONE and attempt is not None:
            attempt.cancel()
            self._attempt = None
        after = (self.state, self.attempt_number, self._prefill_worker, self._decode_worker)
        if event is RequestEvent.DISPATCHED or before != after:
            self._note()

    def _note(self) -> None:
        if self._spec is None:
            # It ended before the journal had it.
            return
        self._services.journal.transition(
            self.request_id,
            self.state,
            attempt=self.attempt_number,
            prefill_worker=self._prefill_worker,
            decode_worker=self._decode_worker,
            error_code=self._error_code if self.state is RequestState.FAILED else None,
        )

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

    def _facts(self) -> dict[str, object]:
        return {
            "request_id": self.request_id,
            "state": self.state.value,
            "attempt": self.attempt_number,
            "prefill_worker": self._prefill_worker,
            "decode_worker": self._decode_worker,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "error_code": self._error_code,
            "duration_ms": round((time.monotonic() - self._received_at) * 1000),
        }
