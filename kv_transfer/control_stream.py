"""The control stream of a KV link as gRPC carries it: messages as bytes, each with a checksum at its end.

A damaged number in a Reserve or a Commit would lead to wrong tokens as surely as a damaged block, and TCP's own
checksum lets one error in some ten thousand pass. The checksum is taken of the bytes on the wire, so fields that only a
newer peer knows are covered too. To protobuf it is a field like any other.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import xxhash
from google.protobuf.message import DecodeError

from pdserve.errors import HandoffError
from pdserve.rpc.v1 import handoff_pb2 as pb

SERVICE = "pdserve.rpc.v1.KvTransfer"
CONTROL = f"/{SERVICE}/Control"
_CHECKSUM = struct.Struct("<2sQ")
_TAG = bytes(((31 << 3 | 1) & 0x7F | 0x80, (31 << 3 | 1) >> 7))
"""Of field 31, `checksum`, 64 bits."""

_Message = TypeVar("_Message", pb.HandoffRequest, pb.HandoffReply)

ControlCall = grpc.aio.StreamStreamCall[bytes, bytes]
ControlContext = grpc.aio.ServicerContext[bytes, bytes]


class DamagedMessageError(HandoffError):
    """A control message is not what was sent. The stream cannot be trusted any more: open another one."""


def open_call(channel: grpc.aio.Channel) -> ControlCall:
    """Prefill side: the stream, not yet connected."""
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(CONTROL)
    return method()


def register(server: grpc.aio.Server, serve: Callable[[AsyncIterator[bytes], ControlContext], Awaitable[None]]) -> None:
    """Decode side: call `serve` with every stream that is opened. Before the server is started."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(serve)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Control": handler}),))


def seal(message: pb.HandoffRequest | pb.HandoffReply) -> bytes:
    """The message, without a checksum yet, as it goes on the wire."""
    body = message.SerializeToString()
    return body + _CHECKSUM.pack(_TAG, xxhash.xxh3_64_intdigest(body))


def request_from_wire(data: bytes) -> pb.HandoffRequest:
    """Raises DamagedMessageError."""
    return _unsealed(data, pb.HandoffRequest())


def reply_from_wire(data: bytes) -> pb.HandoffReply:
    """Raises DamagedMessageError."""
    return _unsealed(data, pb.HandoffReply())


def _unsealed(data: bytes, message: _Message) -> _Message:
    at = len(data) - _CHECKSUM.size
    if at < 0 or _CHECKSUM.unpack_from(data, at) != (_TAG, xxhash.xxh3_64_intdigest(memoryview(data)[:at])):
        raise DamagedMessageError(f"a control message of {len(data)} bytes arrived damaged (checksum)")
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise DamagedMessageError(f"a control message of {len(data)} bytes cannot be read: {error}") from error
    return message
