"""The `local` transport where `post` makes its offers itself, because sources are memory of this process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kv_transfer.plan import ChunkPlan
from kv_transfer.transports import local_sender
from kv_transfer.transports.base import PostError, TransportContext
from kv_transfer.transports.local import LOCAL
from kv_transfer.transports.local_sender import LocalSender, _Post
from kv_transfer.transports.local_wire import STREAM_ONLY
from kv_transfer.wire import Frame
from pdserve.engine.host_store import HostBlockStore
from pdserve.errors import HandoffError
from pdserve.testing.handoff_rig import CONFIG, LAYOUT
from pdserve.testing.kv_store import NumpyBlockStore
from pdserve.testing.local_peer import LINK, chunk_frame, shared_memories
from pdserve.testing.local_rig import HERE, Decode, Freed, contents, decode_side
from pdserve.testing.waiting import eventually
from pdserve.types import DecodeTarget

TARGET = DecodeTarget(worker_id="d", incarnation="d", address="127.0.0.1:1")


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side() as decode:
        yield decode


def work_of_threads(monkeypatch: pytest.MonkeyPatch) -> list[_Post]:
    """What a sender's thread has offered, from now on."""
    offer = LocalSender._offer
    done: list[_Post] = []

    def recording(sender: LocalSender, connection: socket.socket, post: _Post) -> None:
        if threading.current_thread() is not threading.main_thread():
            done.append(post)
        offer(sender, connection, post)

    monkeypatch.setattr(LocalSender, "_offer", recording)
    return done


def in_pieces(frame: Frame, num_pieces: int) -> Frame:
    """The same, from memory that is cut into so many pieces."""
    payload = memoryview(bytearray().join(frame.payload))
    ends = [payload.nbytes * i // num_pieces for i in range(num_pieces + 1)]
    pieces = [payload[begin:end] for begin, end in pairwise(ends)]
    return Frame(frame.chunk, lambda: pieces)


def shrink(sender: LocalSender) -> None:
    """Let the sender's socket hold as little as the kernel allows."""
    assert sender._socket is not None
    sender._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)


@contextmanager
def standing_still(decode: Decode) -> Iterator[None]:
    """The decode side takes nothing meanwhile. Fails if the event loop waits for it."""
    gate = decode.sink.gate
    gate.clear()
    watchdog = threading.Timer(10, gate.set)
    watchdog.start()
    try:
        yield
        assert not gate.is_set(), "a post has waited for the decode worker"
    finally:
        watchdog.cancel()
        gate.set()


async def test_chunks_are_offered_without_the_thread_and_every_source_is_given_back_once(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_thread = work_of_threads(monkeypatch)
    sender, freed = await decode.sender(at_once=True), Freed()
    for seq in range(50):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    await eventually(lambda: len(decode.sink.landed) == 50, "all chunks have landed")
    await eventually(lambda: freed.exactly(*range(50)), "all sources are free")
    assert decode.sink.landed == contents(3, 50) and not decode.sink.refused
    assert of_thread == []


async def test_others_have_their_turn_between_offers(decode: Decode) -> None:
    sender, freed = await decode.sender(at_once=True), Freed()
    turns: list[None] = []
    asyncio.get_running_loop().call_soon(turns.append, None)
    for seq in range(local_sender._MAX_IN_A_ROW):
        assert not turns
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    assert turns


@pytest.mark.parametrize("limit", ["_AT_ONCE_NBYTES", "_AT_ONCE_PIECES"])
async def test_large_chunks_and_those_behind_them_are_left_to_the_thread(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    of_thread = work_of_threads(monkeypatch)
    monkeypatch.setattr(local_sender, limit, 1)
    sender, freed = await decode.sender(at_once=True), Freed()
    for seq in range(10):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    await eventually(lambda: freed.exactly(*range(10)), "all sources are free")
    assert decode.sink.landed == contents(3, 10) and len(of_thread) == 10


async def test_chunks_in_many_pieces_are_not_even_looked_at_by_the_event_loop(decode: Decode) -> None:
    frame, readers = chunk_frame(3, 0)[0], []

    def read() -> Sequence[memoryview]:
        readers.append(threading.current_thread())
        return frame.payload

    sender, freed = (
        await decode.sender(at_once=True, num_pieces=lambda chunk: local_sender._AT_ONCE_PIECES + 1),
        Freed(),
    )
    await sender.post(Frame(frame.chunk, read), freed.of(0))
    await eventually(lambda: freed.exactly(0), "the source is free")
    assert decode.sink.landed == contents(3, 1) and readers and threading.main_thread() not in readers


@pytest.mark.parametrize(
    ("num_pieces", "in_part"), [(5, False), (1000, True)], ids=["offers that do not fit", "an offer that fits in part"]
)
async def test_a_full_socket_is_left_to_the_thread_and_the_order_kept(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, num_pieces: int, in_part: bool
) -> None:
    """D stands still, and the event loop of P goes on."""
    of_thread = work_of_threads(monkeypatch)
    monkeypatch.setattr(local_sender, "_AT_ONCE_PIECES", num_pieces)
    sender, freed = await decode.sender(at_once=True, num_pieces=lambda chunk: num_pieces), Freed()
    shrink(sender)
    with standing_still(decode):
        for seq in range(20):
            await sender.post(in_pieces(chunk_frame(3, seq)[0], num_pieces), freed.of(seq))
    await eventually(lambda: freed.exactly(*range(20)), "all sources are free")
    assert list(decode.sink.landed.items()) == list(contents(3, 20).items()) and not decode.sink.refused
    rests = [len(post.unsent) for post in of_thread if post.unsent is not None]
    assert of_thread and bool(rests) is in_part and all(0 < nbytes < 16 * num_pieces for nbytes in rests)


async def test_memory_that_a_full_socket_keeps_from_being_shared_is_left_to_the_thread(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_thread = work_of_threads(monkeypatch)
    sender, freed = await decode.sender(at_once=True), Freed()
    with standing_still(decode):
        for seq in range(20):
            await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
        assert not of_thread
        shrink(sender)
        await sender.post(chunk_frame(3, 20, memory=next(shared_memories()))[0], freed.of(20))
    await eventually(lambda: freed.exactly(*range(21)), "all sources are free")
    assert list(decode.sink.landed.items()) == list(contents(3, 21).items()) and not decode.sink.refused
    assert len(of_thread) == 1 and len(sender._shared) == 1


async def test_without_permission_to_read_the_thread_streams(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    of_thread = work_of_threads(monkeypatch)
    sender, freed = await decode.sender(mode=STREAM_ONLY, at_once=True), Freed()
    for seq in range(5):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    await eventually(lambda: freed.exactly(*range(5)), "all sources are free")
    assert decode.sink.landed == contents(3, 5) and of_thread == []


async def test_a_source_that_cannot_be_read_is_said_at_once_and_the_transport_goes_on(decode: Decode) -> None:
    def read() -> list[memoryview]:
        raise HandoffError("no such block")

    sender, freed = await decode.sender(at_once=True), Freed()
    with pytest.raises(HandoffError, match="no such block"):
        await sender.post(Frame(chunk_frame(3, 0)[0].chunk, read), freed.of(0))
    assert freed.exactly(0)
    await sender.post(chunk_frame(3, 1)[0], freed.of(1))
    await eventually(lambda: freed.exactly(0, 1), "the next one has arrived")
    assert decode.sink.landed == {1: contents(3, 2)[1]}


async def test_an_offer_to_a_socket_that_is_gone_fails_its_post_and_frees_its_source(decode: Decode) -> None:
    sender, freed = await decode.sender(at_once=True), Freed()
    decode.receiver.fence(LINK)
    with pytest.raises(PostError):
        for seq in range(1000):
            await sender.post(chunk_frame(3, 0)[0], freed.of(seq))
    await sender.fence()
    assert set(freed.counts.values()) == {1} and max(freed.counts) == len(freed.counts) - 1


async def test_a_fence_gives_back_what_the_decode_worker_has_not_read(decode: Decode) -> None:
    decode.sink.gate.clear()
    sender, freed = await decode.sender(at_once=True), Freed()
    for seq in range(5):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    assert freed.exactly()
    await sender.fence()
    assert freed.exactly(*range(5))
    with pytest.raises(PostError):
        await sender.post(chunk_frame(3, 5)[0], freed.of(5))


@pytest.mark.parametrize(
    ("views", "codec", "expected"), [(True, "none", True), (True, "int8", False), (False, "none", False)]
)
async def test_only_pools_that_are_memory_of_this_process_are_offered_at_once(
    monkeypatch: pytest.MonkeyPatch, views: bool, codec: str, expected: bool
) -> None:
    """A GPU has to be asked for its blocks, and a codec takes its time."""
    store = NumpyBlockStore(LAYOUT, 1)
    if not views:
        monkeypatch.setattr(store, "views", lambda *args: None)
    context = TransportContext(incarnation="p", store=store, config=replace(CONFIG, codec=codec))
    sender = LOCAL.sending(context, HERE, TARGET, LINK)
    assert isinstance(sender, LocalSender) and (sender._num_pieces is not None) is expected


@pytest.mark.parametrize("head_cuts", [(), (1,)], ids=["all heads", "some heads"])
@pytest.mark.parametrize("target_chunk_bytes", [8 << 10, 16 << 10, 64 << 10])
def test_a_header_tells_in_how_many_pieces_a_chunk_lies(head_cuts: tuple[int, ...], target_chunk_bytes: int) -> None:
    """At most: blocks that adjoin are one piece."""
    blocks = [9, 1, 2, 5, 4]
    store = HostBlockStore(LAYOUT, np.zeros((10, LAYOUT.num_layers, LAYOUT.layer_nbytes // 4), np.int32))
    context = TransportContext(incarnation="p", store=store, config=CONFIG)
    sender = LOCAL.sending(context, HERE, TARGET, LINK)
    assert isinstance(sender, LocalSender) and sender._num_pieces is not None
    plan = ChunkPlan.make(70, replace(LAYOUT, head_cuts=head_cuts), target_chunk_bytes)
    for seq in range(plan.num_chunks):
        chunk = plan.chunk(seq)
        pieces = store.read(
            blocks[chunk.block_begin : chunk.block_end],
            *(chunk.layer_begin, chunk.layer_end, (chunk.head_begin, chunk.head_end)),
        )
        told = sender._num_pieces(plan.header(seq, nonce=1, attempt=1))
        if pieces[0].nbytes < LAYOUT.block_nbytes:
            assert told == len(pieces)
        else:
            assert len(pieces) <= told == chunk.block_end - chunk.block_begin
