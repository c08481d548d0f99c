"""One thread that looks after the streams of a blocking client, whose readers cannot look at a clock themselves."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Protocol

from pdserve.client.silence import TICK_S


class Watched(Protocol):
    """A stream."""

    def look(self, now: float) -> None:
        """Is called every TICK_S, from another thread, with the time of the monotonic clock. Returns at once."""


class Watch:
    """The thread lives while there are streams, and keeps none of them alive."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._running = False

    def add(self, stream: Watched) -> None:
        """Begin to look after a stream."""
        with self._lock:
            self._streams.add(stream)
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="pdserve-client-watch", daemon=True).start()

    def remove(self, stream: Watched) -> None:
        """Harmless when repeated."""
        with self._lock:
            self._streams.discard(stream)

    def _run(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                streams = list(self._streams)
                if not streams:
                    self._running = False
                    return
            now = time.monotonic()
            for stream in streams:
                stream.look(now)
            # Or the last one would stay alive until the next look.
            streams.clear()
            del stream
