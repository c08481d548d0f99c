"""Calls to a router, over both of its APIs, as a client would make them that has lost its mind."""

from __future__ import annotations

import itertools
import json
from random import Random
from typing import Any, Final
from urllib.parse import quote

import httpx2
from google.protobuf.message import Message

from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import inference_pb2 as pb
from pdserve.testing import fuzz_json
from pdserve.testing.fuzz_calls import Script
from pdserve.testing.fuzz_protobuf import MessageFuzzer
from pdserve.testing.fuzz_values import damaged, odd_int, odd_text
from router.http.operations import OPERATIONS, Operation

SERVICE: Final = "/pdserve.rpc.v1.Inference"
STATUS: Final = "/pdserve.rpc.v1.Cluster/GetStatus"
_SCHEMA: Final = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
_TOOL: Final = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_CHAT: Final = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
_BODIES: Final[dict[str, list[dict[str, Any]]]] = {
    "chat": [
        {"messages": _CHAT, "max_tokens": 3},
        {"messages": _CHAT, "max_tokens": 3, "stream": True, "n": 2, "logprobs": True, "top_logprobs": 2},
        {"messages": _CHAT, "max_completion_tokens": 2, "tools": [_TOOL], "tool_choice": "auto"},
        {"messages": _CHAT, "max_tokens": 9, "response_format": {"type": "json_object"}, "seed": 3, "stop": ["x"]},
    ],
    "completion": [
        {"prompt": "hello", "max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "logit_bias": {"5": 1.0}},
        {"prompt": [[7, 8], [9]], "max_tokens": 2, "stream": True, "echo": True, "logprobs": 1, "n": 2},
        {"prompt": [7, 8, 9], "max_tokens": 4, "ignore_eos": True, "request_id": "fuzz", "resumable": True},
    ],
    "tokenize": [{"prompt": "hello"}, {"messages": _CHAT, "tools": [_TOOL]}],
    "detokenize": [{"tokens": [7, 8, 9]}],
}
_METHODS: Final = ("GET", "POST", "DELETE", "PUT", "HEAD", "OPTIONS", "PATCH")
_STREAMS_FOR_EVER: Final = "dashboard_events"
MAX_NBYTES: Final = 1 << 16
"""Of an answer, after which the client leaves."""


class RouterScripts:
    """Of one router."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._fuzzer = MessageFuzzer(rng)
        self._numbers = itertools.count(1)

    def grpc(self) -> Script:
        """Any method."""
        rng, fuzzer = self._rng, self._fuzzer
        name = self._name()
        samples: dict[str, list[Message]] = {
            f"{SERVICE}/Generate": list(self._requests(name)),
            f"{SERVICE}/Attach": [pb.AttachRequest(request_id=name, received_tokens=[1])],
            f"{SERVICE}/Cancel": [pb.CancelRequest(request_id=name)],
            f"{SERVICE}/GetRequest": [pb.GetRequestRequest(request_id=name)],
            f"{SERVICE}/ListModels": [pb.ListModelsRequest()],
            f"{SERVICE}/Tokenize": [
                pb.TokenizeRequest(text="hello"),
                pb.TokenizeRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])),
            ],
            f"{SERVICE}/Detokenize": [pb.DetokenizeRequest(token_ids=[7, 8])],
            STATUS: [pb.GetStatusRequest()],
        }
        path = f"{SERVICE}/Generate" if rng.random() < 0.5 else rng.choice(sorted(samples))
        return Script(path=path, messages=(fuzzer.wire(fuzzer.likely(samples[path])),))

    async def http(self, client: httpx2.AsyncClient) -> str:
        """One request; empty, or what is wrong with the answer."""
        rng = self._rng
        operation = rng.choice([op for op in OPERATIONS if op.name != _STREAMS_FOR_EVER])
        if rng.random() < 0.5:
            operation = rng.choice([op for op in OPERATIONS if op.name in _BODIES])
        method = operation.method if rng.random() < 0.9 else rng.choice(_METHODS)
        path = self._path(operation)
        headers = {"Content-Type": "application/json"} if rng.random() < 0.95 else {"Content-Type": "text/x"}
        if rng.random() < 0.1:
            headers["Last-Event-ID"] = quote(odd_text(rng)) if rng.random() < 0.5 else f"{odd_int(rng, -9, 9)}"
        body = self._body(operation) if operation.body is not None or rng.random() < 0.05 else b""
        nbytes = 0
        async with client.stream(method, path, content=body, headers=headers) as answer:
            async for piece in answer.aiter_raw():
                nbytes += len(piece)
                if nbytes > MAX_NBYTES:
                    break
        if answer.status_code >= 500 and answer.status_code not in (503, 504):
            return f"{answer.status_code} to {method} {path} {body!r}"
        return ""

    def _path(self, operation: Operation) -> str:
        name = operation.parameter
        if name is None:
            return operation.path
        value = quote(odd_text(self._rng), safe="") if self._rng.random() < 0.5 else self._name()
        begin, _, rest = operation.path.partition("{")
        return begin + value + rest.partition("}")[2]

    def _body(self, operation: Operation) -> bytes:
        rng = self._rng
        samples = _BODIES.get(operation.name, [{"x": 1}])
        if rng.random() < 0.05:
            return damaged(json.dumps(rng.choice(samples)).encode(), rng)
        sample = dict(rng.choice(samples))
        if "request_id" in sample:
            sample["request_id"] = self._name()
        return fuzz_json.body(sample, rng)

    def _name(self) -> str:
        """Of a request; most are used several times."""
        return f"fuzz-{next(self._numbers) // 6}"

    def _requests(self, name: str) -> list[pb.GenerateRequest]:
        sampling = common_pb2.SamplingParams(temperature=0.7, top_p=0.9)
        stop = common_pb2.StopParams(max_tokens=3)
        ids = pb.TokenIds(ids=[7, 8, 9])
        chat = pb.ChatPrompt(
            messages=[pb.ChatMessage(role="user", content="hi")],
            tools=[pb.Tool(name="f", description="d")],
        )
        return [
            pb.GenerateRequest(token_ids=ids, sampling=sampling, stop=stop),
            pb.GenerateRequest(token_ids=ids, stop=stop, request_id=name, resumable=True, n=2, heartbeats=True),
            pb.GenerateRequest(text="hello", stop=stop, grammar=common_pb2.Grammar(regex="[ab]+")),
            pb.GenerateRequest(text="hello", stop=stop, grammar=common_pb2.Grammar(json_schema=json.dumps(_SCHEMA))),
            pb.GenerateRequest(chat=chat, stop=stop, request_id=name),
        ]
