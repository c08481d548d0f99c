"""Turns failed calls into errors that say what to do about it. Shared by both clients."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from pdserve.errors import DeadlineExceededError, PdServeError, UnavailableError
from pdserve.rpc.errors import error_of

_RICH_STATUS_KEY = "grpc-status-details-bin"


@dataclass(frozen=True, slots=True)
class CallFailure:
    """How a call ended that did not succeed."""

    error: PdServeError
    answered: bool
    """Whether a router has said so. False: the connection failed, and what the router thinks is not known."""
    silent: bool = False
    """The connection was given up because nothing came over it: the router may be frozen, so others are better."""


def failure_of(call: grpc.RpcError, address: str, timeout_s: float | None) -> CallFailure:
    """Of a call that was given `timeout_s`. Where no router answered at all, or not in time, the message says what to
    do about it."""
    assert isinstance(call, grpc.Call | grpc.aio.AioRpcError)
    answered = any(key == _RICH_STATUS_KEY for key, _ in call.trailing_metadata() or ())
    if call.code() is grpc.StatusCode.UNAVAILABLE and not answered:
        error: PdServeError = UnavailableError(
            f"no router answers at {address}: start one with `pdserve up`, or name another with --router or "
            f"PDSERVE__ROUTER__LISTEN ({call.details()})"
        )
        return CallFailure(error, answered=False)
    if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and timeout_s is not None:
        # Whether we gave up or the router did first is a matter of milliseconds: it has been given the same time.
        return CallFailure(no_answer_in_time(address, timeout_s), answered=True)
    return CallFailure(error_of(call), answered=True)


def silence_of(address: str, limit_s: float) -> CallFailure:
    """Of a call on which nothing was heard for `limit_s`."""
    error = UnavailableError(
        f"the router at {address} has sent nothing for {limit_s:g} s, not even a heartbeat: it is frozen or cut off "
        "(a router without heartbeats needs retry.silence_s=0)"
    )
    return CallFailure(error, answered=False, silent=True)


def no_answer_in_time(address: str, timeout_s: float) -> DeadlineExceededError:
    """What a call of `timeout_s` ends with when they are over."""
    return DeadlineExceededError(
        f"no complete answer from {address} within {timeout_s:g} s: allow more time (--timeout, or timeout_s) or ask "
        "for less; `pdserve status` shows how busy the workers are"
    )
