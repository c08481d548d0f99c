"""Any server of the OpenAI API (pdserve, vLLM, SGLang, llama.cpp), by streamed completions of token ids.

Beyond OpenAI's own fields it uses two extensions that all of these have: a prompt of token ids, so that lengths are
exact, and `ignore_eos`, so that output lengths are forced. A server without the latter gives short answers, which are
counted as errors.
"""

from __future__ import annotations

import json
from typing import Any

from pdserve.bench.requests import Answer, PlannedRequest
from pdserve.bench.targets.http import Http, HttpStatusError, Origin
from pdserve.bench.targets.target import OnTokens, QueueSample
from pdserve.errors import PdServeError


class OpenAiTarget:
    """Implements `Target`."""

    def __init__(self, url: str, *, model: str | None = None, api_key: str | None = None) -> None:
        """`url` is http://HOST:PORT, with or without /v1. `model` is asked of the server if not given. Raises
        ConfigError."""
        origin = Origin.parse(url)
        self._root = origin.path.removesuffix("/v1")
        self._url = url
        self._model = model
        self._http = Http(origin, {"Authorization": f"Bearer {api_key}"} if api_key else {})

    @property
    def name(self) -> str:
        """See `Target`."""
        return f"OpenAI {self._url}"

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """See `Target`. By POST /tokenize, which pdserve, vLLM and SGLang take with `prompt`, llama.cpp with
        `content`."""
        body = {
            "model": await self._served_model(), "prompt": text, "content": text, "add_special_tokens": False,
            "add_special": False,
        }  # fmt: skip
        for fields in (("model", "prompt", "add_special_tokens"), ("content", "add_special")):
            try:
                answer = await self._http.ask("POST", f"{self._root}/tokenize", {name: body[name] for name in fields})
            except HttpStatusError:
                continue
            tokens = answer.get("tokens") if isinstance(answer, dict) else None
            if tokens:
                return tuple(tokens)
        raise HttpStatusError(
            f"{self._url}/tokenize: no tokens; prompts of an exact length need this endpoint of pdserve, vLLM, SGLang "
            "or llama.cpp"
        )

    async def generate(self, request: PlannedRequest, on_tokens: OnTokens) -> Answer:
        """See `Target`."""
        body = {
            "model": await self._served_model(),
            "prompt": request.token_ids,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        counted = 0
        usage: dict[str, Any] = {}
        async with self._http.open("POST", f"{self._root}/v1/completions", body) as lines:
            async for line in lines:
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                event = self._event(line[5:])
                usage = event.get("usage") or usage
                if count := _num_tokens(event):
                    counted += count
                    on_tokens(count)
        # Tokens of half a character have no event of their own where events carry text only; by now they have come.
        if (missing := usage.get("completion_tokens", counted) - counted) > 0:
            on_tokens(missing)
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            prompt_tokens=usage.get("prompt_tokens"),
            completion_tokens=usage.get("completion_tokens"),
            cached_tokens=details.get("cached_tokens"),
        )

    async def queues(self, at_s: float) -> QueueSample | None:
        """See `Target`. The API has no such thing."""
        return None

    async def close(self) -> None:
        """See `Target`. No connection outlives its request."""

    async def _served_model(self) -> str:
        if self._model is None:
            answer = await self._http.ask("GET", f"{self._root}/v1/models")
            try:
                self._model = str(answer["data"][0]["id"])
            except (KeyError, IndexError, TypeError) as error:
                raise HttpStatusError(f"{self._url}/v1/models names no model; give --model") from error
        return self._model

    def _event(self, text: str) -> dict[str, Any]:
        """Raises the error that an event reports."""
        try:
            event = json.loads(text)
        except ValueError as error:
            raise HttpStatusError(f"{self._url}: an event is no JSON: {text[:200]!r}") from error
        if not isinstance(event, dict):
            raise HttpStatusError(f"{self._url}: an event is no JSON object: {text[:200]!r}")
        if failure := event.get("error"):
            raise PdServeError(f"{self._url}: {failure.get('message') if isinstance(failure, dict) else failure}")
        return event


def _num_tokens(event: dict[str, Any]) -> int:
    """Output tokens of an event: as many as it names ids, and one for text without ids."""
    choices = event.get("choices") or [{}]
    ids = choices[0].get("token_ids")
    if ids is not None:
        return len(ids)
    return 1 if choices[0].get("text") else 0
