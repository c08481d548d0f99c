"""A transport that does to chunk frames what networks and bugs do: for tests of what must never come of it."""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable, Sequence

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import PostError, SendingTransport, TransportKind
from kv_transfer.wire import Frame


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


class _FaultySender:
    def __init__(self, inner: SendingTransport, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults
        self._held: bytes | None = None

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """See SendingTransport."""
        data = frame.join()
        source_free()
        match self._faults.next():
            case Fault.NONE:
                await self._send(data)
            case Fault.DROP:
                return
            case Fault.REPEAT:
                await self._send(data)
                await self._send(data)
            case Fault.REORDER:
                held, self._held = self._held, data
                if held is not None:
                    await self._send(held)
                return
            case Fault.FLIP:
                damaged = bytearray(data)
                damaged[self._faults.rng.randrange(len(damaged))] ^= 1 << self._faults.rng.randrange(8)
                await self._send(bytes(damaged))
            case Fault.TRUNCATE:
                await self._send(data[: self._faults.rng.randrange(len(data))])
            case Fault.DELAY:
                await asyncio.sleep(self._faults.delay_s)
                await self._send(data)
            case Fault.BREAK:
                raise PostError("broken on purpose")
        if self._held is not None:
            held, self._held = self._held, None
            await self._send(held)

    async def fence(self) -> None:
        """See SendingTransport."""
        self._held = None
        await self._inner.fence()

    async def _send(self, data: bytes) -> None:
        await self._inner.post(Frame(data, ()), lambda: None)


def faulty(kind: TransportKind, faults: Faults) -> TransportKind:
    """`kind` with these faults on its sending side, under the same name."""

    def sending(address: str, decode_incarnation: str, link: LinkId) -> SendingTransport:
        return _FaultySender(kind.sending(address, decode_incarnation, link), faults)

    return TransportKind(name=kind.name, one_sided=kind.one_sided, sending=sending, receiving=kind.receiving)
