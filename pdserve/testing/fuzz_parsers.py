"""Everything that reads bytes or messages of somebody else, each with what it is given in good order, and the errors
that it may raise for anything else."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from kv_transfer import kv_codec, wire
from kv_transfer.codec import (
    prefix_request_from_proto,
    prefix_request_to_proto,
    replies_from_proto,
    reply_to_proto,
    request_from_proto,
    request_to_proto,
)
from kv_transfer.control_stream import reply_from_wire, request_from_wire, seal
from kv_transfer.messages import (
    ChunkNak,
    Commit,
    CommitNack,
    Endpoint,
    Gone,
    Grant,
    LinkHello,
    LinkWelcome,
    PrefixRequest,
    Reserve,
)
from kv_transfer.process_memory import PIECES_TYPECODE
from kv_transfer.transports import local_wire, tcp_opening, torch_envelope
from pdserve.errors import InvalidRequestError, PdServeError
from pdserve.kv_layout import KvLayout
from pdserve.rpc.codec import job_from_proto, job_to_proto, stats_from_proto, stats_to_proto, worker_info_to_proto
from pdserve.rpc.v1 import common_pb2, handoff_pb2, prefix_pb2
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.store.prefix_events import event_from
from pdserve.store.worker_codec import decode_worker, encode_info, encode_stats
from pdserve.telemetry import context as trace_context
from pdserve.testing import fuzz_json
from pdserve.testing.fuzz_protobuf import MessageFuzzer
from pdserve.testing.fuzz_values import damaged, odd_bytes, odd_float, odd_int, odd_text
from pdserve.types import GenerationJob, HandoffId, Role, SamplingParams, WorkerStats
from pdserve.worker.codec import decode_command_from_proto, prefill_command_from_proto
from pdserve.worker_info import WorkerInfo
from router.events import decode_message, prefill_message
from router.http.event_ids import parse_event_id
from router.resume_record import ResolvedPrompt, ResumeRecord, Source
from router.resume_record import decode as decode_resume
from router.resume_record import encode as encode_resume

LAYOUT: Final = KvLayout(dtype="float32", block_size=16, num_layers=3, num_kv_heads=2, head_dim=4)
INFO: Final = WorkerInfo(
    worker_id="p0", incarnation="p0-1", role=Role.PREFILL, address="127.0.0.1:9", model="m", model_fingerprint="f",
    kv_layout=LAYOUT, num_blocks=64, max_model_len=512, transports=("grpc",), version="1",
)  # fmt: skip
JOB: Final = GenerationJob(
    request_id="r", attempt=1, router_id="router", token_ids=tuple(range(20)), num_prompt_tokens=20, max_new_tokens=4,
    sampling=SamplingParams(temperature=0.5), stop_token_ids=(1,), cache_salt="s",
)  # fmt: skip
_ID: Final = HandoffId("r", 1)
_REQUESTS: Final = [
    request_to_proto(message)
    for message in (
        LinkHello(
            prefill=INFO, generation=1, decode_incarnation="d", target_chunk_bytes=4096, tail_tokens=0,
            offers=(Endpoint("local", {"a": "b"}),),
        ),
        Reserve(id=_ID, job=JOB, num_tokens=20, plan_hash=7),
        Commit(_ID, 5, (1, -1)),
    )
]  # fmt: skip
_REPLIES: Final = [
    reply_to_proto(message)
    for message in (
        LinkWelcome(decode=INFO, endpoints=(Endpoint("tcp", {"key": "00"}),)),
        Grant(_ID, 5, 10.0, 1 << 20, 0, 7),
        Gone(_ID, 5, "gone", "text"),
        ChunkNak(_ID, 5, 1, "checksum"),
        CommitNack(_ID, 5, (1, 2)),
    )
]
_SCORES: Final = common_pb2.Logprobs(logprobs=[-0.5, -1.0])
_EVENTS: Final = [
    pb.PrefillEvent(started=pb.PrefillStarted(request_id="r", attempt=1, decode_worker="d")),
    pb.PrefillEvent(first_token=pb.FirstToken(request_id="r", attempt=1, token_id=5, logprobs=_SCORES)),
    pb.PrefillEvent(handed_off=pb.HandedOff(request_id="r", attempt=1, transport="grpc", kv_bytes=9)),
    pb.PrefillEvent(failed=pb.JobFailed(request_id="r", attempt=1, code="overloaded", message="m", retryable=True)),
]
_STEPS: Final = [
    pb.DecodeEvent(tokens=pb.StepTokens(request_id="r", attempt=1, first_index=1, token_ids=[5, 6], logprobs=_SCORES)),
    pb.DecodeEvent(migration_wanted=pb.MigrationWanted(request_id="r", attempt=1)),
    pb.DecodeEvent(migrated=pb.Migrated(request_id="r", attempt=1, new_attempt=2, transport="grpc")),
]
_HELLO: Final = pb.WorkerHello(info=worker_info_to_proto(INFO), stats=stats_to_proto(WorkerStats()))


@dataclass(frozen=True, slots=True)
class Parser:
    """One reader."""

    name: str
    make: Callable[[Random], Any]
    """Something to read: good, or nearly so."""
    read: Callable[[Any], object]
    errors: tuple[type[Exception], ...] = ()
    """What `read` may raise."""

    def feed(self, rng: Random) -> None:
        """One case. Raises whatever may not be raised."""
        data = self.make(rng)
        try:
            self.read(data)
        except self.errors:
            return


def _frame(rng: Random) -> bytes:
    header = wire.ChunkHeader(
        nonce=rng.getrandbits(63), attempt=1, seq=0, dtype=rng.choice(sorted(wire.DTYPE_CODES)), layer_begin=0,
        layer_end=3, token_begin=0, token_end=16, head_begin=0, head_end=2, payload_nbytes=96,
    )  # fmt: skip
    if rng.random() < 0.5:
        changed: dict[str, Any] = {
            rng.choice(("attempt", "seq", "token_begin", "token_end")): odd_int(rng, 0, 2**32 - 1)
        }
        header = replace(header, **changed)
    frame = wire.encode(header, [memoryview(rng.randbytes(96))]).join()
    return damaged(frame, rng) if rng.random() < 0.7 else frame


def _sealed(samples: list[Any]) -> Callable[[Random], bytes]:
    def make(rng: Random) -> bytes:
        data = seal(MessageFuzzer(rng).likely(samples))
        return damaged(data, rng) if rng.random() < 0.2 else data

    return make


def _read_control_request(data: bytes) -> object:
    return request_from_proto(request_from_wire(data))


def _read_control_reply(data: bytes) -> object:
    return replies_from_proto(reply_from_wire(data))


def _message(samples: list[Any]) -> Callable[[Random], Any]:
    return lambda rng: MessageFuzzer(rng).likely(samples)


def _parsed(kind: type[Any], samples: list[Any]) -> Callable[[Random], Any]:
    """Through bytes that were damaged, as far as those can be read."""

    def make(rng: Random) -> Any:
        message = kind()
        try:
            message.ParseFromString(damaged(MessageFuzzer(rng).likely(samples).SerializeToString(), rng))
        except DecodeError:
            return MessageFuzzer(rng).anything(kind)
        return message

    return make


def _prefill_events(rng: Random) -> pb.PrefillEvents:
    fuzzer = MessageFuzzer(rng)
    events = [fuzzer.likely(_EVENTS) for _ in range(rng.randrange(4))]
    return fuzzer.likely([pb.PrefillEvents(events=events), pb.PrefillEvents(hello=_HELLO)])


def _decode_events(rng: Random) -> pb.DecodeEvents:
    fuzzer = MessageFuzzer(rng)
    events = [fuzzer.likely(_STEPS) for _ in range(rng.randrange(4))]
    return fuzzer.likely([pb.DecodeEvents(events=events), pb.DecodeEvents(hello=_HELLO)])


def _fixed(length: int, good: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    """Records whose length the reader has made sure of."""

    def make(rng: Random) -> bytes:
        data = good(rng)
        return (damaged(data, rng) + bytes(length))[:length] if rng.random() < 0.8 else rng.randbytes(length)

    return make


def _greeting(rng: Random) -> bytes:
    return local_wire.Greeting(local_wire.Mode.READ, rng.randbytes(32), rng.getrandbits(64), rng.randbytes(32)).pack()


def _offer(rng: Random) -> bytearray:
    pieces = array(PIECES_TYPECODE, [rng.getrandbits(48) for _ in range(2 * rng.randrange(4))])
    data = local_wire.pack_offer(rng.randbytes(wire.HEADER_NBYTES), pieces)
    return bytearray(damaged(data, rng) if rng.random() < 0.7 else data)


def _codes(rng: Random) -> tuple[Any, Any, str, str]:
    scales = np.array([[max(-3e38, min(3e38, odd_float(rng))) for _ in range(3)]], np.float32)
    codes = np.frombuffer(rng.randbytes(3 * 8), np.uint8).reshape(1, 3, 8)
    return scales, codes, rng.choice(("int8", "fp8")), rng.choice(("float32", "float16", "bfloat16"))


def _worker(rng: Random) -> tuple[str, object, object]:
    info, stats = encode_info(INFO).encode(), encode_stats(WorkerStats()).encode()
    changed = [fuzz_json.body(json.loads(data), rng) if rng.random() < 0.6 else data for data in (info, stats)]
    return rng.choice(("p0", "p0", "x")), rng.choice((changed[0], None)), changed[1]


def _resume(rng: Random) -> bytes:
    good = encode_resume(
        ResumeRecord(
            source=Source("grpc", b"body"), model="m", prompts=(ResolvedPrompt((1, 2), 5, 4),), created=1,
            deadline_s=5.0, digest=b"d", tenant=b"t",
        )
    )  # fmt: skip
    return fuzz_json.body(json.loads(good), rng)


def _event(rng: Random) -> object:
    fields: dict[bytes, bytes] = {
        b"incarnation": b"i", b"seq": b"5", b"cleared": b"0", b"removed": b"", b"stored": bytes(32),
    }  # fmt: skip
    name = rng.choice(sorted(fields))
    fields[name] = rng.choice((odd_bytes(rng), odd_text(rng).encode(), str(odd_int(rng, -5, 2**70)).encode()))
    if rng.random() < 0.2:
        del fields[rng.choice(sorted(fields))]
    return rng.choice((fields, fields, fields, None))


_FETCH: Final = prefix_request_to_proto(PrefixRequest(id=_ID, requester=INFO, names=(bytes(16),), timeout_s=1.0))
_JOB: Final = job_to_proto(JOB)
_COMMANDS: Final = [pb.PrefillCommand(submit=pb.PrefillJob(job=_JOB, decode=[pb.DecodeTarget(address="a:1")]))]
_DECODE_COMMANDS: Final = [
    pb.DecodeCommand(submit=_JOB),
    pb.DecodeCommand(
        migrate=pb.Migrate(request_id="r", attempt=1, new_attempt=2, target=pb.DecodeTarget(address="a:1"))
    ),
]

PARSERS: Final = (
    Parser("frame", _frame, wire.decode, (wire.FrameError,)),
    Parser("frame header", lambda rng: _frame(rng).ljust(64, b"\0")[:64], wire.decode_header, (wire.FrameError,)),
    Parser("control request", _sealed(_REQUESTS), _read_control_request, (PdServeError,)),
    Parser("control reply", _sealed(_REPLIES), _read_control_reply, (PdServeError,)),
    Parser("hand-off request", _parsed(handoff_pb2.HandoffRequest, _REQUESTS), request_from_proto, (PdServeError,)),
    Parser("hand-off reply", _parsed(handoff_pb2.HandoffReply, _REPLIES), replies_from_proto, (PdServeError,)),
    Parser(
        "prefix fetch", _parsed(prefix_pb2.FetchRequest, [_FETCH]), prefix_request_from_proto, (InvalidRequestError,)
    ),
    Parser("job", _message([_JOB]), job_from_proto, (InvalidRequestError,)),
    Parser("statistics", _message([stats_to_proto(WorkerStats())]), stats_from_proto, (InvalidRequestError,)),
    Parser("prefill command", _message(_COMMANDS), prefill_command_from_proto),
    Parser("decode command", _message(_DECODE_COMMANDS), decode_command_from_proto),
    Parser("prefill events", _prefill_events, prefill_message, (InvalidRequestError,)),
    Parser("decode events", _decode_events, decode_message, (InvalidRequestError,)),
    Parser(
        "greeting",
        _fixed(local_wire.GREETING_NBYTES, _greeting),
        local_wire.Greeting.unpack,
        (local_wire.ProtocolError,),
    ),
    Parser(
        "greeting's reply",
        _fixed(local_wire.REPLY_NBYTES, lambda rng: local_wire.pack_reply(local_wire.Verdict.DENIED, 1)),
        local_wire.unpack_reply,
        (local_wire.ProtocolError,),
    ),
    Parser("offer", _offer, local_wire.split_offer, (local_wire.ProtocolError,)),
    Parser(
        "opening",
        _fixed(tcp_opening.OPENING_NBYTES, lambda rng: tcp_opening.Credentials.fresh().opening()),
        tcp_opening.read_opening,
    ),
    Parser(
        "credentials",
        lambda rng: (odd_text(rng), odd_text(rng)),
        lambda pair: tcp_opening.Credentials.parse(*pair),
        (ValueError,),
    ),
    Parser(
        "envelope",
        _fixed(torch_envelope.ENVELOPE_NBYTES, lambda rng: torch_envelope.ALIVE.pack()),
        torch_envelope.unpack,
    ),
    Parser("coded payload", _codes, lambda parts: kv_codec.decode(*parts), (kv_codec.PayloadError,)),
    Parser("worker in redis", _worker, lambda parts: decode_worker(*parts), (ValueError,)),
    Parser("request in redis", _resume, decode_resume, (ValueError,)),
    Parser("announcement in redis", _event, event_from, (ValueError,)),
    Parser("traceparent", odd_text, trace_context.parse),
    Parser("event id", odd_text, lambda text: parse_event_id(text, 2), (InvalidRequestError,)),
)
"""By name."""
