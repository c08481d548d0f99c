"""How redis says which blocks a worker holds: what an announcement looks like, and what is made of one that was read.

A worker process keeps the set of the names of its blocks (`blocks:{worker}:{incarnation}`), and beside it a stream of
the latest changes (`events:{worker}`), which all processes under one worker id share. Each entry is numbered by its
process: 1, 2, 3 ... A reader that has all of them in order knows the set; one that has missed some reads the set, and
then what was added to the stream since before it began: whatever changed meanwhile is said again there.

Everything is written by one script, so set and stream agree at any time. It writes only where redis still says what the
process wrote last (number of the last entry, size of the set). Whatever happened in between, a flush, a restart, a
failover to an older copy, an eviction, another program, it then changes nothing, and the process announces everything
anew. That begins with an entry that says `cleared`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.block_hash import NAME_NBYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixEvent:
    """One entry of a stream. Its parts apply in the order of the fields; a name is in one of them at most."""

    incarnation: str
    seq: int
    """From 1. It never goes back, also when everything is announced anew."""
    cleared: bool = False
    """Forget what was said before."""
    removed: Sequence[bytes] = ()
    stored: Sequence[bytes] = ()


@dataclass(frozen=True, slots=True)
class Tail:
    """Where a stream ends."""

    position: str
    """Id of its last entry; `0-0` if it has none."""
    incarnation: str = ""
    """Of the process that wrote that entry. Empty if there is none, or it is none of ours."""
    seq: int = 0
    """Number of that entry."""


def pack(names: Sequence[bytes]) -> bytes:
    """Names as they are in an entry: one after the other."""
    return b"".join(names)


def unpack(data: bytes) -> list[bytes]:
    """Undo `pack`. Raises ValueError if it was none."""
    if len(data) % NAME_NBYTES:
        raise ValueError(f"names of {NAME_NBYTES} bytes do not make {len(data)}")
    return [data[i : i + NAME_NBYTES] for i in range(0, len(data), NAME_NBYTES)]


def event_from(fields: object) -> PrefixEvent:
    """The entry with these fields, as redis-py gives them: bytes to bytes.

    Raises ValueError saying what is wrong, without quoting values, if this is nothing that a worker wrote.
    """
    if not isinstance(fields, dict):
        raise ValueError("no fields")
    try:
        incarnation, seq = fields[b"incarnation"], fields[b"seq"]
        cleared, removed, stored = fields[b"cleared"], fields[b"removed"], fields[b"stored"]
    except KeyError as e:
        raise ValueError(f"field {e.args[0].decode()!r} is missing") from e
    number = seq_from(seq)
    if not incarnation or number == 0:
        raise ValueError("`incarnation` or `seq` is not valid")
    return PrefixEvent(
        incarnation=incarnation.decode(errors="replace"),
        seq=number,
        cleared=cleared == b"1",
        removed=unpack(removed),
        stored=unpack(stored),
    )


def seq_from(data: bytes) -> int:
    """Number of an entry; 0 if it is none."""
    return int(data) if data.isdigit() and len(data) <= 18 else 0


def position_key(position: str) -> tuple[int, int]:
    """Ids of entries in their order."""
    milliseconds, _, number = position.partition("-")
    return int(milliseconds), int(number or 0)
