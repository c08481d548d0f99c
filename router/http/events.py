"""The body of a streamed answer: what comes for the choices as server-sent events, from any place on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from pdserve.errors import InternalError, PdServeError
from pdserve.tokenizer import Tokenizer
from router.generation import Generation
from router.http.attendant import Attendant
from router.http.chunks import DONE, KEEP_ALIVE, KEEP_ALIVE_NUMBERED, ChoiceChunks, Frame, encode_text
from router.http.errors import error_json
from router.http.event_ids import END, Place, event_id
from router.http.generation import Choice, choices_of, shown
from router.http.plans import Plan
from router.http.usage import UsageMeter
from router.reader import Reader, Response
from router.stream import Delta

log = logging.getLogger(__name__)

HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies of the nginx kind would collect events before they pass them on.
    (b"x-accel-buffering", b"no"),
)

TOKENS_AT_ONCE: Final = 256
"""Of an output that is gone through once more: about a millisecond."""

MakeChunks = Callable[[Tokenizer, Choice], ChoiceChunks]


class EventStream:
    """Streams one generation to one client.

    What comes while it waits is written at once, without the task that runs `send`: see Sink.

    Without ids, one event has all that came together. With ids, tokens are shown one by one: what events there are
    then depends on the output alone, so that each client gets the same ones, however slow it is and wherever it goes
    on.
    """

    __slots__ = (
        "_chunks",
        "_client",
        "_frame",
        "_generation",
        "_meter",
        "_num_skipped",
        "_numbered",
        "_places",
        "_plain",
        "_plan",
    )

    def __init__(
        self, generation: Generation, plan: Plan, tokenizer: Tokenizer, make: MakeChunks, *, model: str, numbered: bool
    ) -> None:
        """`numbered`: events have ids."""
        choices = choices_of(generation)
        self._generation = generation
        self._plan = plan
        self._numbered = numbered
        self._chunks = [make(tokenizer, choice) for choice in choices]
        self._places = [Place() for _ in choices]
        self._num_skipped = [0] * len(choices)
        """Events of each choice, counted from its last complete token, that the client has got already."""
        self._frame = Frame(
            request_id=plan.request_id,
            object_name=self._chunks[0].object_name,
            created=generation.created,
            model=model,
            include_usage=plan.include_usage,
        )
        self._meter = UsageMeter(choices)
        self._client: Attendant | None = None
        self._plain: Sequence[tuple[str, str]] = ()
        """Of each choice, what is around its text in every event to come; empty if that is not all of them."""

    async def go_on_from(self, places: Sequence[Place]) -> None:
        """The client has got all events up to there. They are made once more and dropped, so that whatever the next
        ones depend on is as it was. Before `send`; the tokens must be there."""
        for index, (place, chunks, log) in enumerate(zip(places, self._chunks, self._generation.logs, strict=True)):
            if not place.begun:
                continue
            chunks.open()
            for begin in range(0, place.num_tokens, TOKENS_AT_ONCE):
                end = min(begin + TOKENS_AT_ONCE, place.num_tokens)
                chunks.more(log.delta(begin, end, None if begin else 0))
                # A long output must not hold up everybody else.
                await asyncio.sleep(0)
            self._places[index].advance(place.num_tokens)
            self._num_skipped[index] = place.num_events
            self._meter.reached(index, place.num_tokens)

    async def send(
        self, reader: Reader, client: Attendant, headers: Sequence[tuple[bytes, bytes]], first_within_s: float
    ) -> None:
        """Write head and events.

        The head waits for the first response, so that a request that fails before has a status of its own, but no
        longer than `first_within_s`. Raises PdServeError only if nothing was written.
        """
        try:
            async with asyncio.timeout(first_within_s):
                batch = await reader.next()
        except TimeoutError:
            batch = ()
        await client.send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})
        opening = "".join(self._opening())
        self._client = client
        client.keep_alive(KEEP_ALIVE_NUMBERED if self._numbered else KEEP_ALIVE)
        try:
            while True:
                text = opening + "".join(event for response in batch for event in self._events(response))
                opening = ""
                if reader.done:
                    break
                if text:
                    await client.send(_body(text.encode()))
                self._plain = self._around_text()
                batch = await reader.next(self)
        except PdServeError as error:
            client.stop_keep_alive()
            await client.send(_body(_error_event(self._plan.names.renamed(error)), more=False))
            # The client knows; there is nobody else to tell.
            return
        except Exception:
            log.exception("internal error in request %s", self._plan.request_id)
            failure = InternalError(f"internal error in request {self._plan.request_id}")
            reader.close(failure)
            client.stop_keep_alive()
            await client.send(_body(_error_event(failure), more=False))
            return
        if self._plan.include_usage:
            text += (f"id: {END}\n" if self._numbered else "") + self._frame.usage(self._meter.as_json())
        client.stop_keep_alive()
        await client.send(_body(text.encode() + DONE, more=False))

    def ready(self) -> bool:
        """See Sink."""
        return self._client is not None and self._client.writable

    def take(self, reader: Reader) -> None:
        """See Sink. Writes the events that `send` would have written."""
        assert self._client is not None, "asked before whether it can be"
        if self._plain:
            text = ""
            for index, num_tokens, more in reader.take_texts():
                self._meter.reached(index, num_tokens)
                if more:
                    before, after = self._plain[index]
                    text += before + encode_text(more) + after
        else:
            text = "".join(event for response in reader.take() for event in self._events(response))
        if text:
            self._client.write(text.encode())

    def _around_text(self) -> Sequence[tuple[str, str]]:
        if self._numbered or self._plan.continuous_usage or self._plan.score_only:
            return ()
        fields = [chunks.plain for chunks in self._chunks]
        around = [self._frame.around(index, plain) for index, plain in enumerate(fields) if plain is not None]
        return around if len(around) == len(fields) else ()

    def _opening(self) -> Iterator[str]:
        for index, (place, chunks) in enumerate(zip(self._places, self._chunks, strict=True)):
            if not place.begun:
                yield from self._step(index, chunks.open(), 0)

    def _events(self, response: Response) -> Iterator[str]:
        response = shown(self._plan, response)
        index, chunks = response.index, self._chunks[response.index]
        for num_tokens, delta in self._deltas(response):
            self._meter.reached(index, num_tokens)
            yield from self._step(index, chunks.more(delta), num_tokens)
        if response.summary is not None:
            self._meter.ended(index, response.summary)
            yield from self._step(index, chunks.close(response.summary), None)

    def _deltas(self, response: Response) -> Iterator[tuple[int, Delta]]:
        """The delta of a response, or token by token; with each the number of tokens up to there."""
        delta = response.delta
        if not delta.token_ids and not delta.prompt_logprobs:
            # Only the end is left, and the client may have got a part of its events.
            return
        if not self._numbered or len(delta.token_ids) < 2:
            yield response.num_tokens, delta
            return
        log = self._generation.logs[response.index]
        begin = response.num_tokens - len(delta.token_ids)
        for end in range(begin + 1, response.num_tokens + 1):
            one = log.delta(end - 1, end)
            if end == begin + 1:
                one.prompt_logprobs = delta.prompt_logprobs
            yield end, one

    def _step(self, index: int, parts: Sequence[str], num_tokens: int | None) -> Iterator[str]:
        """Events of one step of a choice, each with its own part: of its opening, of what has come up to so many
        tokens, or (None) of its end. A step that brings no token is not complete before the next one that does."""
        usage = self._meter.as_json() if self._plan.continuous_usage else None
        if not self._numbered:
            for part in parts:
                yield self._frame.chunk(index, part, usage)
            return
        place = self._places[index]
        complete = num_tokens is not None and (num_tokens > place.num_tokens or not place.begun)
        for number, part in enumerate(parts, start=1):
            place.num_events += 1
            if place.num_events <= self._num_skipped[index]:
                continue
            if complete and number == len(parts):
                place.advance(num_tokens or 0)
            yield f"id: {event_id(self._places)}\n{self._frame.chunk(index, part, usage)}"
        if complete:
            place.advance(num_tokens or 0)
            self._num_skipped[index] = 0


def _body(data: bytes, *, more: bool = True) -> dict[str, object]:
    return {"type": "http.response.body", "body": data, "more_body": more}


def _error_event(error: PdServeError) -> bytes:
    return b"data: " + error_json(error) + b"\n\n"
