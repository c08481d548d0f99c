"""What a router is and has: read when Prometheus asks, so that nobody has to keep a gauge up to date."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import pdserve
from pdserve.lifecycle import LIVE_STATES, RequestState
from pdserve.metrics import router_table as table
from pdserve.metrics import vllm_table as vllm
from pdserve.security.refusals import Refusals
from pdserve.types import Role
from router.admission import Admission, Reason
from router.index import PrefixIndex
from router.limits import CallLimiter
from router.metrics.events import RouterMetrics
from router.retry_budget import RetryBudget
from router.worker import Worker, WorkerState
from router.worker_pool import WorkerPool

_VLLM_REASONS: Final = {"finished": None, "cancelled": "abort", "failed": "error"}
"""By outcome; None: the reason itself."""


class Outputs(Protocol):
    """The part of the table of requests that is read. (The table imports requests, and those this package.)"""

    @property
    def closed(self) -> bool:
        """Whether nobody is admitted any more."""

    def states(self) -> Counter[RequestState]:
        """How many outputs in progress are in each state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterState:
    """Where to look."""

    router_id: str
    pool: WorkerPool
    table: Outputs
    admission: Admission
    limiter: CallLimiter
    retry_budget: RetryBudget
    index: PrefixIndex
    refusals: Mapping[str, Refusals]
    """By port: grpc, http."""
    grpc_calls: Mapping[tuple[str, str], int]
    """Those that have ended, by method and status."""
    store_available: Callable[[], bool]


class StateReader:
    """Brings the values up to date; see Exposition."""

    def __init__(self, metrics: RouterMetrics, state: RouterState) -> None:
        self._metrics = metrics
        self._values = metrics.values
        self._state = state
        self._values.set(table.BUILD_INFO, pdserve.__version__, state.router_id, metrics.model, to=1)

    def __call__(self) -> None:
        """Read everything."""
        values, state = self._values, self._state
        active = state.table.states()
        for one in RequestState:
            if one in LIVE_STATES:
                values.set(table.ACTIVE, one.value.lower(), to=active[one])
        values.set(table.COMPLETION_TOKENS, to=self._metrics.num_output_tokens)
        values.set(table.STALE_EVENTS, to=state.pool.num_stale_events)
        local_up_to = state.pool.local_prefill_up_to()
        values.set(table.LOCAL_UP_TO, to=math.inf if local_up_to is None else local_up_to)
        values.set(table.RETRY_BUDGET, to=state.retry_budget.left(time.monotonic()))
        values.set(table.STORE_AVAILABLE, to=state.store_available())
        values.set(table.INDEX_BLOCKS, to=len(state.index))
        values.set(table.DRAINING, to=state.table.closed)
        for port, account in state.refusals.items():
            for reason, number in account.counts.items():
                values.set(table.STRANGERS, port, reason.value, to=number)
        for (method, status), number in state.grpc_calls.items():
            values.set(table.GRPC_CALLS, method, status, to=number)
        self._read_admission()
        workers = state.pool.workers
        self._read_workers(workers)
        self._read_scaling_hints(workers)
        if self._metrics.vllm_names:
            self._read_for_vllm(active, workers)

    def _read_admission(self) -> None:
        values = self._values
        admission = self._state.admission
        for length in admission.lengths():
            values.set(table.WAITING, length.kind.label, to=length.num_waiting)
            values.set(table.WAITING_WORK, length.kind.label, to=length.drained_in_s)
        refused: Counter[Reason] = Counter()
        for (_, reason), number in admission.counters.refused.items():
            refused[reason] += number
        for reason in Reason:
            values.set(table.REJECTIONS, reason.value, to=refused[reason])
        values.set(table.REJECTIONS, "client_limit", to=self._state.limiter.num_refused)

    def _read_scaling_hints(self, workers: Sequence[Worker]) -> None:
        """One number for each role, for autoscalers: they need no more than a target."""
        connected = [worker for worker in workers if worker.connected]
        computing = [worker.info.role is Role.PREFILL for worker in connected]
        prefill = [worker for worker, computes in zip(connected, computing, strict=True) if computes] or connected
        waiting_s = sum(length.drained_in_s for length in self._state.admission.lengths())
        backlog_s = math.inf if waiting_s else 0.0
        if prefill:
            backlog_s = waiting_s + sum(worker.view().waits[-1] for worker in prefill) / len(prefill)
        self._values.set(table.PREFILL_BACKLOG, to=backlog_s)
        stats = [worker.stats for worker in connected if worker.info.role is Role.DECODE]
        in_use, total = sum(one.blocks_in_use for one in stats), sum(one.blocks_total for one in stats)
        self._values.set(table.DECODE_KV_USAGE, to=in_use / max(1, total))

    def _read_workers(self, workers: Sequence[Worker]) -> None:
        values = self._values
        values.clear(
            table.WORKERS, table.WORKER_BACKLOG, table.WORKER_REQUESTS, table.WORKER_KV_USAGE, table.WORKER_SILENT
        )
        for role in Role:
            for state in WorkerState:
                values.set(table.WORKERS, role.value, state.value, to=0)
        for worker in workers:
            kind, name, stats = worker.info.role.value, worker.info.worker_id, worker.stats
            values.add(table.WORKERS, kind, worker.state.value)
            # While a worker leaves and its successor has come, two have one name: the last one is shown.
            values.set(table.WORKER_BACKLOG, kind, name, to=worker.view().waits[-1])
            values.set(table.WORKER_REQUESTS, kind, name, to=worker.num_requests)
            values.set(table.WORKER_KV_USAGE, kind, name, to=stats.blocks_in_use / max(1, stats.blocks_total))
            values.set(table.WORKER_SILENT, kind, name, to=worker.session.silent_s)

    def _read_for_vllm(self, active: Counter[RequestState], workers: Sequence[Worker]) -> None:
        values, model = self._values, self._metrics.model
        waiting = active[RequestState.QUEUED]
        values.set(vllm.VLLM_WAITING, model, to=waiting)
        values.set(vllm.VLLM_RUNNING, model, to=active.total() - waiting)
        decode = [worker for worker in workers if worker.info.role is Role.DECODE and worker.connected]
        num_blocks = sum(worker.info.num_blocks for worker in decode)
        in_use = sum(worker.stats.blocks_in_use for worker in decode)
        values.set(vllm.VLLM_KV_USAGE, model, to=in_use / max(1, num_blocks))
        values.clear(vllm.VLLM_CACHE_CONFIG)
        if decode:
            block_size = decode[0].info.kv_layout.block_size
            values.set(vllm.VLLM_CACHE_CONFIG, model, str(block_size), str(num_blocks), to=1)
        values.set(vllm.VLLM_GENERATION_TOKENS, model, to=self._metrics.num_output_tokens)
        for own, alias in (
            (table.PROMPT_TOKENS, vllm.VLLM_PROMPT_TOKENS),
            (table.PROMPT_TOKENS, vllm.VLLM_PREFIX_QUERIES),
            (table.CACHED_TOKENS, vllm.VLLM_PREFIX_HITS),
        ):
            values.set(alias, model, to=values.number(own))
        ended: Counter[str] = Counter()
        for (outcome, reason), number in values.series(table.REQUESTS).items():
            ended[_VLLM_REASONS[outcome] or reason] += int(number)
        for reason in ("stop", "length", "abort", "error"):
            values.set(vllm.VLLM_SUCCESS, model, reason, to=ended[reason])
