"""Metrics of a worker. Every series has the label `role`, prefill or decode."""

from __future__ import annotations

from typing import Final

from pdserve.metrics.definitions import (
    PHASE_BUCKETS,
    SEQUENCE_BUCKETS,
    TOKEN_BUCKETS,
    TOKEN_GAP_BUCKETS,
    counter,
    gauge,
    histogram,
)

BUILD_INFO: Final = gauge("pdserve_worker_build_info", "Always 1; what runs here", "version", "worker", "model")
ENGINE_RANKS: Final = gauge(
    "pdserve_worker_engine_ranks", "Processes that compute together: engine.tensor_parallel of the worker"
)

STEP: Final = histogram(
    "pdserve_worker_step_seconds", "Forward passes, sampling included", buckets=(0.0005, *TOKEN_GAP_BUCKETS, 5.0, 10.0)
)
STEP_SEQUENCES: Final = histogram(
    "pdserve_worker_step_sequences", "Sequences in a step: the batch size", buckets=SEQUENCE_BUCKETS
)
STEP_TOKENS: Final = histogram(
    "pdserve_worker_step_tokens", "Tokens that went through the model in a step", buckets=TOKEN_BUCKETS
)
STEP_FAILURES: Final = counter("pdserve_worker_step_failures_total", "Steps in which the engine failed")
STEP_RUNNING: Final = gauge(
    "pdserve_worker_step_running_seconds", "How long the running step has taken so far; 0 between steps"
)
TOKENS: Final = counter(
    "pdserve_worker_tokens_total",
    "Tokens by kind: prefill (computed as prompt), generated (drawn), cached (of prompts, found in the prefix cache), "
    "fetched (whose KV came from another worker's cache), recomputed (after preemptions)",
    "kind",
)

REQUESTS: Final = gauge(
    "pdserve_worker_requests", "Requests here, by state: waiting, running, transferring (hand-offs)", "state"
)
QUEUED_TOKENS: Final = gauge(
    "pdserve_worker_queued_tokens", "Prefill: prompt tokens left to compute. Decode: tokens of running sequences"
)
BLOCKS: Final = gauge(
    "pdserve_worker_kv_blocks",
    "KV blocks by state: used (somebody holds them), cached (kept for their content until they are needed), free",
    "state",
)
BLOCK_TOKENS: Final = gauge("pdserve_worker_kv_block_tokens", "Tokens in a KV block")
PREEMPTIONS: Final = counter(
    "pdserve_worker_preemptions_total", "How often a sequence had to give its blocks to another one"
)
DRAFT_TOKENS: Final = counter(
    "pdserve_worker_draft_tokens_total",
    "Decode workers: tokens drafted, by outcome: accepted (each saved its sequence a step) or rejected",
    "outcome",
)
DRAFT_MODEL_TOKENS: Final = counter(
    "pdserve_worker_draft_model_tokens_total",
    "Decode workers: what the draft model has computed, by kind: caught_up (KV of tokens that were there already), "
    "drafted",
    "kind",
)

HANDOFFS: Final = counter(
    "pdserve_worker_handoffs_total", "Hand-offs of KV that ended here, by outcome: committed or failed", "outcome"
)
HANDOFFS_LIVE: Final = gauge("pdserve_worker_handoffs", "Hand-offs under way")
HANDOFF_TIME: Final = histogram(
    "pdserve_worker_handoff_seconds",
    "Prefill workers: from the first token to the last byte of KV in place, by transport",
    "transport",
    buckets=PHASE_BUCKETS,
)
LINKS: Final = gauge("pdserve_worker_kv_links", "Workers at the other end of hand-offs that are connected")
TRANSFER_BYTES: Final = counter(
    "pdserve_worker_transfer_bytes_total", "KV sent or received, repeats included, by transport", "transport"
)
TRANSFER_CHUNKS: Final = counter("pdserve_worker_transfer_chunks_total", "The same in messages", "transport")
TRANSFER_ERRORS: Final = counter(
    "pdserve_worker_transfer_errors_total",
    "Failed connections and sends, stalls, and damaged chunks, each of which is sent again, by transport",
    "transport",
)
TRANSFER_FALLBACKS: Final = counter(
    "pdserve_worker_transfer_fallbacks_total",
    "How often a link went on over another transport because this one had failed",
    "transport",
)
FETCHES: Final = counter(
    "pdserve_worker_fetches_total",
    "Beginnings of prompts exchanged between caches, by outcome: fetched, failed, declined (computing was expected to "
    "be faster), served (to another worker)",
    "outcome",
)
FETCHED_BYTES: Final = counter("pdserve_worker_fetched_bytes_total", "KV that came from other workers' caches")
GRPC_CALLS: Final = counter(
    "pdserve_worker_grpc_calls_total",
    "Calls over gRPC that have ended, by method (unknown: one that is not served) and status",
    "method", "status",
)  # fmt: skip
STRANGERS: Final = counter(
    "pdserve_worker_strangers_total",
    "Connections and calls refused because of who made them, by port (grpc, metrics, and the KV transports local and "
    "tcp) and reason: handshake (no TLS, or an untrusted certificate), role, remote (a drain from another machine, "
    "without TLS), token (no token of an open KV link)",
    "port", "reason",
)  # fmt: skip
DRAINING: Final = gauge("pdserve_worker_draining", "1 while no new request is taken because the worker stops")

WORKER_METRICS: Final = (
    BUILD_INFO, ENGINE_RANKS, STEP, STEP_SEQUENCES, STEP_TOKENS, STEP_FAILURES, STEP_RUNNING, TOKENS,
    REQUESTS, QUEUED_TOKENS, BLOCKS, BLOCK_TOKENS, PREEMPTIONS, DRAFT_TOKENS, DRAFT_MODEL_TOKENS,
    HANDOFFS, HANDOFFS_LIVE, HANDOFF_TIME, LINKS,
    TRANSFER_BYTES, TRANSFER_CHUNKS, TRANSFER_ERRORS, TRANSFER_FALLBACKS, FETCHES, FETCHED_BYTES, GRPC_CALLS,
    STRANGERS, DRAINING,
)  # fmt: skip
