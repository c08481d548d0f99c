"""All clients, in one process of their own: `python -m benchmarks.front_door.clients SETTINGS`.

They do as little as they can: what a client spends is not the router's, but it takes the machine's time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from benchmarks.front_door.child import serve
from benchmarks.front_door.text import text_of
from pdserve.model.source import open_model
from pdserve.rpc.codec import job_to_proto
from pdserve.rpc.options import CHANNEL_OPTIONS
from pdserve.rpc.v1 import common_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.tokenizer import load_tokenizer
from pdserve.types import GenerationJob

ROUTER_ID = "clients"
"""Under which the fake prefill worker is asked directly."""

IDLE_S = 0.02

Measure = Callable[[str], Awaitable[None]]


class HttpStream(asyncio.Protocol):
    """Counts the events of one streamed answer."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.num_events = 0
        self.transport: asyncio.Transport | None = None
        self._last = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Ask."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """An event ends with an empty line, which may come in two parts."""
        self.num_events += data.count(b"\n\n") + (self._last == b"\n" == data[:1])
        self._last = data[-1:]


class Clients:
    """See the module."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._tokenizer = load_tokenizer(open_model(settings["model"]))
        self._http_address = settings["http_address"]
        self._prefill_address = settings["prefill_address"]
        self._prompts = [text_of(self._tokenizer, settings["prompt_tokens"], first) for first in range(5)]
        self._channel = grpc.aio.insecure_channel(settings["address"], options=list(CHANNEL_OPTIONS))
        self._inference = inference_pb2_grpc.InferenceStub(self._channel)
        self._http: list[HttpStream] = []
        self._calls: list[Any] = []
        self._readers: list[asyncio.Task[None]] = []
        self._num_responses = 0

    async def open(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Start `streams` streams of `tokens` tokens over `api`."""
        for number in range(arguments["streams"]):
            if arguments["api"] == "http":
                request = _post(self._prompts[number % 5], arguments["tokens"], stream=True)
                host, port = self._http_address.rsplit(":", 1)
                stream = HttpStream(request)
                await asyncio.get_running_loop().create_connection(partial(_same, stream), host, int(port))
                self._http.append(stream)
            else:
                call = self._inference.Generate(self._request(number, arguments["tokens"]))
                self._calls.append(call)
                self._readers.append(asyncio.create_task(self._read(call)))
        return {}

    async def count(self, _: dict[str, Any]) -> dict[str, Any]:
        """Events and responses of all streams so far."""
        return {"events": self._num_responses + sum(stream.num_events for stream in self._http)}

    async def close(self, _: dict[str, Any]) -> dict[str, Any]:
        """Leave, in the middle of everything."""
        for stream in self._http:
            assert stream.transport is not None
            stream.transport.abort()
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._http.clear()
        self._calls.clear()
        self._readers.clear()
        self._num_responses = 0
        return {}

    async def aclose(self) -> None:
        """Leave for good."""
        await self.close({})
        await self._channel.close()

    async def latency(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Seconds of requests for one token, one after the other: over either API, and of the fake's own answer; and of
        the least that can be asked of the router. `sent`: when each of the first three was sent, in that order."""
        host, port = self._http_address.rsplit(":", 1)
        reader, writer = await asyncio.open_connection(host, int(port))

        async def over_http(prompt: str) -> None:
            await exchange(_post(prompt, 1, stream=False))

        async def bare_http(_: str) -> None:
            await exchange(b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n")

        async def exchange(request: bytes) -> None:
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            assert head.startswith(b"HTTP/1.1 200"), head

        async def over_grpc(prompt: str) -> None:
            async for _ in self._inference.Generate(_generate(prompt, 1)):
                pass

        async def bare_grpc(_: str) -> None:
            await self._inference.ListModels(pb.ListModelsRequest())

        async with grpc.aio.insecure_channel(self._prefill_address, options=list(CHANNEL_OPTIONS)) as channel:
            session = worker_pb2_grpc.PrefillWorkerStub(channel).Session()
            await session.write(worker_pb2.PrefillCommand(hello=worker_pb2.RouterHello(router_id=ROUTER_ID)))
            events = aiter(session)
            await anext(events)
            jobs = [self._job(prompt) for prompt in self._prompts]
            direct = _direct(session, events, dict(zip(self._prompts, jobs, strict=True)))
            ways: dict[str, Measure] = {
                "http": over_http, "grpc": over_grpc, "direct": direct, "bare_http": bare_http, "bare_grpc": bare_grpc,
            }  # fmt: skip
            samples: dict[str, list[float]] = {name: [] for name in (*ways, "sent")}
            for number in range(arguments["rounds"]):
                for name, measure in ways.items():
                    # What the router still does for the request before is not this one's latency.
                    await asyncio.sleep(IDLE_S)
                    began = time.monotonic()
                    await measure(self._prompts[number % 5])
                    samples[name].append(time.monotonic() - began)
                    if not name.startswith("bare"):
                        samples["sent"].append(began)
            session.cancel()
        writer.close()
        return samples

    async def _read(self, call: Any) -> None:
        async for _ in call:
            self._num_responses += 1

    def _request(self, number: int, tokens: int) -> pb.GenerateRequest:
        return _generate(self._prompts[number % 5], tokens)

    def _job(self, prompt: str) -> worker_pb2.PrefillCommand:
        ids = tuple(self._tokenizer.encode(prompt))
        job = GenerationJob(
            request_id="direct", attempt=1, router_id=ROUTER_ID, token_ids=ids, num_prompt_tokens=len(ids),
            max_new_tokens=1,
        )  # fmt: skip
        target = worker_pb2.DecodeTarget(worker_id="d0")
        return worker_pb2.PrefillCommand(submit=worker_pb2.PrefillJob(job=job_to_proto(job), decode=[target]))


def _same(stream: HttpStream) -> HttpStream:
    return stream


def _direct(session: Any, events: AsyncIterator[Any], jobs: dict[str, worker_pb2.PrefillCommand]) -> Measure:
    async def ask(prompt: str) -> None:
        await session.write(jobs[prompt])
        async for message in events:
            if any(event.WhichOneof("event") == "first_token" for event in message.events):
                return

    return ask


def _post(prompt: str, tokens: int, *, stream: bool) -> bytes:
    body = json.dumps({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n".encode() + body


def _generate(prompt: str, tokens: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        text=prompt,
        sampling=common_pb2.SamplingParams(temperature=0),
        stop=common_pb2.StopParams(max_tokens=tokens),
    )


async def run(settings: dict[str, Any]) -> None:
    """Obey the parent."""
    clients = Clients(settings)
    await serve({"open": clients.open, "count": clients.count, "close": clients.close, "latency": clients.latency})
    await clients.aclose()


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
