"""The body of a streamed answer: what comes for the choices, merged, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final

from pdserve.errors import InternalError, PdServeError
from pdserve.tokenizer import Tokenizer
from router.http.attendant import Attendant
from router.http.chunks import DONE, KEEP_ALIVE, ChoiceChunks, Frame
from router.http.errors import error_json
from router.http.generation import Choice, Generation
from router.http.usage import UsageMeter
from router.stream import Response

log = logging.getLogger(__name__)

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx kind would collect events before they pass them on.
    (b"x-accel-buffering", b"no"),
)

MakeChunks = Callable[[Tokenizer, Choice], ChoiceChunks]


class EventStream:
    """Streams one generation to one client."""

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, make: MakeChunks, *, created: int, model: str
    ) -> None:
        plan = generation.plan
        self._generation = generation
        self._plan = plan
        self._choices = generation.choices
        self._chunks = [make(tokenizer, choice) for choice in generation.choices]
        self._frame = Frame(
            request_id=plan.request_id,
            object_name=self._chunks[0].object_name,
            created=created,
            model=model,
            include_usage=plan.include_usage,
        )
        self._meter = UsageMeter(generation.choices)

    async def send(self, client: Attendant, headers: Sequence[tuple[bytes, bytes]], first_within_s: float) -> None:
        """Write head and events.

        The head waits for the first response, so that a request that fails before has a status of its own, but no
        longer than `first_within_s`. Raises PdServeError only if nothing was written.
        """
        start = {"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]}
        num_open = len(self._choices)
        async with _responses(self._choices) as responses:
            try:
                async with asyncio.timeout(first_within_s):
                    batch = await responses.next()
            except TimeoutError:
                batch = ()
            await client.send(start)
            opening = "".join(self._opening())
            client.keep_alive(KEEP_ALIVE)
            try:
                while True:
                    text = opening + "".join(self._events(batch))
                    opening = ""
                    num_open -= sum(response.summary is not None for _, response in batch)
                    if not num_open:
                        break
                    if text:
                        await client.send(_body(text.encode()))
                    batch = await responses.next()
            except PdServeError as error:
                client.stop_keep_alive()
                await client.send(_body(_error_event(self._plan.names.renamed(error)), more=False))
                # The client knows; there is nobody else to tell.
                return
            except Exception:
                log.exception("internal error in request %s", self._plan.request_id)
                failure = InternalError(f"internal error in request {self._plan.request_id}")
                self._generation.fail(failure)
                client.stop_keep_alive()
                await client.send(_body(_error_event(failure), more=False))
                return
        if self._plan.include_usage:
            text += self._frame.usage(self._meter.as_json())
        client.stop_keep_alive()
        await client.send(_body(text.encode() + DONE, more=False))

    def _opening(self) -> list[str]:
        return [
            self._frame.chunk(choice.index, fields, self._usage_so_far())
            for choice, chunks in zip(self._choices, self._chunks, strict=True)
            for fields in chunks.open()
        ]

    def _events(self, batch: Sequence[tuple[Choice, Response]]) -> list[str]:
        events = []
        for choice, response in batch:
            self._meter.add(choice, response)
            chunks = self._chunks[choice.index]
            fields = chunks.more(response.delta)
            if response.summary is not None:
                fields = (*fields, *chunks.close(response.summary))
            if fields:
                usage = self._usage_so_far()
                events += [self._frame.chunk(choice.index, field, usage) for field in fields]
        return events

    def _usage_so_far(self) -> str | None:
        return self._meter.as_json() if self._plan.continuous_usage else None


class _OneChoice:
    """Responses of a single choice, without a task in between."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice

    async def next(self) -> Sequence[tuple[Choice, Response]]:
        """The next one."""
        return ((self._choice, await self._choice.next()),)


class _ManyChoices:
    """Responses of several choices; those that are there at the same time come together.

    The queue is short: a client that does not read leaves responses in the streams of the requests, which merge them
    and have a bound.
    """

    def __init__(self, choices: Sequence[Choice]) -> None:
        self._queue: asyncio.Queue[tuple[Choice, Response] | Exception] = asyncio.Queue(len(choices))
        self._error: Exception | None = None
        self._pumps = [asyncio.create_task(self._pump(choice), name="http-choice") for choice in choices]

    async def next(self) -> Sequence[tuple[Choice, Response]]:
        """All that have come since the last call, at least one. Raises what a request ended with."""
        if self._error is not None:
            raise self._error
        batch = []
        item = await self._queue.get()
        while not isinstance(item, Exception):
            batch.append(item)
            if self._queue.empty():
                return batch
            item = self._queue.get_nowait()
        self._error = item
        if not batch:
            raise item
        return batch

    async def aclose(self) -> None:
        """End the tasks."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, choice: Choice) -> None:
        try:
            while True:
                response = await choice.next()
                await self._queue.put((choice, response))
                if response.summary is not None:
                    return
        except Exception as error:
            await self._queue.put(error)


@contextlib.asynccontextmanager
async def _responses(choices: Sequence[Choice]) -> AsyncIterator[_OneChoice | _ManyChoices]:
    if len(choices) == 1:
        yield _OneChoice(choices[0])
        return
    many = _ManyChoices(choices)
    try:
        yield many
    finally:
        await many.aclose()


def _body(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _error_event(error: PdServeError) -> bytes:
    return b"data: " + error_json(error) + b"\n\n"
