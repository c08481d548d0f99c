"""What precedes the payload of every message of the `torch` transport: which frame it belongs to, and where."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kv_transfer.wire import HEADER_NBYTES

_MAGIC = b"PDTG"
_FIELDS = struct.Struct(f"<4sIQQ{HEADER_NBYTES}s")
ENVELOPE_NBYTES = 128
"""With room to spare, so that payloads begin at a cache line."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """The message carries bytes [offset, offset + nbytes) of a payload of `payload_nbytes`.

    All zero in a message that only says that its sender is alive.
    """

    header: bytes
    """The frame's header, HEADER_NBYTES long."""
    payload_nbytes: int
    offset: int
    nbytes: int

    def pack(self) -> bytes:
        """ENVELOPE_NBYTES bytes."""
        fields = _FIELDS.pack(_MAGIC, self.nbytes, self.offset, self.payload_nbytes, self.header)
        return fields.ljust(ENVELOPE_NBYTES, b"\0")


ALIVE = Envelope(bytes(HEADER_NBYTES), 0, 0, 0)


def unpack(data: bytes) -> Envelope | None:
    """The envelope in these ENVELOPE_NBYTES bytes; None if they are none."""
    magic, nbytes, offset, payload_nbytes, header = _FIELDS.unpack_from(data)
    return Envelope(header, payload_nbytes, offset, nbytes) if magic == _MAGIC else None
