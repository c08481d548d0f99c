"""Hand-off messages to and from protobuf: the only module of `kv_transfer` that touches generated stubs' messages."""

from __future__ import annotations

from collections.abc import Callable

from kv_transfer.messages import (
    Abort,
    AbortAck,
    Busy,
    ChunkAck,
    ChunkNak,
    Commit,
    CommitAck,
    CommitNack,
    Gone,
    Grant,
    LinkHeartbeat,
    LinkHello,
    LinkRefused,
    LinkWelcome,
    Quiet,
    Renew,
    RenewAck,
    Reserve,
    ToDecode,
    ToPrefill,
)
from pdserve.errors import HandoffError
from pdserve.rpc.codec import job_from_proto, job_to_proto, worker_info_from_proto, worker_info_to_proto
from pdserve.rpc.v1 import handoff_pb2 as pb
from pdserve.types import HandoffId

Request = ToDecode | LinkHello | LinkHeartbeat
Reply = ToPrefill | LinkWelcome | LinkRefused | LinkHeartbeat


def _id(handoff: HandoffId) -> pb.HandoffId:
    return pb.HandoffId(request_id=handoff.request_id, attempt=handoff.attempt)


def _id_from(message: pb.HandoffId) -> HandoffId:
    return HandoffId(message.request_id, message.attempt)


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
                    protocol=message.protocol,
                )
            )
        case LinkHeartbeat():
            return pb.HandoffRequest(heartbeat=pb.LinkHeartbeat())
        case Reserve(handoff, job, num_tokens, plan_hash):
            return pb.HandoffRequest(
                reserve=pb.Reserve(id=_id(handoff), job=job_to_proto(job), num_tokens=num_tokens, plan_hash=plan_hash)
            )
        case Commit(handoff, nonce, first_token):
            return pb.HandoffRequest(commit=pb.Commit(id=_id(handoff), nonce=nonce, first_token=first_token))
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
            return pb.HandoffReply(welcome=pb.LinkWelcome(decode=worker_info_to_proto(message.decode)))
        case LinkRefused():
            return pb.HandoffReply(refused=pb.LinkRefused(code=message.code, message=message.message))
        case LinkHeartbeat():
            return pb.HandoffReply(heartbeat=pb.LinkHeartbeat())
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
        protocol=m.hello.protocol,
    ),
    "heartbeat": lambda m: LinkHeartbeat(),
    "reserve": lambda m: Reserve(
        _id_from(m.reserve.id), job_from_proto(m.reserve.job), m.reserve.num_tokens, m.reserve.plan_hash
    ),
    "commit": lambda m: Commit(_id_from(m.commit.id), m.commit.nonce, m.commit.first_token),
    "renew": lambda m: Renew(_id_from(m.renew.id), m.renew.nonce),
    "abort": lambda m: Abort(_id_from(m.abort.id), m.abort.nonce),
    "quiet": lambda m: Quiet(_id_from(m.quiet.id), m.quiet.nonce),
}

_FROM_REPLY: dict[str, Callable[[pb.HandoffReply], Reply]] = {
    "welcome": lambda m: LinkWelcome(decode=worker_info_from_proto(m.welcome.decode)),
    "refused": lambda m: LinkRefused(code=m.refused.code, message=m.refused.message),
    "heartbeat": lambda m: LinkHeartbeat(),
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


def reply_from_proto(message: pb.HandoffReply) -> Reply:
    """Raises like `request_from_proto`."""
    kind = message.WhichOneof("message")
    if kind is None:
        raise HandoffError("empty or unknown message on a KV link; is the decode worker of a newer version?")
    return _FROM_REPLY[kind](message)
