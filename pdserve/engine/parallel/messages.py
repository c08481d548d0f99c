"""What rank 0 tells the followers: a fixed header, a descriptor for each array, and the arrays' bytes. No pickle.

Both ends are processes of one worker on one host, so numbers are in the machine's own byte order.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_MAGIC: Final = b"PDTP"
_HEADER = struct.Struct("=4sHHQ")
"""Magic, kind, number of arrays, bytes that follow."""
_DESCRIPTOR = struct.Struct("=BBHII")
"""Index in `_DTYPES`, number of axes (1 or 2), 0, and the two axes."""
_DTYPES: Final = tuple(np.dtype(name) for name in ("uint8", "int32", "uint32", "int64", "uint64", "float32", "float64"))
_ALIGNMENT = 8
MAX_NBYTES = 1 << 30
"""Longer messages are not ours. A batch has some kilobytes, blocks of KV some megabytes."""


class Kind(enum.IntEnum):
    """What a message is about."""

    START = 1
    """To a follower: its settings, JSON."""
    READY = 2
    """From a follower: the model is loaded."""
    FAILED = 3
    """From a follower: it cannot be, JSON with the error."""
    JOIN = 4
    """To a follower: form the group."""
    FORWARD = 10
    """A batch to compute, see `batch_codec`."""
    DRAW = 11
    """Propose tokens for the logit rows of that batch; the masks of masked rows, uint32."""
    GATHER = 12
    """Send the logits of these rows, int64, as `DRAW` has edited them."""
    GATHER_RAW = 13
    """Send the raw logits of all logit rows."""
    SCORE_DRAWN = 14
    """Report log-probabilities of the drawn tokens, int64, of the rows that want them."""
    SCORE_PROMPT = 15
    """Report those of the prompt tokens that the batch names."""
    READ = 20
    """Send the bytes of some blocks."""
    WRITE = 21
    """Store bytes in some blocks."""
    COPY = 22
    """Copy one block to another."""
    DONE = 23
    """Answer to the last three, with the bytes read."""


class ChannelClosedError(Exception):
    """The other end has gone."""


class ProtocolError(Exception):
    """What came is no message of ours."""


class Channel:
    """One end of a socket pair between rank 0 and one follower. One thread at each end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, kind: Kind, arrays: Sequence[Array] = ()) -> None:
        """Raises ChannelClosedError if the other end has gone, TimeoutError if it does not read."""
        self.send_packed(pack(kind, arrays))

    def send_packed(self, message: bytes) -> None:
        """As `send`, what `pack` has made: for who tells several the same."""
        try:
            self._socket.sendall(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosedError("the other rank has gone") from error

    def receive(self) -> tuple[Kind, list[Array]]:
        """The next message; its arrays are writable and the caller's own.

        Raises ChannelClosedError when the other end has gone, TimeoutError by the socket's time-out, ProtocolError.
        """
        magic, kind, num_arrays, nbytes = _HEADER.unpack(self._read(_HEADER.size))
        if magic != _MAGIC or nbytes > MAX_NBYTES:
            raise ProtocolError(f"no message of a rank: {magic!r}, {nbytes} bytes")
        return Kind(kind), _unpack_arrays(self._read(nbytes), num_arrays)

    def set_timeout(self, seconds: float | None) -> None:
        """Of every wait from now on; None: for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """The other end sees it at once."""
        self._socket.close()

    def _read(self, nbytes: int) -> bytearray:
        data = bytearray(nbytes)
        view, done = memoryview(data), 0
        while done < nbytes:
            try:
                got = self._socket.recv_into(view[done:])
            except ConnectionResetError:
                got = 0
            if not got:
                raise ChannelClosedError("the other rank has gone")
            done += got
        return data


def pack(kind: Kind, arrays: Sequence[Array] = ()) -> bytes:
    """A message. Arrays have one or two axes and a type of `_DTYPES`."""
    parts = [b"".join(_descriptor(array) for array in arrays)]
    parts[0] += bytes(-len(parts[0]) % _ALIGNMENT)
    for array in arrays:
        data = np.ascontiguousarray(array).tobytes()
        parts += (data, bytes(-len(data) % _ALIGNMENT))
    body = b"".join(parts)
    return _HEADER.pack(_MAGIC, kind, len(arrays), len(body)) + body


def _descriptor(array: Array) -> bytes:
    assert array.ndim in (1, 2), f"an array of {array.ndim} axes"
    return _DESCRIPTOR.pack(_DTYPES.index(array.dtype), array.ndim, 0, array.shape[0], array.shape[-1])


def _unpack_arrays(body: bytearray, num_arrays: int) -> list[Array]:
    arrays: list[Array] = []
    begin = num_arrays * _DESCRIPTOR.size
    begin += -begin % _ALIGNMENT
    try:
        for index in range(num_arrays):
            code, ndim, _, rows, columns = _DESCRIPTOR.unpack_from(body, index * _DESCRIPTOR.size)
            dtype, count = _DTYPES[code], rows if ndim == 1 else rows * columns
            array = np.frombuffer(body, dtype, count, begin)
            arrays.append(array if ndim == 1 else array.reshape(rows, columns))
            begin += array.nbytes + -array.nbytes % _ALIGNMENT
    except (struct.error, ValueError, IndexError) as error:
        raise ProtocolError(f"a message with {num_arrays} arrays in {len(body)} bytes: {error}") from error
    return arrays


def from_json(value: dict[str, Any]) -> Array:
    """Settings as an array, for messages that are about a process and not about a batch."""
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def to_json(array: Array) -> dict[str, Any]:
    """The inverse. Raises ProtocolError."""
    try:
        value = json.loads(array.tobytes())
    except ValueError as error:
        raise ProtocolError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"not an object: {type(value).__name__}")
    return value
