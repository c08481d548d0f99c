"""A generation that is being read, for threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import grpc

from pdserve.client.failures import failure_of, silence_of
from pdserve.client.results import Generation, GenerationDelta
from pdserve.client.session import Dial, GenerationSession
from pdserve.client.sync_connections import Connections, StreamCall
from pdserve.errors import CancelledError, PdServeError
from pdserve.rpc.v1 import inference_pb2 as pb


class GenerationStream:
    """A running generation: iterate over its deltas, then ask for `result()`. Closing it early cancels the request.

    Use it as a context manager, so that a `break` or an exception in the loop reaches the cluster. A connection that
    breaks is opened again, and the deltas go on with the next token. One thread reads it; any may close it.
    """

    def __init__(self, session: GenerationSession, connections: Connections, timeout_s: float | None) -> None:
        self._session = session
        self._connections = connections
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._outcome: Generation | PdServeError | None = None
        self._closed = threading.Event()
        self._silence = session.silence
        self._lost_call: StreamCall | None = None
        """The call that was given up because its router is silent."""
        self._dial = session.dial()
        self._call = self._open(self._dial)
        if self._silence is not None:
            connections.watch.add(self)

    @property
    def request_id(self) -> str:
        """Name of the request; empty if the router makes it and has not answered yet."""
        return self._session.request_id

    def __iter__(self) -> Iterator[GenerationDelta]:
        return self

    def __next__(self) -> GenerationDelta:
        """Raises the PdServeError with which the request failed."""
        while self._outcome is None and not self._closed.is_set():
            try:
                delta = self._next_delta()
            except PdServeError as error:
                if self._closed.is_set():
                    break
                self._outcome = error
                if self._session.may_go_on_after(error):
                    self._stop()
                self._connections.watch.remove(self)
                raise
            if delta is not None:
                return delta
        self._connections.watch.remove(self)
        raise StopIteration

    def result(self) -> Generation:
        """The whole generation; waits for what has not been read yet. Raises as iterating does."""
        for _ in self:
            continue
        if self._outcome is None:
            raise self._session.named(CancelledError("the stream was closed before its end"))
        if isinstance(self._outcome, PdServeError):
            raise self._outcome
        return self._outcome

    def close(self) -> None:
        """Cancel the request if it still runs, and end the iteration. Harmless when repeated."""
        if not self._closed.is_set():
            self._closed.set()
            self._connections.watch.remove(self)
            if self._outcome is None:
                self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _next_delta(self) -> GenerationDelta | None:
        """None when there is nothing new yet; then there may be an outcome."""
        try:
            response = self._next_response()
        except StopIteration:
            self._outcome = self._session.ended()
            return None
        except grpc.RpcError as error:
            if self._session.complete:
                self._outcome = self._session.ended()
            else:
                self._go_on(error)
            return None
        self._connections.preferred = self._dial.router
        return self._session.received(response)

    def _next_response(self) -> pb.GenerateResponse:
        if self._silence is None:
            return next(self._call)
        self._silence.begin()
        try:
            return next(self._call)
        finally:
            self._silence.end()

    def look(self, now: float) -> None:
        """See Watched: give the call up if the router is silent."""
        call = self._call
        if self._silence is not None and self._silence.too_long(now):
            self._lost_call = call
            call.cancel()

    def _go_on(self, error: grpc.RpcError) -> None:
        if self._closed.is_set():
            return
        if self._connections.closed:
            raise self._session.named(
                CancelledError("the connection was closed while the request was running")
            ) from error
        address = self._connections.routers[self._dial.router].address
        if self._silence is not None and self._lost_call is self._call:
            failure = silence_of(address, self._silence.limit_s)
        else:
            failure = failure_of(error, address, self._timeout_s)
        self._dial = self._session.failed(failure, time.monotonic(), self._deadline)
        if self._dial.pause_s and self._closed.wait(self._dial.pause_s):
            return
        self._call = self._open(self._dial)
        if self._closed.is_set():
            # Closed between the two, so that `close` has only seen the call before.
            self._stop()

    def _open(self, dial: Dial) -> StreamCall:
        return self._connections.open(dial, None if self._deadline is None else self._deadline - time.monotonic())

    def _stop(self) -> None:
        if self._session.outlives_its_call:
            self._connections.cancel(self._dial.router, self.request_id)
        self._call.cancel()
