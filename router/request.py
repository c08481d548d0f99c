"""One active request: from its admission to its only end.

Everything here runs in the event loop and returns at once: events of workers, news from the pool, timers and the client
change the state, and whatever has to be said to workers, client and journal is said in the same step. So there is no
moment in which a request is half cancelled, and no task that could be left behind.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from pdserve.errors import (
    CancelledError,
    DeadlineExceededError,
    InternalError,
    PdServeError,
    PoisonedRequestError,
    WorkerLostError,
)
from pdserve.lifecycle import RequestEvent, RequestLifecycle, RequestState
from pdserve.store.requests import RequestRecord
from pdserve.telemetry.context import TraceContext
from pdserve.types import FinishReason
from router.attempts import Attempts
from router.events import WorkerEvent
from router.index import PrefixNames
from router.jobs import finish_reason
from router.migrating_attempt import MigratingAttempt
from router.progress import Progress
from router.reports import Reports
from router.request_services import RequestServices
from router.status import RequestStatus
from router.story import Asked, Story
from router.stream import OutputLog
from router.timers import Timers
from router.validation import GenerationSpec
from router.worker import Worker

log = logging.getLogger(__name__)

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
        client_trace: TraceContext | None,
        asked: Asked,
    ) -> None:
        """Times are `time.monotonic()`. `unique`: this router has drawn the id, so nobody else can have it. `tenant`:
        see Ask; so is `client_trace`. `asked`: as far as it is known before the prompt is resolved. `on_end` is called
        once, whatever the end is."""
        self.request_id = request_id
        self._unique = unique
        self._services = services
        self._deadline = deadline
        self._on_end = on_end
        self._timers = Timers()
        self._progress = Progress(
            request_id,
            services,
            received_at=received_at,
            deadline=deadline,
            tenant=tenant,
            client_trace=client_trace,
            asked=asked,
        )
        self.log = OutputLog()
        self.attempts = Attempts(self._progress, services, self._timers, self, self.fail)
        """On workers."""
        self._reports = Reports(
            self._progress,
            self.attempts,
            self.log,
            services,
            self._timers,
            fail=self.fail,
            complete=self._complete,
        )
        self._timers.set("deadline", deadline - time.monotonic(), self._on_deadline)

    @property
    def state(self) -> RequestState:
        """Where it is."""
        return self._progress.state

    @property
    def ended(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self._progress.ended

    @property
    def received_at(self) -> float:
        """`time.monotonic()`."""
        return self._progress.received_at

    @property
    def tenant(self) -> bytes:
        """Whose it is, see Ask."""
        return self._progress.tenant

    @property
    def status(self) -> RequestStatus:
        """Where it is, for whoever asks."""
        return self._progress.status

    @property
    def trace(self) -> TraceContext | None:
        """Its own span, if it is traced."""
        return self._progress.trace

    @property
    def story(self) -> Story:
        """What has become of it so far."""
        return self._progress.story

    async def begin(self, spec: GenerationSpec, resume: bytes) -> None:
        """Claim the request id and dispatch; `resume` is for the journal. Raises AlreadyExistsError if another router
        has the id."""
        await self.claim(spec, resume)
        self.use_names(await self.name_prompt())
        self.attempts.place()

    def begin_now(self, spec: GenerationSpec, resume: bytes) -> None:
        """As `begin`, before it returns: for an id that is unique and a prompt of at most HASH_INLINE_TOKENS. Raises
        AlreadyExistsError if this router has the id."""
        assert self._unique, "the claim of a name that others may have takes time"
        services = self._services
        self._progress.spec = spec
        services.journal.admit_own(
            self.request_id,
            model=services.model,
            num_prompt_tokens=len(spec.prompt_ids),
            resume=resume,
            tenant=self.tenant,
        )
        self._progress.make_output("tokenized")
        self.use_names(services.prefixes.names_now(spec.prompt_ids, spec.cache_salt))
        self.attempts.place()

    async def claim(self, spec: GenerationSpec, resume: bytes = b"") -> None:
        """Claim the request id; after that it can be placed. Raises AlreadyExistsError if another router has the id."""
        # From here on the journal hears of the end, also of one that comes while it claims the id.
        self._progress.spec = spec
        await self._services.journal.admit(
            self.request_id,
            model=self._services.model,
            num_prompt_tokens=len(spec.prompt_ids),
            unique=self._unique,
            resume=resume,
            tenant=self.tenant,
        )
        if not self.ended:
            self._progress.make_output("tokenized")

    async def name_prompt(self) -> PrefixNames:
        """By what names workers know the blocks of the prompt."""
        spec = self._progress.started_spec
        return await self._services.prefixes.names(spec.prompt_ids, spec.cache_salt)

    def use_names(self, names: PrefixNames) -> None:
        """`names` are those of the prompt. Call it before the request is placed."""
        self._progress.names = names

    async def restore(
        self, spec: GenerationSpec, record: RequestRecord, resume: bytes, *, num_outputs: int, leads: bool
    ) -> None:
        """Instead of `begin`: go on with what another router has left, from the tokens that it has noted. `record` has
        just been taken over; `resume` goes back into the journal. Of `num_outputs` of one prompt one `leads`, and the
        others find the prompt in a prefix cache."""
        progress = self._progress
        progress.spec = spec
        # Log-probabilities are noted nowhere, so with them everything is generated once more.
        scored = spec.num_logprobs is not None or spec.num_prompt_logprobs is not None
        tokens = () if scored or not self._can_be_of(spec, record.output_token_ids) else record.output_token_ids
        self._services.journal.adopt(record, num_kept=len(tokens), resume=resume)
        progress.lifecycle = RequestLifecycle(self.request_id, progress.received_at, attempt=record.attempt)
        self.attempts.allow_more(record.attempt - 1)
        progress.make_output("taken_over")
        await self._recall(tokens, finish_reason(spec, tokens))
        if self.ended:
            return
        if progress.output_complete:
            progress.lifecycle = RequestLifecycle(
                self.request_id, progress.received_at, attempt=record.attempt, state=RequestState.FINISHED
            )
            progress.note()
            self._succeed()
            return
        self.use_names(await self.name_prompt())
        if not self.ended:
            self.attempts.place_taken_over(num_outputs=num_outputs, leads=leads)

    def _can_be_of(self, spec: GenerationSpec, tokens: Sequence[int]) -> bool:
        """Whether a router can have noted these tokens. If not, everything is generated once more."""
        if len(tokens) <= spec.max_tokens and all(0 <= token < self._services.vocab_size for token in tokens):
            return True
        log.warning("the output in the record of %s cannot be right, and is not used", self.request_id)
        return False

    async def _recall(self, tokens: Sequence[int], finish: FinishReason | None) -> None:
        """Take tokens that were given out before; others have their turn in between."""
        output = self._progress.started_output
        for begin in range(0, len(tokens), TOKENS_AT_ONCE):
            end = begin + TOKENS_AT_ONCE
            new, texts = output.add(begin, tokens[begin:end], finish if end >= len(tokens) else None)
            self.log.push(new, texts)
            self._progress.timeline.tokens(len(new), time.monotonic())
            if output.ending is not None:
                return
            await asyncio.sleep(0)
            if self.ended:
                return

    # What workers report.

    def on_event(self, worker: Worker, event: WorkerEvent) -> None:
        """See Consumer."""
        if not self.attempts.accepts(event.attempt):
            worker.num_stale_events += 1
            return
        try:
            self._reports.take(worker, event)
        except WorkerLostError as error:
            self.attempts.retry_without(error, error.details["worker"])
        except PdServeError as error:
            self.fail(error)

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        """See Consumer."""
        progress, attempt = self._progress, self.attempts.current
        if attempt is None or self.ended:
            return
        has_gap = progress.started_output.has_gap
        if isinstance(attempt, MigratingAttempt) and attempt.is_settled_without(worker, has_gap):
            self.attempts.arrived(None)
            return
        if killed := self.attempts.kills(worker, attempt):
            names = " and ".join(killed)
            self.fail(
                PoisonedRequestError(
                    f"request {self.request_id}: workers {names} have died while they computed it, at the same place; "
                    "it is not given to another one"
                )
            )
            return
        if progress.output_complete or not attempt.survives_loss_of(worker):
            error = WorkerLostError(
                f"{worker.info.role.value} worker {worker.info.worker_id} was lost: {reason}",
                worker=worker.info.worker_id,
            )
            self.attempts.retry_or_fail(error, worker, attempt)

    def on_bug(self, error: Exception) -> None:
        """See Consumer."""
        self.fail(InternalError(f"internal error in request {self.request_id}: {type(error).__name__}"))

    # The end.

    def cancel(self, reason: str) -> None:
        """Stop for good. Harmless if it has ended."""
        self.fail(CancelledError(reason))

    def client_gone(self) -> None:
        """The client's call is over. Harmless if the request is, too."""
        if time.monotonic() >= self._deadline - DEADLINE_SLACK_S:
            self._on_deadline()
        else:
            self.fail(CancelledError("the client has gone", reason="disconnect"))

    def _on_deadline(self) -> None:
        self.fail(DeadlineExceededError(f"request {self.request_id}: the deadline has passed"))

    def fail(self, error: PdServeError) -> None:
        """End with `error`, unless the output is complete already. Harmless if it has ended."""
        if self.ended:
            return
        if self._progress.output_complete:
            self._complete(RequestEvent.FINISHED)
            return
        event = RequestEvent.FAIL
        if isinstance(error, CancelledError):
            event = RequestEvent.CANCEL
        elif isinstance(error, DeadlineExceededError):
            event = RequestEvent.DEADLINE
        self._progress.error_code = error.code
        self.attempts.apply(event)
        self.log.fail(error)
        self._services.metrics.failed(error)
        if event is not RequestEvent.CANCEL:
            self._services.metrics.judged_failed(self._progress.priority_class)
        self._finish_up()

    def _complete(self, event: RequestEvent) -> None:
        """The output has ended with `event`."""
        self.attempts.apply(event)
        self._succeed()

    def _succeed(self) -> None:
        progress, attempt = self._progress, self.attempts.current
        progress.migrations.ended(attempt)
        if attempt is not None and not attempt.decoding:
            # The prefill worker's token was the last one; whoever had a reservation for the rest did nothing.
            progress.served.decode_worker = ""
        summary = progress.summary()
        self.log.finish(summary)
        metrics, slo = self._services.metrics, self._services.config.slo
        metrics.finished(summary, self.attempts.recovered_from)
        metrics.judged(
            progress.priority_class,
            ttft_met=summary.phases.ttft_s <= slo.ttft_s,
            tpot_met=summary.phases.tpot_s <= slo.tpot_s,
        )
        self._finish_up()

    def _finish_up(self) -> None:
        """After the last transition: let go of everything."""
        assert self.ended, "not at an end"
        self._timers.cancel_all()
        self.attempts.end()
        self._on_end(self)
        # After the readers, whose clients wait for the end.
        asyncio.get_running_loop().call_soon(self._note_for_later)

    def _note_for_later(self) -> None:
        progress = self._progress
        if progress.decoder is not None:
            # The newest token has not been computed.
            names = progress.names_upto(progress.num_output_tokens - 1)
            self._services.prefixes.served(progress.decoder, names)
        self._services.history.add(self.story)
        log.info("request ended", extra=progress.facts())
