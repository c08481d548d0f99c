"""What the page shows of a router at one moment, as JSON. No prompts, no outputs, and nothing else of a client's making
but the names of its own requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeAlias

import pdserve
from pdserve.lifecycle import RequestState
from pdserve.types import Role
from router.metrics import RouterMetrics
from router.request import Request
from router.requests import RequestTable
from router.worker import Worker
from router.worker_pool import WorkerPool

MAX_REQUESTS: Final = 200
"""Outputs that are listed, the oldest first; all of them are counted."""

IsShown: TypeAlias = Callable[[bytes], bool]
"""Whether outputs of a tenant are listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterView:
    """Where to look."""

    router_id: str
    pool: WorkerPool
    table: RequestTable
    metrics: RouterMetrics
    store_available: Callable[[], bool]

    def snapshot(self, now: float, *, at: float, is_shown: IsShown) -> dict[str, Any]:
        """`now` is `time.monotonic()`, `at` seconds since 1970."""
        outputs = list(self.table.outputs)
        listed = list(islice((output for output in outputs if is_shown(output.tenant)), MAX_REQUESTS))
        states = self.table.states()
        return {
            "at": round(at, 3),
            "router": {
                "id": self.router_id,
                "model": self.metrics.model,
                "version": pdserve.__version__,
                "state": self._state(),
                "store_available": self.store_available(),
            },
            "num_requests": len(outputs),
            "num_queued": states[RequestState.QUEUED],
            "output_tokens_total": self.metrics.num_output_tokens,
            "workers": [_worker(worker) for worker in self.pool.workers],
            "requests": [_request(request, now) for request in listed],
            "transfers": _transfers(listed),
        }

    def _state(self) -> str:
        if self.table.closed:
            return "draining"
        return "ready" if self.pool.has_usable_pair else "no workers"


def _worker(worker: Worker) -> dict[str, Any]:
    stats, is_prefill = worker.stats, worker.info.role is Role.PREFILL
    total = stats.blocks_total or worker.info.num_blocks
    return {
        "id": worker.info.worker_id,
        "role": worker.info.role.value,
        "state": worker.state.value,
        "running": stats.num_running if worker.connected else 0,
        "waiting": (stats.num_waiting if is_prefill else stats.num_waiting + stats.num_transferring)
        if worker.connected
        else 0,
        "backlog_s": round(worker.view().waits[-1], 4),
        "blocks": {
            "used": stats.blocks_in_use if worker.connected else 0,
            "cached": stats.blocks_cached if worker.connected else 0,
            "total": total,
        },
    }


def _request(request: Request, now: float) -> dict[str, Any]:
    status = request.status
    return {
        "id": status.request_id,
        "state": status.state.value,
        "attempt": status.attempt,
        "prefill_worker": status.prefill_worker,
        "decode_worker": status.decode_worker,
        "prompt_tokens": status.num_prompt_tokens,
        "output_tokens": status.num_output_tokens,
        "age_s": round(now - request.received_at, 3),
    }


def _transfers(requests: Iterable[Request]) -> list[dict[str, str]]:
    """Hand-offs under way between two workers that are known."""
    moving = []
    for request in requests:
        status = request.status
        if status.state is RequestState.TRANSFERRING and status.prefill_worker and status.decode_worker:
            moving.append({"request_id": status.request_id, "from": status.prefill_worker, "to": status.decode_worker})
    return moving
