"""Which routers are alive: each holds a lease, and whoever wants to take over what a router has left looks at it.

A lease that is not there says that its router is gone, except when redis has lost it: while this router cannot be sure
of its own lease, absence of another one means nothing.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Callable
from typing import Final

from pdserve.errors import StoreError
from pdserve.store.client import Store

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE: Final = 4
"""Pauses between renewals that fit into one lease."""

POLL_S: Final = 0.05
"""How often the lease of another router is looked at while its end is awaited."""

_LUA_RENEW: Final = """
-- KEYS: lease. ARGV: incarnation, TTL in ms. Returns 1 if it was held by this incarnation until now.
local held = redis.call('TYPE', KEYS[1]).ok == 'string' and redis.call('GET', KEYS[1]) == ARGV[1]
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return held and 1 or 0
"""

_LUA_WITHDRAW: Final = """
-- KEYS: lease. ARGV: incarnation.
local key = KEYS[1]
if redis.call('TYPE', key).ok == 'string' and redis.call('GET', key) == ARGV[1] then redis.call('DEL', key) end
return 1
"""


class _Question:
    """Whether one router is gone: asked once for all who want to know at the same time."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.answered_at = float("-inf")
        self.gone = False


class RouterLease:
    """That of one router process, and its view of the others'. One event loop uses it."""

    def __init__(self, store: Store, router_id: str, incarnation: str, *, lease_s: float) -> None:
        """`incarnation` is of this process; the id may have belonged to another one before."""
        self._store = store
        self._router_id = router_id
        self._incarnation = incarnation
        self._lease_s = lease_s
        self._renew = store.script(_LUA_RENEW)
        self._withdraw = store.script(_LUA_WITHDRAW)
        self._held_since: float | None = None
        """Since when the lease is known never to have been missing; None: it may be now."""
        self._withdrawn = False
        self._writing = asyncio.Lock()
        self._questions: weakref.WeakValueDictionary[str, _Question] = weakref.WeakValueDictionary()

    async def keep(self, on_lapse: Callable[[], None]) -> None:
        """Renew for ever. `on_lapse` is called after a time in which others may have seen no lease: what this router
        has may have been taken over."""
        while True:
            await asyncio.sleep(self._lease_s / RENEWALS_PER_LEASE)
            held_before = self._held_since
            try:
                await self.acquire()
            except StoreError as error:
                if held_before is not None:
                    log.warning("cannot renew the lease of this router: %s", error)
                self._held_since = None
            else:
                if self._held_since != held_before:
                    log.warning("the lease of this router may have ended for a while")
                    on_lapse()

    async def acquire(self) -> None:
        """Hold the lease from now on, unless it was withdrawn. Raises StoreError."""
        async with self._writing:
            if self._withdrawn:
                return
            held = await self._store.run(
                self._renew, (self._key(self._router_id),), (self._incarnation, int(self._lease_s * 1000))
            )
            if not held or self._held_since is None:
                self._held_since = asyncio.get_running_loop().time()

    async def withdraw(self) -> None:
        """Have others see at once that this router is gone. Raises StoreError."""
        self._withdrawn = True
        # A renewal that is under way must not come after it.
        async with self._writing:
            await self._store.run(self._withdraw, (self._key(self._router_id),), (self._incarnation,))

    async def gone(self, router_id: str) -> bool:
        """Whether a router is gone. Waits until that is known: until it renews its lease, or its lease ends.

        Raises StoreError.
        """
        clock = asyncio.get_running_loop().time
        began = clock()
        question = self._questions.setdefault(router_id, _Question())
        async with question.lock:
            if question.answered_at < began:
                question.gone = await self._find_out(router_id)
                question.answered_at = clock()
            return question.gone

    async def _find_out(self, router_id: str) -> bool:
        clock = asyncio.get_running_loop().time
        before = await self._ttl_ms(router_id)
        while True:
            if before is None and self._held_since is not None and clock() - self._held_since >= self._lease_s:
                return True
            await asyncio.sleep(POLL_S)
            now = await self._ttl_ms(router_id)
            if now is not None and (before is None or now > before):
                return False
            before = now

    async def _ttl_ms(self, router_id: str) -> int | None:
        """What is left of a lease; None if there is none."""
        left = int(await self._store.command("PTTL", self._key(router_id)))
        return left if left >= 0 else None

    def _key(self, router_id: str) -> str:
        return self._store.keys.router(router_id)
