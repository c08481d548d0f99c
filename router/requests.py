"""What this router is serving and what it has served lately, by name: admission, look-up, and drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Collection

from pdserve.errors import AlreadyExistsError, CapacityError, UnavailableError, WrongRouterError
from pdserve.lifecycle import RequestState
from pdserve.telemetry.context import TraceContext
from router.admission import Reason, class_of
from router.generation import Ask, Generation, GenerationServices, Inherit, Inheritance, Resolve, ResolveNow
from router.metrics import TakeoverOutcome
from router.request import Request
from router.request_services import RequestServices
from router.retention import Retention
from router.story import Asked
from router.validation import ChatInput


class RequestTable:
    """Owns generations from admission until their results are forgotten, and the requests that they are made of."""

    def __init__(self, services: RequestServices, resolve: Resolve, resolve_now: ResolveNow, inherit: Inherit) -> None:
        """See GenerationServices."""
        config = services.config
        self._services = services
        self._generation_services = GenerationServices(
            max_unread_tokens=config.max_unread_tokens,
            resume_s=config.resume_s,
            model=services.model,
            journal=services.journal,
            admission=services.admission,
            resolve=resolve,
            resolve_now=resolve_now,
            inherit=inherit,
        )
        self._active: dict[str, Request] = {}
        self._generations: dict[str, Generation] = {}
        """Those that have not ended."""
        self._ended = Retention(
            retain_s=config.retain_s, max_number=config.retain_requests, max_nbytes=config.retain_bytes
        )
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        services.journal.watch_lost(self._on_lost)

    def __len__(self) -> int:
        """Outputs in progress."""
        return len(self._active)

    def states(self) -> Counter[RequestState]:
        """How many outputs in progress are in each state."""
        return Counter(request.state for request in self._active.values())

    @property
    def outputs(self) -> Collection[Request]:
        """Outputs in progress, the oldest first. A view."""
        return self._active.values()

    @property
    def router_id(self) -> str:
        """Who serves them."""
        return self._services.router_id

    @property
    def closed(self) -> bool:
        """Whether nobody is admitted any more."""
        return self._closed

    def output(self, name: str) -> Request | None:
        """An output in progress."""
        return self._active.get(name)

    def running(self, name: str) -> Generation | None:
        """One that has not ended."""
        return self._generations.get(name)

    def find(self, name: str) -> Generation | None:
        """One that runs or whose result is kept."""
        return self._generations.get(name) or self._ended.get(name)

    def admit(self, ask: Ask, *, received_at: float, deadline: float) -> Generation:
        """A new generation, which the caller starts and reads. Times are `time.monotonic()`.

        Raises UnavailableError, CapacityError or AlreadyExistsError, and keeps nothing then.
        """
        if self._closed:
            raise UnavailableError("the router is stopping", retry_after_s=1.0)
        limit, admission = self._services.config.max_active_requests, self._services.admission
        kind, ever_fits = class_of(ask.prompts[0].priority), ask.num_requests <= limit
        while len(self._active) + ask.num_requests > limit:
            # Whoever sends most must not keep the others out by what only waits.
            if not (ever_fits and admission.make_room(ask.tenant, kind)):
                raise CapacityError(
                    f"{len(self._active)} outputs are in progress of at most {limit} (router.max_active_requests), and "
                    f"this request has {ask.num_requests}",
                    retry_after_s=1.0,
                    reason=Reason.ROUTER_FULL.value,
                )
        names = (ask.request_id, *ask.names())
        if self.find(ask.request_id) is not None or any(name in self._active for name in names):
            raise AlreadyExistsError(
                f"request_id: {ask.request_id!r} is in use, or was a moment ago, for another request; choose another",
                field="request_id",
            )
        return self._add(ask, received_at=received_at, deadline=deadline)

    def adopt(self, ask: Ask, inheritance: Inheritance, *, deadline: float) -> Generation:
        """One that another router has left, which goes on here. `deadline` is `time.monotonic()`. No limit keeps it
        out: it has been admitted once.

        Raises WrongRouterError if this router stops.
        """
        if self._closed:
            raise stopping()
        assert self.find(ask.request_id) is None, "taken over twice"
        generation = self._add(ask, received_at=time.monotonic(), deadline=deadline)
        generation.inherit(inheritance)
        return generation

    def leave_to_others(self) -> int:
        """End here what any other router can go on with. Returns how many outputs that were."""
        before = len(self._active)
        for generation in list(self._generations.values()):
            generation.leave_to_others(stopping())
        return before - len(self._active)

    async def drain(self, timeout_s: float) -> None:
        """Admit nobody any more and wait for the rest, at most `timeout_s`."""
        self._closed = True
        with contextlib.suppress(TimeoutError):  # What is left is the caller's to end.
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()

    def close(self) -> int:
        """End everything now, also for others to go on with, and forget the rest. Returns how many outputs nobody can
        go on with."""
        self._closed = True
        self.leave_to_others()
        num_remaining = len(self._active)
        for generation in list(self._generations.values()):
            generation.fail(UnavailableError("the router is stopping", retry_after_s=1.0))
        self._ended.close()
        return num_remaining

    def _add(self, ask: Ask, *, received_at: float, deadline: float) -> Generation:
        generation = Generation(
            ask,
            self._generation_services,
            functools.partial(
                self._new_request,
                received_at=received_at,
                deadline=deadline,
                unique=not ask.named_by_client,
                tenant=ask.tenant,
                client_trace=ask.client_trace,
                asked=Asked(chat=isinstance(ask.prompts[0].prompt, ChatInput), num_outputs=ask.num_outputs),
            ),
            self._on_end,
            deadline=deadline,
        )
        self._generations[ask.request_id] = generation
        self._idle.clear()
        return generation

    def _on_lost(self, request_id: str, owner: str) -> None:
        """Another router has taken over a request, or one of its outputs."""
        active = self._generations.get(request_id) or self._active.get(request_id)
        if active is not None:
            # Ends all outputs, so it comes here once.
            self._services.metrics.took_over(TakeoverOutcome.LOST)
            active.fail(
                WrongRouterError(
                    f"request_id: {request_id!r} is at router {owner!r} now; ask that one",
                    field="request_id",
                    router=owner,
                )
            )

    def _new_request(
        self,
        name: str,
        on_end: Callable[[Request], None],
        *,
        received_at: float,
        deadline: float,
        unique: bool,
        tenant: bytes,
        client_trace: TraceContext | None,
        asked: Asked,
    ) -> Request:
        def ended(request: Request) -> None:
            del self._active[name]
            on_end(request)

        request = Request(
            name,
            self._services,
            received_at=received_at,
            deadline=deadline,
            unique=unique,
            tenant=tenant,
            on_end=ended,
            client_trace=client_trace,
            asked=asked,
        )
        self._active[name] = request
        return request

    def _on_end(self, generation: Generation) -> None:
        del self._generations[generation.name]
        if generation.worth_keeping:
            self._ended.add(generation)
        if not self._generations:
            self._idle.set()


def stopping() -> WrongRouterError:
    """Whoever comes back is to go elsewhere."""
    return WrongRouterError(
        "the router is stopping; ask another one, which goes on with the request", field="request_id", router=""
    )
