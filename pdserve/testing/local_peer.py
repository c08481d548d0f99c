"""One end of the `local` transport as a process of its own, to be killed and frozen: `python -m ...local_peer ROLE`.

`decode` prints the attributes of its endpoint, then one line for each chunk that has landed, until its input ends.
`prefill` takes such attributes as its argument, prints the mode it connected in, and then posts chunk `seq` of `seed`
for each line "seed seq" of its input; it prints "free seq" when a source is free, and "closed" at the end. With another
argument, `shared`, the chunks lie in shared memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import PostError
from kv_transfer.transports.local_receiver import LocalReceiver
from kv_transfer.transports.local_sender import LocalSender
from kv_transfer.transports.local_wire import where_am_i
from kv_transfer.wire import ChunkHeader, Frame, FrameError, decode_header, encode
from pdserve.shared_memory import SharedMemory

LINK = LinkId("prefill", 1)
_PIECES = (3, 400_000, 1, 65_536, 4096)
"""Lengths of the source pieces; the destination is cut otherwise."""
NUM_PIECES = len(_PIECES)
CHUNK_NBYTES = sum(_PIECES)
"""More than a socket holds, so that a chunk that nobody receives is not sent whole."""


def content(seed: int, seq: int) -> bytes:
    """Payload of a chunk."""
    return np.random.default_rng((seed, seq)).bytes(CHUNK_NBYTES)


_GAP = 512
MEMORY_NBYTES = CHUNK_NBYTES + _GAP * len(_PIECES)
"""Of the pieces of a chunk, with what lies between them."""


def chunk_frame(seed: int, seq: int, *, nonce: int = 1, memory: memoryview | None = None) -> tuple[Frame, memoryview]:
    """A frame of `content`, in scattered pieces of `memory`, or else of new memory; it is given back too."""
    memory = memoryview(bytearray(MEMORY_NBYTES)) if memory is None else memory
    payload, pieces, at = content(seed, seq), [], 0
    for index, nbytes in enumerate(_PIECES):
        begin = at + _GAP * (index + 1)
        memory[begin : begin + nbytes] = payload[at : at + nbytes]
        pieces.append(memory[begin : begin + nbytes])
        at += nbytes
    header = ChunkHeader(
        nonce=nonce,
        attempt=1,
        seq=seq,
        dtype="float16",
        layer_begin=0,
        layer_end=1,
        token_begin=0,
        token_end=16,
        head_begin=0,
        head_end=1,
        payload_nbytes=CHUNK_NBYTES,
    )
    return encode(header, pieces), memory


class RecordingSink:
    """Implements `Sink`: takes every chunk into memory of its own and remembers how each ended."""

    def __init__(self) -> None:
        self.landed: dict[int, bytes] = {}
        """Payload by `seq` of chunks whose checksum was right."""
        self.refused: list[int] = []
        """Those whose checksum was wrong."""
        self.failed: list[str] = []
        """Reasons."""
        self.gate = threading.Event()
        """While it is not set, a claim waits."""
        self.gate.set()
        self.num_claims = 0
        self.unwanted: set[int] = set()
        """Chunks that `claim` does not take."""
        self.ended: set[int] = set()
        """Chunks whose reservation ends between the claim and the copy."""

    def claim(self, link: LinkId, header: bytes) -> RecordingLanding | None:
        """See `Sink`."""
        chunk, digest = decode_header(header)
        if chunk.payload_nbytes > 1 << 24:
            raise FrameError("too long")
        self.num_claims += 1
        self.gate.wait()
        return None if chunk.seq in self.unwanted else RecordingLanding(self, chunk, digest)

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """This transport never delivers whole frames."""
        raise AssertionError("deliver")


class RecordingLanding:
    """Implements `Landing`."""

    def __init__(self, sink: RecordingSink, header: ChunkHeader, digest: int) -> None:
        self.header = header
        self._sink = sink
        self._digest = digest
        self._memory = bytearray(header.payload_nbytes)
        view, middle = memoryview(self._memory), header.payload_nbytes // 3
        self._pieces = [view[:middle], view[middle:]]

    @contextlib.contextmanager
    def writing(self) -> Iterator[Sequence[memoryview] | None]:
        """See `Landing`."""
        yield None if self.header.seq in self._sink.ended else self._pieces

    def finish(self, digest: int) -> None:
        """See `Landing`."""
        if digest == self._digest:
            self._sink.landed[self.header.seq] = bytes(self._memory)
        else:
            self._sink.refused.append(self.header.seq)

    def fail(self, reason: str) -> None:
        """See `Landing`."""
        self._sink.failed.append(reason)


def forbid_ptrace() -> None:
    """From now on no process of this user may read this one, nor may this one read others, root's included."""
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_dumpable, cap_sys_ptrace, version_3 = 4, 19, 0x20080522
    if libc.prctl(pr_set_dumpable, 0, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    header = ctypes.create_string_buffer(struct.pack("=Ii", version_3, 0))
    data = ctypes.create_string_buffer(24)
    if libc.capget(header, data):
        raise OSError(ctypes.get_errno(), "capget")
    sets = [value & ~(1 << cap_sys_ptrace) for value in struct.unpack("=6I", data.raw[:24])]
    if libc.capset(header, ctypes.create_string_buffer(struct.pack("=6I", *sets))):
        raise OSError(ctypes.get_errno(), "capset")


async def _decode() -> None:
    sink = RecordingSink()
    receiver = LocalReceiver("decode", sink)
    await receiver.start()
    endpoint = receiver.open(LINK, Endpoint("local", where_am_i()))
    assert endpoint is not None
    _say(json.dumps(dict(endpoint.attributes)))
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    told = 0
    while not reading.done():
        await asyncio.wait((reading,), timeout=0.01)
        num_ended = len(sink.landed) + len(sink.refused) + len(sink.failed)
        if num_ended > told:
            told = num_ended
            _say(json.dumps({"landed": sorted(sink.landed), "refused": sink.refused, "failed": sink.failed}))
    await receiver.aclose()


def shared_memories() -> Iterator[memoryview]:
    """Places for one chunk after the other, all in one shared memory; good for 32 of them."""
    pool = np.asarray(SharedMemory.create(32 * MEMORY_NBYTES))
    for begin in range(0, len(pool), MEMORY_NBYTES):
        yield pool[begin : begin + MEMORY_NBYTES].data


async def _prefill(attributes: dict[str, str], *, shared: bool) -> None:
    memories = shared_memories()
    sender = LocalSender(attributes, "the decode worker")
    await sender.connect()
    _say(sender.mode.name)
    while line := await asyncio.to_thread(sys.stdin.readline):
        seed, seq = map(int, line.split())
        try:
            frame, _ = chunk_frame(seed, seq, memory=next(memories) if shared else None)
            await sender.post(frame, partial(_say, f"free {seq}"))
        except PostError as error:
            _say(f"refused {error}")
    await sender.fence()
    _say("closed")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if os.environ.get("FORBID_PTRACE"):
        forbid_ptrace()
    asyncio.run(
        _decode() if sys.argv[1] == "decode" else _prefill(json.loads(sys.argv[2]), shared="shared" in sys.argv[3:])
    )
