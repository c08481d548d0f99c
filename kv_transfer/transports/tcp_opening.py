"""How a connection of the `tcp` transport begins: who it is for, and the proof that it may be.

opening, 56 bytes                          answer, 8 bytes
0   magic "PDKT"     8   link key          0   magic "PDKT"
4   version    u16   24  token             4   version    u16
6   reserved   u16                         6   reserved   u16
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
from dataclasses import dataclass

_MAGIC = b"PDKT"
_VERSION = 1
_KEY_NBYTES = 16
_TOKEN_NBYTES = 32
_OPENING = struct.Struct(f"<4sHH{_KEY_NBYTES}s{_TOKEN_NBYTES}s")
OPENING_NBYTES = _OPENING.size
ANSWER = struct.pack("<4sHH", _MAGIC, _VERSION, 0)
"""What the decode worker says to an opening that it accepts. It closes the connection otherwise."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a connection must show to carry frames of a link."""

    key: bytes
    """Which link. Not secret."""
    token: bytes
    """Secret."""

    @classmethod
    def fresh(cls) -> Credentials:
        """For a new link."""
        return cls(secrets.token_bytes(_KEY_NBYTES), secrets.token_bytes(_TOKEN_NBYTES))

    @classmethod
    def parse(cls, key: str, token: str) -> Credentials:
        """From hexadecimal digits. Raises ValueError if they are none, or not as many as they must be."""
        credentials = cls(bytes.fromhex(key), bytes.fromhex(token))
        if (len(credentials.key), len(credentials.token)) != (_KEY_NBYTES, _TOKEN_NBYTES):
            raise ValueError("key or token of the wrong length")
        return credentials

    def opening(self) -> bytes:
        """The first bytes of a connection."""
        return _OPENING.pack(_MAGIC, _VERSION, 0, self.key, self.token)

    def match(self, opening: Credentials) -> bool:
        """Whether an opening shows these. Takes the same time for every wrong token."""
        return hmac.compare_digest(self.token, opening.token)


def read_opening(data: bytes) -> Credentials | None:
    """What the first bytes of a connection show; None if they are not an opening that this version knows."""
    magic, version, _, key, token = _OPENING.unpack(data)
    return Credentials(key, token) if (magic, version) == (_MAGIC, _VERSION) else None


def shut_down(connection: socket.socket) -> None:
    """Break a connection that another thread may be using: its calls return."""
    with contextlib.suppress(OSError):  # it was not, or is no longer, connected
        connection.shutdown(socket.SHUT_RDWR)
