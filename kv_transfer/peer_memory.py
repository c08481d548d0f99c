"""The memory of the process at the other end of a connection: what it shares is mapped here, the rest the kernel reads.

A KV pool that a process has in shared memory (`pdserve.shared_memory`) is mapped once and copied from like memory of
our own, at the speed of memory. `process_vm_readv` needs nobody's preparation, but finds and pins every small page of
the other process for itself.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import xxhash

from kv_transfer import process_memory
from kv_transfer.copying import checked_copy
from kv_transfer.process_memory import PIECES_TYPECODE, Pieces, pieces_of
from pdserve.shared_memory import SharedMemory

MAX_REGIONS = 64
"""Of one process: a pool for each of its shards. More is mischief."""


class PeerMemory:
    """Of process `pid`. One thread."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._regions: list[tuple[int, int, SharedMemory]] = []
        """Begin and end in the other process, and the same bytes here."""

    @property
    def num_regions(self) -> int:
        """How much of it is mapped."""
        return len(self._regions)

    def map(self, address: int, fd: int) -> None:
        """Map what the other process has at `address`. Takes over `fd`. Raises OSError: see `SharedMemory.attach`.

        What it had there before is not there any more.
        """
        memory = SharedMemory.attach(fd)
        end = address + memory.nbytes
        self._regions = [region for region in self._regions if region[1] <= address or end <= region[0]]
        self._regions.append((address, end, memory))

    def close(self) -> None:
        """Unmap everything. Idempotent; nothing is read afterwards."""
        self._regions = []

    def copy(self, prefix: bytes, source: Pieces, destination: Sequence[memoryview]) -> int:
        """Copy `source` to `destination`, equally long in all, and return the xxh3_64 of `prefix` and what is there
        now.

        Raises OSError if not all of it could be read, with part of the destination written.
        """
        mapped = self._here(source)
        if mapped is not None:
            return checked_copy(prefix, mapped, destination)
        process_memory.read(self._pid, source, pieces_of(destination))
        digest = xxhash.xxh3_64(prefix)
        for view in destination:
            digest.update(view)
        return digest.intdigest()

    def _here(self, source: Pieces) -> Pieces | None:
        """Where the pieces are mapped; None if one of them is not, or not whole."""
        table = np.frombuffer(source, np.uint64).reshape(-1, 2)
        begins, lengths = table[:, 0], table[:, 1]
        for region_begin, region_end, memory in self._regions:
            # No sum, which could go round; most chunks lie in one region.
            if (region_begin <= begins).all() and (begins <= region_end).all():
                if not (lengths <= region_end - begins).all():
                    return None
                moved = table.copy()
                moved[:, 0] += np.uint64((memory.address - region_begin) % 2**64)
                return array(PIECES_TYPECODE, moved.tobytes())
        pieces = array(PIECES_TYPECODE)
        for i in range(0, len(source), 2):
            begin, nbytes = source[i], source[i + 1]
            for region_begin, region_end, memory in self._regions:
                if region_begin <= begin and begin + nbytes <= region_end:
                    pieces.extend((memory.address + begin - region_begin, nbytes))
                    break
            else:
                return None
        return pieces
