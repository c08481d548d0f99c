"""The receiver as transports see it, without hand-offs: frames made from a seed, and a sink that keeps them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import Landing
from kv_transfer.wire import ChunkHeader, Frame, decode_header, encode


def random_frame(seq: int, piece_nbytes: Sequence[int], *, nonce: int = 7) -> Frame:
    """A frame whose payload is a function of `seq`, in pieces of these sizes."""
    rng = np.random.default_rng(seq)
    pieces = [rng.integers(0, 256, nbytes, dtype=np.uint8).data for nbytes in piece_nbytes]
    header = ChunkHeader(
        nonce=nonce,
        attempt=1,
        seq=seq,
        dtype="float16",
        layer_begin=0,
        layer_end=1,
        token_begin=seq * 16,
        token_end=seq * 16 + 16,
        head_begin=0,
        head_end=1,
        payload_nbytes=sum(piece_nbytes),
    )
    return encode(header, pieces)


class FrameLanding:
    """Implements `Landing`: memory of its own, in pieces."""

    def __init__(self, sink: FrameSink, link: LinkId, header: bytes, piece_nbytes: int) -> None:
        self._header, self._digest = decode_header(header)
        self._sink = sink
        self._link = link
        self._memory = bytearray(self._header.payload_nbytes)
        whole = memoryview(self._memory)
        self._pieces = [whole[at : at + piece_nbytes] for at in range(0, len(self._memory), piece_nbytes)]

    @property
    def header(self) -> ChunkHeader:
        """See `Landing`."""
        return self._header

    @contextmanager
    def writing(self) -> Iterator[Sequence[memoryview] | None]:
        """The pieces; None once the sink is closed for new bytes."""
        yield None if self._sink.ended else self._pieces

    def finish(self, digest: int) -> None:
        """Keep the payload as arrived, or as damaged if the checksum says so."""
        damaged = digest != self._digest
        self._sink.landed(self._link, self._header.seq, None if damaged else bytes(self._memory))

    def fail(self, reason: str) -> None:
        """Keep the reason."""
        self._sink.failed(self._link, self._header.seq, reason)


class FrameSink:
    """Implements `Sink` for any number of links. Frames of a nonce in `unwanted` are not taken."""

    def __init__(self, *, piece_nbytes: int = 1 << 30, unwanted: Sequence[int] = ()) -> None:
        """Destinations are pieces of `piece_nbytes`."""
        self.frames: dict[tuple[LinkId, int], bytes] = {}
        """Payloads by link and seq."""
        self.order: list[int] = []
        """Their seqs in order of arrival."""
        self.num_damaged = 0
        self.failures: list[str] = []
        self.ended = False
        """Set it to end every reservation: bytes that still come are discarded."""
        self._piece_nbytes = piece_nbytes
        self._unwanted = frozenset(unwanted)
        self._lock = threading.Lock()

    def claim(self, link: LinkId, header: bytes) -> Landing | None:
        """See `Sink`."""
        if decode_header(header)[0].nonce in self._unwanted:
            return None
        return FrameLanding(self, link, header, self._piece_nbytes)

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """See `Sink`; for transports that hand whole frames over."""
        header = frame[:64]
        self.landed(link, decode_header(header)[0].seq, frame[64:])

    def landed(self, link: LinkId, seq: int, payload: bytes | None) -> None:
        """A frame is complete; None if it came damaged."""
        with self._lock:
            if payload is None:
                self.num_damaged += 1
            else:
                self.frames[link, seq] = payload
                self.order.append(seq)

    def failed(self, link: LinkId, seq: int, reason: str) -> None:
        """A frame will not be completed."""
        with self._lock:
            self.failures.append(f"{link} chunk {seq}: {reason}")
