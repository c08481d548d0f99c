"""What the two ends of a `local` connection say to each other over their Unix socket.

The prefill worker connects and greets until a greeting is accepted; then it sends offers (mode READ) or frames (mode
STREAM). Before the first offer out of shared memory it passes a descriptor of that memory, if the decode worker has
said that it maps such (attribute MAPS). All integers are in the byte order of the host that both are on.

    greeting   P to D   magic "PDKL", version u8, mode u8, 2 x 0, token 32 B, proof: address u64 and 32 B at it
    reply      D to P   verdict u8, 3 x 0, errno i32
    share      P to D   magic "PDKM", 4 x 0, address of the memory at P u64; with it one descriptor (SCM_RIGHTS)
    offer      P to D   magic "PDKO", number of pieces u32, frame header 64 B, per piece address u64 and length u64
    answer     D to P   1 byte for each offer, in order: it has been read, or is not wanted
"""

from __future__ import annotations

import enum
import os
import socket
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from kv_transfer.process_memory import PIECES_TYPECODE, Pieces
from kv_transfer.wire import HEADER_NBYTES

NAME = "local"
VERSION = 1
TOKEN_NBYTES = 32
PROOF_NBYTES = 32
MAX_PIECES = 1 << 14
"""Of one offer: 1 MiB in pieces of 64 bytes. More is damage or mischief."""
STREAM_ONLY = "stream"
"""Of the attribute "mode" in the decode worker's endpoint, if it cannot read any process."""
MAPS = "maps"
"""Attribute of the decode worker's endpoint, "1" if it maps shared memory."""
ANSWER = b"\x01"

_GREETING = struct.Struct(f"=4sBBxx{TOKEN_NBYTES}sQ{PROOF_NBYTES}s")
_GREETING_MAGIC = b"PDKL"
_REPLY = struct.Struct("=Bxxxi")
_OFFER = struct.Struct(f"=4sI{HEADER_NBYTES}s")
_OFFER_MAGIC = b"PDKO"
_PIECE_NBYTES = 16
_SHARE = struct.Struct("=4s4xQ")
_SHARE_MAGIC = b"PDKM"
_CREDENTIALS = struct.Struct("=iII")

GREETING_NBYTES = _GREETING.size
REPLY_NBYTES = _REPLY.size


class ProtocolError(Exception):
    """The other end does not speak this protocol; the connection is of no use."""


class Mode(enum.IntEnum):
    """How payload moves over a connection."""

    READ = 1
    """The decode worker reads it from the prefill worker's memory."""
    STREAM = 2
    """It follows each frame header in the socket."""


class Verdict(enum.IntEnum):
    """The decode worker's answer to a greeting."""

    ACCEPTED = 1
    DENIED = 2
    """It may not read the prefill worker's memory, `errno` says why; greet again, or in the other mode."""
    UNKNOWN = 3
    """No open link has this token."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """First record of a connection."""

    mode: Mode
    token: bytes
    proof_address: int
    """Where `proof` lies in the memory of the prefill worker: whether the decode worker can read it there decides."""
    proof: bytes

    def pack(self) -> bytes:
        """The record."""
        return _GREETING.pack(_GREETING_MAGIC, VERSION, self.mode, self.token, self.proof_address, self.proof)

    @classmethod
    def unpack(cls, record: bytes) -> Self:
        """Raises ProtocolError."""
        magic, version, mode, token, address, proof = _GREETING.unpack(record)
        if (magic, version) != (_GREETING_MAGIC, VERSION) or mode not in tuple(Mode):
            raise ProtocolError(f"greeted with magic {magic!r}, version {version}, mode {mode}")
        return cls(Mode(mode), token, address, proof)


def pack_reply(verdict: Verdict, errno: int = 0) -> bytes:
    """A reply to a greeting."""
    return _REPLY.pack(verdict, errno)


def unpack_reply(record: bytes) -> tuple[Verdict, int]:
    """Verdict and errno of a reply. Raises ProtocolError."""
    verdict, errno = _REPLY.unpack(record)
    if verdict not in tuple(Verdict):
        raise ProtocolError(f"replied with verdict {verdict}")
    return Verdict(verdict), errno


def pack_offer(header: bytes, pieces: Pieces) -> bytes:
    """An offer of one frame whose payload lies in `pieces`, at most `MAX_PIECES`."""
    return _OFFER.pack(_OFFER_MAGIC, len(pieces) // 2, header) + pieces.tobytes()


def pack_share(address: int) -> bytes:
    """Says what the descriptor that goes with it is: memory that the prefill worker has at this address."""
    return _SHARE.pack(_SHARE_MAGIC, address)


def split_share(received: bytearray) -> int | None:
    """The address, if `received` begins with a whole share, which is taken out; None if not."""
    if len(received) < _SHARE.size or not received.startswith(_SHARE_MAGIC):
        return None
    _, address = _SHARE.unpack_from(received)
    del received[: _SHARE.size]
    return int(address)


def split_offer(received: bytearray) -> tuple[bytes, Pieces] | None:
    """Header and pieces of the offer at the front of `received`, which is taken out; None if it is not whole yet.

    Raises ProtocolError if it is none.
    """
    if len(received) < _OFFER.size:
        return None
    magic, num_pieces, header = _OFFER.unpack_from(received)
    if magic != _OFFER_MAGIC or num_pieces > MAX_PIECES:
        raise ProtocolError(f"offered {num_pieces} pieces with magic {magic!r}; at most {MAX_PIECES} are allowed")
    end = _OFFER.size + num_pieces * _PIECE_NBYTES
    if len(received) < end:
        return None
    pieces = array(PIECES_TYPECODE, bytes(received[_OFFER.size : end]))
    del received[:end]
    return header, pieces


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other end when it connected, or listened, from the kernel."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def where_am_i() -> dict[str, str]:
    """Equal for two processes that can meet here: same boot of the host, process ids, names of abstract sockets, user.

    Empty where the kernel does not say.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespaces = [str(Path("/proc/self/ns", name).stat().st_ino) for name in ("pid", "net")]
    except OSError:
        return {}
    return {"host": "/".join((boot, *namespaces)), "user": str(os.geteuid())}
