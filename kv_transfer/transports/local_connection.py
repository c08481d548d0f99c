"""The decode side of one `local` connection: greeting, then offers to pull or frames to take from the socket.

Lives in the thread of its mover. A chunk is copied straight into its destination blocks, out of shared memory that the
other process has passed a descriptor of or else by the kernel, and its checksum is taken from there, while the bytes
are in the cache. Memory that cannot be mapped is no error: the kernel reads it.

The process to read is the one that connected, by the kernel's word. If it dies and its pid is given to another one of
the same user before the end of the connection is seen, that one is read instead: not the bytes that were offered, so
the chunk is refused like any other damaged one.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from array import array
from collections import deque
from typing import Protocol

from kv_transfer import process_memory
from kv_transfer.messages import LinkId
from kv_transfer.peer_memory import MAX_REGIONS, PeerMemory
from kv_transfer.process_memory import PIECES_TYPECODE, Pieces
from kv_transfer.transports.base import Landing, Sink
from kv_transfer.transports.local_stream import FrameStream
from kv_transfer.transports.local_wire import (
    ANSWER,
    GREETING_NBYTES,
    PROOF_NBYTES,
    Greeting,
    Mode,
    ProtocolError,
    Verdict,
    pack_reply,
    split_offer,
    split_share,
)
from kv_transfer.wire import DIGEST_AT

logger = logging.getLogger(__name__)

_RECEIVE_NBYTES = 1 << 16
_ANCILLARY_NBYTES = socket.CMSG_SPACE(array("i").itemsize)
"""Of one descriptor at a time."""
_MAX_BATCH = 4
"""Chunks that are copied before any of them is reported. A report wakes the event loop, which then wants the
interpreter, and a core, while the next chunk is to be copied."""
_MAX_GREETINGS = 3
"""To read, to read after consent was given, to stream."""


class OpenLinks(Protocol):
    """What a connection needs to know of the worker's links. Any thread."""

    def of(self, token: bytes) -> LinkId | None:
        """The open link that has this token."""

    def is_open(self, link: LinkId) -> bool:
        """Whether frames of the link are accepted still."""


class LocalConnection:
    """See the module."""

    def __init__(self, connection: socket.socket, pid: int, links: OpenLinks, sink: Sink) -> None:
        """`pid` is the prefill process."""
        self.link: LinkId | None = None
        """Set by an accepted greeting."""
        self.since = time.monotonic()
        self._socket = connection
        self._pid = pid
        self._links = links
        self._sink = sink
        self._memory = PeerMemory(pid)
        self._descriptors: deque[int] = deque()
        """Passed with shares that have not been taken yet."""
        self._num_greetings = 0
        self._received = bytearray()
        self._stream: FrameStream | None = None

    @property
    def socket(self) -> socket.socket:
        """Non-blocking; closed by the mover."""
        return self._socket

    def on_readable(self) -> None:
        """Take what has come: records that are whole, or a part of a streamed frame."""
        if self._stream is not None:
            self._stream.on_readable()
            return
        if self.link is None:
            self._take(self._socket.recv(_RECEIVE_NBYTES))
            self._greet()
        else:
            self._take(self._receive_records())
            while self._take_offers(self.link):
                continue

    def on_closed(self, reason: str) -> None:
        """Unmap what is mapped, and give up a frame that is being streamed."""
        self._memory.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        if self._stream is not None:
            self._stream.on_closed(reason)

    def _take(self, data: bytes) -> None:
        if not data:
            raise EOFError
        self._received += data

    # Greeting ---------------------------------------------------------------------------------------------------------

    def _greet(self) -> None:
        if len(self._received) < GREETING_NBYTES:
            return
        if len(self._received) > GREETING_NBYTES or self._num_greetings == _MAX_GREETINGS:
            raise ProtocolError(f"process {self._pid} does not wait for the answer to its greeting")
        self._num_greetings += 1
        greeting = Greeting.unpack(bytes(self._received))
        self._received.clear()
        link = self._links.of(greeting.token)
        if link is None:
            self._answer(pack_reply(Verdict.UNKNOWN))
            raise ProtocolError(f"process {self._pid} names no open link")
        if greeting.mode is Mode.READ:
            denied = self._why_not_readable(greeting)
            if denied:
                logger.debug("cannot read process %d of link %s: %s", self._pid, link, os.strerror(denied))
                self._answer(pack_reply(Verdict.DENIED, denied))
                return
        else:
            self._stream = FrameStream(self._socket, link, self._sink)
        self.link = link
        self._answer(pack_reply(Verdict.ACCEPTED))

    def _why_not_readable(self, greeting: Greeting) -> int:
        """The errno that keeps this process from reading the proof where the peer says it lies; 0 if nothing does."""
        source = array(PIECES_TYPECODE, (greeting.proof_address, PROOF_NBYTES))
        seen = bytearray(PROOF_NBYTES)
        try:
            process_memory.read(self._pid, source, process_memory.pieces_of([memoryview(seen)]))
        except OSError as error:
            return error.errno or errno.EIO
        # Another process answers to this pid here: the two are in different pid namespaces.
        return 0 if seen == greeting.proof else errno.ESRCH

    def _answer(self, record: bytes) -> None:
        try:
            self._socket.send(record)
        except BlockingIOError as error:
            raise ProtocolError(f"process {self._pid} does not read its answers") from error

    # Offers -----------------------------------------------------------------------------------------------------------

    def _receive_records(self) -> bytes:
        data, ancillary, _, _ = self._socket.recvmsg(_RECEIVE_NBYTES, _ANCILLARY_NBYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array("i")
                descriptors.frombytes(content[: len(content) // descriptors.itemsize * descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if len(self._descriptors) > MAX_REGIONS:
            raise ProtocolError(f"process {self._pid} passes descriptors without saying what for")
        return data

    def _take_offers(self, link: LinkId) -> bool:
        """Copy a batch of what is offered, and report it. False if that was all."""
        copied: list[tuple[Landing, int]] = []
        num_read = 0
        try:
            while len(copied) < _MAX_BATCH:
                if (address := split_share(self._received)) is not None:
                    self._map(address)
                elif (offer := split_offer(self._received)) is not None:
                    if not self._links.is_open(link):
                        raise EOFError
                    landed = self._pull(link, *offer)
                    if landed is not None:
                        copied.append(landed)
                    num_read += 1
                elif not num_read or not self._more_has_come():
                    break
        finally:
            for landing, digest in copied:
                if self._links.is_open(link):
                    landing.finish(digest)
                else:
                    landing.fail("the transport has been fenced")
        if num_read:
            self._answer(ANSWER * num_read)
        return len(copied) == _MAX_BATCH

    def _more_has_come(self) -> bool:
        """While chunks were copied: whether there is something in the socket, which is then received."""
        try:
            self._take(self._receive_records())
        except BlockingIOError:
            return False
        return True

    def _map(self, address: int) -> None:
        if not self._descriptors or self._memory.num_regions == MAX_REGIONS:
            raise ProtocolError(f"process {self._pid} shares memory without a descriptor, or in too many pieces")
        try:
            self._memory.map(address, self._descriptors.popleft())
        except OSError as error:
            logger.warning("cannot map the KV pool of process %d, so the kernel reads it: %s", self._pid, error)

    def _pull(self, link: LinkId, header: bytes, source: Pieces) -> tuple[Landing, int] | None:
        """Read one payload into its place. Gives what is to be finished, and the checksum; None if it is over."""
        landing = self._sink.claim(link, header)
        if landing is None:
            return None
        digest = None
        try:
            nbytes = sum(source[1::2])
            if nbytes != landing.header.payload_nbytes:
                raise ProtocolError(f"offered {nbytes} bytes for a chunk of {landing.header.payload_nbytes}")
            with landing.writing() as views:
                if views is not None:
                    digest = self._memory.copy(header[:DIGEST_AT], source, views)
        except Exception as error:
            # Whatever it was, nobody else will complete this chunk.
            landing.fail(str(error))
            raise
        if digest is None:
            landing.fail("the reservation has ended")
            return None
        return landing, digest
