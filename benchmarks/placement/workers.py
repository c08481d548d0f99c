"""Any number of fake prefill and decode workers, in a process of their own.

`python -m benchmarks.placement.workers SETTINGS`. They answer any prompt at once, and beat as real workers do.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from benchmarks.front_door.child import serve
from pdserve.model.source import open_model
from pdserve.store.client import Store
from pdserve.store.registry import WorkerRegistration
from pdserve.testing.fake_worker_base import fake_info, hashed_token
from pdserve.testing.fake_workers import FakeDecodeWorker, FakePrefillWorker
from pdserve.types import Role, WorkerStats
from pdserve.worker_info import WorkerInfo

HEARTBEAT_S = 1.0
"""The default of real workers."""
LEASE_S = 600.0
"""Longer than any run, which is not about leases."""


async def run(settings: dict[str, Any]) -> None:
    """Add pairs of workers as the parent asks for them."""
    source = open_model(settings["model"])
    store = await Store.connect(settings["store_url"], settings["cluster"], timeout_s=5.0)
    next_token = hashed_token(100, 200)
    decode: dict[str, FakeDecodeWorker] = {}
    prefill: dict[str, FakePrefillWorker] = {}

    def info(worker_id: str, role: Role) -> WorkerInfo:
        return fake_info(worker_id, role, model=source.name, model_fingerprint=source.fingerprint, num_blocks=1 << 16)

    async def add(arguments: dict[str, Any]) -> dict[str, Any]:
        for number in range(len(prefill), len(prefill) + arguments["pairs"]):
            d = decode[f"d{number}"] = FakeDecodeWorker(info(f"d{number}", Role.DECODE), next_token, HEARTBEAT_S)
            p = prefill[f"p{number}"] = FakePrefillWorker(
                info(f"p{number}", Role.PREFILL), next_token, decode.get, HEARTBEAT_S
            )
            for started in (await d.start(), await p.start()):
                await WorkerRegistration(store, started, lease_s=LEASE_S).register(WorkerStats())
        return {"workers": len(prefill) + len(decode)}

    await serve({"add": add})
    for p in prefill.values():
        await p.kill()
    for d in decode.values():
        await d.kill()
    await store.aclose()


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.argv[1])))
