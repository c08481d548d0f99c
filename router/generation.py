"""All that is generated for one call of a client: its prompts, their outputs, and whoever reads them.

To the rest of the router each output is a `Request`. Here they begin together, and the first one that ends with an
error ends them all: a client that asked for three outputs has no use for two. Any number of readers follow, each from
where it is, also after the end, as long as the result is kept. When nobody reads any more the work is stopped: at once,
or, if the client said that it would come back, after a while.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from pdserve.errors import AlreadyExistsError, CancelledError, InternalError, PdServeError, WrongRouterError
from pdserve.store.journal import RequestJournal
from pdserve.store.requests import RequestRecord, output_name
from pdserve.telemetry.context import TraceContext
from router.admission import Admission
from router.fork_group import begin_group
from router.reader import Reader
from router.request import Request
from router.resume_record import ResolvedPrompt, ResumeRecord, Source, encode
from router.status import RequestStatus, combined
from router.stream import OutputLog
from router.timers import Timers
from router.validation import ChatInput, CheckedRequest, GenerationSpec, PromptInput, TextInput, TokenInput

log = logging.getLogger(__name__)

NUM_SEEDS: Final = 2**64
FIXED_NBYTES: Final = 4096
"""Of a generation that is kept, beside what grows with prompt and output."""
PROMPT_TOKEN_NBYTES: Final = 36

Resolve = Callable[[CheckedRequest], Awaitable[GenerationSpec]]
ResolveNow = Callable[[CheckedRequest], GenerationSpec | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a client wants, each field checked."""

    request_id: str
    prompts: tuple[CheckedRequest, ...]
    num_outputs: int = 1
    """Of each prompt."""
    resumable: bool = False
    """Whether the client may come back when its connection breaks."""
    digest: bytes = b""
    """Of everything that the client sent, to know the same request when it comes again. Empty if it has no name of the
    client's."""
    tenant: bytes = b""
    """Whose it is, see CallLimiter.name_of. Tenants share alike when there is too much to do."""
    client_trace: TraceContext | None = None
    """The client's span whose child this is. None: it has named none."""
    source: Source | None = None
    """As the client has sent it, for another router to go on with. None: no other router can."""

    @property
    def named_by_client(self) -> bool:
        """Whether the name was chosen by the client and not drawn here."""
        return bool(self.digest)

    @property
    def num_requests(self) -> int:
        """Outputs over all prompts."""
        return len(self.prompts) * self.num_outputs

    def names(self) -> Iterator[str]:
        """Of the outputs: that of the request if there is one, `{request_id}-{index}` otherwise. Those of one prompt
        are next to each other."""
        if self.num_requests == 1:
            yield self.request_id
        else:
            yield from (output_name(self.request_id, index) for index in range(self.num_requests))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inheritance:
    """What another router has left of a generation, each record just taken over from it."""

    specs: Sequence[GenerationSpec]
    """Of the outputs; so are `outputs`."""
    outputs: Sequence[RequestRecord]
    whole: RequestRecord | None
    """That of a request with several outputs."""
    resume: bytes
    """See RequestJournal.admit."""
    created: int
    """Unix time in seconds."""


Inherit = Callable[[Ask], Awaitable[Inheritance | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationServices:
    """What all generations of a router share."""

    max_unread_tokens: int
    resume_s: float
    model: str
    journal: RequestJournal
    admission: Admission
    resolve: Resolve
    """Tokenizes a prompt and checks its length; raises PdServeError."""
    resolve_now: ResolveNow
    """The same before it returns; None for one that may take long."""
    inherit: Inherit
    """Takes over what another router has left of the very same request, if it is gone; None if nothing can be taken
    over. Raises PdServeError."""


class Generation:
    """Made at admission; `start` sets it off."""

    def __init__(
        self,
        ask: Ask,
        services: GenerationServices,
        new_request: Callable[[str, Callable[[Request], None]], Request],
        on_end: Callable[[Generation], None],
        *,
        deadline: float,
    ) -> None:
        """`new_request` makes the request of a name that calls back at its end. `on_end` is called once, when every
        output has ended. `deadline` is `time.monotonic()`."""
        self.ask = ask
        self.created = int(time.time())
        """Unix time in seconds."""
        self.inherited = False
        """Whether it began at another router, so that clients may have got more of it than is here yet."""
        self._others_can = False
        """Whether another router could go on with it."""
        self._deadline = deadline
        self._services = services
        self._on_end = on_end
        self._requests = [new_request(name, self._on_request_end) for name in ask.names()]
        """Empty once all have ended."""
        self._num_running = len(self._requests)
        self.logs: Sequence[OutputLog] = [request.log for request in self._requests]
        """Of the outputs: output i of prompt p is number p * ask.num_outputs + i."""
        self._specs: Sequence[GenerationSpec] = ()
        self._error: PdServeError | None = None
        self._final: Sequence[RequestStatus] = ()
        self._readers: set[Reader] = set()
        self._timers = Timers()
        self._starting: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Of the request."""
        return self.ask.request_id

    @property
    def ended(self) -> bool:
        """Whether every output has ended."""
        return self._num_running == 0

    @property
    def worth_keeping(self) -> bool:
        """Once it has ended: whether it has come to anything. What was refused before any worker had it may be tried
        again under the same name, and what has gone to another router is read there."""
        if not self._specs or isinstance(self._error, AlreadyExistsError | WrongRouterError):
            return False
        return not all(output.refused for output in self._final)

    @property
    def specs(self) -> Sequence[GenerationSpec]:
        """Of the outputs. Empty until `wait_begun` has returned."""
        return self._specs

    @property
    def nbytes(self) -> int:
        """About what it takes to keep it."""
        num_prompt_tokens = sum(len(spec.prompt_ids) for spec in self._specs[:: self.ask.num_outputs])
        as_sent = sum(_nbytes_as_sent(checked.prompt) for checked in self.ask.prompts)
        outputs = sum(log.nbytes for log in self.logs)
        source = self.ask.source
        as_sent += len(source.body) if source is not None else 0
        return FIXED_NBYTES + PROMPT_TOKEN_NBYTES * num_prompt_tokens + as_sent + outputs

    @property
    def tenant(self) -> bytes:
        """See Ask."""
        return self.ask.tenant

    @property
    def status(self) -> RequestStatus:
        """Of all outputs together."""
        outputs = self._final or [request.status for request in self._requests]
        prompts = sum(output.num_prompt_tokens for output in outputs[:: self.ask.num_outputs])
        return combined(self.name, outputs, prompts)

    def start(self, renamed: Callable[[int, PdServeError], PdServeError] | None = None) -> None:
        """Tokenize, claim the names and dispatch: in a task of its own, which goes on whoever leaves, or, where nothing
        has to be waited for, before this returns.

        `renamed` puts an error of the prompt with that index into the words of the client.
        """
        if not self._start_now(renamed):
            self._starting = asyncio.create_task(self._start(renamed), name=f"start-{self.name}")

    def inherit(self, inheritance: Inheritance) -> None:
        """Instead of `start`: go on with what another router has left, in a task of its own."""
        self.inherited = True
        self._specs = inheritance.specs
        self._starting = asyncio.create_task(self._start_from(inheritance), name=f"go-on-{self.name}")
        # Whoever it was taken over for may have left meanwhile.
        self._timers.set("resume", self._services.resume_s, self._abandon)

    async def wait_begun(self) -> None:
        """Return once it is known what is generated. Raises the error that it ended with if it has not come to that."""
        if self._starting is not None:
            await asyncio.wait((self._starting,))
        if not self._specs:
            assert self._error is not None, "ended before it began, without an error"
            raise copy.copy(self._error)

    def read(self, received: Sequence[int] = (), *, whole: bool = False) -> Reader:
        """A reader that has got so many tokens of each output already; with `whole` for `Reader.rest`.

        The caller closes it, and waits until it has `caught_up`. Raises InvalidRequestError, see Reader.
        """
        reader = Reader(
            self.logs,
            received,
            max_unread=None if whole else self._services.max_unread_tokens,
            on_close=self._on_reader_closed,
            # While it starts it may turn out that another router has left more of it.
            may_be_ahead=self.inherited or (self._starting is not None and not self._starting.done()),
        )
        self._readers.add(reader)
        self._timers.cancel("resume")
        return reader

    def cancel(self, reason: str) -> None:
        """Stop for good. Harmless if it has ended."""
        self.fail(CancelledError(reason))

    def fail(self, error: PdServeError) -> None:
        """End every output that is not complete. Harmless if it has ended."""
        if self._error is None:
            self._error = copy.copy(error)
        for request in tuple(self._requests):
            request.fail(error)

    def leave_to_others(self, error: PdServeError) -> None:
        """End here with `error`, for any other router to go on. What no other one could go on with goes on here."""
        if not self._others_can or not self._services.journal.release(self.name):
            return
        for request in self._requests:
            self._services.journal.release(request.request_id)
        self.fail(error)

    def _start_now(self, renamed: Callable[[int, PdServeError], PdServeError] | None) -> bool:
        """Start at once, if that takes no time worth another task. False: nothing has been done."""
        ask = self.ask
        if ask.num_requests > 1 or ask.named_by_client:
            return False
        try:
            try:
                spec = self._services.resolve_now(ask.prompts[0])
            except PdServeError as error:
                raise (error if renamed is None else renamed(0, error)) from None
            if spec is None:
                return False
            self._specs = (spec,)
            resume = self._resume_record()
            self._others_can = bool(resume)
            self._requests[0].begin_now(spec, resume)
        except PdServeError as error:
            self.fail(error)
        except Exception:
            self._fail_by_bug()
        return True

    async def _start(self, renamed: Callable[[int, PdServeError], PdServeError] | None) -> None:
        try:
            specs = await self._resolve(renamed)
            if self.ended:
                return
            self._specs = specs
            try:
                await self._begin()
            except AlreadyExistsError:
                # Its client may have come back from a router that is gone.
                inheritance = await self._services.inherit(self.ask) if self.ask.source is not None else None
                if inheritance is None:
                    raise
                await self._go_on(inheritance)
        except PdServeError as error:
            self.fail(error)
        except Exception:
            self._fail_by_bug()

    async def _start_from(self, inheritance: Inheritance) -> None:
        try:
            await self._go_on(inheritance)
        except PdServeError as error:
            self.fail(error)
        except Exception:
            self._fail_by_bug()

    def _fail_by_bug(self) -> None:
        log.exception("internal error in request %s", self.name)
        self.fail(InternalError(f"internal error in request {self.name}"))

    async def _go_on(self, inheritance: Inheritance) -> None:
        self.inherited = self._others_can = True
        self.created = inheritance.created
        self._specs = inheritance.specs
        resume, num_outputs = inheritance.resume, self.ask.num_outputs
        if inheritance.whole is not None:
            self._services.journal.adopt(inheritance.whole, num_kept=0, resume=resume)
            resume = b""
        outputs = zip(tuple(self._requests), self._specs, inheritance.outputs, strict=True)
        for index, (request, spec, record) in enumerate(outputs):
            if not request.ended:
                leads = index % num_outputs == 0
                await request.restore(spec, record, resume, num_outputs=num_outputs, leads=leads)

    async def _resolve(self, renamed: Callable[[int, PdServeError], PdServeError] | None) -> Sequence[GenerationSpec]:
        specs: list[GenerationSpec] = []
        for index, prompt in enumerate(self.ask.prompts):
            try:
                spec = await self._services.resolve(prompt)
            except PdServeError as error:
                raise (error if renamed is None else renamed(index, error)) from None
            specs += specs_of_outputs(spec, self.ask.num_outputs)
        return specs

    async def _begin(self) -> None:
        """Each claim of a name is a round trip; those of the outputs go at once."""
        requests, specs, step = tuple(self._requests), self._specs, self.ask.num_outputs
        resume = self._resume_record()
        self._others_can = bool(resume)
        if len(requests) == 1:
            await requests[0].begin(specs[0], resume)
            return
        # Its own name is that of no output. Without a claim another router could give it away.
        await self._services.journal.admit(
            self.name,
            model=self._services.model,
            num_prompt_tokens=sum(len(spec.prompt_ids) for spec in specs[::step]),
            num_outputs=len(requests),
            unique=not self.ask.named_by_client,
            resume=resume,
            tenant=self.tenant,
        )
        if self.ended:
            return
        admission = self._services.admission
        groups = (
            begin_group(requests[i : i + step], specs[i : i + step], admission) for i in range(0, len(requests), step)
        )
        for outcome in await asyncio.gather(*groups, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    def _resume_record(self) -> bytes:
        """What another router needs to go on; empty if none can."""
        ask = self.ask
        if ask.source is None:
            return b""
        prompts = tuple(
            ResolvedPrompt(spec.prompt_ids, spec.sampling.seed, spec.max_tokens)
            for spec in self._specs[:: ask.num_outputs]
        )
        return encode(
            ResumeRecord(
                source=ask.source,
                model=self._services.model,
                prompts=prompts,
                created=self.created,
                deadline_s=self._deadline - time.monotonic(),
                digest=ask.digest,
                tenant=ask.tenant,
                trace=ask.client_trace or self._requests[0].trace,
            )
        )

    def _on_request_end(self, request: Request) -> None:
        self._num_running -= 1
        if request.log.error is not None:
            # Ends the others, each of which comes here.
            self.fail(request.log.error)
        if self._num_running > 0 or self._final:
            return
        self._final = [request.status for request in self._requests]
        if len(self._final) > 1:
            end = self.status
            self._services.journal.transition(
                self.name,
                end.state,
                attempt=end.attempt,
                prefill_worker=end.prefill_worker,
                decode_worker=end.decode_worker,
                error_code=end.error_code,
            )
        self._requests = []
        self._timers.cancel_all()
        if self._starting is not None and self._starting is not asyncio.current_task():
            self._starting.cancel()
        self._on_end(self)

    def _on_reader_closed(self, reader: Reader, reason: PdServeError | None) -> None:
        self._readers.discard(reader)
        if self._readers or self.ended:
            return
        if self.ask.resumable:
            self._timers.set("resume", self._services.resume_s, self._abandon)
        elif reason is not None:
            self.fail(reason)
        else:
            self._abandon()

    def _abandon(self) -> None:
        """Nobody reads."""
        for request in tuple(self._requests):
            request.client_gone()


def specs_of_outputs(spec: GenerationSpec, num_outputs: int) -> list[GenerationSpec]:
    """Output i of a prompt is drawn with (seed + i) mod 2**64: as a request of its own with that seed would be."""
    if num_outputs == 1:
        return [spec]
    seeds = ((spec.sampling.seed + i) % NUM_SEEDS for i in range(num_outputs))
    return [dataclasses.replace(spec, sampling=dataclasses.replace(spec.sampling, seed=seed)) for seed in seeds]


def _nbytes_as_sent(prompt: PromptInput) -> int:
    """About what a prompt takes beside its tokens."""
    match prompt:
        case TextInput():
            return sys.getsizeof(prompt.text)
        case ChatInput():
            return sum(sys.getsizeof(value) for message in prompt.messages for value in message.values())
        case TokenInput():
            return 0
