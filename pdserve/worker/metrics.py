"""What a worker tells Prometheus: each step as it is done, everything else when it is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.metrics import Exposition, Values
from pdserve.metrics import worker_table as table
from pdserve.security.refusals import Refusals
from pdserve.types import Role, WorkerStats
from pdserve.worker.engine_thread import EngineThread, StepResult, StepRunner
from pdserve.worker_info import WorkerInfo


class TransportCount(Protocol):
    """What `kv_transfer` counts of one transport."""

    @property
    def num_frames(self) -> int:
        """Chunks carried, repeats included."""

    @property
    def num_bytes(self) -> int:
        """Their payload."""

    @property
    def num_errors(self) -> int:
        """What went wrong on it."""

    @property
    def num_fallbacks(self) -> int:
        """How often another one took over."""


class TransferStats(Protocol):
    """Of hand-offs, of whichever end this worker is."""

    @property
    def num_committed(self) -> int:
        """Hand-offs that succeeded."""

    @property
    def num_failed(self) -> int:
        """Hand-offs that ended otherwise."""

    @property
    def num_live(self) -> int:
        """Hand-offs under way."""

    @property
    def num_links(self) -> int:
        """Peers that are connected."""

    @property
    def transports(self) -> Mapping[str, TransportCount]:
        """By name of the transport."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """Where to look. Everything is called in the event loop and must be quick."""

    stats: Callable[[], WorkerStats]
    transfers: Callable[[], TransferStats]
    refusals: Mapping[str, Refusals] = field(default_factory=dict)
    """By port: grpc, metrics, and KV transports that listen for themselves."""
    grpc_calls: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """Calls that have ended, by method and status."""
    draft_model_tokens: Callable[[], Mapping[str, int]] = dict
    """By kind, if there is a draft model."""


class WorkerMetrics:
    """Values of one worker. `engine_loaded`, `step_done` and `handed_off` are told; the rest is read from what
    `exposition` is given."""

    def __init__(self) -> None:
        self._values = Values(table.WORKER_METRICS)
        self._step = self._values.distribution(table.STEP)
        self._sequences = self._values.distribution(table.STEP_SEQUENCES)
        self._tokens = self._values.distribution(table.STEP_TOKENS)

    def engine_loaded(self, num_ranks: int) -> None:
        """It is computed by so many processes."""
        self._values.set(table.ENGINE_RANKS, to=num_ranks)

    def step_done(self, result: StepResult) -> None:
        """The engine has computed a step."""
        self._step.add(result.duration_s)
        self._sequences.add(len(result.query_lens))
        self._tokens.add(sum(result.query_lens))

    def handed_off(self, transport: str, transfer_s: float) -> None:
        """KV is with a decode worker, `transfer_s` after the first token."""
        self._values.distribution(table.HANDOFF_TIME, transport).add(transfer_s)

    def exposition(
        self, info: WorkerInfo, runner: StepRunner, thread: EngineThread, state: WorkerState, now: Callable[[], float]
    ) -> Exposition:
        """All of it, for Prometheus. `now` is `time.monotonic`."""
        values = self._values
        values.set(table.BUILD_INFO, info.version, info.worker_id, info.model, to=1)
        values.set(table.BLOCK_TOKENS, to=info.kv_layout.block_size)

        def refresh() -> None:
            values.set(table.STEP_FAILURES, to=runner.num_failures)
            values.set(table.STEP_RUNNING, to=thread.busy_s(now()))
            self._read_stats(info.role, state.stats())
            self._read_transfers(state.transfers())
            for kind, number in state.draft_model_tokens().items():
                values.set(table.DRAFT_MODEL_TOKENS, kind, to=number)
            for (method, status), number in state.grpc_calls.items():
                values.set(table.GRPC_CALLS, method, status, to=number)
            for port, account in state.refusals.items():
                for reason, number in account.counts.items():
                    values.set(table.STRANGERS, port, reason.value, to=number)

        return Exposition(values, refresh, constant={"role": info.role.value})

    def _read_stats(self, role: Role, stats: WorkerStats) -> None:
        values = self._values
        num_free = stats.blocks_total - stats.blocks_in_use - stats.blocks_cached
        for kind, number in (
            ("prefill", stats.prefill_tokens_total),
            ("generated", stats.generated_tokens_total),
            ("cached", stats.cached_tokens_total),
            ("fetched", stats.fetched_tokens_total),
            ("recomputed", stats.recomputed_tokens_total),
        ):
            values.set(table.TOKENS, kind, to=number)
        for state, number in (
            ("waiting", stats.num_waiting),
            ("running", stats.num_running),
            ("transferring", stats.num_transferring),
        ):
            values.set(table.REQUESTS, state, to=number)
        for state, number in (("used", stats.blocks_in_use), ("cached", stats.blocks_cached), ("free", num_free)):
            values.set(table.BLOCKS, state, to=number)
        for outcome, number in (
            ("fetched", stats.fetches_total),
            ("failed", stats.failed_fetches_total),
            ("declined", stats.declined_fetches_total),
            ("served", stats.served_fetches_total),
        ):
            values.set(table.FETCHES, outcome, to=number)
        for outcome, number in (
            ("accepted", stats.accepted_draft_tokens_total),
            ("rejected", stats.rejected_draft_tokens_total),
        ):
            values.set(table.DRAFT_TOKENS, outcome, to=number)
        values.set(table.QUEUED_TOKENS, to=stats.queued_tokens)
        values.set(table.PREEMPTIONS, to=stats.preemptions_total)
        values.set(table.FETCHED_BYTES, to=stats.fetched_bytes_total)
        values.set(table.DRAINING, to=stats.draining)

    def _read_transfers(self, stats: TransferStats) -> None:
        values = self._values
        values.set(table.HANDOFFS, "committed", to=stats.num_committed)
        values.set(table.HANDOFFS, "failed", to=stats.num_failed)
        values.set(table.HANDOFFS_LIVE, to=stats.num_live)
        values.set(table.LINKS, to=stats.num_links)
        for name, transport in stats.transports.items():
            values.set(table.TRANSFER_BYTES, name, to=transport.num_bytes)
            values.set(table.TRANSFER_CHUNKS, name, to=transport.num_frames)
            values.set(table.TRANSFER_ERRORS, name, to=transport.num_errors)
            values.set(table.TRANSFER_FALLBACKS, name, to=transport.num_fallbacks)
