"""A server of the OpenAI API that does what a script says, when it says so: for measuring what measures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How each completion goes."""

    first_s: float = 0.0
    """Pause before the first token."""
    gap_s: float = 0.0
    """Pause before each further token."""
    tokens: int | None = None
    """So many instead of those that were asked for."""
    status: int = 200
    break_after: int | None = None
    """Tokens after which the connection breaks."""
    error_after: int | None = None
    """Tokens after which an event reports an error."""
    with_ids: bool = True
    """Whether events name token ids."""
    serial: bool = False
    """One completion at a time, the others wait."""


@dataclass(slots=True)
class ScriptedOpenAi:
    """Use as an async context manager; then there is `url`. Each word of a text is a token."""

    script: Script
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of completions, as they came."""
    _server: asyncio.Server | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length:")[2].partition("\r\n")[0])
            body = json.loads(await reader.readexactly(length) or b"null")
            path = head.split(" ", 2)[1]
            if path == "/v1/models":
                _answer(writer, {"data": [{"id": "scripted"}]})
            elif path == "/tokenize":
                words = body.get("prompt", "").split()
                ids = {word: i + 10 for i, word in enumerate(dict.fromkeys(words))}
                _answer(writer, {"tokens": [ids[word] for word in words]})
            elif self.script.status != 200:
                _answer(writer, {"error": {"message": "as the script says"}}, self.script.status)
            else:
                self.bodies.append(body)
                if self.script.serial:
                    async with self._turn:
                        await self._complete(body, writer)
                else:
                    await self._complete(body, writer)
            await writer.drain()
        except ConnectionError:
            # A client that leaves early is part of some scripts.
            return
        finally:
            writer.close()

    async def _complete(self, body: Mapping[str, Any], writer: asyncio.StreamWriter) -> None:
        script = self.script
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        count = body["max_tokens"] if script.tokens is None else script.tokens
        for i in range(count):
            await asyncio.sleep(script.gap_s if i else script.first_s)
            if i == script.break_after:
                writer.transport.abort()
                return
            if i == script.error_after:
                _event(writer, {"error": {"message": "out of luck"}})
                break
            choice = {"index": 0, "text": "x"} | ({"token_ids": [7]} if script.with_ids else {})
            _event(writer, {"choices": [choice]})
            await writer.drain()
        prompt_tokens = len(body["prompt"])
        usage = {
            "prompt_tokens": prompt_tokens, "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": prompt_tokens // 2},
        }  # fmt: skip
        _event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _answer(writer: asyncio.StreamWriter, content: Mapping[str, Any], status: int = 200) -> None:
    body = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} Scripted\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)


def _event(writer: asyncio.StreamWriter, content: Mapping[str, Any]) -> None:
    _chunk(writer, f"data: {json.dumps(content)}\n\n".encode())


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
