"""What a router also says under vLLM's names, which endpoint pickers, autoscalers and dashboards read.

Types and meanings are those of vLLM; a router speaks for its whole cluster, so the KV cache is that of all decode
workers. Every series has the label `model_name`.
"""

from __future__ import annotations

from typing import Final

from pdserve.metrics.definitions import (
    FIRST_TOKEN_BUCKETS,
    PHASE_BUCKETS,
    REQUEST_BUCKETS,
    TOKEN_BUCKETS,
    TOKEN_GAP_BUCKETS,
    counter,
    gauge,
    histogram,
)

MODEL: Final = "model_name"

VLLM_RUNNING: Final = gauge("vllm:num_requests_running", "Outputs that workers compute", MODEL)
VLLM_WAITING: Final = gauge("vllm:num_requests_waiting", "Outputs that wait to be computed", MODEL)
VLLM_KV_USAGE: Final = gauge(
    "vllm:kv_cache_usage_perc", "Part of the KV blocks of decode workers that somebody holds, 1 is all", MODEL
)
VLLM_CACHE_CONFIG: Final = gauge(
    "vllm:cache_config_info",
    "Always 1; the KV cache of all decode workers together",
    MODEL,
    "block_size",
    "num_gpu_blocks",
)
VLLM_PROMPT_TOKENS: Final = counter("vllm:prompt_tokens_total", "Tokens of prompts", MODEL)
VLLM_GENERATION_TOKENS: Final = counter("vllm:generation_tokens_total", "Tokens of outputs", MODEL)
VLLM_PREFIX_QUERIES: Final = counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in caches", MODEL)
VLLM_PREFIX_HITS: Final = counter("vllm:prefix_cache_hits_total", "Prompt tokens found in caches", MODEL)
VLLM_SUCCESS: Final = counter(
    "vllm:request_success_total", "Outputs that have ended: stop, length, abort or error", MODEL, "finished_reason"
)
VLLM_TTFT: Final = histogram(
    "vllm:time_to_first_token_seconds", "As pdserve_router_ttft_seconds", MODEL, buckets=FIRST_TOKEN_BUCKETS
)
VLLM_ITL: Final = histogram(
    "vllm:inter_token_latency_seconds", "As pdserve_router_itl_seconds", MODEL, buckets=TOKEN_GAP_BUCKETS
)
VLLM_TPOT: Final = histogram(
    "vllm:request_time_per_output_token_seconds", "As pdserve_router_tpot_seconds", MODEL, buckets=TOKEN_GAP_BUCKETS
)
VLLM_E2E: Final = histogram(
    "vllm:e2e_request_latency_seconds", "As pdserve_router_e2e_seconds", MODEL, buckets=REQUEST_BUCKETS
)
VLLM_QUEUE: Final = histogram(
    "vllm:request_queue_time_seconds", "As phase queue of pdserve_router_phase_seconds", MODEL, buckets=PHASE_BUCKETS
)
VLLM_PREFILL: Final = histogram(
    "vllm:request_prefill_time_seconds",
    "As phase prefill of pdserve_router_phase_seconds",
    MODEL,
    buckets=PHASE_BUCKETS,
)
VLLM_DECODE: Final = histogram(
    "vllm:request_decode_time_seconds", "As phase decode of pdserve_router_phase_seconds", MODEL, buckets=PHASE_BUCKETS
)
VLLM_PROMPT_LENGTH: Final = histogram(
    "vllm:request_prompt_tokens", "As pdserve_router_prompt_length_tokens", MODEL, buckets=TOKEN_BUCKETS
)
VLLM_OUTPUT_LENGTH: Final = histogram(
    "vllm:request_generation_tokens", "As pdserve_router_completion_length_tokens", MODEL, buckets=TOKEN_BUCKETS
)

VLLM_METRICS: Final = (
    VLLM_RUNNING, VLLM_WAITING, VLLM_KV_USAGE, VLLM_CACHE_CONFIG,
    VLLM_PROMPT_TOKENS, VLLM_GENERATION_TOKENS, VLLM_PREFIX_QUERIES, VLLM_PREFIX_HITS, VLLM_SUCCESS,
    VLLM_TTFT, VLLM_ITL, VLLM_TPOT, VLLM_E2E, VLLM_QUEUE, VLLM_PREFILL, VLLM_DECODE,
    VLLM_PROMPT_LENGTH, VLLM_OUTPUT_LENGTH,
)  # fmt: skip
