"""One generation as a client sees it, over as many calls as it takes. Decides; makes no call, knows no clock.

Before the first token a failed call is made again, under the same name: a router that has the request already goes on
with it. After the first token the request exists at one router, and `Attach` continues it where the stream broke.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.client.collector import Collector
from pdserve.client.failures import CallFailure
from pdserve.client.requests import new_request_id
from pdserve.client.results import Generation, GenerationDelta
from pdserve.client.retries import RetryPolicy, Turn, Turns
from pdserve.client.silence import Silence
from pdserve.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    NotFoundError,
    PdServeError,
    StoreError,
    UnavailableError,
    WrongRouterError,
)
from pdserve.rpc.v1 import inference_pb2 as pb

_ELSEWHERE = (NotFoundError, WrongRouterError)
"""What a router says to Attach that does not have the request. With the second one somebody has it: another router, or
whichever is asked next, because that one has died or stops."""


@dataclass(frozen=True, slots=True)
class Dial:
    """The call to make next."""

    router: int
    """Place of its address in the list."""
    pause_s: float
    """To wait before."""
    request: pb.GenerateRequest | pb.AttachRequest


class GenerationSession:
    """`dial`, then `received` for each response, then either `ended` or `failed`, which says how to go on."""

    def __init__(
        self,
        request: pb.GenerateRequest | pb.AttachRequest,
        *,
        named_by_user: bool,
        policy: RetryPolicy,
        num_routers: int,
        first_router: int,
    ) -> None:
        self._generate = request if isinstance(request, pb.GenerateRequest) else None
        received = tuple(request.received_tokens) if isinstance(request, pb.AttachRequest) else ()
        num_outputs = max(1, request.n) if isinstance(request, pb.GenerateRequest) else 1
        self._collector = Collector(request.request_id, num_outputs, received)
        self._named_by_user = named_by_user
        self._policy = policy
        self._num_routers = num_routers
        self._turns = Turns(policy, num_routers, first_router)
        self._any_failed = False
        self._heard = False
        self._missing: set[int] = set()
        """Routers that know nothing of the request, since it was last heard of."""
        self._broken_at: float | None = None
        """When the stream broke that is being continued."""

        # A request that ends with its connection is better waited for.
        heartbeats = self.resumable and policy.silence_s != 0
        self.silence = Silence(policy.silence_s) if heartbeats else None
        """Of the current call. None: it may be silent for ever."""

    @property
    def request_id(self) -> str:
        """Name of the request; empty while only the router knows it."""
        return self._collector.request_id

    @property
    def resumable(self) -> bool:
        """Whether a broken connection leaves the request alive."""
        return self._generate is None or self._generate.resumable

    @property
    def complete(self) -> bool:
        """Whether every output has ended. How the call ends then does not matter any more."""
        return self._collector.complete

    @property
    def outlives_its_call(self) -> bool:
        """Whether the request must be cancelled by name when it is not wanted any more: a router cannot tell a call
        that was cancelled from a connection that broke, and goes on for a while with what is resumable."""
        return self._generate is not None and self._generate.resumable and not self.complete

    def may_go_on_after(self, error: PdServeError) -> bool:
        """Whether the request may still be at work although this client has got `error`: its router gave up on the
        reader only, or made no sense. When a deadline has passed, both sides know."""
        return self._heard and self.outlives_its_call and not isinstance(error, DeadlineExceededError)

    def dial(self) -> Dial:
        """The first call."""
        return self._call(self._turns.again())

    def received(self, response: pb.GenerateResponse) -> GenerationDelta | None:
        """Take a response; None if it says nothing new. Raises InternalError if it does not follow the last one."""
        self._heard = True
        if response.HasField("heartbeat"):
            if self.silence is not None:
                self.silence.stated(response.heartbeat.interval_s)
            return None
        delta = self._collector.add(response)
        if delta is not None:
            self._turns.succeeded()
            self._missing.clear()
            self._broken_at = None
        return delta

    def ended(self) -> Generation:
        """The call is over, and well. Raises InternalError if the generation is not."""
        return self._collector.result()

    def failed(self, failure: CallFailure, now: float, deadline: float | None) -> Dial:
        """The call has failed at `now`, before all outputs have ended: how to go on.

        Raises the error if there is nothing left to try. Times are of one monotonic clock; what cannot be done before
        the deadline is not tried.
        """
        error = failure.error
        if failure.silent and self._num_routers == 1:
            # There is no other one. It has the request, and is waited for as long as it is frozen.
            turn: Turn | None = self._turns.again()
        else:
            turn = self._continue(failure, now) if self._collector.begun else self._start_again(error)
        if turn is None or (deadline is not None and now + turn.pause_s >= deadline):
            raise self.named(error)
        self._any_failed = True
        return self._call(turn)

    def named(self, error: PdServeError) -> PdServeError:
        """`error` with the name of the request."""
        if self.request_id:
            error.details.setdefault("request_id", self.request_id)
        return error

    def _start_again(self, error: PdServeError) -> Turn | None:
        """Before the first token: where to send the request again."""
        if isinstance(error, AlreadyExistsError | WrongRouterError) and self._generate is not None and self._any_failed:
            # An earlier try got somewhere before its connection broke, to a router that is another one or a restarted
            # one. Nobody listens to it any more, so it will end.
            if not self._named_by_user:
                self._collector.request_id = new_request_id()
        elif isinstance(error, _ELSEWHERE) and self._generate is None:
            turn = self._next_that_may_have_it(error)
            return turn if self._turns.num_rounds < self._policy.max_attempts else None
        elif not error.retryable and not isinstance(error, WrongRouterError):
            return None
        turn = self._turns.failed(error)
        return turn if self._turns.num_rounds < self._policy.max_attempts else None

    def _continue(self, failure: CallFailure, now: float) -> Turn | None:
        """After the first token: where to attach. Raises if no router has the request any more."""
        error = failure.error
        if failure.answered and not isinstance(error, (*_ELSEWHERE, StoreError)):
            return None
        if self._broken_at is None and self.resumable and self._policy.resume_s:
            self._broken_at = now
            if not failure.answered and not failure.silent:
                # The connection has just broken: the router itself may be well.
                return self._turns.again()
        given_up = self._broken_at is None or now - self._broken_at >= self._policy.resume_s
        turn = None if given_up else self._next_that_may_have_it(error)
        if turn is None:
            lost = UnavailableError(
                f"the connection broke after {self._collector.num_tokens} tokens and the request could not be "
                f"continued: {error.message}"
            )
            raise self.named(lost) from error
        return turn

    def _next_that_may_have_it(self, error: PdServeError) -> Turn | None:
        if isinstance(error, NotFoundError):
            self._missing.add(self._turns.current)
        if len(self._missing) == self._num_routers:
            return None
        turn = self._turns.failed(error)
        pause_s = turn.pause_s
        while turn.router in self._missing:
            turn = self._turns.failed(error)
            pause_s = max(pause_s, turn.pause_s)
        return Turn(turn.router, pause_s)

    def _call(self, turn: Turn) -> Dial:
        self._collector.start_call()
        if self._generate is None or self._collector.begun:
            attach = pb.AttachRequest(request_id=self.request_id, received_tokens=self._collector.cursor)
            attach.heartbeats = self.silence is not None
            return Dial(turn.router, turn.pause_s, attach)
        request = pb.GenerateRequest()
        request.CopyFrom(self._generate)
        request.request_id = self.request_id
        request.heartbeats = self.silence is not None
        return Dial(turn.router, turn.pause_s, request)
