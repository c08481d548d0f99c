"""Where the KV pool of an engine in host memory lies: in shared memory, if the kernel has it.

A decode worker on the same host then copies blocks straight out of the pool of a prefill worker (the `local`
transport), and the ranks of a tensor-parallel worker reach each other's shards. For the engine it is memory like any
other, and of whole huge pages where the kernel gives them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.engine.huge_pages import HUGE_PAGES, MIN_NBYTES, must_be_asked_for
from pdserve.shared_memory import SharedMemory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """Zeroed memory of a pool."""

    data: npt.NDArray[np.uint8]
    """The bytes, [nbytes]; pages are taken as they are touched."""
    shared: tuple[SharedMemory, ...]
    """What `data` lies in; empty if others cannot map it."""


def allocate_pool(nbytes: int, *, shards_write: bool = False) -> PoolMemory:
    """Memory of a pool of `nbytes` > 0 bytes, which others may read, or other ranks of this worker write if
    `shards_write`.

    Where there is no memfd it is ordinary memory: everything works, and `local` reads it more slowly.
    """
    try:
        memory = SharedMemory.create(nbytes)
        if not shards_write:
            memory.seal_writes()
    except OSError as error:
        logger.warning("the KV pool cannot be shared (%s); workers on this host read it more slowly", error)
        return PoolMemory(data=np.zeros(nbytes, np.uint8), shared=())
    if nbytes >= MIN_NBYTES and must_be_asked_for():
        HUGE_PAGES.look_after(memory)
    return PoolMemory(data=np.asarray(memory), shared=(memory,))
