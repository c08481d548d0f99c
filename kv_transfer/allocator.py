"""What the C library does with freed memory, for transports that get every message as new memory.

glibc takes memory of 128 KiB and more from the kernel, and gives it back when it is freed: each message of a megabyte
then begins with 256 page faults, which take several times as long as to copy it.
"""

from __future__ import annotations

import ctypes
import functools
import logging

logger = logging.getLogger(__name__)

MIB = 1 << 20
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_SETTINGS = ((_M_MMAP_THRESHOLD, 32 * MIB), (_M_TRIM_THRESHOLD, 128 * MIB), (_M_TOP_PAD, 4 * MIB))
"""Allocations of up to 32 MiB, which is the most that glibc takes, come from the heap; a heap shrinks when 128 MiB of
it are free; it grows by 4 MiB at least."""


@functools.cache
def keep_freed_memory() -> None:
    """Keep memory of messages for the next one, from now on and in the whole process. Does nothing without glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        logger.debug("no mallopt: the C library is not glibc")
        return
    for parameter, value in _SETTINGS:
        if not mallopt(parameter, value):
            logger.debug("mallopt(%d, %d) is refused", parameter, value)
