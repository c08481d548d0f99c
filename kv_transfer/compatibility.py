"""Whether two workers may exchange KV. Checked on both sides of every link, before any byte moves."""

from __future__ import annotations

from kv_transfer.messages import PROTOCOL_VERSION, LinkHello
from pdserve.errors import IncompatibleWorkersError, StaleAttemptError, WorkerLostError
from pdserve.types import DecodeTarget, Role
from pdserve.worker_info import WorkerInfo


def check_decode_peer(
    prefill: WorkerInfo, decode: WorkerInfo, target: DecodeTarget, *, for_prefixes: bool = False
) -> None:
    """The prefill side's check of who answered.

    Raises WorkerLostError if it is another process than the router meant, IncompatibleWorkersError naming every
    difference otherwise.
    """
    if decode.incarnation != target.incarnation:
        raise WorkerLostError(
            f"{decode.role.value} worker {target.worker_id} at {target.address}: incarnation {target.incarnation} is "
            f"gone, {decode.worker_id} incarnation {decode.incarnation} answers"
        )
    _check(prefill, decode, for_prefixes=for_prefixes)


def check_prefill_peer(hello: LinkHello, decode: WorkerInfo, newest_generation: int) -> None:
    """The decode side's check of who calls.

    Raises WorkerLostError if another incarnation of this worker is meant, StaleAttemptError for a generation that is
    not newer than `newest_generation` (the last seen of this prefill process), IncompatibleWorkersError otherwise.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise IncompatibleWorkersError(
            f"protocol: {hello.prefill.role.value} {hello.prefill.worker_id} speaks {hello.protocol}, "
            f"{decode.role.value} {decode.worker_id} speaks {PROTOCOL_VERSION}"
        )
    if hello.decode_incarnation != decode.incarnation:
        raise WorkerLostError(
            f"{decode.role.value} worker {decode.worker_id}: incarnation {hello.decode_incarnation} is gone, "
            f"this is {decode.incarnation}"
        )
    if hello.generation <= newest_generation:
        raise StaleAttemptError(
            f"link generation {hello.generation} of {hello.prefill.worker_id} is not newer than {newest_generation}"
        )
    if hello.target_chunk_bytes < 1:
        raise IncompatibleWorkersError(f"target_chunk_bytes: must be positive, got {hello.target_chunk_bytes}")
    if hello.tail_tokens < 0:
        raise IncompatibleWorkersError(f"tail_tokens: must not be negative, got {hello.tail_tokens}")
    _check(hello.prefill, decode, for_prefixes=hello.for_prefixes)


def _check(prefill: WorkerInfo, decode: WorkerInfo, *, for_prefixes: bool) -> None:
    problems = prefill.incompatibilities(decode)
    # Any worker may send: prompts that it has computed, streams that move on, prefixes that it holds. Only prefill
    # workers ask for prefixes.
    wanted = Role.PREFILL if for_prefixes else Role.DECODE
    if decode.role is not wanted:
        problems.append(f"role of {decode.worker_id} is {decode.role.value!r}, must be {wanted.value!r}")
    if len(prefill.codecs) != 1:
        problems.append(f"codecs of {prefill.worker_id} are {list(prefill.codecs)}, must be the one that it uses")
    if problems:
        raise IncompatibleWorkersError(
            f"{prefill.role.value} {prefill.worker_id} and {decode.role.value} {decode.worker_id} cannot exchange KV: "
            + "; ".join(problems)
        )
