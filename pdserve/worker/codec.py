"""worker.proto to and from the dataclasses of `events.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from pdserve.errors import InvalidRequestError
from pdserve.rpc.codec import (
    finish_to_proto,
    holder_from_proto,
    job_from_proto,
    logprobs_to_proto,
    stats_to_proto,
    target_from_proto,
    worker_info_to_proto,
)
from pdserve.rpc.v1 import common_pb2
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.types import HandoffId, WorkerStats
from pdserve.worker.events import (
    Cancel,
    DecodeCommand,
    DecodeEvent,
    FirstToken,
    HandedOff,
    Hello,
    JobFailed,
    KeepAlive,
    Malformed,
    Migrate,
    Migrated,
    MigrationCause,
    MigrationFailed,
    MigrationWanted,
    PrefillCommand,
    PrefillEvent,
    PrefillStarted,
    PromptLogprobs,
    StepTokens,
    Submit,
    SubmitLocal,
)
from pdserve.worker_info import WorkerInfo

log = logging.getLogger(__name__)

_CAUSES: Final = {
    MigrationCause.DRAIN: pb.MIGRATION_CAUSE_DRAIN,
    MigrationCause.ROOM: pb.MIGRATION_CAUSE_ROOM,
}


def prefill_command_from_proto(message: pb.PrefillCommand) -> PrefillCommand:
    """Never raises: a job that contradicts itself becomes `Malformed`."""
    match message.WhichOneof("command"):
        case "hello":
            return Hello(router_id=message.hello.router_id)
        case "submit":
            return _submit(message.submit)
        case "cancel":
            return Cancel(id=HandoffId(message.cancel.request_id, message.cancel.attempt))
        case _:
            return KeepAlive()


def decode_command_from_proto(message: pb.DecodeCommand) -> DecodeCommand:
    """As `prefill_command_from_proto`."""
    match message.WhichOneof("command"):
        case "hello":
            return Hello(router_id=message.hello.router_id, reads_step_batch=message.hello.reads_step_batch)
        case "submit":
            try:
                return SubmitLocal(job=job_from_proto(message.submit))
            except InvalidRequestError as error:
                return _malformed(message.submit, error)
        case "migrate":
            return _migrate(message.migrate)
        case "cancel":
            return Cancel(id=HandoffId(message.cancel.request_id, message.cancel.attempt))
        case _:
            return KeepAlive()


def _migrate(message: pb.Migrate) -> Migrate:
    try:
        target = target_from_proto(message.target) if message.HasField("target") else None
    except InvalidRequestError as error:
        # As if there were none: the stream stays where it is.
        log.warning("a stream was to move to %s", error, extra={"request_id": message.request_id})
        target = None
    return Migrate(id=HandoffId(message.request_id, message.attempt), new_attempt=message.new_attempt, target=target)


def _submit(message: pb.PrefillJob) -> Submit | Malformed:
    try:
        return Submit(
            job=job_from_proto(message.job),
            targets=tuple(target_from_proto(t) for t in message.decode),
            holders=tuple(holder_from_proto(h) for h in message.prefix_holders),
        )
    except InvalidRequestError as error:
        return _malformed(message.job, error)


def _malformed(job: common_pb2.GenerationJob, error: InvalidRequestError) -> Malformed:
    ids = (HandoffId(job.request_id, job.attempt), *(HandoffId(fork.request_id, fork.attempt) for fork in job.forks))
    return Malformed(failures=tuple(JobFailed.of(id_, error) for id_ in ids))


def prefill_events_to_proto(
    events: Sequence[PrefillEvent], hello: WorkerInfo | None, stats: WorkerStats | None
) -> pb.PrefillEvents:
    """One message of a prefill session. With `hello` (the first one) the statistics are part of it."""
    message = pb.PrefillEvents(events=[_prefill_event(e) for e in events])
    if hello is not None:
        message.hello.CopyFrom(_hello(hello, stats))
    elif stats is not None:
        message.stats.CopyFrom(stats_to_proto(stats))
    return message


def decode_events_to_proto(
    events: Sequence[DecodeEvent], hello: WorkerInfo | None, stats: WorkerStats | None
) -> pb.DecodeEvents:
    """One message of a decode session. With `hello` (the first one) the statistics are part of it."""
    message = pb.DecodeEvents(events=[_decode_event(e) for e in events])
    _add_facts(message, hello, stats)
    return message


def decode_batches_to_proto(
    events: Sequence[DecodeEvent], hello: WorkerInfo | None, stats: WorkerStats | None
) -> pb.DecodeEvents:
    """As `decode_events_to_proto`, for routers that read StepBatch, which costs both ends less for each token."""
    batch, others = _batched(events)
    message = pb.DecodeEvents(step=batch) if batch is not None else pb.DecodeEvents()
    if others:
        message.events.extend([_decode_event(e) for e in others])
    _add_facts(message, hello, stats)
    return message


def _add_facts(message: pb.DecodeEvents, hello: WorkerInfo | None, stats: WorkerStats | None) -> None:
    if hello is not None:
        message.hello.CopyFrom(_hello(hello, stats))
    elif stats is not None:
        message.stats.CopyFrom(stats_to_proto(stats))


def _batched(events: Sequence[DecodeEvent]) -> tuple[pb.StepBatch | None, Sequence[DecodeEvent]]:
    """The tokens that can be sent as lists, if there are any, and the other events. The lists are read before those, so
    they have nothing that comes after another event of the same request."""
    others: list[DecodeEvent] = []
    ids_of_others: set[str] = set()
    batch: list[StepTokens] = []
    for event in events:
        if (
            isinstance(event, StepTokens)
            and event.finish_reason is None
            and not event.first_step_s
            and not event.logprobs
            and event.id.request_id not in ids_of_others
        ):
            batch.append(event)
        else:
            others.append(event)
            ids_of_others.add(event.id.request_id)
    return (_step_batch(batch) if batch else None), others


def _step_batch(batch: Sequence[StepTokens]) -> pb.StepBatch:
    message = pb.StepBatch(
        request_ids=[event.id.request_id for event in batch],
        attempts=[event.id.attempt for event in batch],
        first_indices=[event.first_index for event in batch],
        token_ids=[token_id for event in batch for token_id in event.token_ids],
    )
    num_tokens = [len(event.token_ids) for event in batch]
    if num_tokens.count(1) != len(batch):
        message.num_tokens.extend(num_tokens)
    if any(event.local_prefill_tokens for event in batch):
        message.local_prefill_tokens.extend([event.local_prefill_tokens for event in batch])
    if any(event.num_accepted or event.num_rejected for event in batch):
        message.accepted_draft_tokens.extend([event.num_accepted for event in batch])
        message.rejected_draft_tokens.extend([event.num_rejected for event in batch])
    return message


def _hello(info: WorkerInfo, stats: WorkerStats | None) -> pb.WorkerHello:
    return pb.WorkerHello(info=worker_info_to_proto(info), stats=None if stats is None else stats_to_proto(stats))


def _prefill_event(event: PrefillEvent) -> pb.PrefillEvent:
    match event:
        case PrefillStarted():
            return pb.PrefillEvent(started=_started(event))
        case PromptLogprobs():
            return pb.PrefillEvent(prompt_logprobs=_prompt_logprobs(event))
        case FirstToken():
            return pb.PrefillEvent(first_token=_first_token(event))
        case HandedOff():
            return pb.PrefillEvent(
                handed_off=pb.HandedOff(
                    request_id=event.id.request_id,
                    attempt=event.id.attempt,
                    decode_worker=event.decode_worker,
                    transport=event.transport,
                    kv_bytes=event.kv_bytes,
                    transfer_s=event.transfer_s,
                )
            )
        case JobFailed():
            return pb.PrefillEvent(failed=_failed(event))


def _decode_event(event: DecodeEvent) -> pb.DecodeEvent:
    match event:
        case StepTokens():
            return pb.DecodeEvent(
                tokens=pb.StepTokens(
                    request_id=event.id.request_id,
                    attempt=event.id.attempt,
                    first_index=event.first_index,
                    token_ids=event.token_ids,
                    finish_reason=finish_to_proto(event.finish_reason),
                    first_step_s=event.first_step_s,
                    local_prefill_tokens=event.local_prefill_tokens,
                    logprobs=logprobs_to_proto(event.logprobs) if event.logprobs else None,
                    accepted_draft_tokens=event.num_accepted,
                    rejected_draft_tokens=event.num_rejected,
                )
            )
        case PrefillStarted():
            return pb.DecodeEvent(started=_started(event))
        case PromptLogprobs():
            return pb.DecodeEvent(prompt_logprobs=_prompt_logprobs(event))
        case FirstToken():
            return pb.DecodeEvent(first_token=_first_token(event))
        case JobFailed():
            return pb.DecodeEvent(failed=_failed(event))
        case MigrationWanted():
            return pb.DecodeEvent(
                migration_wanted=pb.MigrationWanted(
                    request_id=event.id.request_id, attempt=event.id.attempt, cause=_CAUSES[event.cause]
                )
            )
        case Migrated():
            return pb.DecodeEvent(
                migrated=pb.Migrated(
                    request_id=event.id.request_id,
                    attempt=event.id.attempt,
                    new_attempt=event.new_attempt,
                    transport=event.transport,
                    kv_bytes=event.kv_bytes,
                    copy_s=event.copy_s,
                    stop_s=event.stop_s,
                )
            )
        case MigrationFailed():
            return pb.DecodeEvent(
                migration_failed=pb.MigrationFailed(
                    request_id=event.id.request_id,
                    attempt=event.id.attempt,
                    new_attempt=event.new_attempt,
                    code=event.code,
                    message=event.message,
                )
            )


def _started(event: PrefillStarted) -> pb.PrefillStarted:
    return pb.PrefillStarted(
        request_id=event.id.request_id, attempt=event.id.attempt, decode_worker=event.decode_worker
    )


def _prompt_logprobs(event: PromptLogprobs) -> pb.PromptLogprobs:
    return pb.PromptLogprobs(
        request_id=event.id.request_id,
        attempt=event.id.attempt,
        first_index=event.first_index,
        logprobs=logprobs_to_proto(event.tokens),
    )


def _first_token(event: FirstToken) -> pb.FirstToken:
    return pb.FirstToken(
        request_id=event.id.request_id,
        attempt=event.id.attempt,
        index=event.index,
        token_id=event.token_id,
        finish_reason=finish_to_proto(event.finish_reason),
        queue_s=event.queue_s,
        prefill_s=event.prefill_s,
        compute_s=event.compute_s,
        cached_tokens=event.cached_tokens,
        fetched_tokens=event.fetched_tokens,
        fetch_s=event.fetch_s,
        logprobs=None if event.logprobs is None else logprobs_to_proto([event.logprobs]),
    )


def _failed(event: JobFailed) -> pb.JobFailed:
    return pb.JobFailed(
        request_id=event.id.request_id,
        attempt=event.id.attempt,
        code=event.code,
        message=event.message,
        retryable=event.retryable,
        blame=event.blame,
    )
