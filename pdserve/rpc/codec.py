"""Conversion between the shared dataclasses and their protobuf messages. The only place that knows both."""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Sequence

from pdserve.addresses import check_address
from pdserve.errors import InvalidRequestError
from pdserve.kv_layout import AXIS_ORDERS, DTYPE_NBYTES, KvLayout, axis_order
from pdserve.kv_window import KvWindow
from pdserve.rpc.v1 import common_pb2 as pb
from pdserve.rpc.v1 import worker_pb2
from pdserve.types import (
    DecodeTarget,
    FinishReason,
    Fork,
    GenerationJob,
    Grammar,
    GrammarKind,
    PrefixHolder,
    Role,
    SamplingParams,
    TokenLogprobs,
    WorkerStats,
)
from pdserve.worker_info import WorkerInfo

_FINISH_TO_PROTO = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
}
_FINISH_FROM_PROTO = {v: k for k, v in _FINISH_TO_PROTO.items()}


def finish_to_proto(reason: FinishReason | None) -> pb.FinishReason.ValueType:
    """None becomes UNSPECIFIED."""
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(value: pb.FinishReason.ValueType) -> FinishReason | None:
    """UNSPECIFIED becomes None. Raises InvalidRequestError for a value of a newer version."""
    try:
        return _FINISH_FROM_PROTO[value]
    except KeyError:
        raise InvalidRequestError(f"finish_reason: unknown value {value}", field="finish_reason") from None


def job_to_proto(job: GenerationJob, now: float | None = None) -> pb.GenerationJob:
    """The deadline travels as seconds left, so that clocks need not agree. `now` is `time.monotonic()`."""
    left = 0.0
    if job.deadline is not None:
        # 0 means "none" on the wire; a deadline that has passed must not turn into none.
        left = max(job.deadline - (time.monotonic() if now is None else now), 1e-6)
    return pb.GenerationJob(
        request_id=job.request_id,
        attempt=job.attempt,
        router_id=job.router_id,
        token_ids=job.token_ids,
        num_prompt_tokens=job.num_prompt_tokens,
        max_new_tokens=job.max_new_tokens,
        min_new_tokens=job.min_new_tokens,
        stop_token_ids=job.stop_token_ids,
        temperature=job.sampling.temperature,
        top_k=job.sampling.top_k,
        top_p=job.sampling.top_p,
        min_p=job.sampling.min_p,
        seed=job.sampling.seed,
        deadline_s=left,
        presence_penalty=job.sampling.presence_penalty,
        frequency_penalty=job.sampling.frequency_penalty,
        repetition_penalty=job.sampling.repetition_penalty,
        logit_bias_ids=[token_id for token_id, _ in job.sampling.logit_bias],
        logit_bias_values=[value for _, value in job.sampling.logit_bias],
        num_logprobs=job.num_logprobs,
        num_prompt_logprobs=job.num_prompt_logprobs,
        grammar=None if job.grammar is None else grammar_to_proto(job.grammar),
        forks=[pb.Fork(request_id=fork.request_id, attempt=fork.attempt, seed=fork.seed) for fork in job.forks],
        cache_salt=job.cache_salt,
        priority=job.priority,
        traceparent=job.traceparent,
        max_draft_tokens=job.max_draft_tokens,
    )


def job_from_proto(message: pb.GenerationJob, now: float | None = None) -> GenerationJob:
    """Raises InvalidRequestError if the message contradicts itself; token ids are checked against the model later."""
    if not message.request_id:
        raise InvalidRequestError("job.request_id is empty", field="job.request_id")
    if not 0 < message.num_prompt_tokens <= len(message.token_ids):
        raise InvalidRequestError(
            f"job.num_prompt_tokens is {message.num_prompt_tokens} for {len(message.token_ids)} token ids",
            field="job.num_prompt_tokens",
        )
    if message.max_new_tokens <= len(message.token_ids) - message.num_prompt_tokens:
        raise InvalidRequestError(
            f"job.max_new_tokens is {message.max_new_tokens}, which leaves nothing to generate",
            field="job.max_new_tokens",
        )
    num_biased = len(set(message.logit_bias_ids))
    if not num_biased == len(message.logit_bias_ids) == len(message.logit_bias_values):
        raise InvalidRequestError(
            f"job.logit_bias_ids: {len(message.logit_bias_values)} values for {num_biased} different ids",
            field="job.logit_bias_ids",
        )
    deadline = None
    if message.deadline_s:
        deadline = (time.monotonic() if now is None else now) + message.deadline_s
    return GenerationJob(
        request_id=message.request_id,
        attempt=message.attempt,
        router_id=message.router_id,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        max_new_tokens=message.max_new_tokens,
        min_new_tokens=message.min_new_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        sampling=SamplingParams(
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            min_p=message.min_p,
            seed=message.seed,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
            logit_bias=tuple(zip(message.logit_bias_ids, message.logit_bias_values, strict=True)),
        ),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        deadline=deadline,
        grammar=grammar_from_proto(message.grammar, "job.grammar") if message.HasField("grammar") else None,
        forks=_forks_from_proto(message),
        cache_salt=message.cache_salt,
        priority=message.priority,
        traceparent=message.traceparent,
        max_draft_tokens=message.max_draft_tokens if message.HasField("max_draft_tokens") else None,
    )


def _forks_from_proto(message: pb.GenerationJob) -> tuple[Fork, ...]:
    forks = tuple(Fork(request_id=fork.request_id, attempt=fork.attempt, seed=fork.seed) for fork in message.forks)
    if not forks:
        return ()
    if len(message.token_ids) != message.num_prompt_tokens:
        raise InvalidRequestError("job.forks: the outputs have begun and cannot be forked any more", field="job.forks")
    names = {message.request_id, *(fork.request_id for fork in forks)}
    if "" in names or len(names) != len(forks) + 1:
        raise InvalidRequestError("job.forks: a name is empty or used twice", field="job.forks")
    return forks


def grammar_to_proto(grammar: Grammar) -> pb.Grammar:
    """The choices of a grammar become a list."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return pb.Grammar(json_schema=grammar.source)
        case GrammarKind.JSON_OBJECT:
            return pb.Grammar(json_object=True)
        case GrammarKind.REGEX:
            return pb.Grammar(regex=grammar.source)
        case GrammarKind.CHOICE:
            return pb.Grammar(choice=pb.Choices(texts=json.loads(grammar.source)))
        case GrammarKind.LARK:
            return pb.Grammar(lark=grammar.source)


def grammar_from_proto(message: pb.Grammar, field: str) -> Grammar:
    """Whether it compiles is checked elsewhere. Raises InvalidRequestError, naming `field`, if it says nothing."""
    match message.WhichOneof("kind"):
        case "json_schema":
            return Grammar(GrammarKind.JSON_SCHEMA, message.json_schema)
        case "json_object" if message.json_object:
            return Grammar(GrammarKind.JSON_OBJECT)
        case "regex":
            return Grammar(GrammarKind.REGEX, message.regex)
        case "choice" if message.choice.texts:
            return Grammar(GrammarKind.CHOICE, json.dumps(list(message.choice.texts)))
        case "lark":
            return Grammar(GrammarKind.LARK, message.lark)
    raise InvalidRequestError(f"{field}: says neither a schema, an expression, choices nor a grammar", field=field)


def logprobs_to_proto(tokens: Sequence[TokenLogprobs]) -> pb.Logprobs:
    """All of `tokens` must list equally many of the most likely tokens."""
    return pb.Logprobs(
        token_ids=[token.token_id for token in tokens],
        logprobs=[token.logprob for token in tokens],
        top_token_ids=[token_id for token in tokens for token_id, _ in token.top],
        top_logprobs=[logprob for token in tokens for _, logprob in token.top],
    )


def logprobs_from_proto(message: pb.Logprobs) -> tuple[TokenLogprobs, ...]:
    """Raises InvalidRequestError if the columns do not fit each other."""
    num, num_top = len(message.token_ids), len(message.top_token_ids)
    width = num_top // num if num else 0
    if len(message.logprobs) != num or len(message.top_logprobs) != num_top or width * num != num_top:
        raise InvalidRequestError(
            f"logprobs: {len(message.logprobs)} values for {num} tokens, {len(message.top_logprobs)} for {num_top} of "
            "the most likely tokens",
            field="logprobs",
        )
    top = tuple(zip(message.top_token_ids, message.top_logprobs, strict=True))
    return tuple(
        TokenLogprobs(token_id, logprob, top[i * width : (i + 1) * width])
        for i, (token_id, logprob) in enumerate(zip(message.token_ids, message.logprobs, strict=True))
    )


def layout_to_proto(layout: KvLayout) -> pb.KvLayout:
    """Field by field."""
    return pb.KvLayout(
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        k_order=layout.k_order,
        v_order=layout.v_order,
        numerics=layout.numerics,
        head_cuts=layout.head_cuts,
        window=layout.window.size,
        sinks=layout.window.sinks,
    )


def layout_from_proto(message: pb.KvLayout) -> KvLayout:
    """Raises InvalidRequestError for a dtype, size or order that no worker can have, naming the field."""
    if message.dtype not in DTYPE_NBYTES:
        raise InvalidRequestError(f"kv_layout.dtype: unknown {message.dtype!r}", field="kv_layout.dtype")
    for name in ("block_size", "num_layers", "num_kv_heads", "head_dim"):
        value = {
            "block_size": message.block_size,
            "num_layers": message.num_layers,
            "num_kv_heads": message.num_kv_heads,
            "head_dim": message.head_dim,
        }[name]
        if value <= 0:
            raise InvalidRequestError(f"kv_layout.{name}: must be positive, got {value}", field=f"kv_layout.{name}")
    k_order, v_order = axis_order(message.k_order), axis_order(message.v_order)
    if k_order is None or v_order is None:
        field, order = ("v_order", message.v_order) if k_order else ("k_order", message.k_order)
        raise InvalidRequestError(
            f"kv_layout.{field}: must be one of {list(AXIS_ORDERS)}, got {order!r}", field=f"kv_layout.{field}"
        )
    if "dim/4,token,4" in (k_order, v_order) and message.head_dim % 4:
        raise InvalidRequestError(
            f"kv_layout.head_dim: must be a multiple of 4 with this order of axes, got {message.head_dim}",
            field="kv_layout.head_dim",
        )
    if message.window < 0 or message.sinks < 0 or (message.sinks and not message.window):
        raise InvalidRequestError(
            f"kv_layout.window: {message.window} keys and {message.sinks} sinks; sinks need a window",
            field="kv_layout.window",
        )
    cuts = (0, *message.head_cuts, message.num_kv_heads)
    if any(cut >= after for cut, after in itertools.pairwise(cuts)):
        raise InvalidRequestError(
            f"kv_layout.head_cuts: must ascend between 0 and {message.num_kv_heads}, got {list(message.head_cuts)}",
            field="kv_layout.head_cuts",
        )
    return KvLayout(
        dtype=message.dtype,
        block_size=message.block_size,
        num_layers=message.num_layers,
        num_kv_heads=message.num_kv_heads,
        head_dim=message.head_dim,
        k_order=k_order,
        v_order=v_order,
        numerics=message.numerics,
        head_cuts=tuple(message.head_cuts),
        window=KvWindow(message.window, message.sinks),
    )


def worker_info_to_proto(info: WorkerInfo) -> pb.WorkerInfo:
    """Field by field."""
    return pb.WorkerInfo(
        worker_id=info.worker_id,
        incarnation=info.incarnation,
        role=info.role.value,
        address=info.address,
        model=info.model,
        model_fingerprint=info.model_fingerprint,
        kv_layout=layout_to_proto(info.kv_layout),
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        transports=info.transports,
        version=info.version,
        codecs=info.codecs,
        prefill_chunk_tokens=info.prefill_chunk_tokens,
        prefill_pause_s=info.prefill_pause_s,
    )


def worker_info_from_proto(message: pb.WorkerInfo) -> WorkerInfo:
    """Raises InvalidRequestError for an unknown role, an impossible layout, an address that is none, or a pause that is
    not finite or negative."""
    try:
        role = Role(message.role)
    except ValueError:
        raise InvalidRequestError(f"worker role: unknown {message.role!r}", field="role") from None
    if not 0 <= message.prefill_pause_s < math.inf:
        raise InvalidRequestError(
            f"prefill_pause_s: must be finite and not negative, got {message.prefill_pause_s}", field="prefill_pause_s"
        )
    return WorkerInfo(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        role=role,
        address=check_address(message.address, "worker address"),
        model=message.model,
        model_fingerprint=message.model_fingerprint,
        kv_layout=layout_from_proto(message.kv_layout),
        num_blocks=message.num_blocks,
        max_model_len=message.max_model_len,
        transports=tuple(message.transports),
        version=message.version,
        codecs=tuple(message.codecs),
        prefill_chunk_tokens=message.prefill_chunk_tokens,
        prefill_pause_s=message.prefill_pause_s,
    )


def stats_to_proto(stats: WorkerStats) -> pb.WorkerStats:
    """Field by field."""
    return pb.WorkerStats(
        num_waiting=stats.num_waiting,
        num_running=stats.num_running,
        num_transferring=stats.num_transferring,
        queued_tokens=stats.queued_tokens,
        blocks_in_use=stats.blocks_in_use,
        blocks_cached=stats.blocks_cached,
        blocks_total=stats.blocks_total,
        prefill_tokens_total=stats.prefill_tokens_total,
        generated_tokens_total=stats.generated_tokens_total,
        kv_bytes_total=stats.kv_bytes_total,
        failed_handoffs_total=stats.failed_handoffs_total,
        steps_total=stats.steps_total,
        cached_tokens_total=stats.cached_tokens_total,
        preemptions_total=stats.preemptions_total,
        recomputed_tokens_total=stats.recomputed_tokens_total,
        fetches_total=stats.fetches_total,
        fetched_tokens_total=stats.fetched_tokens_total,
        fetched_bytes_total=stats.fetched_bytes_total,
        failed_fetches_total=stats.failed_fetches_total,
        declined_fetches_total=stats.declined_fetches_total,
        served_fetches_total=stats.served_fetches_total,
        local_prefill_tokens=stats.local_prefill_tokens,
        accepted_draft_tokens_total=stats.accepted_draft_tokens_total,
        rejected_draft_tokens_total=stats.rejected_draft_tokens_total,
        draining=stats.draining,
    )


def stats_from_proto(message: pb.WorkerStats) -> WorkerStats:
    """Field by field."""
    return WorkerStats(
        num_waiting=message.num_waiting,
        num_running=message.num_running,
        num_transferring=message.num_transferring,
        queued_tokens=message.queued_tokens,
        blocks_in_use=message.blocks_in_use,
        blocks_cached=message.blocks_cached,
        blocks_total=message.blocks_total,
        prefill_tokens_total=message.prefill_tokens_total,
        generated_tokens_total=message.generated_tokens_total,
        kv_bytes_total=message.kv_bytes_total,
        failed_handoffs_total=message.failed_handoffs_total,
        steps_total=message.steps_total,
        cached_tokens_total=message.cached_tokens_total,
        preemptions_total=message.preemptions_total,
        recomputed_tokens_total=message.recomputed_tokens_total,
        fetches_total=message.fetches_total,
        fetched_tokens_total=message.fetched_tokens_total,
        fetched_bytes_total=message.fetched_bytes_total,
        failed_fetches_total=message.failed_fetches_total,
        declined_fetches_total=message.declined_fetches_total,
        served_fetches_total=message.served_fetches_total,
        local_prefill_tokens=message.local_prefill_tokens,
        accepted_draft_tokens_total=message.accepted_draft_tokens_total,
        rejected_draft_tokens_total=message.rejected_draft_tokens_total,
        draining=message.draining,
    )


def target_to_proto(target: DecodeTarget) -> worker_pb2.DecodeTarget:
    """Field by field."""
    return worker_pb2.DecodeTarget(worker_id=target.worker_id, incarnation=target.incarnation, address=target.address)


def target_from_proto(message: worker_pb2.DecodeTarget) -> DecodeTarget:
    """Raises InvalidRequestError for an address that is none."""
    address = check_address(message.address, "decode.address")
    return DecodeTarget(worker_id=message.worker_id, incarnation=message.incarnation, address=address)


def holder_to_proto(holder: PrefixHolder) -> worker_pb2.PrefixHolder:
    """Field by field."""
    return worker_pb2.PrefixHolder(
        worker_id=holder.worker_id,
        incarnation=holder.incarnation,
        address=holder.address,
        num_tokens=holder.num_tokens,
    )


def holder_from_proto(message: worker_pb2.PrefixHolder) -> PrefixHolder:
    """Raises InvalidRequestError for an address that is none."""
    return PrefixHolder(
        worker_id=message.worker_id,
        incarnation=message.incarnation,
        address=check_address(message.address, "prefix_holders.address"),
        num_tokens=message.num_tokens,
    )
