"""Whether two workers may exchange KV. Checked on both sides of every link, before any byte moves."""

from __future__ import annotations

from kv_transfer.messages import PROTOCOL_VERSION, LinkHello
from pdserve.errors import IncompatibleWorkersError, StaleAttemptError, WorkerLostError
from pdserve.types import DecodeTarget, Role
from pdserve.worker_info import WorkerInfo


def check_decode_peer(prefill: WorkerInfo, decode: WorkerInfo, target: DecodeTarget) -> None:
    """The prefill side's check of who answered.

    Raises WorkerLostError if it is another process than the router meant, IncompatibleWorkersError naming every
    difference otherwise.
    """
    if decode.incarnation != target.incarnation:
        raise WorkerLostError(
            f"decode worker {target.worker_id} at {target.address}: incarnation {target.incarnation} is gone, "
            f"{decode.worker_id} incarnation {decode.incarnation} answers"
        )
    _check(prefill, decode)


def check_prefill_peer(hello: LinkHello, decode: WorkerInfo, newest_generation: int) -> None:
    """The decode side's check of who calls.

    Raises WorkerLostError if another incarnation of this worker is meant, StaleAttemptError for a generation that is
    not newer than `newest_generation` (the last seen of this prefill process), IncompatibleWorkersError otherwise.
    """
    if hello.protocol != PROTOCOL_VERSION:
        raise IncompatibleWorkersError(
            f"protocol: prefill {hello.prefill.worker_id} speaks {hello.protocol}, "
            f"decode {decode.worker_id} speaks {PROTOCOL_VERSION}"
        )
    if hello.decode_incarnation != decode.incarnation:
        raise WorkerLostError(
            f"decode worker {decode.worker_id}: incarnation {hello.decode_incarnation} is gone, "
            f"this is {decode.incarnation}"
        )
    if hello.generation <= newest_generation:
        raise StaleAttemptError(
            f"link generation {hello.generation} of {hello.prefill.worker_id} is not newer than {newest_generation}"
        )
    if hello.target_chunk_bytes < 1:
        raise IncompatibleWorkersError(f"target_chunk_bytes: must be positive, got {hello.target_chunk_bytes}")
    _check(hello.prefill, decode)


def _check(prefill: WorkerInfo, decode: WorkerInfo) -> None:
    problems = prefill.incompatibilities(decode)
    if prefill.role is not Role.PREFILL:
        problems.append(f"role of {prefill.worker_id} is {prefill.role.value!r}, must be 'prefill'")
    if decode.role is not Role.DECODE:
        problems.append(f"role of {decode.worker_id} is {decode.role.value!r}, must be 'decode'")
    if problems:
        raise IncompatibleWorkersError(
            f"prefill {prefill.worker_id} and decode {decode.worker_id} cannot exchange KV: " + "; ".join(problems)
        )
