"""Metrics of a router. Unless it says otherwise, a request with several outputs counts once for each of them."""

from __future__ import annotations

from typing import Final

from pdserve.metrics.definitions import (
    FIRST_TOKEN_BUCKETS,
    PHASE_BUCKETS,
    RATIO_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    TOKEN_GAP_BUCKETS,
    counter,
    gauge,
    histogram,
)

BUILD_INFO: Final = gauge("pdserve_router_build_info", "Always 1; what runs here", "version", "router", "model")

REQUESTS: Final = counter(
    "pdserve_router_requests_total",
    "Outputs that have ended, by outcome (finished, cancelled, failed) and reason (stop, length, disconnect, or the "
    "code of the error)",
    "outcome", "reason",
)  # fmt: skip
REJECTIONS: Final = counter(
    "pdserve_router_rejections_total",
    "Calls refused before any work was done, by reason: the code of the error, client_limit, or why admission refused",
    "reason",
)
STRANGERS: Final = counter(
    "pdserve_router_strangers_total",
    "Connections and calls refused because of who made them, by port (grpc, http) and reason: handshake (no TLS, or an "
    "untrusted certificate), no_key, wrong_key",
    "port", "reason",
)  # fmt: skip
ACTIVE: Final = gauge("pdserve_router_requests", "Outputs in progress, by state of the request's life", "state")
ATTEMPTS: Final = counter(
    "pdserve_router_attempts_total",
    "Attempts sent to workers, by where the prompt is computed: remote (a prefill worker) or local (the decode worker)",
    "placement",
)
RETRIES: Final = counter(
    "pdserve_router_retries_total", "Attempts that failed and were followed by another, by code of the error", "cause"
)
RETRIES_REFUSED: Final = counter(
    "pdserve_router_retries_refused_total",
    "Attempts that failed and were followed by no other because router.retry_budget was used up, by code of the error",
    "cause",
)
RETRY_BUDGET: Final = gauge(
    "pdserve_router_retry_budget_attempts",
    "Attempts after the first that router.retry_budget would let be made at once; below 0 so many wait for it",
)
RECOVERIES: Final = counter(
    "pdserve_router_recoveries_total",
    "Outputs that finished although an attempt had failed, by code of the last such error",
    "cause",
)
TAKEOVERS: Final = counter(
    "pdserve_router_takeovers_total",
    "Attempts to take over requests of routers that are gone, by outcome: taken (goes on here), raced (another router "
    "was quicker), expired (its record had gone), refused (not accepted here, or not readable), failed (redis did not "
    "answer); and lost: requests of this router that another one has taken over",
    "outcome",
)
STALE_EVENTS: Final = counter(
    "pdserve_router_stale_events_total", "Events of workers dropped because their attempt had ended or been replaced"
)

TTFT: Final = histogram(
    "pdserve_router_ttft_seconds", "From receipt of the request to the first token", buckets=FIRST_TOKEN_BUCKETS
)
TPOT: Final = histogram(
    "pdserve_router_tpot_seconds",
    "Mean time per token after the first, over a finished output",
    buckets=TOKEN_GAP_BUCKETS,
)
ITL: Final = histogram(
    "pdserve_router_itl_seconds",
    "Between two arrivals of tokens of one output; pauses of recoveries are included",
    buckets=TOKEN_GAP_BUCKETS,
)
E2E: Final = histogram(
    "pdserve_router_e2e_seconds", "From receipt of the request to the end of its output, of finished outputs",
    buckets=REQUEST_BUCKETS,
)  # fmt: skip
PHASES: Final = histogram(
    "pdserve_router_phase_seconds",
    "Parts of the end-to-end time of finished outputs, which sum to it: tokenize, queue, prefill, transfer, handover, "
    "decode; and fetch, which is a part of queue",
    "phase",
    buckets=PHASE_BUCKETS,
)

SLO: Final = counter(
    "pdserve_router_slo_outputs_total",
    "Outputs that have finished or failed, by priority class and result: met (both objectives of router.slo), ttft, "
    "tpot, both (which of them was missed), failed. The rate of met is goodput",
    "class", "result",
)  # fmt: skip
HTTP_RESPONSES: Final = counter("pdserve_router_http_responses_total", "Answers over HTTP, by status", "status")
GRPC_CALLS: Final = counter(
    "pdserve_router_grpc_calls_total",
    "Calls over gRPC that have ended, by method (unknown: one that is not served) and status",
    "method", "status",
)  # fmt: skip

PROMPT_TOKENS: Final = counter("pdserve_router_prompt_tokens_total", "Tokens of prompts, each prompt once")
CACHED_TOKENS: Final = counter(
    "pdserve_router_cached_tokens_total", "Those of them whose KV was in a prefix cache, or was fetched"
)
FETCHED_TOKENS: Final = counter(
    "pdserve_router_fetched_tokens_total", "Those of the cached ones that came from another worker"
)
PREDICTED_CACHED_TOKENS: Final = counter(
    "pdserve_router_predicted_cached_tokens_total", "Prompt tokens that placement expected to find in a cache"
)
COMPLETION_TOKENS: Final = counter("pdserve_router_completion_tokens_total", "Tokens of outputs")
PROMPT_LENGTH: Final = histogram(
    "pdserve_router_prompt_length_tokens", "Tokens of a prompt, each prompt once", buckets=TOKEN_BUCKETS
)
OUTPUT_LENGTH: Final = histogram(
    "pdserve_router_completion_length_tokens", "Tokens of a finished output", buckets=TOKEN_BUCKETS
)

HANDOFFS: Final = counter("pdserve_router_handoffs_total", "Hand-offs of KV that succeeded, by transport", "transport")
TRANSFER_BYTES: Final = counter(
    "pdserve_router_transfer_bytes_total", "KV moved by hand-offs that succeeded, by transport", "transport"
)
MIGRATIONS: Final = counter(
    "pdserve_router_migrations_total",
    "Running streams that were to move to another decode worker with their KV, by cause (drain, room) and outcome: "
    "moved, declined (no worker for it), failed (goes on where it was), lost (with the worker that had just got it), "
    "ended (before it was known)",
    "cause", "outcome",
)  # fmt: skip
MIGRATION_BYTES: Final = counter("pdserve_router_migration_bytes_total", "KV moved by those, by transport", "transport")
MIGRATION_STOP: Final = histogram(
    "pdserve_router_migration_stop_seconds",
    "From the last token at one decode worker until the other one had the stream",
    buckets=TOKEN_GAP_BUCKETS,
)
PREDICTION_RATIO: Final = histogram(
    "pdserve_router_ttft_prediction_ratio",
    "Time from dispatch to the first token of an output, divided by what placement had predicted",
    buckets=RATIO_BUCKETS,
)
LOCAL_UP_TO: Final = gauge(
    "pdserve_router_local_prefill_up_to_tokens",
    "Longest new prompt that a decode worker would compute itself now; 0 if none, +Inf if there are no prefill workers",
)

WAITING: Final = gauge("pdserve_router_waiting", "Prompts that wait for admission, by priority class", "class")
WAITING_WORK: Final = gauge(
    "pdserve_router_waiting_work_seconds",
    "How long it will take until those have been admitted, as far as can be told, by priority class",
    "class",
)

PREFILL_BACKLOG: Final = gauge(
    "pdserve_router_prefill_backlog_seconds",
    "How long the workers that compute prompts are expected to need for what they and this router have waiting, on "
    "average; +Inf if prompts wait and nobody computes them",
)
DECODE_KV_USAGE: Final = gauge(
    "pdserve_router_decode_kv_usage_ratio", "Part of the KV blocks of all decode workers together that somebody holds"
)

WORKERS: Final = gauge("pdserve_router_workers", "Workers known, by role and state", "role", "state")
WORKER_BACKLOG: Final = gauge(
    "pdserve_router_worker_backlog_seconds",
    "How long a new prompt is expected to wait at a worker before it is computed",
    "role",
    "worker",
)
WORKER_REQUESTS: Final = gauge(
    "pdserve_router_worker_requests", "Outputs of this router that a worker works on", "role", "worker"
)
WORKER_KV_USAGE: Final = gauge(
    "pdserve_router_worker_kv_usage_ratio", "Part of a worker's KV blocks that somebody holds", "role", "worker"
)
WORKER_SILENT: Final = gauge(
    "pdserve_router_worker_silent_seconds", "Since anything was heard of a worker", "role", "worker"
)
STORE_AVAILABLE: Final = gauge("pdserve_router_store_available", "1 while redis answers, else 0")
INDEX_BLOCKS: Final = gauge("pdserve_router_index_blocks", "Distinct KV blocks in the index of who has which prefix")
DRAINING: Final = gauge("pdserve_router_draining", "1 while no new request is taken because the router stops")

ROUTER_METRICS: Final = (
    BUILD_INFO, REQUESTS, REJECTIONS, STRANGERS, ACTIVE, ATTEMPTS, RETRIES, RETRIES_REFUSED,
    RETRY_BUDGET, RECOVERIES, TAKEOVERS, STALE_EVENTS,
    TTFT, TPOT, ITL, E2E, PHASES,
    PROMPT_TOKENS, CACHED_TOKENS, FETCHED_TOKENS, PREDICTED_CACHED_TOKENS, COMPLETION_TOKENS,
    PROMPT_LENGTH, OUTPUT_LENGTH,
    HANDOFFS, TRANSFER_BYTES, MIGRATIONS, MIGRATION_BYTES, MIGRATION_STOP, PREDICTION_RATIO,
    LOCAL_UP_TO, WAITING, WAITING_WORK, SLO, HTTP_RESPONSES, GRPC_CALLS, PREFILL_BACKLOG, DECODE_KV_USAGE,
    WORKERS, WORKER_BACKLOG, WORKER_REQUESTS, WORKER_KV_USAGE, WORKER_SILENT, STORE_AVAILABLE, INDEX_BLOCKS, DRAINING,
)  # fmt: skip
