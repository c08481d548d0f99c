"""Hand-off messages to and from protobuf: the only module of `kv_transfer` that touches generated stubs' messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kv_transfer.messages import (
    ENDED,
    Abort,
    AbortAck,
    Busy,
    ChunkAck,
    ChunkNak,
    Commit,
    CommitAck,
    CommitNack,
    Endpoint,
    Gone,
    Grant,
    LinkHeartbeat,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    PrefixRequest,
    ProbeAck,
    Quiet,
    Renew,
    RenewAck,
    Reserve,
    ToDecode,
    ToPrefill,
)
from pdserve.addresses import check_address
from pdserve.errors import HandoffError, InvalidRequestError
from pdserve.rpc.codec import job_from_proto, job_to_proto, worker_info_from_proto, worker_info_to_proto
from pdserve.rpc.v1 import handoff_pb2 as pb
from pdserve.rpc.v1 import prefix_pb2
from pdserve.types import GenerationJob, HandoffId, HandoffPurpose, PrefixFetch, RunningStream

Request = ToDecode | LinkHello | LinkHeartbeat
Reply = ToPrefill | LinkWelcome | LinkRefused | LinkHeartbeat | ProbeAck


def _id(handoff: HandoffId) -> pb.HandoffId:
    return pb.HandoffId(request_id=handoff.request_id, attempt=handoff.attempt)


def _id_from(message: pb.HandoffId) -> HandoffId:
    return HandoffId(message.request_id, message.attempt)


def _endpoints(endpoints: Sequence[Endpoint]) -> list[pb.TransportEndpoint]:
    return [pb.TransportEndpoint(name=endpoint.name, attributes=endpoint.attributes) for endpoint in endpoints]


def _endpoints_from(messages: Iterable[pb.TransportEndpoint]) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(message.name, dict(message.attributes)) for message in messages)


def _reserve(message: Reserve) -> pb.Reserve:
    reserve = pb.Reserve(
        id=_id(message.id),
        num_tokens=message.num_tokens,
        plan_hash=message.plan_hash,
    )
    match message.job:
        case RunningStream(job=job, exact=exact):
            reserve.job.CopyFrom(job_to_proto(job))
            reserve.migrates, reserve.inexact = True, not exact
        case GenerationJob():
            reserve.job.CopyFrom(job_to_proto(message.job))
        case PrefixFetch():
            reserve.fetch.CopyFrom(pb.PrefixFetch(last_block=message.job.last_block))
    return reserve


def _job_from(message: pb.Reserve) -> HandoffPurpose:
    if message.WhichOneof("purpose") == "fetch":
        return PrefixFetch(
            request_id=message.id.request_id, attempt=message.id.attempt, last_block=message.fetch.last_block
        )
    job = job_from_proto(message.job)
    return RunningStream(job=job, exact=not message.inexact) if message.migrates else job


def _first_tokens_from(message: pb.Commit) -> tuple[int, ...]:
    tokens = tuple(message.first_tokens)
    if not tokens or min(tokens) < ENDED:
        raise InvalidRequestError(
            f"commit.first_tokens: a token id or {ENDED} for each output, got {list(tokens)}",
            field="commit.first_tokens",
        )
    return tokens


def request_to_proto(message: Request) -> pb.HandoffRequest:
    """Prefill worker to decode worker."""
    match message:
        case LinkHello():
            return pb.HandoffRequest(
                hello=pb.LinkHello(
                    prefill=worker_info_to_proto(message.prefill),
                    generation=message.generation,
                    decode_incarnation=message.decode_incarnation,
                    target_chunk_bytes=message.target_chunk_bytes,
                    tail_tokens=message.tail_tokens,
                    protocol=message.protocol,
                    offers=_endpoints(message.offers),
                    for_prefixes=message.for_prefixes,
                )
            )
        case LinkHeartbeat():
            return pb.HandoffRequest(heartbeat=pb.LinkHeartbeat())
        case Reserve():
            return pb.HandoffRequest(reserve=_reserve(message))
        case Commit(handoff, nonce, first_tokens):
            return pb.HandoffRequest(commit=pb.Commit(id=_id(handoff), nonce=nonce, first_tokens=first_tokens))
        case Renew(handoff, nonce):
            return pb.HandoffRequest(renew=pb.Renew(id=_id(handoff), nonce=nonce))
        case Abort(handoff, nonce):
            return pb.HandoffRequest(abort=pb.Abort(id=_id(handoff), nonce=nonce))
        case Quiet(handoff, nonce):
            return pb.HandoffRequest(quiet=pb.Quiet(id=_id(handoff), nonce=nonce))


def reply_to_proto(message: Reply) -> pb.HandoffReply:
    """Decode worker to prefill worker."""
    match message:
        case LinkWelcome():
            decode = worker_info_to_proto(message.decode)
            return pb.HandoffReply(welcome=pb.LinkWelcome(decode=decode, endpoints=_endpoints(message.endpoints)))
        case LinkRefused():
            return pb.HandoffReply(refused=pb.LinkRefused(code=message.code, message=message.message))
        case LinkHeartbeat():
            return pb.HandoffReply(heartbeat=pb.LinkHeartbeat())
        case ProbeAck(transport, seq):
            return pb.HandoffReply(probe_ack=pb.ProbeAck(transport=transport, seq=seq))
        case Grant():
            return pb.HandoffReply(
                grant=pb.Grant(
                    id=_id(message.id),
                    nonce=message.nonce,
                    lease_s=message.lease_s,
                    credit_bytes=message.credit_bytes,
                    num_held_tokens=message.num_held_tokens,
                    plan_hash=message.plan_hash,
                )
            )
        case Busy(handoff, retry_after_s):
            return pb.HandoffReply(busy=pb.Busy(id=_id(handoff), retry_after_s=retry_after_s))
        case Gone(handoff, nonce, code, text):
            return pb.HandoffReply(gone=pb.Gone(id=_id(handoff), nonce=nonce, code=code, message=text))
        case ChunkAck(handoff, nonce, seq, stored_nbytes):
            return pb.HandoffReply(
                chunk_ack=pb.ChunkAck(id=_id(handoff), nonce=nonce, seq=seq, stored_bytes=stored_nbytes)
            )
        case ChunkNak(handoff, nonce, seq, reason):
            return pb.HandoffReply(chunk_nak=pb.ChunkNak(id=_id(handoff), nonce=nonce, seq=seq, reason=reason))
        case CommitAck(handoff, nonce):
            return pb.HandoffReply(commit_ack=pb.CommitAck(id=_id(handoff), nonce=nonce))
        case CommitNack(handoff, nonce, missing):
            return pb.HandoffReply(commit_nack=pb.CommitNack(id=_id(handoff), nonce=nonce, missing_seqs=missing))
        case RenewAck(handoff, nonce, lease_s):
            return pb.HandoffReply(renew_ack=pb.RenewAck(id=_id(handoff), nonce=nonce, lease_s=lease_s))
        case AbortAck(handoff, nonce):
            return pb.HandoffReply(abort_ack=pb.AbortAck(id=_id(handoff), nonce=nonce))


_FROM_REQUEST: dict[str, Callable[[pb.HandoffRequest], Request]] = {
    "hello": lambda m: LinkHello(
        prefill=worker_info_from_proto(m.hello.prefill),
        generation=m.hello.generation,
        decode_incarnation=m.hello.decode_incarnation,
        target_chunk_bytes=m.hello.target_chunk_bytes,
        tail_tokens=m.hello.tail_tokens,
        protocol=m.hello.protocol,
        offers=_endpoints_from(m.hello.offers),
        for_prefixes=m.hello.for_prefixes,
    ),
    "heartbeat": lambda m: LinkHeartbeat(),
    "reserve": lambda m: Reserve(
        _id_from(m.reserve.id), _job_from(m.reserve), m.reserve.num_tokens, m.reserve.plan_hash
    ),
    "commit": lambda m: Commit(_id_from(m.commit.id), m.commit.nonce, _first_tokens_from(m.commit)),
    "renew": lambda m: Renew(_id_from(m.renew.id), m.renew.nonce),
    "abort": lambda m: Abort(_id_from(m.abort.id), m.abort.nonce),
    "quiet": lambda m: Quiet(_id_from(m.quiet.id), m.quiet.nonce),
}

_FROM_REPLY: dict[str, Callable[[pb.HandoffReply], Reply]] = {
    "welcome": lambda m: LinkWelcome(
        decode=worker_info_from_proto(m.welcome.decode), endpoints=_endpoints_from(m.welcome.endpoints)
    ),
    "refused": lambda m: LinkRefused(code=m.refused.code, message=m.refused.message),
    "heartbeat": lambda m: LinkHeartbeat(),
    "probe_ack": lambda m: ProbeAck(m.probe_ack.transport, m.probe_ack.seq),
    "grant": lambda m: Grant(
        _id_from(m.grant.id),
        m.grant.nonce,
        m.grant.lease_s,
        m.grant.credit_bytes,
        m.grant.num_held_tokens,
        m.grant.plan_hash,
    ),
    "busy": lambda m: Busy(_id_from(m.busy.id), m.busy.retry_after_s),
    "gone": lambda m: Gone(_id_from(m.gone.id), m.gone.nonce, m.gone.code, m.gone.message),
    "chunk_ack": lambda m: ChunkAck(
        _id_from(m.chunk_ack.id), m.chunk_ack.nonce, m.chunk_ack.seq, m.chunk_ack.stored_bytes
    ),
    "chunk_nak": lambda m: ChunkNak(_id_from(m.chunk_nak.id), m.chunk_nak.nonce, m.chunk_nak.seq, m.chunk_nak.reason),
    "commit_ack": lambda m: CommitAck(_id_from(m.commit_ack.id), m.commit_ack.nonce),
    "commit_nack": lambda m: CommitNack(
        _id_from(m.commit_nack.id), m.commit_nack.nonce, tuple(m.commit_nack.missing_seqs)
    ),
    "renew_ack": lambda m: RenewAck(_id_from(m.renew_ack.id), m.renew_ack.nonce, m.renew_ack.lease_s),
    "abort_ack": lambda m: AbortAck(_id_from(m.abort_ack.id), m.abort_ack.nonce),
}


def request_from_proto(message: pb.HandoffRequest) -> Request:
    """Raises InvalidRequestError for content that contradicts itself, HandoffError for a message of a newer version."""
    kind = message.WhichOneof("message")
    if kind is None:
        raise HandoffError("empty or unknown message on a KV link; is the prefill worker of a newer version?")
    return _FROM_REQUEST[kind](message)


def replies_to_proto(messages: Sequence[Reply]) -> pb.HandoffReply:
    """One or more replies as one message."""
    if len(messages) == 1:
        return reply_to_proto(messages[0])
    return pb.HandoffReply(batch=pb.ReplyBatch(replies=[reply_to_proto(message) for message in messages]))


def replies_from_proto(message: pb.HandoffReply) -> tuple[Reply, ...]:
    """The replies in one message, in order. Raises like `request_from_proto`."""
    if message.WhichOneof("message") == "batch":
        return tuple(_reply_from_proto(reply) for reply in message.batch.replies)
    return (_reply_from_proto(message),)


def _reply_from_proto(message: pb.HandoffReply) -> Reply:
    kind = message.WhichOneof("message")
    if kind not in _FROM_REPLY:
        raise HandoffError("empty or unknown message on a KV link; is the decode worker of a newer version?")
    return _FROM_REPLY[kind](message)


def prefix_request_to_proto(request: PrefixRequest) -> prefix_pb2.FetchRequest:
    """Field by field."""
    return prefix_pb2.FetchRequest(
        id=_id(request.id),
        requester=worker_info_to_proto(request.requester),
        block_names=request.names,
        timeout_s=request.timeout_s,
    )


def prefix_request_from_proto(message: prefix_pb2.FetchRequest) -> PrefixRequest:
    """Raises InvalidRequestError for a requester that cannot be, an address or a time-out that is none."""
    if not 0 < message.timeout_s < float("inf"):
        raise InvalidRequestError(f"timeout_s: must be positive, got {message.timeout_s:g}", field="timeout_s")
    check_address(message.requester.address, "requester.address")
    return PrefixRequest(
        id=_id_from(message.id),
        requester=worker_info_from_proto(message.requester),
        names=tuple(message.block_names),
        timeout_s=message.timeout_s,
    )
