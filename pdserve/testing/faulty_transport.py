"""A transport that does to chunk frames what networks and bugs do: for tests of what must never come of it."""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from kv_transfer.messages import Endpoint, LinkId
from kv_transfer.transports.base import PostError, SendingTransport, TransportContext, TransportKind
from kv_transfer.wire import HEADER_NBYTES, Frame
from pdserve.types import DecodeTarget


class Fault(enum.Enum):
    """What happens to one frame."""

    NONE = "none"
    DROP = "drop"
    REPEAT = "repeat"
    REORDER = "reorder"
    """Sent after the next frame, or never if none follows."""
    FLIP = "flip"
    """One bit, anywhere."""
    TRUNCATE = "truncate"
    DELAY = "delay"
    BREAK = "break"
    """PostError, and the frame is lost."""


class Faults:
    """Which fault each frame meets, over all links of a sender: a script, then none."""

    def __init__(self, script: Sequence[Fault], *, seed: int = 0, delay_s: float = 0.01) -> None:
        self.num_injected = 0
        self.delay_s = delay_s
        self.rng = random.Random(seed)
        self._script = list(script)

    @classmethod
    def at_random(cls, kinds: Sequence[Fault], *, share: float, num_frames: int, seed: int) -> Faults:
        """A script of `num_frames` in which about `share` of the frames meet one of `kinds`."""
        rng = random.Random(seed)
        script = [rng.choice(kinds) if rng.random() < share else Fault.NONE for _ in range(num_frames)]
        return cls(script, seed=seed)

    def next(self) -> Fault:
        """For the frame that is about to be sent."""
        fault = self._script.pop(0) if self._script else Fault.NONE
        self.num_injected += fault is not Fault.NONE
        return fault


class RawFrame(Frame):
    """A frame of any bytes, which need not be those of a chunk."""

    def __init__(self, like: Frame, data: bytes) -> None:
        super().__init__(like.chunk, lambda: [memoryview(data)[HEADER_NBYTES:]])
        self._data = data

    @property
    def header(self) -> bytes:
        """The first bytes."""
        return self._data[:HEADER_NBYTES]

    @property
    def payload(self) -> Sequence[memoryview]:
        """The rest, if there is one."""
        return [memoryview(self._data)[HEADER_NBYTES:]] if len(self._data) > HEADER_NBYTES else []

    def join(self) -> bytes:
        """All of them, whatever the checksum among them says."""
        return self._data


class _FaultySender:
    def __init__(self, inner: SendingTransport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._held: Frame | None = None

    async def connect(self) -> None:
        """See SendingTransport."""
        await self._inner.connect()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """See SendingTransport."""
        if not frame.chunk.nonce:
            await self._inner.post(frame, source_free)  # probes only measure
            return
        try:
            data = frame.join()
        finally:
            source_free()
        frame = RawFrame(frame, data)
        match self._faults.next():
            case Fault.NONE:
                await self._send(frame)
            case Fault.DROP:
                return
            case Fault.REPEAT:
                await self._send(frame)
                await self._send(frame)
            case Fault.REORDER:
                held, self._held = self._held, frame
                if held is not None:
                    await self._send(held)
                return
            case Fault.FLIP:
                damaged = bytearray(data)
                damaged[self._faults.rng.randrange(len(damaged))] ^= 1 << self._faults.rng.randrange(8)
                await self._send(RawFrame(frame, bytes(damaged)))
            case Fault.TRUNCATE:
                await self._send(RawFrame(frame, data[: self._faults.rng.randrange(len(data))]))
            case Fault.DELAY:
                await asyncio.sleep(self._faults.delay_s)
                await self._send(frame)
            case Fault.BREAK:
                raise PostError("broken on purpose")
        if self._held is not None:
            held, self._held = self._held, None
            await self._send(held)

    async def fence(self) -> None:
        """See SendingTransport."""
        self._held = None
        await self._inner.fence()

    async def _send(self, frame: Frame) -> None:
        await self._inner.post(frame, lambda: None)


def faulty(kind: TransportKind, faults: Faults) -> TransportKind:
    """`kind` with these faults on its sending side, under the same name."""

    def sending(context: TransportContext, endpoint: Endpoint, target: DecodeTarget, link: LinkId) -> SendingTransport:
        return _FaultySender(kind.sending(context, endpoint, target, link), faults)

    return replace(kind, sending=sending)
