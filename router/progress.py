"""What is known of one request, and what is said of it: to whoever asks, to the journal, to logs and traces.

It decides nothing and tells no worker anything: that is for the request and its attempts, which keep it up to date.
"""

from __future__ import annotations

import time

from pdserve.lifecycle import RequestEvent, RequestLifecycle, RequestState
from pdserve.telemetry.context import TraceContext
from router.admission import class_of
from router.index import PrefixNames
from router.jobs import output_of
from router.migrations import Migrations
from router.output import Output, PromptScores
from router.placement import WorkerKey
from router.request_services import RequestServices
from router.served import Served
from router.status import RequestStatus
from router.story import QUIET_EVENTS, Asked, Moment, Story, Trail
from router.stream import Summary
from router.timeline import Timeline
from router.validation import GenerationSpec


class Progress:
    """Of one request, from its admission on; of what it is to generate, from `make_output` on."""

    def __init__(
        self,
        request_id: str,
        services: RequestServices,
        *,
        received_at: float,
        deadline: float,
        tenant: bytes,
        client_trace: TraceContext | None,
        asked: Asked,
    ) -> None:
        """See Request."""
        self.request_id = request_id
        self.received_at = received_at
        self.deadline = deadline
        self.tenant = tenant
        self.lifecycle = RequestLifecycle(request_id, received_at)
        self.timeline = Timeline(received_at)
        self.served = Served()
        self.migrations = Migrations(services.pool, services.metrics)
        self.spec: GenerationSpec | None = None
        """None until the prompt is tokenized and checked."""
        self.output: Output | None = None
        """None until the request id is claimed."""
        self.prompt_scores: PromptScores | None = None
        """None until the request id is claimed, and if nobody asked for them."""
        self.names: PrefixNames | None = None
        """Of the blocks of prompt and output, as far as they were needed. None until they are computed."""
        self.decoder: WorkerKey | None = None
        """The latest worker that has sent tokens of it and has exact KV of them."""
        self.error_code = ""
        """Why it has failed, or the attempt that ends just now."""
        self._services = services
        self._shape = asked
        self._trail = Trail(received_at)
        tracing = services.tracing
        self._spans = tracing.root(client_trace) if tracing is not None else None
        """Its own span and the client's, if it is traced."""

    # Where it is.

    @property
    def state(self) -> RequestState:
        """Where it is."""
        return self.lifecycle.state

    @property
    def ended(self) -> bool:
        """Whether nothing can happen to it any more."""
        return self.lifecycle.terminal

    @property
    def attempt_number(self) -> int:
        """From 1."""
        return self.lifecycle.attempt

    @property
    def num_prompt_tokens(self) -> int:
        """0 until the prompt is tokenized."""
        return len(self.spec.prompt_ids) if self.spec is not None else 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn so far."""
        return self.output.num_tokens if self.output is not None else 0

    @property
    def output_complete(self) -> bool:
        """Whether no token is to come, though the request may still wait for a report."""
        return self.output is not None and self.output.ending is not None

    @property
    def priority_class(self) -> str:
        """Label of its class in metrics."""
        return class_of(self.spec.priority if self.spec is not None else 0).label

    @property
    def started_spec(self) -> GenerationSpec:
        """What it is to generate. Call it of a request whose prompt is tokenized."""
        assert self.spec is not None, "not started"
        return self.spec

    @property
    def started_output(self) -> Output:
        """What it has generated. Call it of a request whose id is claimed."""
        assert self.output is not None, "not started"
        return self.output

    def make_output(self, name: str) -> None:
        """The prompt is tokenized and the request id claimed; `name` is that of the moment in the request's story."""
        spec = self.started_spec
        self.output = output_of(spec, self._services.tokenizer)
        if spec.num_prompt_logprobs is not None:
            self.prompt_scores = PromptScores(len(spec.prompt_ids))
        now = time.monotonic()
        self.timeline.tokenized(now)
        self._trail.note(Moment(at=now, name=name, attempt=self.attempt_number))

    def names_upto(self, num_output_tokens: int) -> PrefixNames:
        """Names of the blocks of the prompt and so many tokens of the output."""
        assert self.names is not None, "its blocks have no names yet"
        prompt_ids = self.started_spec.prompt_ids
        if num_output_tokens > 0:
            prompt_ids = (*prompt_ids, *self.started_output.tokens[:num_output_tokens])
        self.names.use(prompt_ids)
        return self.names

    # What is said of it.

    def new_attempt_span(self) -> str:
        """Under what name the workers know whose child their work is; empty if it is not traced."""
        if self._spans is None:
            return ""
        context = self._spans[0].child()
        self._trail.sent_as(self.attempt_number, context)
        return context.header

    def note(self) -> None:
        """Tell the journal where it is."""
        if self.spec is None:
            # It ended before the journal had it.
            return
        self._services.journal.transition(
            self.request_id,
            self.state,
            attempt=self.lifecycle.newest_attempt,
            prefill_worker=self.served.prefill_worker,
            decode_worker=self.served.decode_worker,
            error_code=self.error_code if self.state is RequestState.FAILED else None,
        )

    def note_moment(self, event: RequestEvent, *, before: RequestState, attempt: int, now: float) -> None:
        """`event` has happened to `attempt`, in the state `before`."""
        if event in QUIET_EVENTS and before is self.state:
            return
        served = self.served
        prefills = event in (RequestEvent.DISPATCHED, RequestEvent.PREFILL_STARTED) and served.prefill_worker
        self._trail.note(
            Moment(
                at=now,
                name=event.value,
                attempt=attempt,
                worker=served.prefill_worker if prefills else served.decode_worker or served.prefill_worker,
                cause=self.error_code,
            )
        )

    def summary(self) -> Summary:
        """The last word on a complete output."""
        output = self.started_output
        assert output.ending is not None, "finished without an ending"
        return self.served.summary(
            output.ending,
            self.timeline.phases(time.monotonic()),
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=output.num_tokens,
            num_attempts=self._num_attempts,
            num_migrations=self.migrations.num_done,
        )

    @property
    def status(self) -> RequestStatus:
        """Where it is, for whoever asks."""
        return RequestStatus(
            request_id=self.request_id,
            state=self.state,
            attempt=self.attempt_number,
            router_id=self._services.router_id,
            prefill_worker=self.served.prefill_worker,
            decode_worker=self.served.decode_worker,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            error_code=self.error_code if self.state is RequestState.FAILED else "",
        )

    @property
    def trace(self) -> TraceContext | None:
        """Its own span, if it is traced."""
        return None if self._spans is None else self._spans[0]

    @property
    def story(self) -> Story:
        """What has become of it so far."""
        now, served = time.monotonic(), self.served
        end = self._trail.moments[-1].at if self.ended else now
        return Story(
            request_id=self.request_id,
            tenant=self.tenant,
            state=self.state,
            error_code=self.error_code if self.state is RequestState.FAILED else "",
            ended_at=end,
            ended_unix=time.time() - (now - end),
            phases=self.timeline.phases(end, complete=self.state is RequestState.FINISHED),
            moments=self._trail.moments,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=served.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            num_attempts=self._num_attempts,
            num_migrations=self.migrations.num_done,
            prefill_worker=served.prefill_worker,
            decode_worker=served.decode_worker,
            transport=served.transport,
            kv_bytes=served.kv_bytes,
            asked=self._asked,
            span=self.trace,
            parent=None if self._spans is None else self._spans[1],
            contexts=self._trail.contexts,
        )

    def facts(self) -> dict[str, object]:
        """Fields for its lines in the log."""
        return {
            "request_id": self.request_id,
            "state": self.state.value,
            "attempt": self.attempt_number,
            "prefill_worker": self.served.prefill_worker,
            "decode_worker": self.served.decode_worker,
            "prompt_tokens": self.num_prompt_tokens,
            "output_tokens": self.num_output_tokens,
            "error_code": self.error_code,
            "duration_ms": round((time.monotonic() - self.received_at) * 1000),
        }

    @property
    def _num_attempts(self) -> int:
        """Those that were no migrations."""
        return self.lifecycle.newest_attempt - self.migrations.num_issued

    @property
    def _asked(self) -> Asked:
        spec = self.spec
        return self._shape if spec is None else self._shape.resolved(spec.sampling, spec.max_tokens)
