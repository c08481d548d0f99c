"""The two endpoints that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from router.core import RouterCore
from router.http.answers import AnswerShape, ChatShape, CompletionShape, whole_answer
from router.http.attendant import Attendant
from router.http.body import BodyLimits, read_json
from router.http.chunks import ChatChunks, CompletionChunks
from router.http.events import EventStream, MakeChunks
from router.http.fields import ChatBody, CompletionBody, parse
from router.http.generation import Generation
from router.http.plans import Plan, chat_plan, completion_plan
from router.http.unsupported import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, check_extra


class Endpoint(Protocol):
    """What tells the two apart."""

    def plan(self, value: Mapping[str, Any], core: RouterCore) -> Plan:
        """Check a body. Raises PdServeError."""

    def shape(self, core: RouterCore, plan: Plan) -> AnswerShape:
        """For an answer in one piece."""

    def chunks(self, plan: Plan) -> MakeChunks:
        """For a stream."""


class ChatEndpoint:
    """POST /v1/chat/completions."""

    def plan(self, value: Mapping[str, Any], core: RouterCore) -> Plan:
        """See Endpoint."""
        body = parse(ChatBody, value)
        check_extra(body, REFUSED_IN_CHAT)
        return chat_plan(body, core)

    def shape(self, core: RouterCore, plan: Plan) -> AnswerShape:
        """See Endpoint."""
        return ChatShape(core.prompts.tokenizer)

    def chunks(self, plan: Plan) -> MakeChunks:
        """See Endpoint."""
        return lambda tokenizer, choice: ChatChunks(tokenizer, choice, token_ids=plan.token_ids)


class CompletionEndpoint:
    """POST /v1/completions."""

    def plan(self, value: Mapping[str, Any], core: RouterCore) -> Plan:
        """See Endpoint."""
        body = parse(CompletionBody, value)
        check_extra(body, REFUSED_IN_COMPLETIONS)
        return completion_plan(body, core)

    def shape(self, core: RouterCore, plan: Plan) -> AnswerShape:
        """See Endpoint."""
        return CompletionShape(core.prompts.tokenizer, echo=plan.echo)

    def chunks(self, plan: Plan) -> MakeChunks:
        """See Endpoint."""
        return lambda tokenizer, choice: CompletionChunks(tokenizer, choice, echo=plan.echo, token_ids=plan.token_ids)


class GenerateApp:
    """One of the endpoints as an ASGI application: it writes while it computes, so it does without response objects."""

    def __init__(self, core: RouterCore, endpoint: Endpoint) -> None:
        self._core = core
        self._endpoint = endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises PdServeError if nothing was written yet."""
        core, config = self._core, self._core.config
        request = Request(scope, receive)
        limits = BodyLimits(max_nbytes=config.http_max_body_bytes, timeout_s=config.http_body_timeout_s)
        plan = self._endpoint.plan(await read_json(request, limits), core)
        generation = Generation(core, plan)
        name = request.headers.get("x-request-id", plan.request_id)[:256].encode("latin-1", "replace")
        headers = ((b"x-request-id", name),)
        created = int(time.time())
        client = Attendant(
            scope,
            receive,
            send,
            on_gone=generation.client_gone,
            beat_s=config.http_heartbeat_s,
            write_timeout_s=config.http_write_timeout_s,
        )
        async with client, generation.run():
            if plan.stream:
                stream = EventStream(
                    generation,
                    core.prompts.tokenizer,
                    self._endpoint.chunks(plan),
                    created=created,
                    model=core.model.name,
                )
                await stream.send(client, headers, config.http_heartbeat_s)
                return
            shape = self._endpoint.shape(core, plan)
            body = await whole_answer(generation, shape, created=created, model=core.model.name)
            length = (b"content-length", b"%d" % len(body))
            start = [(b"content-type", b"application/json"), length, *headers]
            await client.send({"type": "http.response.start", "status": 200, "headers": start})
            await client.send({"type": "http.response.body", "body": body})
