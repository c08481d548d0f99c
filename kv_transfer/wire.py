"""Chunk frames: the bytes a transport moves. A fixed little-endian header, then the payload.

    0   magic "PDKV"      16  attempt    u32    32  token_begin u32    48  payload_bytes u32
    4   version    u16    20  seq        u32    36  token_end   u32    52  reserved (0)  u32
    6   dtype code u16    24  layer_begin u16   40  head_begin  u16    56  xxh3_64       u64
    8   ticket nonce u64  26  layer_end   u16   42  head_end    u16    64  payload
                          28  reserved (0) u32  44  reserved (0) u32

The checksum covers the first 56 bytes and the payload, so a flipped bit anywhere is seen. Ranges are tokens x layers x
heads, never block numbers of one side. Nothing here knows of reservations; the receiver decides what is wanted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import xxhash

from kv_transfer.copying import fill_in, joined
from kv_transfer.process_memory import pieces_of
from pdserve.errors import HandoffError

MAGIC = b"PDKV"
VERSION = 1
DTYPE_CODES = {"float32": 1, "float16": 2, "bfloat16": 3, "int8": 4, "float8_e4m3": 5}
"""Of the values in the payload: those of the pool, or what a codec makes of them."""
_DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}

_FIELDS = struct.Struct("<4sHHQIIHHIIIHHIII")
_HASH = struct.Struct("<Q")
HEADER_NBYTES = _FIELDS.size + _HASH.size
DIGEST_AT = _FIELDS.size
"""Where in the header the checksum is; what comes before is covered by it."""


class FrameError(HandoffError):
    """A frame that is damaged or not ours. `nonce` and `seq` are what it claims, if it has a whole header of ours."""

    def __init__(self, message: str, *, nonce: int | None = None, seq: int | None = None) -> None:
        super().__init__(message)
        self.nonce = nonce
        self.seq = seq


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """Everything a frame says of its payload."""

    nonce: int
    attempt: int
    seq: int
    dtype: str
    layer_begin: int
    layer_end: int
    token_begin: int
    token_end: int
    head_begin: int
    head_end: int
    payload_nbytes: int


class Frame:
    """A frame to send: the header, and views of the source that nobody has copied yet.

    The source is read, and the checksum computed, when `payload` or `header` is first asked for. That may take
    milliseconds (a GPU pool, a coded payload), so a transport does it in its own thread. One thread at a time.
    """

    __slots__ = ("_header", "_payload", "_read", "chunk", "lost")

    def __init__(
        self,
        chunk: ChunkHeader,
        read: Callable[[], Sequence[memoryview]],
        lost: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`read` gives C-contiguous views, together `chunk.payload_nbytes` long (a bug otherwise)."""
        self.chunk = chunk
        self.lost = lost
        """To be called in the event loop, with the reason, by a transport that finds out after the post that the frame
        does not arrive."""
        self._read = read
        self._payload: Sequence[memoryview] | None = None
        self._header: bytes | None = None

    @property
    def payload(self) -> Sequence[memoryview]:
        """Views of the source, in payload order."""
        if self._payload is None:
            payload = self._read()
            assert sum(view.nbytes for view in payload) == self.chunk.payload_nbytes, "payload differs from its header"
            self._payload = payload
        return self._payload

    @property
    def header(self) -> bytes:
        """The header with its checksum."""
        if self._header is None:
            fields = _pack(self.chunk)
            digest = xxhash.xxh3_64(fields)
            for view in self.payload:
                digest.update(view)
            self._header = fields + _HASH.pack(digest.intdigest())
        return self._header

    @property
    def nbytes(self) -> int:
        """Header and payload."""
        return HEADER_NBYTES + self.chunk.payload_nbytes

    def join(self) -> bytes:
        """One contiguous copy, for transports that need it. After this the source is not read again."""
        fields = _pack(self.chunk)
        data, digest = joined(fields, HEADER_NBYTES, pieces_of(self.payload))
        fill_in(data, fields + _HASH.pack(digest))
        return data


def _pack(header: ChunkHeader) -> bytes:
    return _FIELDS.pack(
        MAGIC,
        VERSION,
        DTYPE_CODES[header.dtype],
        header.nonce,
        header.attempt,
        header.seq,
        header.layer_begin,
        header.layer_end,
        0,
        header.token_begin,
        header.token_end,
        header.head_begin,
        header.head_end,
        0,
        header.payload_nbytes,
        0,
    )


def encode(header: ChunkHeader, payload: Sequence[memoryview]) -> Frame:
    """Frame of `payload`, whose views are C-contiguous and together `header.payload_nbytes` long (a bug otherwise)."""
    assert sum(view.nbytes for view in payload) == header.payload_nbytes, "payload does not match its header"
    return Frame(header, lambda: payload)


def digest_of(header: bytes | memoryview) -> xxhash.xxh3_64:
    """The running checksum of a frame after its header, to be updated with the payload."""
    return xxhash.xxh3_64(header[: _FIELDS.size])


def payload_nbytes(header: bytes) -> int:
    """Length of the payload that these 64 bytes announce; to be trusted only if `decode_header` takes them."""
    return int(_FIELDS.unpack_from(header)[14])


def decode_header(header: bytes) -> tuple[ChunkHeader, int]:
    """What 64 header bytes say, and the checksum that they announce; whether it is right shows with the payload.

    Raises FrameError: foreign, other version, unknown dtype, empty range.
    """
    return _unpack(memoryview(header)), int(_HASH.unpack_from(header, _FIELDS.size)[0])


def decode(frame: bytes | bytearray | memoryview) -> tuple[ChunkHeader, memoryview]:
    """Header and payload (a view of `frame`) of an undamaged frame.

    Raises FrameError, which says what is wrong: too short, foreign, other version, unknown dtype, empty range, length
    that differs from the header's, checksum that differs.
    """
    view = memoryview(frame)
    if view.nbytes < HEADER_NBYTES:
        raise FrameError(f"chunk frame of {view.nbytes} bytes is shorter than its header ({HEADER_NBYTES})")
    claimed = _FIELDS.unpack_from(view)
    payload = view[HEADER_NBYTES:]
    if claimed[0] == MAGIC and claimed[1] == VERSION:
        nonce, seq, expected_nbytes = claimed[3], claimed[5], claimed[14]
        if payload.nbytes != expected_nbytes:
            message = f"chunk {seq}: payload of {payload.nbytes} bytes, header says {expected_nbytes}"
            raise FrameError(message, nonce=nonce, seq=seq)
        digest = digest_of(view[:HEADER_NBYTES])
        digest.update(payload)
        if digest.intdigest() != _HASH.unpack_from(view, _FIELDS.size)[0]:
            raise FrameError(f"chunk {seq}: checksum differs", nonce=nonce, seq=seq)
    return _unpack(view), payload


def _unpack(view: memoryview) -> ChunkHeader:
    fields = _FIELDS.unpack_from(view)
    magic, version, dtype_code, nonce, attempt, seq, layer_begin, layer_end, reserved_1 = fields[:9]
    token_begin, token_end, head_begin, head_end, reserved_2, nbytes, reserved_3 = fields[9:]
    if magic != MAGIC:
        raise FrameError(f"not a chunk frame: starts with {magic!r}, expected {MAGIC!r}")

    def bad(what: str) -> FrameError:
        return FrameError(f"chunk {seq}: {what}", nonce=nonce, seq=seq)

    if version != VERSION:
        raise bad(f"frame version {version}, this worker speaks {VERSION}")
    if dtype_code not in _DTYPE_NAMES or (reserved_1, reserved_2, reserved_3) != (0, 0, 0):
        raise bad(f"dtype code {dtype_code} or a reserved field is unknown to this worker")
    if layer_begin >= layer_end or token_begin >= token_end or head_begin >= head_end:
        raise bad("empty layer, token or head range")
    return ChunkHeader(
        nonce=nonce,
        attempt=attempt,
        seq=seq,
        dtype=_DTYPE_NAMES[dtype_code],
        layer_begin=layer_begin,
        layer_end=layer_end,
        token_begin=token_begin,
        token_end=token_end,
        head_begin=head_begin,
        head_end=head_end,
        payload_nbytes=nbytes,
    )
