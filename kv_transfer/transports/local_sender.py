"""The prefill side of the `local` transport: it says where the bytes lie, and keeps them until they have been read.

    event loop                        thread of the link                 decode worker
    post ──frame──▶ queue ──────────▶ checksum, addresses ──offer──────▶ read, check
    source_free ◀──────────────────────────────────────────── answer ◀── done

Memory that can be shared, as KV pools can, is passed to the decode worker with the first offer out of it, to be mapped.

The thread exists because reading a pool and taking checksums may last milliseconds. `post` does not wait for it: the
checksum of one chunk is taken while the next is being posted and the one before is being read. Where a chunk is memory
of this process, its checksum takes a tenth of a millisecond, less than waking a thread that then competes for the
interpreter: while the thread has nothing to do, `post` makes the offer itself. It never waits for the decode worker,
which may stand still: what the socket has no room for goes to the thread.

All that is in flight is given back when the transport ends, however it ends: by `fence`, because the decode worker has
closed the connection, or because the source of a chunk could not be read. (The next transport of the link then meets
that error where it can be told whose it is.)

A decode worker that was frozen when the transport ended may still read later, while the blocks hold something else. It
then finds another checksum than it was offered, and refuses the chunk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import socket
import threading
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kv_transfer.peer_memory import MAX_REGIONS
from kv_transfer.process_memory import IOV_MAX, pieces_of
from kv_transfer.transports.base import PostError
from kv_transfer.transports.local_greeting import Greeter
from kv_transfer.transports.local_wire import ANSWER, MAPS, MAX_PIECES, Mode, ProtocolError, pack_offer, pack_share
from kv_transfer.wire import ChunkHeader, Frame
from pdserve.errors import PdServeError
from pdserve.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

_MAX_IN_FLIGHT = 32
"""Frames posted and not given back. Few enough that their answers always fit into the socket."""
_ANSWERS_NBYTES = 4096
_AT_ONCE_NBYTES = 4 << 20
"""Chunks longer than this are for the thread."""
_AT_ONCE_PIECES = 128
"""Likewise those in more pieces, as each takes its time."""
_MAX_IN_A_ROW = 4
"""Offers made by `post` before the event loop has another turn."""


@dataclass(slots=True, eq=False)
class _Post:
    frame: Frame
    """Keeps the source views alive, and with them the memory."""
    source_free: Callable[[], None]
    unsent: bytes | None = None
    """Of its offer, if `post` has made it and the socket was full."""


class LocalSender:
    """See the module and `SendingTransport`."""

    def __init__(
        self,
        attributes: Mapping[str, str],
        peer: str,
        *,
        num_pieces: Callable[[ChunkHeader], int] | None = None,
    ) -> None:
        """`attributes` are those of the decode worker's endpoint, `peer` names it in messages.

        `num_pieces`, if payloads are memory of this process, which costs nothing to read where it is in few pieces:
        how many those of a chunk are at most. None: reading may take its time.
        """
        self._num_pieces = num_pieces
        self._num_in_a_row = 0
        self._num_queued = 0
        """Posts that the thread has been given,"""
        self._num_taken_care_of = 0
        """and those that it is done with. Written by the thread."""
        self._greeter = Greeter(attributes, peer)
        self._peer = peer
        self._peer_maps = attributes.get(MAPS) == "1"
        self._shared: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        """What the decode worker has a descriptor of. Belongs to the thread, and to `post` while that is idle."""
        self._num_shared = 0
        self._socket: socket.socket | None = None
        """Blocking, for the thread; the event loop takes answers with MSG_DONTWAIT."""
        self._posts: queue.SimpleQueue[_Post | None] = queue.SimpleQueue()
        self._in_flight: set[_Post] = set()
        self._offered: deque[_Post] = deque()
        """Without an answer yet, in order. Who ends an offer appends, the event loop takes from the front."""
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        self._thread: threading.Thread | None = None
        self._broken: str | None = None
        self._ended = asyncio.Event()
        """Nothing is in flight, nor will be."""

    @property
    def mode(self) -> Mode:
        """How payload moves; settled by `connect`."""
        return self._greeter.mode

    async def connect(self) -> None:
        """Open the connection and start the thread. Raises TransportUnavailable."""
        connection = self._socket = await self._greeter.connect()
        connection.setblocking(True)
        loop = asyncio.get_running_loop()
        loop.add_reader(connection, self._take_answers, connection)
        self._thread = threading.Thread(target=self._run, args=(loop, connection), name="kv-local-send", daemon=True)
        self._thread.start()

    async def post(self, frame: Frame, source_free: Callable[[], None]) -> None:
        """Queue the frame for the thread. Waits while too many are in flight."""
        try:
            await self._slots.acquire()
        except asyncio.CancelledError:
            source_free()
            raise
        if self._broken is not None:
            self._slots.release()
            source_free()
            raise PostError(self._broken)
        post = _Post(frame, source_free)
        self._in_flight.add(post)
        if self._may_offer_at_once(frame):
            await self._offer_at_once(post)
        else:
            self._leave_to_thread(post)

    async def fence(self) -> None:
        """Close the connection and wait for the thread."""
        self._break(f"the local transport to {self._peer} is closed")
        await self._ended.wait()

    # Event loop -------------------------------------------------------------------------------------------------------

    def _leave_to_thread(self, post: _Post) -> None:
        self._num_queued += 1
        self._posts.put(post)

    def _may_offer_at_once(self, frame: Frame) -> bool:
        """Asks the header only: to look at the payload may be what takes its time."""
        is_idle = self._num_queued == self._num_taken_care_of
        if self._num_pieces is None or self.mode is not Mode.READ or not is_idle:
            return False
        return frame.nbytes <= _AT_ONCE_NBYTES and self._num_pieces(frame.chunk) <= _AT_ONCE_PIECES

    async def _offer_at_once(self, post: _Post) -> None:
        """What the thread would do, which is idle, unless it would have to wait."""
        connection = self._socket
        assert connection is not None, "not connected"
        try:
            offer = self._introduce(connection, post, socket.MSG_DONTWAIT)
            num_sent = connection.send(offer, socket.MSG_DONTWAIT)
            if num_sent < len(offer):
                post.unsent = offer[num_sent:]
                self._leave_to_thread(post)
                return
            self._offered.append(post)
        except BlockingIOError:
            self._leave_to_thread(post)
            return
        except PdServeError:
            self._free(post)
            raise
        except (OSError, ProtocolError) as error:
            self._break(f"{self._peer}: {error}")
            self._free(post)
            raise PostError(f"{self._peer}: {error}") from error
        self._num_in_a_row += 1
        if self._num_in_a_row == _MAX_IN_A_ROW:
            self._num_in_a_row = 0
            await asyncio.sleep(0)

    def _take_answers(self, connection: socket.socket) -> None:
        try:
            answers = connection.recv(_ANSWERS_NBYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            self._break(f"{self._peer}: {error}")
            return
        if not answers:
            self._break(f"{self._peer} has closed the connection")
        elif answers.strip(ANSWER) or len(answers) > len(self._offered):
            self._break(f"{self._peer} answers what it was not asked")
        else:
            for _ in answers:
                self._free(self._offered.popleft())

    def _free(self, post: _Post) -> None:
        if post in self._in_flight:
            self._in_flight.remove(post)
            self._slots.release()
            post.source_free()

    def _break(self, reason: str) -> None:
        """The transport has ended. The sockets are closed when the thread has let go of them."""
        if self._broken is not None:
            return
        self._broken = reason
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            # Not closed: the thread may be writing. A socket that the peer has closed refuses this; no matter.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        if self._thread is None:
            self._finish()
        else:
            self._posts.put(None)

    def _on_thread_end(self, reason: str) -> None:
        assert self._thread is not None
        self._thread.join()  # this call was its last act
        self._break(reason)
        self._finish()

    def _finish(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._greeter.withdraw()
        for post in list(self._in_flight):
            self._free(post)
        self._ended.set()

    # Thread -----------------------------------------------------------------------------------------------------------

    def _run(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        reason = ""
        try:
            while self._broken is None and (post := self._posts.get()) is not None:
                if self.mode is Mode.READ:
                    self._offer(connection, post)
                else:
                    _stream(connection, post.frame)
                    loop.call_soon_threadsafe(self._free, post)
                self._num_taken_care_of += 1
        except (OSError, ProtocolError) as error:
            reason = f"{self._peer}: {error}"
        except Exception as error:
            logger.exception("sending a chunk to %s failed", self._peer)
            reason = f"sending a chunk failed: {error}"
        loop.call_soon_threadsafe(self._on_thread_end, reason)

    def _offer(self, connection: socket.socket, post: _Post) -> None:
        offer = self._introduce(connection, post, 0) if post.unsent is None else post.unsent
        self._offered.append(post)
        connection.sendall(offer)

    # Event loop while the thread is idle, or thread -------------------------------------------------------------------

    def _introduce(self, connection: socket.socket, post: _Post, flags: int) -> bytes:
        """Share the memory that the chunk lies in, if need be, and give the offer, which has to be sent next.

        With MSG_DONTWAIT in `flags`, raises BlockingIOError if the socket is full; nothing has been sent then.
        """
        pieces = pieces_of(post.frame.payload)
        if len(pieces) > 2 * MAX_PIECES:
            raise ProtocolError(f"a chunk of {len(pieces) // 2} pieces of memory; at most {MAX_PIECES} can be offered")
        if pieces and self._peer_maps:
            self._share(connection, pieces[0], flags)
        return pack_offer(post.frame.header, pieces)

    def _share(self, connection: socket.socket, address: int, flags: int) -> None:
        """Let the decode worker map the memory around `address`, if it can be shared and has not been."""
        memory = SharedMemory.holding(address)
        if memory is None or memory in self._shared or self._num_shared == MAX_REGIONS:
            return
        try:
            descriptor = memory.descriptor()
        except OSError as error:
            logger.warning("%s has to read this worker's KV pool through the kernel: %s", self._peer, error)
        else:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", (descriptor,)))
            try:
                connection.sendmsg([pack_share(memory.address)], [rights], flags)
            finally:
                os.close(descriptor)
        self._shared.add(memory)
        self._num_shared += 1


def _stream(connection: socket.socket, frame: Frame) -> None:
    rest = deque((memoryview(frame.header), *(view.cast("B") for view in frame.payload)))
    while rest:
        nbytes = connection.sendmsg(list(itertools.islice(rest, IOV_MAX)))
        while rest and nbytes >= rest[0].nbytes:
            nbytes -= rest.popleft().nbytes
        if nbytes:
            rest[0] = rest[0][nbytes:]
