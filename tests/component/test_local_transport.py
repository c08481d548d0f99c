"""The `local` transport between a real sender and a real receiver, in one process and in two."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from kv_transfer import process_memory
from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.process_memory import PIECES_TYPECODE, Pieces, pieces_of
from kv_transfer.transports import local_greeting, local_receiver
from kv_transfer.transports.base import PostError, TransportUnavailable
from kv_transfer.transports.local_greeting import Greeter
from kv_transfer.transports.local_receiver import LocalReceiver
from kv_transfer.transports.local_sender import LocalSender
from kv_transfer.transports.local_wire import MAX_PIECES, STREAM_ONLY, Mode, pack_offer, where_am_i
from kv_transfer.wire import Frame
from pdserve.errors import HandoffError
from pdserve.testing.handoff_rig import CONFIG, decode_worker, prefill_worker, worker_info
from pdserve.testing.local_peer import CHUNK_NBYTES, LINK, RecordingSink, chunk_frame, content
from pdserve.testing.local_rig import OTHER_LINK, Decode, Freed, contents, decode_side, peer
from pdserve.testing.waiting import eventually
from pdserve.types import Role


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side() as decode:
        yield decode


# Chunks arrive --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [None, STREAM_ONLY])
async def test_chunks_arrive_exactly_and_every_source_is_given_back_once(decode: Decode, mode: str | None) -> None:
    sender, freed = await decode.sender(mode=mode), Freed()
    assert sender.mode is (Mode.READ if mode is None else Mode.STREAM)
    for seq in range(100):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    await eventually(lambda: len(decode.sink.landed) == 100, "all chunks have landed")
    await eventually(lambda: freed.exactly(*range(100)), "all sources are free")
    assert decode.sink.landed == contents(3, 100)
    assert decode.sink.refused == [] and decode.sink.failed == []


async def test_the_memory_of_another_process_is_read(decode: Decode) -> None:
    with peer("prefill", json.dumps(decode.attributes())) as prefill:
        assert await prefill.line() == "READ"
        prefill.say(*(f"5 {seq}" for seq in range(20)))
        assert [await prefill.line() for _ in range(20)] == [f"free {seq}" for seq in range(20)]
    assert decode.sink.landed == contents(5, 20)


async def test_where_the_kernel_forbids_reading_chunks_come_through_the_socket() -> None:
    with peer("decode", forbid_ptrace=True) as decode:
        attributes = await decode.line()
        with peer("prefill", attributes, forbid_ptrace=True) as prefill:
            assert await prefill.line() == "STREAM"
            prefill.say("5 0", "5 1")
            assert [await prefill.line() for _ in range(2)] == ["free 0", "free 1"]
            reports = json.loads(await decode.line())
            while len(reports["landed"]) < 2:
                reports = json.loads(await decode.line())
    assert reports == {"landed": [0, 1], "refused": [], "failed": []}


async def test_a_decode_worker_that_can_read_nobody_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seccomp filter without process_vm_readv."""
    monkeypatch.setattr(local_receiver, "_why_no_reads", lambda: 38)
    async with decode_side() as decode:
        sender, freed = await decode.sender(), Freed()
        assert sender.mode is Mode.STREAM
        await sender.post(chunk_frame(3, 0)[0], freed.of(0))
        await eventually(lambda: decode.sink.landed == contents(3, 1), "the chunk has landed")


def sockets_of_this_host() -> str:
    """Of the Unix kind, with their names."""
    return Path("/proc/net/unix").read_text()


async def test_a_receiver_that_is_still_compiling_can_be_given_up_and_has_no_listener(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiling, compiled = threading.Event(), threading.Event()

    def compile_slowly() -> None:
        compiling.set()
        assert compiled.wait(10), "nobody let it end"

    monkeypatch.setattr(local_receiver, "copy_kernel", compile_slowly)
    receiver = LocalReceiver("given-up", RecordingSink())
    starting = asyncio.create_task(receiver.start())
    await eventually(compiling.is_set, "it compiles")
    assert "given-up" not in sockets_of_this_host()
    starting.cancel()
    compiled.set()
    with suppress(asyncio.CancelledError):
        await starting
    await receiver.aclose()


@pytest.mark.parametrize("mode", [None, STREAM_ONLY])
async def test_a_chunk_that_is_not_wanted_gives_its_source_back(decode: Decode, mode: str | None) -> None:
    decode.sink.unwanted, decode.sink.ended = {0}, {1}
    sender, freed = await decode.sender(mode=mode), Freed()
    for seq in range(3):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    await eventually(lambda: freed.exactly(0, 1, 2), "all sources are free")
    await eventually(lambda: list(decode.sink.landed) == [2], "only the last chunk has landed")
    assert decode.sink.failed == ["the reservation has ended"]


# Who may connect ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("difference", [{"host": "elsewhere"}, {"user": "12345"}, {"host": ""}])
async def test_a_peer_of_another_host_or_user_does_not_get_this_transport(
    decode: Decode, difference: dict[str, str]
) -> None:
    assert decode.receiver.open(LINK, Endpoint("local", {**where_am_i(), **difference})) is None
    assert decode.receiver.open(LINK, Endpoint("local")) is None


async def test_a_wrong_token_is_refused_and_so_is_the_token_of_a_closed_link(decode: Decode) -> None:
    attributes = decode.attributes()
    wrong = LocalSender({**attributes, "token": "00" * 32}, "the decode worker")
    with pytest.raises(TransportUnavailable, match="does not know this link"):
        await wrong.connect()
    decode.receiver.fence(LINK)
    late = LocalSender(attributes, "the decode worker")
    with pytest.raises(TransportUnavailable, match="does not know this link"):
        await late.connect()
    await wrong.fence()
    await late.fence()


@pytest.mark.parametrize("missing", ["socket", "token"])
async def test_an_endpoint_that_makes_no_sense_is_refused(decode: Decode, missing: str) -> None:
    attributes = decode.attributes()
    for damaged in ({**attributes, missing: "zz"}, {k: v for k, v in attributes.items() if k != missing}):
        sender = LocalSender(damaged, "the decode worker")
        with pytest.raises(TransportUnavailable, match="the decode worker"):
            await sender.connect()
        await sender.fence()


async def test_a_connection_of_another_user_is_closed_by_both_sides(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def foreign(connection: socket.socket) -> tuple[int, int]:
        return os.getpid(), os.geteuid() + 1

    monkeypatch.setattr(local_receiver, "peer_of", foreign)
    with pytest.raises(TransportUnavailable, match=r"closed the connection|reset|Broken pipe"):
        await decode.sender()
    assert "belongs to user" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(local_greeting, "peer_of", foreign)
    with pytest.raises(TransportUnavailable, match="belongs to user"):
        await decode.sender(OTHER_LINK)


async def test_a_peer_whose_pid_means_another_process_here_is_not_read(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pid namespace: the number is that of some process of this user, which holds something else there."""
    with peer("decode") as other:
        await other.line()
        monkeypatch.setattr(local_receiver, "peer_of", lambda connection: (other.process.pid, os.geteuid()))
        sender = await decode.sender()
        assert sender.mode is Mode.STREAM


async def test_garbage_closes_its_connection_and_no_other(decode: Decode) -> None:
    sender, freed = await decode.sender(), Freed()
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + decode.attributes(OTHER_LINK)["socket"])
        stranger.sendall(os.urandom(4096))
        with suppress(ConnectionResetError):
            assert await asyncio.to_thread(stranger.recv, 1) == b""
    await sender.post(chunk_frame(3, 0)[0], freed.of(0))
    await eventually(lambda: decode.sink.landed == contents(3, 1), "the chunk has landed")


# Offers that are wrong ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def raw_connection(decode: Decode) -> AsyncIterator[socket.socket]:
    """A greeted connection of which the test writes the records itself."""
    with await Greeter(decode.attributes(OTHER_LINK), "the decode worker").connect() as connection:
        yield connection


async def closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it, without an answer. Waits for either."""
    with suppress(ConnectionResetError):
        return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    return True


@pytest.mark.parametrize("address", [0, 4096, 2**47, 2**64 - 4096])
async def test_wild_addresses_fail_the_chunk_and_the_connection_but_nothing_else(decode: Decode, address: int) -> None:
    sender, freed = await decode.sender(), Freed()
    async with raw_connection(decode) as connection:
        header = chunk_frame(3, 1)[0].header
        connection.send(pack_offer(header, array(PIECES_TYPECODE, (address, CHUNK_NBYTES))))
        assert await closed(connection)
    assert len(decode.sink.failed) == 1 and "cannot read the memory" in decode.sink.failed[0]
    await sender.post(chunk_frame(3, 0)[0], freed.of(0))
    await eventually(lambda: decode.sink.landed == contents(3, 1), "the chunk has landed")


async def test_an_offer_of_another_length_than_its_header_says_is_refused(decode: Decode) -> None:
    async with raw_connection(decode) as connection:
        frame, memory = chunk_frame(3, 1)
        connection.send(pack_offer(frame.header, pieces_of([memoryview(memory)[:-1]])))
        assert await closed(connection)
    assert len(decode.sink.failed) == 1 and decode.sink.failed[0].startswith("offered")
    assert decode.sink.landed == {}


async def test_an_offer_of_too_many_pieces_is_refused_at_once(decode: Decode) -> None:
    async with raw_connection(decode) as connection:
        pieces: Pieces = array(PIECES_TYPECODE, (4096, 1)) * (MAX_PIECES + 1)
        connection.send(pack_offer(chunk_frame(3, 1)[0].header, pieces)[:200])
        assert await closed(connection)
    assert decode.sink.num_claims == 0


async def test_a_header_that_cannot_be_trusted_closes_the_connection(decode: Decode) -> None:
    async with raw_connection(decode) as connection:
        connection.send(pack_offer(os.urandom(64), array(PIECES_TYPECODE, (4096, 1))))
        assert await closed(connection)
    assert decode.sink.landed == {} and decode.sink.failed == []


async def test_a_source_in_more_pieces_than_can_be_offered_ends_the_transport(decode: Decode) -> None:
    sender, freed = await decode.sender(), Freed()
    frame, memory = chunk_frame(3, 0)
    shreds = [memoryview(memory)[i : min(i + 16, CHUNK_NBYTES)] for i in range(0, CHUNK_NBYTES, 16)]
    await sender.post(Frame(frame.chunk, lambda: shreds), freed.of(0))
    await eventually(lambda: freed.exactly(0), "the source is free")
    with pytest.raises(PostError, match="pieces of memory"):
        await sender.post(frame, freed.of(1))


# Ends -----------------------------------------------------------------------------------------------------------------


async def test_a_source_that_cannot_be_read_ends_the_transport(decode: Decode) -> None:
    def read() -> list[memoryview]:
        raise HandoffError("no such block")

    sender, freed = await decode.sender(), Freed()
    await sender.post(Frame(chunk_frame(3, 0)[0].chunk, read), freed.of(0))
    await eventually(lambda: freed.exactly(0), "the source is free")
    with pytest.raises(PostError, match="no such block"):
        await sender.post(chunk_frame(3, 1)[0], freed.of(1))
    assert freed.exactly(0, 1)


@pytest.mark.parametrize("mode", [None, STREAM_ONLY])
async def test_a_fence_of_the_decode_worker_ends_the_connection_for_good(decode: Decode, mode: str | None) -> None:
    sender, freed = await decode.sender(mode=mode), Freed()
    await sender.post(chunk_frame(3, 0)[0], freed.of(0))
    await eventually(lambda: list(decode.sink.landed) == [0], "the chunk has landed")
    decode.receiver.fence(LINK)
    decode.receiver.fence(LINK)
    posted = 0

    async def post_until_refused() -> bool:
        nonlocal posted
        posted += 1
        try:
            await sender.post(chunk_frame(3, posted)[0], freed.of(posted))
        except PostError:
            return True
        return False

    await eventually(post_until_refused, "the sender has noticed")
    await eventually(lambda: freed.exactly(*range(posted + 1)), "all sources are free")
    assert list(decode.sink.landed) == [0]


async def test_chunks_offered_before_a_fence_of_the_decode_worker_do_not_land_after_it(decode: Decode) -> None:
    decode.sink.gate.clear()
    sender, freed = await decode.sender(), Freed()
    for seq in range(3):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    await eventually(lambda: decode.sink.num_claims == 1, "the first chunk is about to be read")
    decode.receiver.fence(LINK)
    decode.sink.gate.set()
    await eventually(lambda: freed.exactly(0, 1, 2), "all sources are free")
    assert decode.sink.landed == {} and decode.sink.num_claims == 1
    assert decode.sink.failed == ["the transport has been fenced"]


async def test_a_fence_of_the_prefill_worker_gives_everything_back_and_can_be_repeated(decode: Decode) -> None:
    decode.sink.gate.clear()
    sender, freed = await decode.sender(), Freed()
    for seq in range(5):
        await sender.post(chunk_frame(3, seq)[0], freed.of(seq))
    await eventually(lambda: decode.sink.num_claims == 1, "the first chunk is about to be read")
    assert freed.counts == {}, "sources are held until they are read"
    await sender.fence()
    await sender.fence()
    assert freed.exactly(*range(5))
    with pytest.raises(PostError, match="is closed"):
        await sender.post(chunk_frame(3, 5)[0], freed.of(5))
    assert freed.exactly(*range(6))


async def test_a_fence_before_connect_or_after_a_failed_one_returns(decode: Decode) -> None:
    sender = LocalSender(decode.attributes(), "the decode worker")
    await sender.fence()
    nobody = LocalSender({**decode.attributes(OTHER_LINK), "socket": "nobody"}, "the decode worker")
    with pytest.raises(TransportUnavailable, match="refused"):
        await nobody.connect()
    await nobody.fence()


async def test_posts_wait_while_too_much_is_in_flight_and_can_be_cancelled(decode: Decode) -> None:
    decode.sink.gate.clear()
    sender, freed, num = await decode.sender(), Freed(), 0

    async def post_one() -> bool:
        nonlocal num
        try:
            async with asyncio.timeout(0.05):
                await sender.post(chunk_frame(3, num)[0], freed.of(num))
        except TimeoutError:
            return True
        num += 1
        return False

    await eventually(post_one, "a post waits")
    assert 8 <= num <= 64
    assert freed.exactly(num), "the cancelled one is given back, the others are held"
    decode.sink.gate.set()
    await eventually(lambda: freed.exactly(*range(num + 1)), "all sources are free")
    assert decode.sink.landed == contents(3, num)


async def test_links_leave_no_descriptors_and_no_threads() -> None:
    async def one_life(decode: Decode, generation: int) -> None:
        link = LinkId("prefill", generation)
        sender = await decode.sender(link, mode=STREAM_ONLY if generation % 2 else None)
        arrived = asyncio.Event()
        await sender.post(chunk_frame(3, generation)[0], arrived.set)
        await arrived.wait()
        if generation % 3:
            await sender.fence()
            decode.receiver.fence(link)
        else:
            decode.receiver.fence(link)
            await sender.fence()

    def num_descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    at_first = num_descriptors(), threading.active_count()
    async with decode_side() as decode:
        await one_life(decode, 0)
        warm = num_descriptors(), threading.active_count()
        for generation in range(1, 60):
            await one_life(decode, generation)
        await eventually(lambda: num_descriptors() <= warm[0], "all connections are closed")
        await eventually(lambda: threading.active_count() <= warm[1], "all threads of links have ended")
    # Beside the executor's threads, which stay.
    assert num_descriptors() <= at_first[0]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kv-local")]


# Processes that die or freeze -----------------------------------------------------------------------------------------


async def test_a_prefill_worker_killed_before_its_memory_is_read_fails_its_chunk_only(decode: Decode) -> None:
    """F-KILL of P with a chunk on its way: another link goes on at once."""
    with peer("prefill", json.dumps(decode.attributes())) as prefill:
        assert await prefill.line() == "READ"
        decode.sink.gate.clear()
        prefill.say("5 0", "5 1")
        await eventually(lambda: decode.sink.num_claims == 1, "the first chunk is about to be read")
        await prefill.kill()
        decode.sink.gate.set()
        await eventually(lambda: len(decode.sink.failed) == 1, "the chunk has failed")
    assert decode.sink.landed == {} and "cannot read the memory" in decode.sink.failed[0]
    sender, freed = await decode.sender(OTHER_LINK), Freed()
    await sender.post(chunk_frame(3, 9)[0], freed.of(9))
    await eventually(lambda: decode.sink.landed == {9: content(3, 9)}, "the other link works")


async def test_a_frozen_prefill_worker_is_read_all_the_same(decode: Decode) -> None:
    """What it has offered needs no work of its own; nobody waits for it."""
    with peer("prefill", json.dumps(decode.attributes())) as prefill:
        assert await prefill.line() == "READ"
        decode.sink.gate.clear()
        prefill.say("5 0", "5 1")
        await eventually(lambda: decode.sink.num_claims == 1, "the first chunk is about to be read")
        await prefill.freeze()
        decode.sink.gate.set()
        await eventually(lambda: 0 in decode.sink.landed, "the chunk has landed")
        sender, freed = await decode.sender(OTHER_LINK), Freed()
        await sender.post(chunk_frame(3, 9)[0], freed.of(9))
        await eventually(lambda: 9 in decode.sink.landed, "the other link works")
        prefill.thaw()
        assert [await prefill.line() for _ in range(2)] == ["free 0", "free 1"]
    assert decode.sink.landed == {**contents(5, 2), 9: content(3, 9)}


async def test_a_prefill_worker_killed_while_it_streams_fails_the_chunk(decode: Decode) -> None:
    with peer("prefill", json.dumps(decode.attributes(mode=STREAM_ONLY))) as prefill:
        assert await prefill.line() == "STREAM"
        decode.sink.gate.clear()
        prefill.say("5 0", "5 1")
        await eventually(lambda: decode.sink.num_claims == 1, "the first chunk has begun to come")
        await prefill.kill()
        decode.sink.gate.set()
        await eventually(lambda: len(decode.sink.failed) == 1, "the broken chunk has failed")
    assert decode.sink.landed == {} and decode.sink.refused == []


async def test_a_frozen_decode_worker_that_reads_reused_memory_later_refuses_it() -> None:
    """The fence of the prefill worker does not wait for it, and blocks may be used again at once."""
    with peer("decode") as decode:
        sender, freed = LocalSender(json.loads(await decode.line()), "the decode worker"), Freed()
        await sender.connect()
        await sender.post(chunk_frame(3, 0)[0], freed.of(0))
        assert json.loads(await decode.line())["landed"] == [0]
        await decode.freeze()
        memories = []
        third_is_next = threading.Event()
        for seq in (1, 2):
            frame, memory = chunk_frame(3, seq)
            memories.append(memory)
            await sender.post(frame, freed.of(seq))
        third = chunk_frame(3, 3)[0]

        def read_third() -> Sequence[memoryview]:
            third_is_next.set()
            return third.payload

        await sender.post(Frame(third.chunk, read_third), freed.of(3))
        await eventually(third_is_next.is_set, "the two before it have been offered")
        async with asyncio.timeout(2):
            await sender.fence()
        assert freed.exactly(0, 1, 2, 3)
        for memory in memories:
            memory[:] = bytes(len(memory))
        decode.thaw()
        reports = json.loads(await decode.line())
        while len(reports["refused"]) < 2:
            reports = json.loads(await decode.line())
    assert reports["refused"][:2] == [1, 2] and set(reports["landed"]) <= {0, 3}


@pytest.mark.parametrize("mode", [None, STREAM_ONLY])
async def test_a_frozen_decode_worker_holds_up_neither_a_fence_nor_a_new_link(mode: str | None) -> None:
    """Not even while a send is blocked, because nobody takes the bytes."""
    with peer("decode") as decode:
        attributes = json.loads(await decode.line())
        if mode is not None:
            attributes["mode"] = mode
        first, second = (LocalSender(attributes, "the decode worker") for _ in range(2))
        freed = Freed()
        await first.connect()
        await decode.freeze()
        for seq in range(3):
            await first.post(chunk_frame(3, seq)[0], freed.of(seq))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await second.connect()
        async with asyncio.timeout(2):
            await first.fence()
            await second.fence()
        assert freed.exactly(0, 1, 2)


# Whole hand-offs ------------------------------------------------------------------------------------------------------


BLOCKS = (200, 3, 77, 12, 150, 9, 31, 64)


async def test_a_hand_off_goes_over_it_exactly() -> None:
    async with (
        decode_worker(info=worker_info(Role.DECODE, "d-local", transports=("local", "grpc"))) as d,
        prefill_worker(info=worker_info(Role.PREFILL, "p-local", transports=("local", "grpc"))) as p,
    ):
        for attempt in range(1, 4):
            p.store.fill(BLOCKS, seed=attempt)
            handoff = p.begin(d.target, BLOCKS, attempt=attempt, num_tokens=120)
            await handoff.reserve()
            handoff.advance(120)
            result = await handoff.commit(7)
            assert result.transport == "local"
            assert d.store.content(d.admission.held[handoff.id]) == p.store.content(BLOCKS)
            d.finish(handoff.id)


async def test_a_hand_off_goes_on_over_the_next_transport_when_reading_is_forbidden_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """O-KVT-2: the permission to read is withdrawn after some chunks."""
    num_reads = 0
    read = process_memory.read

    def read_a_few(pid: int, source: Pieces, destination: Pieces) -> None:
        nonlocal num_reads
        num_reads += 1
        if num_reads > 4:
            raise PermissionError(1, "Operation not permitted")
        read(pid, source, destination)

    config = replace(CONFIG, chunk_timeout_s=0.5, preflight=False)
    async with (
        decode_worker(config=config, info=worker_info(Role.DECODE, "d-local", transports=("local", "grpc"))) as d,
        prefill_worker(config=config, info=worker_info(Role.PREFILL, "p-local", transports=("local", "grpc"))) as p,
    ):
        p.store.fill(BLOCKS, seed=1)
        handoff = p.begin(d.target, BLOCKS)
        await handoff.reserve()
        monkeypatch.setattr(process_memory, "read", read_a_few)
        handoff.advance(handoff.plan.num_tokens)
        result = await handoff.commit(7)
        assert num_reads == 5
        assert result.transport == "local+grpc"
        assert d.store.content(d.admission.held[handoff.id]) == p.store.content(BLOCKS)
