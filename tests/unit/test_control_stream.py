"""Control messages on the wire: what is damaged is never taken for a message."""

from __future__ import annotations

import pytest
import xxhash

from kv_transfer.control_stream import DamagedMessageError, reply_from_wire, request_from_wire, seal
from pdserve.rpc.v1 import handoff_pb2 as pb

COMMIT = pb.HandoffRequest(
    commit=pb.Commit(id=pb.HandoffId(request_id="r", attempt=2), nonce=1 << 60, first_tokens=[17, -1])
)
ACK = pb.HandoffReply(chunk_ack=pb.ChunkAck(id=pb.HandoffId(request_id="r", attempt=2), nonce=5, seq=3))


def test_a_message_comes_back_as_it_was() -> None:
    assert request_from_wire(seal(COMMIT)).commit == COMMIT.commit
    assert reply_from_wire(seal(ACK)).chunk_ack == ACK.chunk_ack
    assert request_from_wire(seal(pb.HandoffRequest())).WhichOneof("message") is None


def test_to_protobuf_the_checksum_is_a_field_of_the_message() -> None:
    """So that any tool that knows the .proto can read a captured stream."""
    data = seal(COMMIT)
    message = pb.HandoffRequest.FromString(data)
    assert message.commit == COMMIT.commit
    assert message.checksum == int.from_bytes(data[-8:], "little")
    assert message.SerializeToString() == data


def test_every_flipped_bit_is_noticed() -> None:
    """O-KVT-2: also of numbers that would still make sense, such as the first token."""
    data = seal(COMMIT)
    for position in range(len(data)):
        for bit in range(8):
            damaged = data[:position] + bytes((data[position] ^ 1 << bit,)) + data[position + 1 :]
            with pytest.raises(DamagedMessageError):
                request_from_wire(damaged)


def test_every_other_length_is_noticed() -> None:
    data = seal(COMMIT)
    for length in range(len(data)):
        with pytest.raises(DamagedMessageError):
            request_from_wire(data[:length])
    with pytest.raises(DamagedMessageError):
        request_from_wire(data + b"\0")


def test_fields_that_only_a_newer_peer_knows_are_covered_and_skipped() -> None:
    unknown = pb.HandoffReply.FromString(COMMIT.SerializeToString() + b"\xa2\x01\x03abc")
    data = seal(unknown)
    assert b"abc" in data
    reply_from_wire(data)
    with pytest.raises(DamagedMessageError):
        reply_from_wire(data.replace(b"abc", b"abd"))


def test_bytes_with_a_right_checksum_that_are_no_message_are_refused() -> None:
    body = b"\x0a\xff\xff"
    data = body + b"\xf9\x01" + xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
    with pytest.raises(DamagedMessageError, match="cannot be read"):
        request_from_wire(data)
