"""Looks for what a stopped cluster must not leave behind."""

from __future__ import annotations

import asyncio
import time

import psutil

from pdserve.client import Client
from pdserve.errors import UnavailableError
from pdserve.store.client import Store
from pdserve.store.login import StoreLogin


class ProcessRecord:
    """The descendants of this process at one moment, told from later owners of their process ids."""

    def __init__(self) -> None:
        self._processes = psutil.Process().children(recursive=True)

    def num_left(self) -> int:
        """How many of them, and of the descendants there are now, have not ended."""
        known = {*self._processes, *psutil.Process().children(recursive=True)}
        return sum(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in known)


def blocks_in_use(client: Client, *, num_generated_tokens: int, timeout_s: float) -> int:
    """Blocks that workers hold once they are idle; what is still held when `timeout_s` has passed.

    Workers report by heartbeat, so a report may be older than the last request. Reports that count fewer generated
    tokens than clients have received are not believed; UnavailableError if no newer one comes in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        workers = client.status().workers
        held = sum(w.stats.blocks_in_use for w in workers)
        current = sum(w.stats.generated_tokens_total for w in workers) >= num_generated_tokens
        expired = time.monotonic() > deadline
        if current and (held == 0 or expired):
            return held
        if expired:
            raise UnavailableError(f"workers have not reported their last tokens within {timeout_s:g} s")
        time.sleep(0.05)


def num_keys_without_ttl(redis_url: str, cluster: str, *, timeout_s: float, login: StoreLogin | None = None) -> int:
    """Keys of the deployment that would stay in redis for ever. Raises StoreError. Not for use in an event loop."""

    async def count() -> int:
        # Nothing is written: no schema is left where there was none.
        store = Store(redis_url, cluster, timeout_s=timeout_s, login=login)
        try:
            return len(await store.keys_without_ttl())
        finally:
            await store.aclose()

    return asyncio.run(count())
