"""The decode side of the `local` transport: a Unix socket to meet at, and a thread that pulls.

The socket is abstract (it has no file, so a killed worker leaves none behind). Who connects is known from the kernel:
the same user is required, and the token of the link, which only its control stream carries. Anything else about a peer
is checked by what it offers: a wrong address fails the read, wrong bytes fail the checksum. That is also what makes
late reads harmless: a chunk that is read after the prefill worker has given it up, and used its blocks for something
else, has not the checksum it was offered with and is refused.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
import time
from hashlib import blake2b

import grpc

from kv_transfer import process_memory
from kv_transfer.copy_kernel import copy_kernel
from kv_transfer.messages import LinkId
from kv_transfer.transports.base import Endpoint, Sink, new_accounts
from kv_transfer.transports.local_connection import LocalConnection
from kv_transfer.transports.local_mover import Mover
from kv_transfer.transports.local_wire import (
    MAPS,
    NAME,
    STREAM_ONLY,
    TOKEN_NBYTES,
    peer_of,
    where_am_i,
)
from pdserve.security.refusals import Refusal, Refusals

logger = logging.getLogger(__name__)

_BACKLOG = 128
_GREETING_TIMEOUT_S = 5.0
"""A connection that has not greeted by then is closed when the next one comes."""
_ACCEPT_PAUSE_S = 1.0


class _Links:
    """Open links by token. Changed in the event loop, read in any thread (single dict operations are atomic)."""

    def __init__(self) -> None:
        self._by_digest: dict[bytes, LinkId] = {}
        self._digests: dict[LinkId, bytes] = {}

    def add(self, link: LinkId) -> str:
        """A token for this link, in hex."""
        token = secrets.token_bytes(TOKEN_NBYTES)
        # Looked up by its digest: how long that takes says nothing of the tokens there are.
        digest = blake2b(token).digest()
        self._by_digest[digest] = link
        self._digests[link] = digest
        return token.hex()

    def remove(self, link: LinkId) -> bool:
        """False if it was not there."""
        digest = self._digests.pop(link, None)
        return digest is not None and self._by_digest.pop(digest, None) is not None

    def of(self, token: bytes) -> LinkId | None:
        """The open link that has this token."""
        return self._by_digest.get(blake2b(token).digest())

    def is_open(self, link: LinkId) -> bool:
        """Whether frames of the link are accepted still."""
        return link in self._digests

    def all(self) -> list[LinkId]:
        """Every open link."""
        return list(self._digests)


class LocalReceiver:
    """See the module and `ReceivingTransport`."""

    def __init__(self, incarnation: str, sink: Sink, strangers: Refusals | None = None) -> None:
        """`strangers` is the account of those that may not send; without one it is kept all the same."""
        self._sink = sink
        self._strangers = strangers or new_accounts()[NAME]
        # Names of sockets are at most 107 bytes long.
        self._name = f"\0pdserve-kv-{incarnation[:40]}-{secrets.token_hex(8)}"
        self._where: dict[str, str] = {}
        self._stream_only = False
        self._links = _Links()
        self._mover: Mover | None = None
        self._listener: socket.socket | None = None
        self._pause: asyncio.TimerHandle | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Needs nothing of the gRPC server."""

    async def start(self) -> None:
        """Compile what copies, if it can be, and listen.

        Where the host does not allow listening, no link gets this transport, and the log says why.
        """
        # Now, and not with the first chunk; nor with a listener in hand, as this may be cancelled while it waits.
        await asyncio.to_thread(copy_kernel)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._name)
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            logger.warning("the local KV transport is not available: %s", error)
            return
        self._where = where_am_i()
        refused = _why_no_reads()
        if refused:
            self._stream_only = True
            logger.warning("KV of local peers comes through a socket: process_vm_readv gives %s", os.strerror(refused))
        self._listener = listener
        self._mover = Mover("kv-local-mover", self._strangers)
        self._mover.start()
        asyncio.get_running_loop().add_reader(listener, self._accept)

    async def aclose(self) -> None:
        """Fence every link, close the socket and end the threads."""
        for link in self._links.all():
            self.fence(link)
        if self._pause is not None:
            self._pause.cancel()
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        if self._mover is not None:
            mover, self._mover = self._mover, None
            await asyncio.to_thread(mover.stop)

    def open(self, link: LinkId, offer: Endpoint) -> Endpoint | None:
        """Accept connections for this link; None if the prefill worker is on another host or another user's."""
        if self._listener is None or not self._where or dict(offer.attributes) != self._where:
            return None
        attributes = {"socket": self._name.removeprefix("\0"), "token": self._links.add(link), MAPS: "1"}
        if self._stream_only:
            attributes["mode"] = STREAM_ONLY
        return Endpoint(NAME, attributes)

    def fence(self, link: LinkId) -> None:
        """Accept nothing of this link any more, and close its connections."""
        if self._links.remove(link) and self._mover is not None:
            self._mover.drop(lambda connection: connection.link == link, "the transport has been fenced")

    # Connections ------------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None and self._mover is not None
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # Out of file descriptors, say: the listener stays readable, so look away for a while.
            logger.warning("cannot accept a local KV connection: %s", error)
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._listener)
            self._pause = loop.call_later(_ACCEPT_PAUSE_S, loop.add_reader, self._listener, self._accept)
            return
        connection.setblocking(False)
        pid, uid = peer_of(connection)
        if uid != os.geteuid():
            self._strangers.note(Refusal.TOKEN, f"process {pid}", f"it belongs to user {uid}")
            connection.close()
            return
        self._mover.drop(_late, "it did not greet in time")
        self._mover.adopt(LocalConnection(connection, pid, self._links, self._sink))


def _late(connection: LocalConnection) -> bool:
    return connection.link is None and time.monotonic() - connection.since > _GREETING_TIMEOUT_S


def _why_no_reads() -> int:
    """The errno with which this process cannot even read itself (a seccomp filter, an old kernel); 0 if it can."""
    proof = secrets.token_bytes(TOKEN_NBYTES)
    seen = bytearray(TOKEN_NBYTES)
    source, destination = (process_memory.pieces_of([memoryview(each)]) for each in (proof, seen))
    try:
        process_memory.read(os.getpid(), source, destination)
    except OSError as error:
        return error.errno or errno.EIO
    return 0 if seen == proof else errno.EIO
