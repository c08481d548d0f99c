"""The parts of the `local` transport that need no second process."""

from __future__ import annotations

import errno
import os
import socket
from array import array
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kv_transfer import process_memory
from kv_transfer.process_memory import IOV_MAX, PIECES_TYPECODE, PtraceConsent, pieces_of
from kv_transfer.transports.local_stream import FrameStream
from kv_transfer.transports.local_wire import (
    MAX_PIECES,
    Greeting,
    Mode,
    ProtocolError,
    Verdict,
    pack_offer,
    pack_reply,
    split_offer,
    unpack_reply,
)
from kv_transfer.wire import HEADER_NBYTES
from pdserve.testing.local_peer import CHUNK_NBYTES, LINK, RecordingSink, chunk_frame, content

NOBODY = 2**22 + 1
"""Above the largest process id of Linux."""


def cut(memory: bytearray, lengths: Sequence[int], *, gap: int = 0) -> list[memoryview]:
    """Views of `memory` with these lengths, one after the other."""
    views, at = [], 0
    for nbytes in lengths:
        views.append(memoryview(memory)[at : at + nbytes])
        at += nbytes + gap
    return views


# Reading memory -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 40), min_size=1, max_size=60), st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_pieces_cut_one_way_are_read_into_pieces_cut_another_way(left: list[int], right: list[int]) -> None:
    total = min(sum(left), sum(right))
    left.append(sum(right) - total)
    right.append(sum(left) - sum(right))
    source = bytearray(os.urandom(sum(left) + 7 * len(left)))
    destination = bytearray(sum(right) + 3 * len(right))
    source_views, destination_views = cut(source, left, gap=7), cut(destination, right, gap=3)
    process_memory.read(os.getpid(), pieces_of(source_views), pieces_of(destination_views))
    assert b"".join(destination_views) == b"".join(source_views)


@pytest.mark.parametrize(
    ("num_source", "num_destination"), [(1, 3000), (3000, 1), (IOV_MAX + 1, IOV_MAX), (2500, 2000)]
)
def test_more_pieces_than_one_call_takes_are_read(num_source: int, num_destination: int) -> None:
    """The cuts fall inside each other's pieces, so that calls end in the middle of one."""
    nbytes = num_source * num_destination
    source, destination = bytearray(os.urandom(nbytes)), bytearray(nbytes)
    process_memory.read(
        os.getpid(),
        pieces_of(cut(source, [num_destination] * num_source)),
        pieces_of(cut(destination, [num_source] * num_destination)),
    )
    assert destination == source


def test_read_only_sources_have_addresses_too() -> None:
    source, destination = os.urandom(100), bytearray(100)
    process_memory.read(os.getpid(), pieces_of([memoryview(source)]), pieces_of([memoryview(destination)]))
    assert destination == source


@pytest.mark.parametrize("address", [0, 1, 2**47, 2**63, 2**64 - 50])
def test_an_address_without_memory_is_an_error(address: int) -> None:
    """Even behind a piece that can be read."""
    good, destination = bytearray(50), bytearray(100)
    source = pieces_of([memoryview(good)]) + array(PIECES_TYPECODE, (address, 50))
    with pytest.raises(OSError, match="cannot read the memory of process") as caught:
        process_memory.read(os.getpid(), source, pieces_of([memoryview(destination)]))
    assert caught.value.errno in (errno.EFAULT, errno.EINVAL)


def test_lengths_that_differ_are_refused_before_anything_is_copied() -> None:
    destination = bytearray(8)
    huge = array(PIECES_TYPECODE, (id(destination), 2**64 - 1, id(destination), 9))  # 8 modulo 2^64
    with pytest.raises(ValueError, match="destination of 8"):
        process_memory.read(os.getpid(), huge, pieces_of([memoryview(destination)]))


def test_a_process_that_does_not_exist_is_an_error() -> None:
    source, destination = bytearray(8), bytearray(8)
    with pytest.raises(ProcessLookupError):
        process_memory.read(NOBODY, pieces_of([memoryview(source)]), pieces_of([memoryview(destination)]))


def test_consent_names_one_reader_and_opens_to_the_user_only_for_several(monkeypatch: pytest.MonkeyPatch) -> None:
    declared: list[int] = []

    def prctl(option: int, value: int, *rest: int) -> int:
        assert option == 0x59616D61 and rest == (0, 0, 0), "PR_SET_PTRACER of linux/prctl.h"
        declared.append(value)
        return 0

    monkeypatch.setattr(process_memory, "_prctl", prctl)
    consent, anybody = PtraceConsent(), 2**64 - 1
    assert consent.give(10) and consent.give(10) and consent.give(20)
    consent.withdraw(10)
    consent.withdraw(10)
    consent.withdraw(20)
    assert declared == [10, 10, anybody, anybody, 20, 0]


def test_consent_is_not_to_be_had_from_a_kernel_without_yama(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "_prctl", lambda *arguments: -1)
    consent = PtraceConsent()
    assert not consent.give(10)
    assert not consent.give(20)


# Records --------------------------------------------------------------------------------------------------------------


def test_offers_are_taken_out_of_a_byte_stream_however_it_is_cut() -> None:
    offers = [(os.urandom(HEADER_NBYTES), array(PIECES_TYPECODE, range(2 * n))) for n in (1, 0, 5)]
    received, found = bytearray(), []
    for byte in b"".join(pack_offer(*offer) for offer in offers):
        received.append(byte)
        while (offer := split_offer(received)) is not None:
            found.append(offer)
    assert found == offers
    assert not received


@pytest.mark.parametrize("damage", ["magic", "count"])
def test_an_offer_that_is_none_is_refused_before_its_pieces_are_there(damage: str) -> None:
    record = bytearray(pack_offer(bytes(HEADER_NBYTES), array(PIECES_TYPECODE)))
    if damage == "magic":
        record[0] ^= 1
    else:
        record[4:8] = (MAX_PIECES + 1).to_bytes(4, "little")
    with pytest.raises(ProtocolError, match="offered"):
        split_offer(record)


def test_greetings_and_replies_survive_the_way() -> None:
    greeting = Greeting(Mode.READ, os.urandom(32), 2**63 + 1, os.urandom(32))
    assert Greeting.unpack(greeting.pack()) == greeting
    assert unpack_reply(pack_reply(Verdict.DENIED, errno.EPERM)) == (Verdict.DENIED, errno.EPERM)


@pytest.mark.parametrize("index", [0, 4, 5])
def test_a_greeting_of_another_protocol_version_or_mode_is_refused(index: int) -> None:
    record = bytearray(Greeting(Mode.READ, bytes(32), 0, bytes(32)).pack())
    record[index] = 99
    with pytest.raises(ProtocolError, match="greeted"):
        Greeting.unpack(bytes(record))


# Streamed frames ------------------------------------------------------------------------------------------------------


def feed(receiver: FrameStream, there: socket.socket, data: bytes, cuts: Sequence[int] = (70_000,)) -> None:
    """Send `data` in parts of these lengths, in turn; after each one the receiver takes what has come."""
    at, turn = 0, 0
    while at < len(data):
        at += there.send(data[at : at + cuts[turn % len(cuts)]])
        turn += 1
        with pytest.raises(BlockingIOError):
            while True:
                receiver.on_readable()


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The receiving end, which does not block, and the sending one."""
    here, there = socket.socketpair()
    with here, there:
        here.setblocking(False)
        yield here, there


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from((1, 63, 64, 65, 4096, 50_000)), max_size=5))
def test_frames_are_received_however_the_stream_is_cut(
    ends: tuple[socket.socket, socket.socket], cuts: list[int]
) -> None:
    """Wanted ones land whole; of the others nothing is left in the way."""
    sink = RecordingSink()
    sink.unwanted, sink.ended = {1}, {3}
    stream = b"".join(chunk_frame(7, seq)[0].join() for seq in range(5))
    feed(FrameStream(ends[0], LINK, sink), ends[1], stream, [*cuts, 70_000])
    assert sink.landed == {seq: content(7, seq) for seq in (0, 2, 4)}
    assert sink.refused == [] and sink.failed == ["the reservation has ended"]


def test_a_stream_that_ends_inside_a_chunk_gives_it_up_once(ends: tuple[socket.socket, socket.socket]) -> None:
    here, there = ends
    sink = RecordingSink()
    receiver = FrameStream(here, LINK, sink)
    feed(receiver, there, chunk_frame(7, 0)[0].join()[: HEADER_NBYTES + CHUNK_NBYTES // 2])
    there.close()
    with pytest.raises(EOFError):
        receiver.on_readable()
    receiver.on_closed("it broke")
    receiver.on_closed("again")
    assert sink.failed == ["it broke"] and sink.landed == {}


def test_a_flipped_byte_in_the_stream_is_seen(ends: tuple[socket.socket, socket.socket]) -> None:
    sink = RecordingSink()
    frame = bytearray(chunk_frame(7, 0)[0].join())
    frame[-1] ^= 1
    feed(FrameStream(ends[0], LINK, sink), ends[1], bytes(frame))
    assert sink.refused == [0] and sink.landed == {}
