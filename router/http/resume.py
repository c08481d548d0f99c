"""GET /v1/requests/{request_id}/events: the rest of a stream, for a client that has lost it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pdserve.errors import InvalidRequestError
from router.core import RouterCore
from router.generation import Generation
from router.http.attendant import attendant
from router.http.call_limits import client_of
from router.http.chunks import DONE
from router.http.event_ids import END, parse_event_id
from router.http.events import HEADERS
from router.http.views import Views


class EventsApp:
    """As an ASGI application, like GenerateApp."""

    def __init__(self, core: RouterCore, views: Views) -> None:
        self._core = core
        self._views = views

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises PdServeError if nothing was written yet."""
        core, request = self._core, Request(scope, receive)
        generation = await core.find(request.path_params["request_id"], core.limiter.caller(*client_of(scope)))
        last_id = request.headers.get("last-event-id", "")
        headers = ((b"x-request-id", generation.name.encode()),)
        if last_id == END and (generation.ended or generation.inherited):
            await _wait_ended(generation)
            await send({"type": "http.response.start", "status": 200, "headers": [*HEADERS, *headers]})
            await send({"type": "http.response.body", "body": DONE})
            return
        places = parse_event_id(last_id, len(generation.logs))
        with _in_words_of_http():
            reader = generation.read([place.num_tokens for place in places])
        try:
            async with attendant(core, scope, receive, send, reader) as client:
                await generation.wait_begun()
                with _in_words_of_http():
                    await reader.caught_up()
                stream = self._views.stream(generation, numbered=True)
                await stream.go_on_from(places)
                await stream.send(reader, client, headers, core.config.http_heartbeat_s)
        finally:
            reader.close()


async def _wait_ended(generation: Generation) -> None:
    """What was complete at another router is soon complete here."""
    reader = generation.read(whole=True)
    try:
        await reader.rest()
    finally:
        reader.close()


@contextlib.contextmanager
def _in_words_of_http() -> Iterator[None]:
    try:
        yield
    except InvalidRequestError as error:
        raise InvalidRequestError(
            "Last-Event-ID: is ahead of the outputs, so it is of another request", field="Last-Event-ID"
        ) from error
