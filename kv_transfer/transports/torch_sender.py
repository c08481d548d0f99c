"""The prefill side of the `torch` transport: frames are queued for a thread that copies them and one that sends them.

Sources are free as soon as they have been copied, whatever becomes of the sends: an operation that hangs holds a buffer
of ours and nothing else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kv_transfer.messages import LinkId
from kv_transfer.transports.base import PostError, TransportUnavailable
from kv_transfer.transports.torch_channel import Channel, PairError
from kv_transfer.transports.torch_send_flow import SendFlow
from kv_transfer.wire import Frame

MAX_QUEUED = 8
"""Frames that wait to be copied. Waking a thread for each frame by itself would cost more than copying it."""


class TorchSender:
    """See `SendingTransport`."""

    def __init__(self, join: Callable[[], Channel], link: LinkId, keepalive_s: float) -> None:
        """`join` forms the pair: it blocks, for a bounded time, and raises PairError."""
        self._join = join
        self._link = link
        self._keepalive_s = keepalive_s
        self._joiner = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"kv-torch-join-{link.generation}")
        self._flow: SendFlow | None = None
        self._fenced = False
        self._sources: deque[Callable[[], None]] = deque()
        """What to call for the frames in the queue, in order."""
        self._room = asyncio.Event()
        """Set when the queue may have room, and at the end."""

    async def connect(self) -> None:
        """Form the pair. Raises TransportUnavailable within the time-outs of the store and the group."""
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._joiner, self._connect, loop)
        except PairError as error:
            raise TransportUnavailable(str(error)) from error
        finally:
            self._joiner.shutdown(wait=False)

    def _connect(self, loop: asyncio.AbstractEventLoop) -> None:
        flow = SendFlow(self._join(), self._keepalive_s, loop, self._copied)
        self._flow = flow
        if self._fenced:
            flow.stop()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Returns when the frame is queued. What breaks later is for the next post to say."""
        try:
            while (flow := self._usable()) is not None and len(self._sources) >= MAX_QUEUED:
                self._room.clear()
                await self._room.wait()
        except asyncio.CancelledError:
            source_free()
            raise
        failure = "it is not connected" if flow is None else flow.failure
        if flow is None or failure is not None:
            source_free()
            raise PostError(f"the pair of link {self._link}: {failure}")
        self._sources.append(source_free)
        flow.put(frame)

    def _usable(self) -> SendFlow | None:
        return None if self._fenced else self._flow

    async def fence(self) -> None:
        """Waits for a copy under way. Sends that hang end by the group's time-out, in a thread that sees no source."""
        self._fenced = True
        if self._flow is not None:
            self._flow.stop()
            await self._flow.quiet()
        self._copied(len(self._sources))

    def _copied(self, num_frames: int) -> None:
        """In the event loop: this many more frames will not be read again."""
        for _ in range(min(num_frames, len(self._sources))):
            self._sources.popleft()()
        self._room.set()
