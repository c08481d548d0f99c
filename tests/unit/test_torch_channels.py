"""Parts of the `torch` transport: staging copies, envelopes, the choice of a backend, and the protocol round NCCL.

The device is played by host memory here; what needs a GPU is in tests/gpu/test_nccl_transport.py.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.copying import CheckedCopy
from kv_transfer.copying import portion as portion_of
from kv_transfer.messages import LinkId
from kv_transfer.process_memory import pieces_of
from kv_transfer.transports.torch_channel import DECODE_RANK, PREFILL_RANK, Buffer, Channel, PairError
from kv_transfer.transports.torch_envelope import ALIVE, ENVELOPE_NBYTES, Envelope, unpack
from kv_transfer.transports.torch_gloo import GlooChannel, gloo_group
from kv_transfer.transports.torch_join import GLOO, NCCL, abilities, choose_backend
from kv_transfer.transports.torch_nccl import AnnouncedChannel, abort_within
from kv_transfer.transports.torch_rendezvous import PairStore, pair_name, reach_store
from kv_transfer.transports.torch_send_flow import write_envelope
from kv_transfer.transports.torch_staging import Gather

PREFIX = bytes(range(56))
SIZES = st.lists(st.integers(0, 40), max_size=8)


@given(SIZES, st.integers(1, 50))
def test_gathering_gives_the_concatenation_in_portions(sizes: list[int], portion: int) -> None:
    data = np.random.default_rng(1).integers(0, 256, sum(sizes), dtype=np.uint8)
    ends = np.cumsum([0, *sizes])
    gather = Gather([data[a:b].data for a, b in itertools.pairwise(ends)])
    taken = []
    while gather.nbytes_left:
        target = np.zeros(portion, dtype=np.uint8)
        nbytes = gather.fill(target)
        assert nbytes == min(portion, len(data) - portion * len(taken))
        taken.append(target[:nbytes].tobytes())
    assert b"".join(taken) == data.tobytes()


@given(SIZES, st.integers(1, 50))
def test_scattering_in_portions_fills_the_pieces_in_order(sizes: list[int], portion: int) -> None:
    data = np.random.default_rng(2).integers(0, 256, sum(sizes), dtype=np.uint8)
    pieces = [bytearray(size) for size in sizes]
    views = [memoryview(piece) for piece in pieces]
    copy = CheckedCopy(PREFIX, len(data))
    for offset in range(0, len(data), portion):
        message = data[offset : offset + portion]
        copy.add(pieces_of([message.data]), portion_of(pieces_of(views), offset, len(message)))
    assert b"".join(pieces) == data.tobytes()
    assert copy.digest() == xxhash.xxh3_64_intdigest(PREFIX + data.tobytes())


def test_an_envelope_survives_the_wire_and_other_bytes_are_none() -> None:
    envelope = Envelope(bytes(range(64)), 1 << 40, 5 << 20, 1 << 20)
    assert len(envelope.pack()) == ENVELOPE_NBYTES and unpack(envelope.pack()) == envelope
    assert unpack(b"\1" * ENVELOPE_NBYTES) is None


A = {"nccl": "2.27.5", "gpu": "GPU-a"}


@pytest.mark.parametrize(
    ("prefill", "decode", "backend"),
    [
        (A, {"nccl": "2.27.5", "gpu": "GPU-b"}, NCCL),
        (A, A, GLOO),
        (A, {"nccl": "2.26.2", "gpu": "GPU-b"}, GLOO),
        (A, {}, GLOO),
        ({}, A, GLOO),
        ({}, {}, GLOO),
    ],
)
def test_nccl_is_for_two_gpus_with_one_version(prefill: dict[str, str], decode: dict[str, str], backend: str) -> None:
    assert choose_backend(prefill, decode) == backend


def test_a_worker_without_a_gpu_offers_no_nccl() -> None:
    import torch

    assert abilities(torch.device("cpu")) == {}


# The protocol round NCCL ----------------------------------------------------------------------------------------------


class Wire:
    """What NCCL is to two movers: payloads in order of the sends, and a record of who started what when."""

    def __init__(self) -> None:
        self.payloads: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.log: list[str] = []
        self.stalled = False


class HostMover:
    """Implements `Mover` for one side of a `Wire`."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.aborted = threading.Event()

    def buffer(self) -> Buffer:
        return Buffer.allocate()

    def send(self, buffer: Buffer, nbytes: int) -> Callable[[], bool]:
        self._wire.log.append("send")
        self._wire.payloads.put(buffer.payload[:nbytes].tobytes())
        return lambda: not self._wire.stalled

    def recv(self, buffer: Buffer, nbytes: int) -> Callable[[], bool]:
        self._wire.log.append("recv")

        def is_complete() -> bool:
            if self._wire.stalled or self._wire.payloads.empty():
                return False
            payload = self._wire.payloads.get()
            assert len(payload) == nbytes, "sides disagree on the length"
            buffer.payload[:nbytes] = np.frombuffer(payload, dtype=np.uint8)
            return True

        return is_complete

    def abort(self) -> None:
        self.aborted.set()


class Sides:
    """Both ends of an announced pair in one process, over real gloo."""

    def __init__(self, timeout_s: float) -> None:
        self.wire = Wire()
        self.threads = ThreadPoolExecutor(4)
        store = PairStore("127.0.0.1", timeout_s)
        name = pair_name("d", LinkId("p", 1))
        prefill_store = reach_store(f"127.0.0.1:{store.port}", timeout_s)
        groups = [
            self.threads.submit(gloo_group, client, name, rank, "127.0.0.1", timeout_s)
            for rank, client in ((PREFILL_RANK, prefill_store), (DECODE_RANK, store.client()))
        ]
        self.movers = [HostMover(self.wire), HostMover(self.wire)]
        self.prefill, self.decode = (
            AnnouncedChannel(GlooChannel(group.result(), 1 - rank), mover, timeout_s)
            for rank, (group, mover) in enumerate(zip(groups, self.movers, strict=True))
        )

    def send(self, seq: int, nbytes: int) -> Callable[[], None]:
        buffer = self.prefill.buffer()
        write_envelope(buffer, Envelope(bytes([seq]) * 64, nbytes, 0, nbytes))
        buffer.payload[:nbytes] = seq
        return self.prefill.send(buffer, nbytes).wait


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides(timeout_s=2.0)
    yield sides
    sides.threads.shutdown()


def test_payloads_follow_their_announcements_in_order(sides: Sides) -> None:
    buffers = [sides.decode.buffer() for _ in range(3)]
    receives = [sides.decode.recv(buffer).wait for buffer in buffers]
    sends = [sides.send(seq, nbytes) for seq, nbytes in ((1, 10), (2, 1 << 20), (3, 777))]
    done = sides.threads.submit(lambda: [send() for send in sends])
    for seq, (buffer, receive) in enumerate(zip(buffers, receives, strict=True), 1):
        receive()
        envelope = unpack(buffer.envelope.tobytes())
        assert envelope is not None and envelope.header == bytes([seq]) * 64
        assert set(buffer.payload[: envelope.nbytes].tolist()) == {seq}
    done.result()


def test_neither_side_starts_before_the_other_is_ready(sides: Sides) -> None:
    sent = sides.threads.submit(sides.send(1, 100))
    buffer = sides.decode.buffer()
    receive = sides.decode.recv(buffer).wait
    time.sleep(0.1)  # time for a send that does not wait for the word to go
    assert sides.wire.log == [], "a payload moved that nobody was ready for"
    receive()
    sent.result()
    assert sorted(sides.wire.log) == ["recv", "send"]


def test_an_empty_message_moves_no_payload(sides: Sides) -> None:
    buffer = sides.prefill.buffer()
    write_envelope(buffer, ALIVE)
    sent = sides.threads.submit(sides.prefill.send(buffer, 0).wait)
    received = sides.decode.buffer()
    sides.decode.recv(received).wait()
    sent.result()
    assert unpack(received.envelope.tobytes()) == ALIVE and sides.wire.log == []


def test_a_payload_that_does_not_come_breaks_the_pair_in_time(sides: Sides) -> None:
    sides.wire.stalled = True
    sent = sides.threads.submit(sides.send(1, 100))
    started = time.monotonic()
    with pytest.raises(PairError, match="within 2 s"):
        sides.decode.recv(sides.decode.buffer()).wait()
    assert time.monotonic() - started < 4
    with pytest.raises(PairError):
        sent.result()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_interrupt_ends_a_wait_under_way(sides: Sides, side: str) -> None:
    sides.wire.stalled = True
    sent = sides.threads.submit(sides.send(1, 100))
    received = sides.threads.submit(sides.decode.recv(sides.decode.buffer()).wait)
    deadline = time.monotonic() + 2
    while len(sides.wire.log) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    channel: Channel = sides.prefill if side == "prefill" else sides.decode
    channel.interrupt()
    with pytest.raises(PairError, match="aborted"):
        (sent if side == "prefill" else received).result(timeout=1)
    channel.abort()
    assert sides.movers[side == "decode"].aborted.is_set()
    sides.wire.stalled = False  # lets the other side end


def test_an_abort_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    started = time.monotonic()
    assert not abort_within(lambda: bool(release.wait(10)) and None, 0.1)
    assert time.monotonic() - started < 2
    release.set()
    assert abort_within(lambda: None, 5.0)


def test_an_abort_that_fails_is_over() -> None:
    def abort() -> None:
        raise RuntimeError("no such communicator")

    assert abort_within(abort, 5.0)
