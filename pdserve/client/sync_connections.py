"""Channels of the blocking client to its routers, and calls over them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import grpc

from pdserve.client.endpoints import Endpoints
from pdserve.client.failures import failure_of
from pdserve.client.retries import RetryPolicy, Turns
from pdserve.client.session import Dial
from pdserve.client.sync_watch import Watch
from pdserve.errors import CancelledError, PdServeError
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.rpc.v1 import inference_pb2_grpc as rpc

CANCEL_TIMEOUT_S = 2.0
"""For the word to a router that a request is not wanted any more."""

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class StreamCall(Protocol):
    """What a stream needs of a gRPC server-stream call."""

    def __next__(self) -> pb.GenerateResponse: ...

    def cancel(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class RouterStubs:
    """One router."""

    address: str
    channel: grpc.Channel
    inference: rpc.InferenceStub
    cluster: rpc.ClusterStub


class Connections:
    """To all routers; shared by threads."""

    def __init__(self, endpoints: Endpoints, policy: RetryPolicy) -> None:
        self.policy = policy
        self.watch = Watch()
        self.preferred = 0
        """Place of the router that answered last. Threads may overwrite each other: it is only a hint."""
        self._metadata = endpoints.metadata
        self._closed = threading.Event()
        self.routers: Sequence[RouterStubs] = [_connect(address, endpoints) for address in endpoints.addresses]

    def open(self, dial: Dial, timeout_s: float | None) -> StreamCall:
        """Make the call of `dial`. Raises CancelledError if the client is closed."""
        self._check_open()
        inference = self.routers[dial.router].inference
        if isinstance(dial.request, pb.GenerateRequest):
            return inference.Generate(dial.request, timeout=timeout_s, metadata=self._metadata)
        return inference.Attach(dial.request, timeout=timeout_s, metadata=self._metadata)

    def call(
        self,
        method: Callable[[RouterStubs], grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]],
        request: RequestT,
        timeout_s: float | None,
    ) -> ResponseT:
        """The answer of whichever router answers first. Raises PdServeError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        turns = Turns(self.policy, len(self.routers), self.preferred)
        turn = turns.again()
        while True:
            try:
                answer = self.call_at(turn.router, method, request, timeout_s, deadline)
            except PdServeError as error:
                again = turns.retry(error, time.monotonic(), deadline)
                if again is None:
                    raise
                turn = again
                self.pause(turn.pause_s)
            else:
                self.preferred = turn.router
                return answer

    def call_at(
        self,
        router: int,
        method: Callable[[RouterStubs], grpc.UnaryUnaryMultiCallable[RequestT, ResponseT]],
        request: RequestT,
        timeout_s: float | None,
        deadline: float | None = None,
    ) -> ResponseT:
        """The answer of one router, without another try; `deadline` is what is left of `timeout_s`, if not all of it.

        Raises PdServeError.
        """
        self._check_open()
        stubs = self.routers[router]
        left_s = timeout_s if deadline is None else deadline - time.monotonic()
        try:
            return method(stubs)(request, timeout=left_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure_of(error, stubs.address, timeout_s).error from error

    def cancel(self, router: int, request_id: str) -> None:
        """Tell a router that nobody wants a request any more; whether it hears it is its own business."""
        message = pb.CancelRequest(request_id=request_id)
        try:
            self.call_at(router, lambda stubs: stubs.inference.Cancel, message, CANCEL_TIMEOUT_S)
        except PdServeError:
            # It cannot be reached: then it will miss its client and end the request by itself.
            return

    def pause(self, pause_s: float) -> None:
        """Wait, unless the client is closed meanwhile. Raises CancelledError then."""
        self._closed.wait(pause_s)
        self._check_open()

    def close(self) -> None:
        """Close all channels; what runs over them ends."""
        self._closed.set()
        for router in self.routers:
            router.channel.close()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed.is_set()

    def _check_open(self) -> None:
        if self.closed:
            raise CancelledError("the client is closed")


def _connect(address: str, endpoints: Endpoints) -> RouterStubs:
    options = list(endpoints.options)
    channel = (
        grpc.insecure_channel(address, options=options)
        if endpoints.credentials is None
        else grpc.secure_channel(address, endpoints.credentials, options=options)
    )
    return RouterStubs(address, channel, rpc.InferenceStub(channel), rpc.ClusterStub(channel))
