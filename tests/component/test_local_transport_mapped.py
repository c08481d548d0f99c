"""The `local` transport where chunks lie in shared memory: the decode worker maps it and needs nobody to read it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from kv_transfer import process_memory
from kv_transfer.messages import LinkId
from kv_transfer.process_memory import Pieces, pieces_of
from kv_transfer.transports.local_greeting import Greeter
from kv_transfer.transports.local_sender import LocalSender
from kv_transfer.transports.local_wire import MAPS, pack_offer, pack_share
from pdserve.shared_memory import SharedMemory
from pdserve.testing.handoff_rig import decode_worker, prefill_worker, worker_info
from pdserve.testing.local_peer import LINK, chunk_frame, content, shared_memories
from pdserve.testing.local_rig import OTHER_LINK, Decode, Freed, contents, decode_side, peer
from pdserve.testing.waiting import eventually
from pdserve.types import Role


@pytest.fixture
async def decode() -> AsyncIterator[Decode]:
    async with decode_side() as decode:
        yield decode


def num_mappings() -> int:
    """Shared memories that this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:pdserve-kv")


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def no_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greetings may be read, which are short, and nothing else."""
    read = process_memory.read

    def refuse(pid: int, source: Pieces, destination: Pieces) -> None:
        if sum(source[1::2]) > 64:
            raise PermissionError(1, "a chunk was read by the kernel")
        read(pid, source, destination)

    monkeypatch.setattr(process_memory, "read", refuse)


async def post(sender: LocalSender, seed: int, num: int, freed: Freed) -> None:
    memories = shared_memories()
    for seq in range(num):
        await sender.post(chunk_frame(seed, seq, memory=next(memories))[0], freed.of(seq))


@pytest.mark.usefixtures("no_reads")
async def test_chunks_in_shared_memory_are_copied_out_of_a_mapping(decode: Decode) -> None:
    sender, freed = await decode.sender(), Freed()
    await post(sender, 3, 20, freed)
    await eventually(lambda: freed.exactly(*range(20)), "all sources are free")
    assert decode.sink.landed == contents(3, 20)


@pytest.mark.usefixtures("no_reads")
async def test_the_pool_of_another_process_is_mapped(decode: Decode) -> None:
    with peer("prefill", json.dumps(decode.attributes()), "shared") as prefill:
        assert await prefill.line() == "READ"
        prefill.say(*(f"5 {seq}" for seq in range(5)))
        assert [await prefill.line() for _ in range(5)] == [f"free {seq}" for seq in range(5)]
        assert num_mappings() == 1
        decode.receiver.fence(LINK)
        await eventually(lambda: num_mappings() == 0, "it is unmapped with the end of the link")
    assert decode.sink.landed == contents(5, 5)


@pytest.mark.usefixtures("no_reads")
async def test_a_prefill_worker_that_is_killed_takes_nothing_from_under_a_copy(decode: Decode) -> None:
    """F-KILL of P with a chunk on its way: its memory lasts as long as it is mapped, so nobody faults (SIGBUS)."""
    with peer("prefill", json.dumps(decode.attributes()), "shared") as prefill:
        assert await prefill.line() == "READ"
        prefill.say("5 0")
        assert await prefill.line() == "free 0"
        decode.sink.gate.clear()
        prefill.say("5 1", "5 2")
        await eventually(lambda: decode.sink.num_claims == 2, "the second chunk is about to be copied")
        await prefill.kill()
        decode.sink.gate.set()
        await eventually(lambda: 1 in decode.sink.landed, "it has been copied all the same")
    assert decode.sink.landed[1] == content(5, 1) and decode.sink.refused == []
    await eventually(lambda: num_mappings() == 0, "its memory is given back")


async def test_memory_that_cannot_be_mapped_is_read_by_the_kernel(
    decode: Decode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int) -> SharedMemory:
        os.close(fd)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(SharedMemory, "attach", refuse)
    sender, freed = await decode.sender(), Freed()
    await post(sender, 3, 3, freed)
    await eventually(lambda: freed.exactly(0, 1, 2), "all sources are free")
    assert decode.sink.landed == contents(3, 3)
    assert caplog.text.count("cannot map the KV pool") == 1


async def test_a_decode_worker_that_does_not_map_is_offered_no_memory(
    decode: Decode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of an older version."""

    def unasked(memory: SharedMemory) -> int:
        raise AssertionError("nobody asked for a descriptor")

    monkeypatch.setattr(SharedMemory, "descriptor", unasked)
    attributes = decode.attributes()
    del attributes[MAPS]
    sender, freed = LocalSender(attributes, "the decode worker"), Freed()
    decode.senders.append(sender)
    await sender.connect()
    await post(sender, 3, 2, freed)
    await eventually(lambda: freed.exactly(0, 1), "all sources are free")
    assert decode.sink.landed == contents(3, 2)


@pytest.mark.usefixtures("no_reads")
async def test_a_chunk_whose_memory_is_used_again_before_it_is_copied_is_refused(decode: Decode) -> None:
    sender, freed = await decode.sender(), Freed()
    frame, memory = chunk_frame(3, 0, memory=next(shared_memories()))
    decode.sink.gate.clear()
    await sender.post(frame, freed.of(0))
    await eventually(lambda: decode.sink.num_claims == 1, "it is about to be copied")
    memory[:] = bytes(len(memory))
    decode.sink.gate.set()
    await eventually(lambda: decode.sink.refused == [0], "its checksum is wrong")


# What a peer may share ------------------------------------------------------------------------------------------------


async def closed(connection: socket.socket) -> bool:
    try:
        return await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    except ConnectionResetError:
        return True


async def test_a_share_without_a_descriptor_closes_its_connection(decode: Decode) -> None:
    with await Greeter(decode.attributes(OTHER_LINK), "the decode worker").connect() as connection:
        connection.send(pack_share(4096))
        assert await closed(connection)


async def test_memory_that_its_owner_could_shrink_is_not_mapped(decode: Decode) -> None:
    """Or it could end the decode worker (SIGBUS)."""
    with await Greeter(decode.attributes(OTHER_LINK), "the decode worker").connect() as connection:
        fd = os.memfd_create("pdserve-kv-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 1 << 20)
        frame, _ = chunk_frame(3, 0)
        pieces = pieces_of(frame.payload)
        socket.send_fds(connection, [pack_share(pieces[0])], [fd])
        os.close(fd)
        connection.send(pack_offer(frame.header, pieces))
        await eventually(lambda: decode.sink.landed == contents(3, 1), "the chunk was read by the kernel")
        assert num_mappings() == 0


async def test_descriptors_that_nobody_asked_for_are_closed(decode: Decode) -> None:
    with await Greeter(decode.attributes(OTHER_LINK), "the decode worker").connect() as connection:
        before = num_descriptors()
        frame, _ = chunk_frame(3, 0)
        memories = [SharedMemory.create(4096) for _ in range(2)]
        ours = num_descriptors() - before
        for memory in memories:
            fd = memory.descriptor()
            # A byte of an offer carries it, not a share.
            socket.send_fds(connection, [pack_offer(frame.header, pieces_of(frame.payload))], [fd])
            os.close(fd)
        await eventually(lambda: decode.sink.num_claims == 2, "the offers have come")
        connection.shutdown(socket.SHUT_RDWR)
        await eventually(lambda: num_descriptors() <= before + ours - 1, "they are closed with the connection")


# Lifetimes ------------------------------------------------------------------------------------------------------------


async def test_a_hundred_links_leave_no_descriptors_and_no_mappings() -> None:
    pool = np.asarray(SharedMemory.create(1 << 20))
    async with decode_side() as decode:
        before = 0, 0
        for generation in range(101):
            link = LinkId("prefill", generation)
            sender = await decode.sender(link)
            arrived = asyncio.Event()
            await sender.post(chunk_frame(3, 0, memory=pool[: 1 << 19].data)[0], arrived.set)
            await arrived.wait()
            decode.receiver.fence(link)
            await sender.fence()
            if generation == 0:
                await eventually(lambda: num_mappings() == 1, "the first one is unmapped")
                before = num_descriptors(), num_mappings()
        await eventually(lambda: num_mappings() == before[1], "everything is unmapped but the pool")
        await eventually(lambda: num_descriptors() <= before[0], "all descriptors are closed")


@pytest.mark.usefixtures("no_reads")
async def test_hand_offs_out_of_a_shared_pool_are_exact() -> None:
    info = worker_info(Role.DECODE, "d-mapped", transports=("local",))
    async with (
        decode_worker(info=info) as d,
        prefill_worker(info=worker_info(Role.PREFILL, "p-mapped", transports=("local",)), shared=True) as p,
    ):
        blocks = (200, 3, 77, 12, 150, 9, 31, 64)
        for attempt in range(1, 4):
            p.store.fill(blocks, seed=attempt)
            handoff = p.begin(d.target, blocks, attempt=attempt, num_tokens=120)
            await handoff.reserve()
            handoff.advance(120)
            assert (await handoff.commit(7)).transport == "local"
            assert d.store.content(d.admission.held[handoff.id]) == p.store.content(blocks)
            d.finish(handoff.id)
