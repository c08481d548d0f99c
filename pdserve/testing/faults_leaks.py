"""What a process holds of the operating system, and the check that it has not become more."""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.testing.asyncio_leaks import assert_no_leaks
from pdserve.testing.waiting import eventually

NUM_SPARE_DESCRIPTORS = 8
"""gRPC opens a few once and keeps them for the life of the process."""


def num_descriptors() -> int:
    """Open file descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def resident_nbytes() -> int:
    """Memory of this process that is not swapped out."""
    fields = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * 4096


def threads() -> Counter[str]:
    """Names of the threads of this process, without those that belong to the event loop's own executor and to gRPC."""
    names = (thread.name for thread in threading.enumerate() if thread is not threading.main_thread())
    return Counter(name for name in names if not name.startswith(("asyncio_", "Thread-")))


def unexpected_errors(records: Sequence[logging.LogRecord]) -> list[str]:
    """What our code, or gRPC about an exception that our code let through, has logged as an error. A fault of the
    network is none: it is expected."""
    errors = (record for record in records if record.levelno >= logging.ERROR)
    ours = (r for r in errors if r.name.startswith("kv_transfer") or "raised by servicer method" in r.getMessage())
    return [record.getMessage() for record in ours]


@asynccontextmanager
async def nothing_left(timeout_s: float = 5.0) -> AsyncIterator[None]:
    """Fail unless every task, thread and descriptor from inside the body is gone `timeout_s` after it."""
    fds, before = num_descriptors(), threads()
    async with assert_no_leaks(timeout_s):
        yield
    await eventually(lambda: threads() <= before, f"no threads but {before}", timeout_s)
    limit = fds + NUM_SPARE_DESCRIPTORS

    def within_limit() -> bool:
        gc.collect()  # a process group of torch lives as long as the error that ended it
        return num_descriptors() <= limit

    await eventually(within_limit, f"not more than {limit} descriptors", timeout_s)
