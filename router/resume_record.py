"""What a router leaves in redis of a request whose client may come back, so that another router can go on with it.

The request is kept as its client has sent it, to be read by the same code again, and beside it whatever of its meaning
does not follow from that alone: the tokens of its prompts, the seed that was drawn, how long the output may become.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.telemetry.context import TraceContext, parse

VERSION: Final = 1

MAX_RESUME_NBYTES: Final = 4 << 20
"""Requests that take more are not left to others: redis would hold them twice over in memory, and its other clients
would wait for each."""


@dataclass(frozen=True, slots=True)
class Source:
    """A request as its client has sent it."""

    kind: str
    """Which of the public APIs reads it."""
    body: bytes


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    """What was made of one prompt."""

    token_ids: tuple[int, ...]
    seed: int
    """Of its first output."""
    max_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeRecord:
    """Everything that is needed beside the outputs."""

    source: Source
    model: str
    prompts: tuple[ResolvedPrompt, ...]
    created: int
    """Unix time in seconds that the client was shown."""
    deadline_s: float
    """Time that was left when the record was made."""
    digest: bytes
    """See Ask; so is `tenant`."""
    tenant: bytes
    trace: TraceContext | None = None
    """Below which span it goes on: the client's, or else what this router calls it. None: it is not traced, or the
    record was made by a version that did not say."""


def encode(record: ResumeRecord) -> bytes:
    """Empty if it is too much to be left to others."""
    if len(record.source.body) + sum(4 * len(prompt.token_ids) for prompt in record.prompts) > MAX_RESUME_NBYTES:
        return b""
    value = {
        "version": VERSION,
        "kind": record.source.kind,
        "body": _text(record.source.body),
        "model": record.model,
        "prompts": [
            {"ids": _text(_packed(prompt.token_ids)), "seed": prompt.seed, "max_tokens": prompt.max_tokens}
            for prompt in record.prompts
        ],
        "created": record.created,
        "deadline_s": record.deadline_s,
        "digest": record.digest.hex(),
        "tenant": record.tenant.hex(),
    }
    if record.trace is not None:
        # Read by whoever knows the field: both older and newer routers do without.
        value["traceparent"] = record.trace.header
    return json.dumps(value, separators=(",", ":")).encode()


def decode(data: bytes) -> ResumeRecord:
    """Raises ValueError for anything that `encode` of this version does not make."""
    try:
        value: Any = json.loads(data)
        if value["version"] != VERSION:
            raise ValueError(f"version {value['version']!r}")
        prompts = tuple(
            ResolvedPrompt(
                _unpacked(_bytes(one["ids"])),
                _integer(one["seed"], 0, 2**64 - 1),
                _integer(one["max_tokens"], 1, 2**31 - 1),
            )
            for one in value["prompts"]
        )
        if not prompts:
            raise ValueError("no prompt")
        return ResumeRecord(
            source=Source(str(value["kind"]), _bytes(value["body"])),
            model=str(value["model"]),
            prompts=prompts,
            created=_integer(value["created"], 0, 2**53),
            deadline_s=_seconds(value["deadline_s"]),
            digest=bytes.fromhex(value["digest"]),
            tenant=bytes.fromhex(value["tenant"]),
            trace=_trace(value.get("traceparent", "")),
        )
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__} in a field") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _integer(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"not an integer between {low} and {high}")
    return value


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError("not a number of seconds")
    return seconds


def _trace(value: Any) -> TraceContext | None:
    if not isinstance(value, str):
        raise ValueError("not a traceparent")
    return parse(value)


def _packed(token_ids: Sequence[int]) -> bytes:
    """Little-endian int32."""
    packed = array("i", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _unpacked(data: bytes) -> tuple[int, ...]:
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    if packed and min(packed) < 0:
        raise ValueError("a token id below 0")
    return tuple(packed)
