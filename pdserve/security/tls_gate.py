"""Handshakes in front of an asyncio server, so that those that fail are known.

asyncio's own TLS server tells nobody of a handshake that fails. Here the connection is accepted first and upgraded
then; what the client sends right behind its handshake waits until the protocol that is to take it is there.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import Final

from pdserve.security.refusals import Refusal, Refusals

HANDSHAKE_S: Final = 10.0
"""Longest handshake."""
MAX_HANDSHAKES: Final = 1024
"""At once; a connection beyond them is cut off."""


class TlsGate:
    """Makes protocols for `loop.create_server` that become others after the handshake."""

    def __init__(
        self,
        context: Callable[[], ssl.SSLContext],
        protocol: Callable[[], asyncio.Protocol],
        refusals: Refusals,
        *,
        allowed: Callable[[ssl.SSLObject], bool] | None = None,
    ) -> None:
        """`context` gives the one for a connection that begins now. `allowed` looks at who has come."""
        self._context = context
        self._protocol = protocol
        self._refusals = refusals
        self._allowed = allowed
        self._tasks: set[asyncio.Task[None]] = set()

    def __call__(self) -> asyncio.Protocol:
        """The factory."""
        return _Waiting(self)

    async def aclose(self) -> None:
        """Cut off whoever is in the middle of a handshake."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def accept(self, transport: asyncio.Transport, waiting: _Waiting) -> None:
        """Of `_Waiting`."""
        if len(self._tasks) >= MAX_HANDSHAKES:
            transport.abort()
            return
        task = asyncio.create_task(self._upgrade(transport, waiting), name="tls-handshake")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _upgrade(self, transport: asyncio.Transport, waiting: _Waiting) -> None:
        peer = str((transport.get_extra_info("peername") or ("",))[0])
        try:
            secure = await asyncio.get_running_loop().start_tls(
                transport, waiting, self._context(), server_side=True, ssl_handshake_timeout=HANDSHAKE_S
            )
        except (OSError, TimeoutError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else None
            self._refusals.note(Refusal.HANDSHAKE, peer, str(reason or error or type(error).__name__))
            transport.abort()
            return
        except asyncio.CancelledError:
            transport.abort()
            raise
        if secure is None:
            # Gone between the handshake and now.
            return
        if self._allowed is not None and not self._allowed(secure.get_extra_info("ssl_object")):
            self._refusals.note(Refusal.ROLE, peer, "the certificate is not that of a process of this cluster")
            secure.abort()
            return
        waiting.become(self._protocol(), secure)


class _Waiting(asyncio.Protocol):
    """Keeps what comes until somebody takes it."""

    def __init__(self, gate: TlsGate) -> None:
        self._gate = gate
        self._seen = False
        self._data = bytearray()
        self._eof = False
        self._lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Of the connection as it was accepted, not of the secure one."""
        if not self._seen:
            self._seen = True
            assert isinstance(transport, asyncio.Transport)
            self._gate.accept(transport, self)

    def data_received(self, data: bytes) -> None:
        """Decrypted."""
        self._data += data

    def eof_received(self) -> None:
        """The client will send no more."""
        self._eof = True

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing to hand over any more."""
        self._lost = True

    def become(self, protocol: asyncio.Protocol, transport: asyncio.Transport) -> None:
        """Hand over."""
        if self._lost:
            return
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if self._data:
            protocol.data_received(bytes(self._data))
        if self._eof:
            protocol.eof_received()
            transport.close()
