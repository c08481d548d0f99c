"""One reader of the outputs of a request, with a position of its own in each."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import CancelledError, InvalidRequestError, OverloadedError, PdServeError
from router.stream import Delta, OutputLog, Summary


@dataclass(slots=True)
class Response:
    """What has come of one output since the last time."""

    index: int
    """Which output."""
    num_tokens: int
    """Tokens of it so far, those of `delta` included: the position after it."""
    delta: Delta
    summary: Summary | None
    """Set with the last response of an output."""


class Sink(Protocol):
    """Takes what comes for a reader that waits, without waking the task that uses the reader."""

    def ready(self) -> bool:
        """Whether it can take something now."""

    def take(self, reader: Reader) -> None:
        """Take what is new, by `Reader.take` or `Reader.take_texts`. What this raises is raised by `Reader.next`."""


class Reader:
    """Nothing is kept for a reader but its positions: what it has not taken is in the logs, and comes in one piece when
    it goes on. If that becomes too much it is let go alone. Use by one task; `close` by anybody."""

    __slots__ = (
        "_closed",
        "_failure",
        "_logs",
        "_loop",
        "_max_unread",
        "_news",
        "_on_close",
        "_open",
        "_positions",
        "_pours",
        "_prompt_positions",
        "_sink",
        "_waiter",
    )

    def __init__(
        self,
        logs: Sequence[OutputLog],
        received: Sequence[int],
        *,
        max_unread: int | None,
        on_close: Callable[[Reader, PdServeError | None], None],
        may_be_ahead: bool = False,
    ) -> None:
        """`received`: tokens of each output that the client has got; may be shorter, the rest is 0. `max_unread`:
        tokens of one output that may be left unread; None: it waits for the ends and reads it all then. `on_close` is
        called once, with the reason if the client is not the one who wanted it. `may_be_ahead`: the outputs may still
        have to reach the positions, see `caught_up`.

        Raises InvalidRequestError for positions that the outputs have not reached.
        """
        self._positions = _positions(logs, received, may_be_ahead=may_be_ahead)
        self._logs = logs
        self._max_unread = max_unread
        self._on_close = on_close
        # Whoever has tokens has got what is known of the prompt, which comes first.
        self._prompt_positions = [0 if position == 0 else None for position in self._positions]
        self._news = set(range(len(logs)))
        self._open = set(range(len(logs)))
        self._failure: PdServeError | None = None
        self._closed = False
        self._waiter: asyncio.Future[bool] | None = None
        self._sink: Sink | None = None
        """Of the one who waits."""
        self._pours = False
        """Whether `_pour` is about to run."""
        self._loop = asyncio.get_running_loop()
        for index, log in enumerate(logs):
            if log.error is not None and self._failure is None:
                self._failure = log.error
            log.attach(self, index)

    @property
    def done(self) -> bool:
        """Whether every output was read to its end."""
        return not self._open

    async def caught_up(self) -> bool:
        """True once the outputs have reached the positions; False after a `nudge` before. Before the first `next`.
        Raises InvalidRequestError if one has ended before, else as `next` does."""
        while any(position > len(log) for position, log in zip(self._positions, self._logs, strict=True)):
            _positions(self._logs, self._positions, may_be_ahead=True)
            if await self._wait():
                return False
        return True

    async def next(self, sink: Sink | None = None) -> Sequence[Response]:
        """What has come since the last time, at most one response for each output, as soon as there is anything. Not
        after `done`. Nothing after a `nudge`.

        With a `sink` what comes meanwhile goes there as long as that is ready: a token costs no task switch. The ends
        of outputs are always returned.

        Raises the error that an output ended with, once all else is read, or at once why the reader was closed.
        """
        while True:
            responses = self.take()
            if responses or await self._wait(sink):
                return responses

    async def rest(self) -> Sequence[Response]:
        """All that is still to come, once it is there: one response for each output. Raises as `next` does."""
        while any(not log.ended for log in self._logs) or self._failure is not None:
            await self._wait()
        return self.take()

    def nudge(self) -> None:
        """Whoever waits for something gets nothing at once, and may come back. Nobody waits: nothing happens."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(True)

    def close(self, reason: PdServeError | None = None) -> None:
        """Read no more: `next` raises `reason`, whatever is unread. None: the client has gone. Harmless when
        repeated."""
        if self._closed:
            return
        self._closed = True
        self._news.clear()
        for log in self._logs:
            log.detach(self)
        if self._failure is None:
            self._failure = reason or CancelledError("the client has gone")
        self._wake()
        self._on_close(self, reason)

    def on_news(self, index: int) -> None:
        """See LogReader."""
        log = self._logs[index]
        if log.ended:
            if self._failure is None:
                self._failure = log.error
        elif self._max_unread is None:
            return
        self._news.add(index)
        if self._sink is None or log.ended:
            self._wake()
        elif not self._pours:
            # Not at once: all that comes in one step of the loop is one piece, as it is for a task.
            self._pours = True
            self._loop.call_soon(self._pour)

    def check_lag(self, index: int) -> None:
        """See LogReader."""
        if self._max_unread is None:
            return
        num_unread = len(self._logs[index]) - self._positions[index]
        if num_unread > self._max_unread:
            self.close(
                OverloadedError(
                    f"the client has left {num_unread} tokens unread (router.max_unread_tokens is {self._max_unread})"
                )
            )

    def take(self) -> Sequence[Response]:
        """What is there now; see `next`."""
        news, self._news = self._news, set()
        responses = []
        for index in sorted(news) if len(news) > 1 else news:
            log = self._logs[index]
            begin, end = self._positions[index], len(log)
            prompt_begin = self._prompt_positions[index]
            summary = log.summary if index in self._open else None
            nothing_of_prompt = prompt_begin is None or prompt_begin == log.num_prompt_logprobs
            if begin == end and nothing_of_prompt and summary is None:
                continue
            delta = log.delta(begin, end, None if nothing_of_prompt else prompt_begin)
            self._positions[index] = end
            if not nothing_of_prompt:
                self._prompt_positions[index] = log.num_prompt_logprobs
            if summary is not None:
                self._open.remove(index)
            responses.append(Response(index, end, delta, summary))
        return responses

    def take_texts(self) -> Iterator[tuple[int, int, str]]:
        """As `take` for a sink to which only text matters: (output, its tokens so far, its new text)."""
        news, self._news = self._news, set()
        for index in sorted(news) if len(news) > 1 else news:
            log = self._logs[index]
            begin, end = self._positions[index], len(log)
            self._positions[index] = end
            yield index, end, log.text(begin, end)

    def _pour(self) -> None:
        self._pours = False
        sink, waiter = self._sink, self._waiter
        if sink is None or waiter is None or waiter.done():
            # The task is about to come for it.
            return
        if not sink.ready():
            waiter.set_result(False)
            return
        try:
            sink.take(self)
        except Exception as error:
            waiter.set_exception(error)

    async def _wait(self, sink: Sink | None = None) -> bool:
        """Until something has happened: False, or True if it was a nudge. Raises if nothing more can."""
        if self._failure is not None:
            # Each reader gets one of its own: raising adds frames to it.
            raise copy.copy(self._failure)
        assert self._open, "read to the end"
        self._waiter, self._sink = self._loop.create_future(), sink
        try:
            return await self._waiter
        finally:
            self._waiter = self._sink = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(False)


def _positions(logs: Sequence[OutputLog], received: Sequence[int], *, may_be_ahead: bool) -> list[int]:
    if len(received) > len(logs):
        raise InvalidRequestError(
            f"received_tokens: {len(received)} numbers for {len(logs)} outputs", field="received_tokens"
        )
    for index, (log, count) in enumerate(zip(logs, received, strict=False)):
        may_come = may_be_ahead and log.summary is None
        if count < 0 or (count > len(log) and not may_come):
            field = f"received_tokens[{index}]"
            raise InvalidRequestError(
                f"{field}: must be between 0 and {len(log)}, the tokens of that output so far, got {count}", field=field
            )
    return [*received, *[0] * (len(logs) - len(received))]
