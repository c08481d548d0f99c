"""Tells redis which blocks a worker holds, so that every router finds prompts that begin alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection
from typing import Final

from pdserve.errors import StoreError
from pdserve.store.prefix_writer import Outcome, PrefixSink
from pdserve.worker.prefix_changes import PrefixChanges

log = logging.getLogger(__name__)

BATCH_S: Final = 0.05
"""How long a change waits for others. One round trip tells all of them."""

REFRESHES_PER_LEASE: Final = 3

RETRY_S: Final = (0.1, 2.0)
"""First and longest pause before another try while redis is away, or keeps losing what was announced."""


class PrefixAnnouncer:
    """One task of a worker. Redis may be away at any time.

    Make it before the blocks, which tell `changes`, and `use` them before it runs.
    """

    def __init__(self, incarnation: str) -> None:
        self._changed = asyncio.Event()
        self.changes = PrefixChanges(incarnation, self._changed.set)
        self._names: Callable[[], Collection[bytes]] = tuple
        self._replaced = False

    def use(self, names: Callable[[], Collection[bytes]]) -> None:
        """`names` gives the names of all blocks that can be found now."""
        self._names = names

    async def run(self, sink: PrefixSink, *, lease_s: float) -> None:
        """Announce for ever."""
        self._changed.set()
        failures, away = 0, False
        while True:
            with contextlib.suppress(TimeoutError):  # Nothing has changed; the lease is due.
                async with asyncio.timeout(lease_s / REFRESHES_PER_LEASE):
                    await self._changed.wait()
            await asyncio.sleep(BATCH_S)
            self._changed.clear()
            try:
                complete = await self.catch_up(sink)
            except StoreError as e:
                if not away:
                    log.warning("cannot announce blocks, routers go on with what they know: %s", e)
                complete, away = False, True
            else:
                if away:
                    log.info("redis takes the names of blocks again")
                away = False
            if complete:
                failures = 0
            else:
                first, longest = RETRY_S
                await asyncio.sleep(min(longest, first * 2**failures))
                failures = min(failures + 1, 16)
                self._changed.set()

    async def catch_up(self, sink: PrefixSink) -> bool:
        """Tell all there is to tell, or refresh what redis has. False if it has lost it. Raises StoreError."""
        changes = self.changes
        while True:
            due = changes.next()
            if due is None:
                outcome = await sink.announce(None, last_seq=changes.last_seq, size=changes.size, size_after=0)
            else:
                outcome = await sink.announce(
                    due.event, last_seq=due.last_seq, size=due.size, size_after=due.size_after
                )
            match outcome:
                case Outcome.LOST:
                    log.info("redis has lost the names of this worker's blocks; announcing all of them")
                    changes.begin_anew(self._names())
                    return False
                case Outcome.REPLACED:
                    if not self._replaced:
                        log.warning("another process has this worker's id; its blocks are not announced")
                    self._replaced = True
                    return True
                case Outcome.WRITTEN:
                    self._replaced = False
                    if due is None:
                        return True
                    changes.written()
                    if changes.next() is None:
                        return True
