"""The two endpoints that generate: /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from pdserve.errors import InternalError, PdServeError
from pdserve.telemetry import context as trace_context
from router.core import RouterCore
from router.generation import Generation
from router.http.answers import AnswerShape, ChatShape, CompletionShape, whole_answer
from router.http.attendant import attendant
from router.http.body import BodyLimits, read_json
from router.http.call_limits import client_of
from router.http.chunks import ChatChunks, CompletionChunks
from router.http.events import MakeChunks
from router.http.fields import ChatBody, CompletionBody, parse
from router.http.generation import Choice
from router.http.known_bodies import known_chats, known_completions
from router.http.plans import Plan, chat_plan, completion_plan
from router.http.unsupported import REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, check_extra
from router.http.views import Endpoint, View, Views
from router.resume_record import Source
from router.takeover import Reread
from router.tools.output import ToolOutput


class ChatEndpoint:
    """POST /v1/chat/completions."""

    kind = "chat"

    def __init__(self) -> None:
        self._known = known_chats()

    def plan(self, value: Mapping[str, Any], core: RouterCore) -> Plan:
        """See Endpoint."""

        def check() -> Plan:
            body = parse(ChatBody, value)
            check_extra(body, REFUSED_IN_CHAT)
            return chat_plan(body, core)

        return self._known.plan(value, core.config, check)

    def shape(self, core: RouterCore, plan: Plan) -> AnswerShape:
        """See Endpoint."""
        return ChatShape(
            core.prompts.tokenizer,
            lambda choice: _tool_output(core, plan, choice),
            names_are_ids=plan.names_are_ids,
        )

    def chunks(self, core: RouterCore, plan: Plan) -> MakeChunks:
        """See Endpoint."""
        return lambda tokenizer, choice: ChatChunks(
            tokenizer,
            choice,
            token_ids=plan.token_ids,
            names_are_ids=plan.names_are_ids,
            tools=_tool_output(core, plan, choice),
        )


class CompletionEndpoint:
    """POST /v1/completions."""

    kind = "completion"

    def __init__(self) -> None:
        self._known = known_completions()

    def plan(self, value: Mapping[str, Any], core: RouterCore) -> Plan:
        """See Endpoint."""

        def check() -> Plan:
            body = parse(CompletionBody, value)
            check_extra(body, REFUSED_IN_COMPLETIONS)
            return completion_plan(body, core)

        return self._known.plan(value, core.config, check)

    def shape(self, core: RouterCore, plan: Plan) -> AnswerShape:
        """See Endpoint."""
        return CompletionShape(core.prompts.tokenizer, echo=plan.echo, names_are_ids=plan.names_are_ids)

    def chunks(self, core: RouterCore, plan: Plan) -> MakeChunks:
        """See Endpoint."""
        return lambda tokenizer, choice: CompletionChunks(
            tokenizer, choice, echo=plan.echo, token_ids=plan.token_ids, names_are_ids=plan.names_are_ids
        )


class GenerateApp:
    """One of the endpoints as an ASGI application: it writes while it computes, so it does without response objects."""

    def __init__(self, core: RouterCore, endpoint: Endpoint, views: Views) -> None:
        self._core = core
        self._endpoint = endpoint
        self._views = views
        core.takeover.understand(endpoint.kind, self._reread)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Raises PdServeError if nothing was written yet."""
        core, config = self._core, self._core.config
        request = Request(scope, receive)
        limits = BodyLimits(max_nbytes=config.http_max_body_bytes, timeout_s=config.http_body_timeout_s)
        value = await read_json(request, limits)
        received_at = time.monotonic()
        with core.counting_refusals():
            plan = self._endpoint.plan(value, core)
            source = Source(self._endpoint.kind, json.dumps(value).encode()) if plan.resumable else None
            generation = core.open(
                plan.ask(
                    _digest(scope["path"], value),
                    core.limiter.name_of(*client_of(scope)),
                    source,
                    trace_context.parse(request.headers.get(trace_context.HEADER)),
                ),
                received_at=received_at,
                renamed=lambda prompt_index, error: plan.names_of(prompt_index).renamed(error),
            )
        reader = generation.read(whole=not plan.stream)
        try:
            # What has been dispatched goes out before anything else is done for this client.
            await asyncio.sleep(0)
            self._views.note(generation, View(plan, self._endpoint))
            headers = (_request_id_header(request, plan.request_id),)
            async with attendant(core, scope, receive, send, reader) as client:
                await generation.wait_begun()
                if plan.stream:
                    stream = self._views.stream(generation, numbered=plan.resumable)
                    await stream.send(reader, client, headers, config.http_heartbeat_s)
                    return
                shape = self._endpoint.shape(core, plan)
                body = await whole_answer(generation, reader, plan, shape, model=core.model.name)
                length = (b"content-length", b"%d" % len(body))
                start = [(b"content-type", b"application/json"), length, *headers]
                await client.send({"type": "http.response.start", "status": 200, "headers": start})
                await client.send({"type": "http.response.body", "body": body})
        except PdServeError as error:
            raise plan.names.renamed(error) from None
        except Exception:
            reader.close(InternalError(f"internal error in request {plan.request_id}"))
            raise
        finally:
            reader.close()

    def _reread(self, body: bytes) -> Reread:
        """A request that another router has left."""
        plan = self._endpoint.plan(json.loads(body), self._core)
        return Reread(plan.ask(b"", b"", None), lambda generation: self._note(generation, plan))

    def _note(self, generation: Generation, plan: Plan) -> None:
        plan = dataclasses.replace(plan, request_id=generation.name)
        self._views.note(generation, View(plan, self._endpoint))


def _tool_output(core: RouterCore, plan: Plan, choice: Choice) -> ToolOutput | None:
    return core.prompts.tool_output(choice.checked.prompt, plan.request_id, choice.index)


def _request_id_header(request: Request, name: str) -> tuple[bytes, bytes]:
    return b"x-request-id", request.headers.get("x-request-id", name)[:256].encode("latin-1", "replace")


def _digest(path: str, value: Mapping[str, Any]) -> bytes:
    """Of a body. Empty for a request that its client has not named, and cannot send again."""
    if value.get("request_id") is None:
        return b""
    data = json.dumps([path, value], sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(data, digest_size=16, person=b"http").digest()
