"""How the prefill side of a `local` connection finds the decode worker, and what they agree on."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
from collections.abc import Mapping

from kv_transfer.process_memory import PTRACE_CONSENT, pieces_of
from kv_transfer.transports.base import TransportUnavailable
from kv_transfer.transports.local_wire import (
    PROOF_NBYTES,
    REPLY_NBYTES,
    STREAM_ONLY,
    Greeting,
    Mode,
    ProtocolError,
    Verdict,
    peer_of,
    unpack_reply,
)

logger = logging.getLogger(__name__)


class Greeter:
    """Opens the connection of one link. `withdraw` in the end."""

    def __init__(self, attributes: Mapping[str, str], peer: str) -> None:
        """`attributes` are those of the decode worker's endpoint; `peer` names it in messages."""
        self._attributes = attributes
        self._peer = peer
        self._pid_with_consent: int | None = None
        self.mode = Mode.STREAM if attributes.get("mode") == STREAM_ONLY else Mode.READ
        """How payload will move: STREAM if the decode worker can read nobody, or was denied reading this process."""

    async def connect(self) -> socket.socket:
        """A connection that is accepted for `mode`, non-blocking. Raises TransportUnavailable."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            # Of a Unix socket this neither blocks nor has to be waited for.
            connection.connect("\0" + self._attributes["socket"])
            pid, uid = peer_of(connection)
            if uid != os.geteuid():
                raise TransportUnavailable(f"{self._peer} belongs to user {uid}, this worker to {os.geteuid()}")
            await self._agree(connection, pid)
        except KeyError as error:
            connection.close()
            raise TransportUnavailable(f"{self._peer} does not say its {error}") from error
        except (OSError, EOFError, ValueError, ProtocolError) as error:
            connection.close()
            raise TransportUnavailable(f"{self._peer}: {error}") from error
        except BaseException:
            connection.close()
            raise
        return connection

    def withdraw(self) -> None:
        """Take back the consent to be read, if it was given. Idempotent."""
        if self._pid_with_consent is not None:
            PTRACE_CONSENT.withdraw(self._pid_with_consent)
            self._pid_with_consent = None

    async def _agree(self, connection: socket.socket, pid: int) -> None:
        if self.mode is Mode.READ:
            denied = await self._greet(connection, Mode.READ)
            if denied == errno.EPERM and self._pid_with_consent is None and PTRACE_CONSENT.give(pid):
                self._pid_with_consent = pid
                denied = await self._greet(connection, Mode.READ)
            if not denied:
                return
            logger.warning(
                "%s may not read the memory of this worker (%s): KV goes through a socket instead, at less speed; "
                "see kernel.yama.ptrace_scope and CAP_SYS_PTRACE",
                self._peer,
                os.strerror(denied),
            )
            self.mode = Mode.STREAM
        await self._greet(connection, Mode.STREAM)

    async def _greet(self, connection: socket.socket, mode: Mode) -> int:
        """Say what we want. Returns 0, or the errno with which reading was denied."""
        loop = asyncio.get_running_loop()
        proof = secrets.token_bytes(PROOF_NBYTES)
        token = bytes.fromhex(self._attributes["token"])
        address = pieces_of([memoryview(proof)])[0]
        await loop.sock_sendall(connection, Greeting(mode, token, address, proof).pack())
        reply = b""
        while len(reply) < REPLY_NBYTES:
            data = await loop.sock_recv(connection, REPLY_NBYTES - len(reply))
            if not data:
                raise EOFError("it closed the connection during the greeting")
            reply += data
        verdict, denied = unpack_reply(reply)
        if verdict is Verdict.UNKNOWN:
            raise ProtocolError("it does not know this link, or its token is wrong")
        if verdict is Verdict.DENIED and (mode is not Mode.READ or denied == 0):
            raise ProtocolError(f"it denied mode {mode.name} with error {denied}")
        return denied
