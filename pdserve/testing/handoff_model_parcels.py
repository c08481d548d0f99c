"""What is on its way between the two sides of a modelled hand-off, and states and messages reduced to what matters."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from kv_transfer import decode_states as ds
from kv_transfer import prefill_states as ps
from kv_transfer.messages import ChunkNak, Gone, Reserve, ToDecode, ToPrefill

SOON, LATER, MUCH_LATER = 8.0, 1_000.0, 10_000.0
"""Everything happens at 0 but the clocks: `SOON` only what is sent again or renewed is due, `LATER` every limit has
passed but that of a quarantine which begins then."""
P_TIMERS = ps.PrefillTimers(resend_s=1, reserve_timeout_s=9, stall_timeout_s=9, commit_timeout_s=9, renew_margin_s=3)
D_TIMERS = ds.DecodeTimers(lease_s=10, max_reservation_s=100, quarantine_s=10, tombstone_s=1e9, credit_bytes=1)


class ToP(NamedTuple):
    """A message on its way to the prefill worker."""

    link: int
    generation: int
    machine: int
    message: ToPrefill


class ToD(NamedTuple):
    """A message on its way to the decode worker."""

    link: int
    generation: int
    machine: int
    message: ToDecode


class Payload(NamedTuple):
    """A chunk on its way to the decode worker."""

    link: int
    generation: int
    machine: int
    nonce: int
    seq: int


class Placed(NamedTuple):
    """The notice, on its way to the tables of the decode worker, that a chunk is in its place, or damaged."""

    link: int
    generation: int
    machine: int
    nonce: int
    seq: int
    fault: str | None = None


Parcel = ToP | ToD | Payload | Placed


def words(parcel: Parcel) -> str:
    """A parcel, for the history of a violation."""
    match parcel:
        case Placed(link, generation, machine, nonce, seq, fault):
            return (
                f"{fault or 'notice'} of chunk {seq} of ticket {nonce} on link {link}/{generation} to machine {machine}"
            )
        case Payload(link, generation, machine, nonce, seq):
            return f"chunk {seq} of ticket {nonce} on link {link}/{generation} to machine {machine}"
        case ToD(link, generation, machine, message):
            words = "Reserve" if isinstance(message, Reserve) else str(message)
            return f"{words} on link {link}/{generation} to machine {machine}"
        case ToP(link, generation, machine, message):
            return f"{message} on link {link}/{generation} from machine {machine}"


def plain_prefill(state: ps.PrefillState) -> ps.PrefillState:
    """The state without what no later transition depends on here: texts, and times that only say when to resend."""
    match state:
        case ps.Failed(failure=failure):
            return replace(state, failure=_plain_failure(failure))
        case ps.Aborting(failure=failure):
            plain = None if failure is None else _plain_failure(failure)
            return replace(state, failure=plain, resend_at=P_TIMERS.resend_s)
        case ps.Reserving():
            return replace(state, resend_at=P_TIMERS.resend_s)
        case ps.Pushing(push=push):
            return replace(state, push=replace(push, renew_at=0.0))
        case ps.Committing(push=push):
            return replace(state, push=replace(push, renew_at=0.0), resend_at=P_TIMERS.resend_s)
        case _:
            return state


def _plain_failure(failure: ps.Failure) -> ps.Failure:
    return ps.Failure(code="", message="", outcome_unknown=failure.outcome_unknown)


def plain_message(message: ToPrefill) -> ToPrefill:
    """The message without its texts."""
    match message:
        case Gone():
            return replace(message, code="", message="")
        case ChunkNak():
            return replace(message, reason="")
        case _:
            return message


def plain_decode(state: ds.DecodeState) -> ds.DecodeState:
    """The state without times that only a later one is compared with."""
    match state:
        case ds.Tomb() | ds.Quarantined():
            return replace(state, since=0.0)
        case _:
            return state
