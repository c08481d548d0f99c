"""A generation that is being read, for tasks."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Self

import grpc

from pdserve.client.aio_connections import Connections
from pdserve.client.failures import failure_of, silence_of
from pdserve.client.results import Generation, GenerationDelta
from pdserve.client.session import Dial, GenerationSession
from pdserve.client.silence import TICK_S
from pdserve.errors import CancelledError, PdServeError
from pdserve.rpc.v1 import inference_pb2 as pb


class AsyncGenerationStream:
    """A running generation: iterate over its deltas, then ask for `result()`. Closing it early cancels the request.

    Use it as an async context manager, so that leaving the loop early reaches the cluster. A connection that breaks is
    opened again, and the deltas go on with the next token. One task reads it; any may close it.
    """

    def __init__(self, session: GenerationSession, connections: Connections, timeout_s: float | None) -> None:
        self._session = session
        self._connections = connections
        self._timeout_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._outcome: Generation | PdServeError | None = None
        self._closed = asyncio.Event()
        self._silence = session.silence
        self._ticking = False
        self._lost = False
        """Whether the current call was given up because its router is silent."""
        self._open(session.dial())

    @property
    def request_id(self) -> str:
        """Name of the request; empty if the router makes it and has not answered yet."""
        return self._session.request_id

    def __aiter__(self) -> AsyncIterator[GenerationDelta]:
        return self

    async def __anext__(self) -> GenerationDelta:
        """Raises the PdServeError with which the request failed."""
        while self._outcome is None and not self._closed.is_set():
            try:
                delta = await self._next_delta()
            except PdServeError as error:
                if self._closed.is_set():
                    break
                self._outcome = error
                if self._session.may_go_on_after(error):
                    await self._stop()
                raise
            except asyncio.CancelledError:
                await self.close()
                raise
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def result(self) -> Generation:
        """The whole generation; waits for what has not been read yet. Raises as iterating does."""
        async for _ in self:
            continue
        if self._outcome is None:
            raise self._session.named(CancelledError("the stream was closed before its end"))
        if isinstance(self._outcome, PdServeError):
            raise self._outcome
        return self._outcome

    async def close(self) -> None:
        """Cancel the request if it still runs, and end the iteration. Harmless when repeated."""
        if not self._closed.is_set():
            self._closed.set()
            if self._outcome is None:
                await self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _next_delta(self) -> GenerationDelta | None:
        """None when there is nothing new yet; then there may be an outcome."""
        try:
            response = await self._next_response()
        except StopAsyncIteration:
            self._outcome = self._session.ended()
            return None
        except grpc.RpcError as error:
            if self._session.complete:
                self._outcome = self._session.ended()
            else:
                await self._go_on(error)
            return None
        except asyncio.CancelledError as error:
            # grpc.aio reports a call that was cancelled through `close()` of another task or of the client in the same
            # way as the cancellation of the reading task; only the latter may be passed on as such.
            task = asyncio.current_task()
            if self._lost and not self._closed.is_set() and (task is None or task.cancelling() == 0):
                if self._session.complete:
                    self._outcome = self._session.ended()
                else:
                    await self._go_on(None)
                return None
            if task is not None and task.cancelling() == 0:
                raise self._session.named(
                    CancelledError("the connection was closed while the request was running")
                ) from error
            raise
        self._connections.preferred = self._dial.router
        return self._session.received(response)

    async def _next_response(self) -> pb.GenerateResponse:
        if self._silence is None:
            return await anext(self._responses)
        self._silence.begin()
        if not self._ticking:
            self._ticking = True
            self._tick()
        try:
            return await anext(self._responses)
        finally:
            self._silence.end()

    def _tick(self) -> None:
        """Look whether the router is silent, for as long as anybody reads."""
        assert self._silence is not None
        self._ticking = self._silence.waiting
        if self._silence.too_long(time.monotonic()):
            self._lost = True
            self._call.cancel()
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    async def _go_on(self, error: grpc.RpcError | None) -> None:
        """After a failed call, or (None) a silent one."""
        if self._closed.is_set():
            return
        address = self._connections.routers[self._dial.router].address
        if self._lost or error is None:
            assert self._silence is not None
            failure = silence_of(address, self._silence.limit_s)
        else:
            failure = failure_of(error, address, self._timeout_s)
        dial = self._session.failed(failure, time.monotonic(), self._deadline)
        if dial.pause_s:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closed.wait(), dial.pause_s)
        if not self._closed.is_set():
            self._open(dial)

    def _open(self, dial: Dial) -> None:
        left_s = None if self._deadline is None else self._deadline - time.monotonic()
        self._dial = dial
        self._lost = False
        self._call = self._connections.open(dial, left_s)
        self._responses = self._call.__aiter__()

    async def _stop(self) -> None:
        try:
            if self._session.outlives_its_call:
                await self._connections.cancel(self._dial.router, self.request_id)
        finally:
            self._call.cancel()
