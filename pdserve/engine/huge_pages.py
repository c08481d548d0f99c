"""Huge pages for KV pools in shared memory, on kernels that give them only when asked for what is there already.

Attention over a long context reads tens of megabytes in each step, and out of pages of 4 KiB that takes about a tenth
longer. Anonymous memory gets huge pages as it is touched; shared memory does only where the kernel's setting
`transparent_hugepage/shmem_enabled` says so, which by default it does not. But since Linux 6.1 whoever has written
pages can have them put together (MADV_COLLAPSE), whatever that setting is. A thread does so now and then for what has
come into use of each pool.
"""

from __future__ import annotations

import os
import re
import threading
import weakref
from pathlib import Path

from pdserve.shared_memory import SharedMemory

MIN_NBYTES = 64 << 20
"""Smaller pools gain nothing that could be measured."""
_FIRST_PAUSE_S, _MAX_PAUSE_S = 2.0, 60.0
"""Between two looks; twice as long after each one, as most of a pool comes into use soon or never."""
_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_COLLAPSE_SINCE = (6, 1)


def must_be_asked_for(settings: Path = _SETTINGS, release: str | None = None) -> bool:
    """Whether shared memory gets huge pages by MADV_COLLAPSE, and only by that.

    Not if the administrator has switched huge pages off altogether.
    """
    version = re.match(r"(\d+)\.(\d+)", release or os.uname().release)
    if version is None or (int(version[1]), int(version[2])) < _COLLAPSE_SINCE:
        return False
    try:
        chosen = [
            (settings / name).read_text(encoding="ascii").partition("[")[2].partition("]")[0]
            for name in ("enabled", "shmem_enabled")
        ]
    except OSError:
        return False
    return chosen[0] in ("always", "madvise") and chosen[1] == "never"


class HugePages:
    """Looks after pools; has a thread as long as there are any. Any thread."""

    def __init__(self, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._first_pause_s = first_pause_s
        self._pause_s = first_pause_s
        self._lock = threading.Lock()
        self._pools: weakref.WeakSet[SharedMemory] = weakref.WeakSet()
        self._news = threading.Event()
        self._thread: threading.Thread | None = None

    def look_after(self, pool: SharedMemory) -> None:
        """Give this pool huge pages as it comes into use, until all of it has them or it is dropped."""
        with self._lock:
            self._pools.add(pool)
            self._pause_s = self._first_pause_s
            self._news.set()
            if self._thread is None:
                # A daemon: it may be waiting when the process ends, and holds nothing.
                self._thread = threading.Thread(target=self._run, name="kv-huge-pages", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._look():
            self._news.clear()
            self._news.wait(self._pause_s)

    def _look(self) -> bool:
        """Whether there is still something to look after. Keeps no pool."""
        with self._lock:
            pools = list(self._pools)
            if not pools:
                self._thread = None
                return False
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
        for pool in pools:
            if pool.collapse():
                with self._lock:
                    self._pools.discard(pool)
        return True


HUGE_PAGES = HugePages()
