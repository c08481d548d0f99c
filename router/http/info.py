"""Endpoints that answer at once: models, tokenizer, requests, health, version."""

from __future__ import annotations

import dataclasses
import json
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import pdserve
from pdserve.errors import InvalidRequestError, NotFoundError
from router.core import RouterCore
from router.http.body import BodyLimits, read_json
from router.http.call_limits import client_of
from router.http.fields import BodyT, DetokenizeBody, TokenizeBody, parse
from router.http.messages import chat_prompt, template_kwargs
from router.http.plans import FieldNames
from router.http.tools import functions
from router.http.unsupported import check_extra
from router.limits import Caller
from router.validation import ChatInput, check_chat, check_model, check_text, check_token_ids


class InfoEndpoints:
    """One method for each."""

    def __init__(self, core: RouterCore) -> None:
        self._core = core
        self._started = int(time.time())

    async def health(self, request: Request) -> Response:
        """200 while new requests find workers, 503 otherwise."""
        return Response(status_code=200 if self._core.ready else 503)

    async def version(self, request: Request) -> Response:
        """Of pdserve."""
        return _json({"version": pdserve.__version__})

    async def models(self, request: Request) -> Response:
        """All models that are served, which is one."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """One model. Raises NotFoundError."""
        name = request.path_params["model_id"]
        check_model(name, self._core.limits())
        if not name:
            raise NotFoundError("model: the path names none", field="model")
        return _json(self._model())

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text or a chat."""
        body = await self._body(request, TokenizeBody)
        core = self._core
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt: set one of prompt and messages", field="prompt")
        try:
            if body.prompt is not None:
                check_text("text", body.prompt, core.config)
                ids = await core.prompts.encode_text(
                    body.prompt, add_special_tokens=body.add_special_tokens is not False
                )
            else:
                ids = await core.prompts.encode_chat(self._chat(body))
        except InvalidRequestError as error:
            names = FieldNames(prompt="messages" if body.prompt is None else "prompt")
            raise names.renamed(error) from error
        strings = [core.prompts.tokenizer.id_to_piece(token_id) for token_id in ids] if body.return_token_strs else None
        return _json(
            {"count": len(ids), "max_model_len": core.max_model_len, "tokens": list(ids), "token_strs": strings}
        )

    async def detokenize(self, request: Request) -> Response:
        """Text of token ids, special tokens included."""
        body = await self._body(request, DetokenizeBody)
        core = self._core
        ids = check_token_ids("tokens", body.tokens, core.model.vocab_size, core.config.max_prompt_bytes)
        return _json({"prompt": await core.prompts.decode(ids, skip_special_tokens=False)})

    async def tokenizer_info(self, request: Request) -> Response:
        """What evaluation harnesses want to know: special tokens and chat template."""
        tokenizer = self._core.prompts.tokenizer
        eos = tokenizer.eos_token_ids
        return _json(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "vocab_size": tokenizer.vocab_size,
                "bos_token": None if tokenizer.bos_token_id is None else tokenizer.id_to_piece(tokenizer.bos_token_id),
                "eos_token": tokenizer.id_to_piece(eos[0]) if eos else None,
                "pad_token": None,
                "add_bos_token": tokenizer.adds_bos,
                "chat_template": tokenizer.chat_template_source,
            }
        )

    async def request_info(self, request: Request) -> Response:
        """State of a request. Raises NotFoundError."""
        status = await self._core.status_of(request.path_params["request_id"], self._caller(request))
        return _json(
            {
                "id": status.request_id,
                "object": "request",
                "state": status.state.value,
                "attempt": status.attempt,
                "router_id": status.router_id,
                "prefill_worker": status.prefill_worker,
                "decode_worker": status.decode_worker,
                "prompt_tokens": status.num_prompt_tokens,
                "completion_tokens": status.num_output_tokens,
                "error_code": status.error_code or None,
            }
        )

    async def cancel_request(self, request: Request) -> Response:
        """Cancel a request. Raises NotFoundError for one that never was."""
        name = request.path_params["request_id"]
        caller = self._caller(request)
        cancelled = self._core.cancel(name, caller)
        if not cancelled:
            await self._core.status_of(name, caller)
        return _json({"id": name, "object": "request", "cancelled": cancelled})

    def _caller(self, request: Request) -> Caller:
        return self._core.limiter.caller(*client_of(request.scope))

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._core.model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "pdserve",
            "max_model_len": self._core.max_model_len,
        }

    async def _body(self, request: Request, kind: type[BodyT]) -> BodyT:
        config = self._core.config
        limits = BodyLimits(max_nbytes=config.http_max_body_bytes, timeout_s=config.http_body_timeout_s)
        body = parse(kind, await read_json(request, limits))
        check_extra(body, {})
        check_model(body.model or "", self._core.limits())
        return body

    def _chat(self, body: TokenizeBody) -> ChatInput:
        chat = chat_prompt(body.messages or ())
        chat.tools.extend(functions(body.tools or ()))
        chat.continue_final_message = bool(body.continue_final_message)
        if body.add_generation_prompt is not None:
            chat.add_generation_prompt = body.add_generation_prompt
        checked = check_chat("chat", chat, self._core.config)
        return dataclasses.replace(checked, template_kwargs=template_kwargs(body.chat_template_kwargs))


def _json(value: object) -> Response:
    return Response(json.dumps(value, ensure_ascii=False, separators=(",", ":")), media_type="application/json")
