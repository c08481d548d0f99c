"""From whole frames to their places, in a thread: the event loop takes the next message out of gRPC meanwhile."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Container
from concurrent.futures import ThreadPoolExecutor

from kv_transfer.copying import checked_copy
from kv_transfer.messages import LinkId
from kv_transfer.process_memory import pieces_of
from kv_transfer.transports.base import Sink
from kv_transfer.wire import DIGEST_AT, HEADER_NBYTES, FrameError, payload_nbytes

logger = logging.getLogger(__name__)

MAX_WAITING = 2
"""Frames of a stream that are not in their places yet. The stream is read no further, so that flow control acts."""


class Placer:
    """The thread, for all streams of a worker. Event loop."""

    def __init__(self, sink: Sink, open_links: Container[LinkId]) -> None:
        """Frames of links that are not in `open_links` any more come to nothing."""
        self._sink = sink
        self._open_links = open_links
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kv-grpc-place")

    def stream(self, link: LinkId) -> FrameStream:
        """For the frames of one call."""
        return FrameStream(self, link)

    def is_open(self, link: LinkId) -> bool:
        """Whether frames of this link are still placed."""
        return link in self._open_links

    def submit(self, link: LinkId, frame: bytes) -> asyncio.Future[None]:
        """Place one frame, of which the length is as its header says."""
        return asyncio.get_running_loop().run_in_executor(self._executor, self._place, link, frame)

    def deliver(self, link: LinkId, frame: bytes) -> None:
        """A frame that is not as it should be, for the sink to say what is wrong with it."""
        self._sink.deliver(link, frame)

    async def aclose(self) -> None:
        """End the thread, after what it has begun. Links are closed before."""
        await asyncio.to_thread(self._executor.shutdown)

    def _place(self, link: LinkId, frame: bytes) -> None:
        if link not in self._open_links:
            return
        header = frame[:HEADER_NBYTES]
        try:
            landing = self._sink.claim(link, header)
        except FrameError:
            return  # the sink knows
        if landing is None:
            return
        digest = None
        try:
            with landing.writing() as views:
                if views is not None:
                    source = pieces_of([memoryview(frame)[HEADER_NBYTES:]])
                    digest = checked_copy(header[:DIGEST_AT], source, views)
        except Exception:
            logger.exception("placing a chunk of KV link %s met an error", link)
        if digest is None:
            landing.fail("the reservation has ended, or it could not be stored")
        elif link not in self._open_links:
            landing.fail("the transport has been fenced")
        else:
            landing.finish(digest)


class FrameStream:
    """One call's frames, in order."""

    def __init__(self, placer: Placer, link: LinkId) -> None:
        self._placer = placer
        self._link = link
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def put(self, frame: bytes) -> None:
        """Begin to place a frame. Waits while too many are not placed yet, and drops it if its link is closed
        meanwhile."""
        if len(frame) < HEADER_NBYTES or payload_nbytes(frame) != len(frame) - HEADER_NBYTES:
            self._placer.deliver(self._link, frame)
            return
        if len(self._waiting) == MAX_WAITING:
            await self._waiting.popleft()
            if not self._placer.is_open(self._link):
                return  # and the thread may have ended
        self._waiting.append(self._placer.submit(self._link, frame))
