"""A thread that moves the bytes of many connections: neither the event loop nor a busy one holds up the other.

It owns the sockets it is given: only the thread itself reads or closes them, so that a file descriptor is never closed
under a read.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from kv_transfer.transports.local_connection import LocalConnection
from kv_transfer.transports.local_wire import ProtocolError
from kv_transfer.wire import FrameError
from pdserve.security.refusals import Refusal, Refusals

logger = logging.getLogger(__name__)


class Mover:
    """The thread, from `start` to `stop`. Other methods may be called from any thread."""

    def __init__(self, name: str, strangers: Refusals) -> None:
        """`strangers` is the account of connections that were never accepted."""
        self._strangers = strangers
        self._connections: set[LocalConnection] = set()
        self._selector = selectors.DefaultSelector()
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin to serve connections."""
        self._thread.start()

    def stop(self) -> None:
        """Close every connection and end the thread; waits for the round of connections that it is in. Call once."""

        def end() -> None:
            self._stopping = True

        self._do(end)
        self._thread.join()
        os.close(self._wake)

    def adopt(self, connection: LocalConnection) -> None:
        """Serve this connection from now on."""

        def add() -> None:
            self._selector.register(connection.socket, selectors.EVENT_READ, connection)
            self._connections.add(connection)

        self._do(add)

    def drop(self, unwanted: Callable[[LocalConnection], bool], reason: str) -> None:
        """Close the connections for which `unwanted` is true; it is called in the mover's thread."""

        def close() -> None:
            for connection in [each for each in self._connections if unwanted(each)]:
                self._close(connection, reason)

        self._do(close)

    def _do(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select():
                if key.data is None:
                    os.eventfd_read(self._wake)
                elif key.data in self._connections:
                    self._guarded(partial(self._serve, key.data))
                # Between any two turns, so that a fence does not wait for a busy round.
                while self._commands:
                    self._guarded(self._commands.popleft())
        for connection in list(self._connections):
            self._guarded(partial(self._close, connection, "this worker is shutting down"))
        self._selector.close()

    @staticmethod
    def _guarded(step: Callable[[], None]) -> None:
        """A bug met by one connection must not end the thread that serves all others."""
        try:
            step()
        except Exception:
            logger.exception("the mover of local KV connections met an error")

    def _serve(self, connection: LocalConnection) -> None:
        try:
            connection.on_readable()
        except BlockingIOError:
            return
        except EOFError:
            self._close(connection, "the other end has closed the connection")
        except (OSError, FrameError, ProtocolError) as error:
            if connection.link is not None:
                logger.warning("closing a local KV connection: %s", error)
            self._close(connection, str(error))
        except Exception:
            self._close(connection, "internal error; see the log of this worker")
            raise

    def _close(self, connection: LocalConnection, reason: str) -> None:
        self._connections.remove(connection)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        connection.on_closed(reason)
        if connection.link is None:
            self._strangers.note(Refusal.TOKEN, "this host", reason)
