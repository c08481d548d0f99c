"""Chunk frames: everything comes back as it went in, and nothing damaged gets through."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.wire import DTYPE_CODES, HEADER_NBYTES, ChunkHeader, FrameError, decode, encode

U16 = st.integers(0, 2**16 - 1)
U32 = st.integers(0, 2**32 - 1)


def ranges(limit: int) -> st.SearchStrategy[tuple[int, int]]:
    return st.integers(0, limit - 1).flatmap(lambda begin: st.tuples(st.just(begin), st.integers(begin + 1, limit)))


@st.composite
def headers(draw: st.DrawFn, nbytes: int) -> ChunkHeader:
    layers, tokens, heads = draw(ranges(2**16 - 1)), draw(ranges(2**32 - 1)), draw(ranges(2**16 - 1))
    return ChunkHeader(
        nonce=draw(st.integers(0, 2**64 - 1)),
        attempt=draw(U32),
        seq=draw(U32),
        dtype=draw(st.sampled_from(sorted(DTYPE_CODES))),
        layer_begin=layers[0],
        layer_end=layers[1],
        token_begin=tokens[0],
        token_end=tokens[1],
        head_begin=heads[0],
        head_end=heads[1],
        payload_nbytes=nbytes,
    )


HEADER = ChunkHeader(
    nonce=7,
    attempt=1,
    seq=3,
    dtype="float32",
    layer_begin=0,
    layer_end=2,
    token_begin=16,
    token_end=32,
    head_begin=0,
    head_end=1,
    payload_nbytes=64,
)
PAYLOAD = bytes(range(64))


@given(st.data())
def test_header_and_payload_survive_the_wire_however_the_payload_is_cut(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.binary(max_size=200), max_size=4))
    payload = b"".join(pieces)
    header = data.draw(headers(len(payload)))
    frame = encode(header, [memoryview(piece) for piece in pieces])
    joined = frame.join()
    assert len(joined) == frame.nbytes == HEADER_NBYTES + len(payload)
    got_header, got_payload = decode(joined)
    assert got_header == header
    assert bytes(got_payload) == payload


def test_encoding_copies_no_payload() -> None:
    source = bytearray(PAYLOAD)
    frame = encode(HEADER, [memoryview(source)])
    assert frame.payload[0].obj is source


@settings(max_examples=300)
@given(position=st.integers(0, HEADER_NBYTES + len(PAYLOAD) - 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_seen(position: int, bit: int) -> None:
    """O-KVT-2."""
    frame = bytearray(encode(HEADER, [memoryview(PAYLOAD)]).join())
    frame[position] ^= 1 << bit
    with pytest.raises(FrameError):
        decode(frame)


@given(length=st.integers(0, HEADER_NBYTES + len(PAYLOAD) - 1))
def test_any_truncation_is_seen(length: int) -> None:
    """O-KVT-2."""
    with pytest.raises(FrameError):
        decode(encode(HEADER, [memoryview(PAYLOAD)]).join()[:length])


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_a_frame_error_and_nothing_else(junk: bytes) -> None:
    with pytest.raises(FrameError):
        decode(junk)
    with pytest.raises(FrameError):
        decode(b"PDKV\x01\x00" + junk)


def test_damage_names_the_ticket_and_chunk_that_the_frame_claims() -> None:
    frame = bytearray(encode(HEADER, [memoryview(PAYLOAD)]).join())
    frame[-1] ^= 1
    with pytest.raises(FrameError, match="chunk 3: checksum") as caught:
        decode(frame)
    assert (caught.value.nonce, caught.value.seq) == (7, 3)


def test_trailing_bytes_are_refused() -> None:
    with pytest.raises(FrameError, match="payload of 65 bytes, header says 64"):
        decode(encode(HEADER, [memoryview(PAYLOAD)]).join() + b"\0")


@pytest.mark.parametrize("field", ["layer_end", "token_end", "head_end"])
def test_empty_ranges_are_refused(field: str) -> None:
    begin = {"layer_end": 0, "token_end": 16, "head_end": 0}[field]
    with pytest.raises(FrameError, match="empty"):
        decode(encode(replace(HEADER, **{field: begin}), [memoryview(PAYLOAD)]).join())


def test_a_payload_that_differs_from_its_header_is_a_bug_of_the_caller() -> None:
    with pytest.raises(AssertionError):
        encode(HEADER, [memoryview(PAYLOAD[:-1])])
