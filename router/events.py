"""What workers report and what they are told, as dataclasses, and their conversion from and to worker.proto.

The rest of the router never sees a protobuf message of the internal protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from pdserve.errors import InvalidRequestError
from pdserve.rpc.codec import (
    finish_from_proto,
    holder_to_proto,
    job_to_proto,
    logprobs_from_proto,
    stats_from_proto,
    target_to_proto,
    worker_info_from_proto,
)
from pdserve.rpc.v1 import worker_pb2 as pb
from pdserve.types import DecodeTarget, FinishReason, GenerationJob, PrefixHolder, TokenLogprobs, WorkerStats
from pdserve.worker_info import WorkerInfo


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    """The prompt is being computed."""

    request_id: str
    attempt: int
    decode_worker: str
    """Worker id of the holder of the reservation, or of who computes the prompt itself; empty if the request ends with
    its first token at a prefill worker."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of a part of the prompt. All parts come before the first token."""

    request_id: str
    attempt: int
    first_index: int
    """Index in the prompt of the first of `tokens`."""
    tokens: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The prompt is computed and the next token drawn."""

    request_id: str
    attempt: int
    index: int
    """Position of the token in the output."""
    token_id: int
    finish_reason: FinishReason | None
    prefill_s: float
    """Seconds of compute, by the worker's clock."""
    num_cached_tokens: int
    num_fetched_tokens: int = 0
    """Those of the cached tokens that came from another worker."""
    fetch_s: float = 0.0
    """Seconds spent waiting for them before the compute, by the worker's clock."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the token, if asked for."""
    compute_s: float = 0.0
    """The request's own part of `prefill_s`, of steps that it has shared with others; 0 if that is not known."""


@dataclass(frozen=True, slots=True)
class HandedOff:
    """The decode worker has committed."""

    request_id: str
    attempt: int
    decode_worker: str
    transport: str
    kv_bytes: int
    transfer_s: float
    """Seconds from the first token to the last byte in place, by the worker's clock."""


@dataclass(frozen=True, slots=True)
class StepTokens:
    """Tokens of one request from one decode step."""

    request_id: str
    attempt: int
    first_index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    """Set with the token that ends the output."""
    first_step_s: float
    """Seconds of the request's first step; 0 in later ones."""
    num_local_prefill_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of `token_ids`, if asked for."""
    num_accepted: int = 0
    """Those of `token_ids` that were drafted."""
    num_rejected: int = 0
    """Tokens that were drafted in vain."""


@dataclass(frozen=True, slots=True)
class JobFailed:
    """The worker has given the request up."""

    request_id: str
    attempt: int
    code: str
    """Of pdserve.errors."""
    message: str
    retryable: bool
    blame: str
    """Worker id to leave out of the next attempt; may be empty."""


@dataclass(frozen=True, slots=True)
class MigrationWanted:
    """The decode worker would like the stream to go on at another one."""

    request_id: str
    attempt: int
    cause: str
    """drain, room, or unknown: of a newer version."""


@dataclass(frozen=True, slots=True)
class Migrated:
    """Another decode worker has the stream. No token of the sender's comes after this."""

    request_id: str
    attempt: int
    new_attempt: int
    transport: str
    kv_bytes: int
    stop_s: float
    """Seconds without a token, as far as the sender knows."""


@dataclass(frozen=True, slots=True)
class MigrationFailed:
    """The stream goes on where it was."""

    request_id: str
    attempt: int
    new_attempt: int
    code: str
    message: str


MigrationEvent = MigrationWanted | Migrated | MigrationFailed

WorkerEvent = PrefillStarted | PromptLogprobs | FirstToken | HandedOff | StepTokens | JobFailed | MigrationEvent


@dataclass(frozen=True, slots=True)
class SubmitJob:
    """To a prefill worker: compute this prompt, hand it over to one of `decode`, best first."""

    job: GenerationJob
    decode: tuple[DecodeTarget, ...]
    holders: tuple[PrefixHolder, ...] = ()
    """Whom it may ask for KV of the job's beginning."""


@dataclass(frozen=True, slots=True)
class SubmitLocal:
    """To a decode worker: compute this prompt, and decode on."""

    job: GenerationJob


@dataclass(frozen=True, slots=True)
class Migrate:
    """To a decode worker: move a stream to `target`, where it goes on as `new_attempt`."""

    request_id: str
    attempt: int
    new_attempt: int = 0
    target: DecodeTarget | None = None
    """None: there is nobody who could take it."""


@dataclass(frozen=True, slots=True)
class CancelJob:
    """Stop; harmless for a job that has ended."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Beat:
    """Nothing to say, still here."""


Command = SubmitJob | SubmitLocal | Migrate | CancelJob | Beat


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a worker."""

    info: WorkerInfo
    stats: WorkerStats


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What most steps bring: a token for each of many requests, and nothing else. As StepTokens, in lists side by
    side."""

    request_ids: Sequence[str]
    attempts: Sequence[int]
    indices: Sequence[int]
    token_ids: Sequence[int]
    local_prefills: Sequence[int]
    """StepTokens.num_local_prefill_tokens."""


@dataclass(frozen=True, slots=True)
class WorkerMessage:
    """One message of a session: everything that one engine step, or a heartbeat, has to say."""

    hello: Hello | None
    stats: WorkerStats | None
    events: tuple[WorkerEvent, ...]
    step: StepBatch | None = None
    """Comes before `events`."""


def prefill_command(command: Command) -> pb.PrefillCommand:
    """Encodes for a prefill worker; a deadline becomes the seconds left now."""
    match command:
        case SubmitJob():
            submit = pb.PrefillJob(
                job=job_to_proto(command.job),
                decode=[target_to_proto(target) for target in command.decode],
                prefix_holders=[holder_to_proto(holder) for holder in command.holders],
            )
            return pb.PrefillCommand(submit=submit)
        case SubmitLocal() | Migrate():
            raise AssertionError("a prefill worker decodes nothing")
        case CancelJob():
            return pb.PrefillCommand(cancel=pb.CancelJob(request_id=command.request_id, attempt=command.attempt))
        case Beat():
            return pb.PrefillCommand(heartbeat=pb.Heartbeat())


def decode_command(command: Command) -> pb.DecodeCommand:
    """Encodes for a decode worker; a deadline becomes the seconds left now."""
    match command:
        case SubmitJob():
            raise AssertionError("a decode worker hands nothing over")
        case SubmitLocal():
            return pb.DecodeCommand(submit=job_to_proto(command.job))
        case Migrate():
            return pb.DecodeCommand(
                migrate=pb.Migrate(
                    request_id=command.request_id,
                    attempt=command.attempt,
                    new_attempt=command.new_attempt,
                    target=None if command.target is None else target_to_proto(command.target),
                )
            )
        case CancelJob():
            return pb.DecodeCommand(cancel=pb.CancelJob(request_id=command.request_id, attempt=command.attempt))
        case Beat():
            return pb.DecodeCommand(heartbeat=pb.Heartbeat())


def prefill_message(message: pb.PrefillEvents) -> WorkerMessage:
    """Decodes. Kinds of event that this version does not know are left out. Raises InvalidRequestError."""
    return WorkerMessage(
        _hello(message), _stats(message), tuple(e for e in map(_prefill_event, message.events) if e is not None)
    )


def decode_message(message: pb.DecodeEvents) -> WorkerMessage:
    """As `prefill_message`. Raises InvalidRequestError also for lists of a step that do not fit together."""
    events: Sequence[WorkerEvent] = ()
    if message.events:
        events = [event for event in map(_decode_event, message.events) if event is not None]
    if not message.HasField("step"):
        return WorkerMessage(_hello(message), _stats(message), tuple(events))
    step = message.step
    if step.num_tokens or step.accepted_draft_tokens or step.rejected_draft_tokens:
        return WorkerMessage(_hello(message), _stats(message), tuple(chain(_uncommon_step(step), events)))
    size = len(step.request_ids)
    columns = [
        list(step.attempts),
        list(step.first_indices),
        list(step.token_ids),
        list(step.local_prefill_tokens) or [0] * size,
    ]
    if any(len(column) != size for column in columns):
        raise _uneven(step)
    batch = StepBatch(list(step.request_ids), *columns)
    return WorkerMessage(_hello(message), _stats(message), tuple(events), batch)


def _uncommon_step(step: pb.StepBatch) -> Iterator[StepTokens]:
    """The entries of lists in which some have more to say than one token."""
    size = len(step.request_ids)
    counts, *more = (
        list(column) or [default] * size
        for column, default in (
            (step.num_tokens, 1),
            (step.local_prefill_tokens, 0),
            (step.accepted_draft_tokens, 0),
            (step.rejected_draft_tokens, 0),
        )
    )
    columns = [step.attempts, step.first_indices, counts, *more]
    if any(len(column) != size for column in columns) or min(counts, default=0) < 0:
        raise _uneven(step)
    if sum(counts) != len(step.token_ids):
        raise _uneven(step)
    token_ids, begin = tuple(step.token_ids), 0
    for request_id, attempt, index, count, prefilled, accepted, rejected in zip(
        step.request_ids, *columns, strict=True
    ):
        tokens = token_ids[begin : begin + count]
        begin += count
        yield StepTokens(request_id, attempt, index, tokens, None, 0.0, prefilled, (), accepted, rejected)


def _uneven(step: pb.StepBatch) -> InvalidRequestError:
    return InvalidRequestError(
        f"step: {len(step.request_ids)} requests, and lists of other lengths beside them", field="step"
    )


def _hello(message: pb.PrefillEvents | pb.DecodeEvents) -> Hello | None:
    if not message.HasField("hello"):
        return None
    return Hello(worker_info_from_proto(message.hello.info), stats_from_proto(message.hello.stats))


def _stats(message: pb.PrefillEvents | pb.DecodeEvents) -> WorkerStats | None:
    return stats_from_proto(message.stats) if message.HasField("stats") else None


def _prefill_event(event: pb.PrefillEvent) -> WorkerEvent | None:
    match event.WhichOneof("event"):
        case "started":
            return _started(event.started)
        case "prompt_logprobs":
            return _prompt_logprobs(event.prompt_logprobs)
        case "first_token":
            return _first_token(event.first_token)
        case "handed_off":
            done = event.handed_off
            return HandedOff(
                request_id=done.request_id,
                attempt=done.attempt,
                decode_worker=done.decode_worker,
                transport=done.transport,
                kv_bytes=done.kv_bytes,
                transfer_s=done.transfer_s,
            )
        case "failed":
            return _failed(event.failed)
        case None:
            return None


def _decode_event(event: pb.DecodeEvent) -> WorkerEvent | None:
    match event.WhichOneof("event"):
        case "tokens":
            tokens = event.tokens
            return StepTokens(
                request_id=tokens.request_id,
                attempt=tokens.attempt,
                first_index=tokens.first_index,
                token_ids=tuple(tokens.token_ids),
                finish_reason=finish_from_proto(tokens.finish_reason),
                first_step_s=tokens.first_step_s,
                num_local_prefill_tokens=tokens.local_prefill_tokens,
                logprobs=logprobs_from_proto(tokens.logprobs) if tokens.HasField("logprobs") else (),
                num_accepted=tokens.accepted_draft_tokens,
                num_rejected=tokens.rejected_draft_tokens,
            )
        case "started":
            return _started(event.started)
        case "prompt_logprobs":
            return _prompt_logprobs(event.prompt_logprobs)
        case "first_token":
            return _first_token(event.first_token)
        case "failed":
            return _failed(event.failed)
        case "migration_wanted":
            wanted = event.migration_wanted
            return MigrationWanted(wanted.request_id, wanted.attempt, _CAUSES.get(wanted.cause, "unknown"))
        case "migrated":
            moved = event.migrated
            return Migrated(
                moved.request_id, moved.attempt, moved.new_attempt, moved.transport, moved.kv_bytes, moved.stop_s
            )
        case "migration_failed":
            stays = event.migration_failed
            return MigrationFailed(stays.request_id, stays.attempt, stays.new_attempt, stays.code, stays.message)
        case None:
            return None


_CAUSES: Final = {pb.MIGRATION_CAUSE_DRAIN: "drain", pb.MIGRATION_CAUSE_ROOM: "room"}


def _started(started: pb.PrefillStarted) -> PrefillStarted:
    return PrefillStarted(started.request_id, started.attempt, started.decode_worker)


def _prompt_logprobs(part: pb.PromptLogprobs) -> PromptLogprobs:
    return PromptLogprobs(part.request_id, part.attempt, part.first_index, logprobs_from_proto(part.logprobs))


def _first_token(first: pb.FirstToken) -> FirstToken:
    return FirstToken(
        request_id=first.request_id,
        attempt=first.attempt,
        index=first.index,
        token_id=first.token_id,
        finish_reason=finish_from_proto(first.finish_reason),
        prefill_s=first.prefill_s,
        num_cached_tokens=first.cached_tokens,
        num_fetched_tokens=first.fetched_tokens,
        fetch_s=first.fetch_s,
        compute_s=first.compute_s,
        logprobs=logprobs_from_proto(first.logprobs) if first.HasField("logprobs") else (),
    )


def _failed(failed: pb.JobFailed) -> JobFailed:
    return JobFailed(
        request_id=failed.request_id,
        attempt=failed.attempt,
        code=failed.code,
        message=failed.message,
        retryable=failed.retryable,
        blame=failed.blame,
    )
