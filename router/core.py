"""What the public APIs have in common: gRPC and HTTP are two ways to call this."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pdserve.config.schema import RouterSection
from pdserve.errors import InvalidRequestError, NotFoundError, PdServeError, WrongRouterError
from pdserve.store.requests import RequestRecord, RequestRecords, output_name
from pdserve.store.router_lease import RouterLease
from pdserve.types import Grammar
from router.generation import Ask, Generation, Inheritance
from router.grammar import Grammars
from router.limits import Caller, CallLimiter
from router.prompts import Prompts
from router.request_services import RequestServices
from router.requests import RequestTable
from router.resume_record import ResolvedPrompt
from router.status import RequestStatus, combined
from router.story import Story
from router.takeover import Takeover
from router.validation import ChatInput, CheckedRequest, GenerationSpec, Limits, check_request_id, resolve
from router.worker_pool import WorkerPool


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """What the router itself knows of the model."""

    name: str
    vocab_size: int
    """Ids below it are valid: rows of the embedding."""
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class RouterCore:
    """Admission, checks and state of requests. Knows no wire format but that of the request itself."""

    def __init__(
        self,
        *,
        model: ServedModel,
        prompts: Prompts,
        services: RequestServices,
        records: RequestRecords,
        lease: RouterLease,
        grammars: Grammars,
        limiter: CallLimiter,
    ) -> None:
        self.model = model
        self.limiter = limiter
        """Who clients are."""
        self.prompts = prompts
        self.config: RouterSection = services.config
        self.table = RequestTable(services, self.resolve, self.resolve_now, self._inherit)
        """What runs, and what has ended lately."""
        self.takeover = Takeover(
            records=records,
            lease=lease,
            table=self.table,
            specify=self._specify,
            model=model.name,
            max_attempts=services.config.max_attempts,
            extra_s=services.config.resume_s,
            metrics=services.metrics,
        )
        """Goes on with what other routers have left."""
        self.history = services.history
        """Outputs that have ended lately."""
        self._pool: WorkerPool = services.pool
        self.metrics = services.metrics
        """What is counted."""
        self._records = records
        self._grammars = grammars

    @property
    def ready(self) -> bool:
        """Whether a new request would find workers."""
        return not self.table.closed and self._pool.has_usable_pair

    @property
    def draining(self) -> bool:
        """Whether nobody is admitted any more."""
        return self.table.closed

    @property
    def max_model_len(self) -> int:
        """Longest sequence that can be served now, prompt and output, in tokens."""
        limits = self.limits()
        return min(limits.max_model_len, limits.decode_tokens or limits.max_model_len)

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Around what is done of a call until there is a request: what is raised meanwhile is a refusal."""
        try:
            yield
        except PdServeError as error:
            self.metrics.rejected(error)
            raise

    def limits(self) -> Limits:
        """What a request is checked against."""
        kv = self._pool.limits()
        return Limits(
            model=self.model.name,
            vocab_size=self.model.vocab_size,
            max_model_len=self.model.max_model_len,
            prefill_tokens=kv.prefill_tokens,
            decode_tokens=kv.decode_tokens,
        )

    async def resolve(self, checked: CheckedRequest) -> GenerationSpec:
        """Tokenize, compile the grammar, and check lengths. Raises InvalidRequestError, or OverloadedError if there are
        too many grammars."""
        grammar = await self._grammar_of(checked)
        return self._resolved(checked, _cut(checked, await self.prompts.encode(checked.prompt)), grammar)

    def resolve_now(self, checked: CheckedRequest) -> GenerationSpec | None:
        """As `resolve`, before it returns; None for what may take long."""
        if checked.grammar is not None:
            return None
        prompt_ids = self.prompts.encode_now(checked.prompt)
        return None if prompt_ids is None else self._resolved(checked, _cut(checked, prompt_ids), None)

    async def _inherit(self, ask: Ask) -> Inheritance | None:
        return await self.takeover.inherit(ask)

    async def _specify(self, checked: CheckedRequest, known: ResolvedPrompt) -> GenerationSpec:
        """As `resolve` did at another router."""
        sampling = dataclasses.replace(checked.sampling, seed=known.seed)
        checked = dataclasses.replace(checked, sampling=sampling, max_tokens=known.max_tokens)
        return self._resolved(checked, known.token_ids, await self._grammar_of(checked))

    def _resolved(self, checked: CheckedRequest, prompt_ids: Sequence[int], grammar: Grammar | None) -> GenerationSpec:
        return resolve(
            checked,
            prompt_ids,
            eos_token_ids=self.model.eos_token_ids,
            limits=self.limits(),
            config=self.config,
            grammar=grammar,
        )

    async def _grammar_of(self, checked: CheckedRequest) -> Grammar | None:
        """What the output must look like, calls of functions included."""
        grammar, prompt = checked.grammar, checked.prompt
        if grammar is not None:
            await self._grammars.check(grammar)
        if not isinstance(prompt, ChatInput) or prompt.tools is None:
            return grammar
        combined = self.prompts.tool_format.grammar(prompt.tools, grammar)
        if combined is not None:
            try:
                await self._grammars.check(combined)
            except InvalidRequestError as error:
                # The client does not know this grammar, and has written nothing of it but schemas of functions.
                problem = error.message.partition(": ")[2]
                raise InvalidRequestError(f"chat.tools: {problem}", field="chat.tools") from error
        return combined

    def open(
        self,
        ask: Ask,
        *,
        received_at: float,
        client_s: float | None = None,
        renamed: Callable[[int, PdServeError], PdServeError] | None = None,
    ) -> Generation:
        """What was asked for: a new generation that has been started, or the one of that name if it is of the same
        request. The caller reads it at once. `received_at` is `time.monotonic()`, `client_s` what the client still
        waits, `renamed` as in `Generation.start`.

        Raises UnavailableError, OverloadedError, or AlreadyExistsError for the name of another request.
        """
        existing = self.table.find(ask.request_id)
        is_same = existing is not None and ask.digest and existing.ask.digest == ask.digest
        if existing is not None and is_same and self._owns(ask.tenant, existing.ask.tenant):
            return existing
        limit_s = self.config.default_deadline_s
        deadline = received_at + (limit_s if client_s is None else min(client_s, limit_s))
        generation = self.table.admit(ask, received_at=received_at, deadline=deadline)
        generation.start(renamed)
        return generation

    async def find(self, request_id: str, caller: Caller) -> Generation:
        """A generation of this router that runs, or whose result is kept; one of a router that is gone is taken over.
        Where clients have keys, what is another's is not there, for operators either: it comes with its output.

        Raises InvalidRequestError, NotFoundError, StoreError, or WrongRouterError that names the router that has it."""
        _check_named(request_id)

        def is_callers(tenant: bytes) -> bool:
            return self._owns(caller.name, tenant)

        generation = self.table.find(request_id) or await self.takeover.take(request_id, is_callers)
        if generation is not None:
            if not is_callers(generation.ask.tenant):
                raise _no_such_request(request_id)
            return generation
        status = await self._recorded(request_id, is_callers)
        if status is None:
            raise _no_such_request(request_id)
        if status.router_id != self.table.router_id:
            raise WrongRouterError(
                f"request_id: {request_id!r} is at router {status.router_id!r}, not here; ask that one",
                field="request_id",
                router=status.router_id,
            )
        raise NotFoundError(
            f"request_id: the result of {request_id!r} is not kept any more (router.retain_s, router.retain_requests, "
            "router.retain_bytes)",
            field="request_id",
        )

    def cancel(self, request_id: str, caller: Caller) -> bool:
        """Stop an active request of this router, given its name or that of one of its outputs. False if there is none
        of that name that `caller` may know of."""
        active = self.table.running(request_id) or self.table.output(request_id)
        if active is None or not self.may_know(caller, active.tenant):
            return False
        active.cancel(f"request {request_id} was cancelled")
        return True

    async def status_of(self, request_id: str, caller: Caller) -> RequestStatus:
        """Of a request that runs or ended recently, at whatever router, or of one of its outputs, if `caller` may know
        of it. Raises InvalidRequestError, NotFoundError or StoreError."""
        _check_named(request_id)
        known = self.table.find(request_id) or self.table.output(request_id)
        if known is not None and not self.may_know(caller, known.tenant):
            raise _no_such_request(request_id)
        if known is not None:
            return known.status
        status = await self._recorded(request_id, lambda tenant: self.may_know(caller, tenant))
        if status is None:
            raise _no_such_request(request_id)
        return status

    def stories_of(self, request_id: str, caller: Caller) -> list[Story]:
        """Of each output of a request that runs here or has ended here lately, or of one output, if `caller` may know
        of it. Raises InvalidRequestError or NotFoundError."""
        _check_named(request_id)
        alone = self._story_of(request_id)
        stories = [] if alone is None else [alone]
        while alone is None and (story := self._story_of(output_name(request_id, len(stories)))) is not None:
            stories.append(story)
        if not stories or not self.may_know(caller, stories[0].tenant):
            raise _no_such_request(request_id)
        return stories

    def _story_of(self, name: str) -> Story | None:
        running = self.table.output(name)
        return self.history.find(name) if running is None else running.story

    def may_know(self, caller: Caller, tenant: bytes) -> bool:
        """Whether `caller` may know of a request of `tenant` that it is there, and stop it."""
        return self.may_know_all(caller) or caller.name == tenant

    def may_know_all(self, caller: Caller) -> bool:
        """Whether `caller` may know of everybody's requests."""
        return caller.is_operator or not self.limiter.names_are_sure

    def _owns(self, name: bytes, tenant: bytes) -> bool:
        """Without keys a client is known by its address at best, and may come back with another: the name of a request
        is all that it has to know."""
        return tenant == name or not self.limiter.names_are_sure

    async def _recorded(self, request_id: str, is_shown: Callable[[bytes], bool]) -> RequestStatus | None:
        """From the records: that of an output, or that of a request with several and those of its outputs. None if it
        is of a tenant whose requests are not to be shown."""
        record = await self._records.get(request_id)
        if record is None or not is_shown(record.tenant):
            return None
        if record.num_outputs == 0:
            return _status_in(record)
        outputs: list[RequestStatus] = []
        for index in range(record.num_outputs):
            output = await self._records.get(output_name(request_id, index))
            if output is None:
                # Not written yet, or not kept any more.
                return _status_in(record)
            outputs.append(_status_in(output))
        return combined(request_id, outputs, record.num_prompt_tokens)


def _cut(checked: CheckedRequest, prompt_ids: Sequence[int]) -> Sequence[int]:
    """To as many tokens of the prompt as the client wants."""
    return prompt_ids if checked.max_prompt_tokens is None else prompt_ids[-checked.max_prompt_tokens :]


def _check_named(request_id: str) -> None:
    if not request_id:
        raise InvalidRequestError("request_id: must not be empty", field="request_id")
    check_request_id(request_id)


def _no_such_request(request_id: str) -> NotFoundError:
    return NotFoundError(f"request_id: no request {request_id!r} runs or ended recently", field="request_id")


def _status_in(record: RequestRecord) -> RequestStatus:
    return RequestStatus(
        request_id=record.request_id,
        state=record.state,
        attempt=record.attempt,
        router_id=record.owner,
        prefill_worker=record.prefill_worker,
        decode_worker=record.decode_worker,
        num_prompt_tokens=record.num_prompt_tokens,
        num_output_tokens=len(record.output_token_ids),
        error_code=record.error_code,
    )
