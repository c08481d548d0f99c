"""How calls are counted by client."""

from __future__ import annotations

import contextlib

import pytest

from pdserve.errors import OverloadedError
from router.call_limits import peer_address
from router.limits import CallLimiter


def test_a_client_has_as_many_calls_at_once_as_it_may_and_one_more_after_one_has_ended() -> None:
    limiter = CallLimiter(2)
    with contextlib.ExitStack() as calls:
        calls.enter_context(limiter.call("Bearer a", "10.0.0.1"))
        with (
            limiter.call("Bearer a", "10.0.0.1"),
            pytest.raises(OverloadedError, match="max_requests_per_key") as error,
        ):
            calls.enter_context(limiter.call("Bearer a", "10.0.0.1"))
        assert error.value.retry_after_s is not None
        calls.enter_context(limiter.call("Bearer a", "10.0.0.1"))
    assert limiter.num_clients == 0


@pytest.mark.parametrize(
    ("authorization", "peer"),
    [("bearer  a ", "10.0.0.2"), ("BEARER a", "")],
)
def test_a_token_is_the_same_client_from_wherever_it_comes_and_however_its_header_is_spelt(
    authorization: str, peer: str
) -> None:
    limiter = CallLimiter(1)
    with limiter.call("Bearer a", "10.0.0.1"), pytest.raises(OverloadedError), limiter.call(authorization, peer):
        pass


@pytest.mark.parametrize(
    ("authorization", "peer"),
    [
        ("Bearer b", "10.0.0.1"),
        (None, "10.0.0.1"),
        ("Basic YTph", "10.0.0.1"),
        # An address that is spelt like what is kept for a token.
        (None, "token a"),
    ],
)
def test_other_clients_are_not_counted_with_it(authorization: str | None, peer: str) -> None:
    limiter = CallLimiter(1)
    with limiter.call("Bearer a", "10.0.0.1"), limiter.call(authorization, peer):
        assert limiter.num_clients == 2


def test_clients_without_a_token_are_told_apart_by_address() -> None:
    limiter = CallLimiter(1)
    with limiter.call(None, "10.0.0.1"), limiter.call(None, "10.0.0.2"):
        again = limiter.call("Basic YTph", "10.0.0.1")
        with pytest.raises(OverloadedError):
            again.__enter__()


def test_a_call_that_fails_is_over() -> None:
    limiter = CallLimiter(1)
    with pytest.raises(ZeroDivisionError), limiter.call(None, "10.0.0.1"):
        raise ZeroDivisionError
    with limiter.call(None, "10.0.0.1"):
        pass


def test_without_a_bound_nothing_is_kept() -> None:
    limiter = CallLimiter(None)
    with limiter.call(None, "10.0.0.1"), limiter.call(None, "10.0.0.1"):
        assert limiter.num_clients == 0


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.7:41234", "10.0.0.7"),
        ("ipv6:%5B::1%5D:41234", "::1"),
        ("ipv6:[fe80::1]:41234", "fe80::1"),
        ("unix:/run/router.sock", "unix:/run/router.sock"),
        ("unix:", "unix:"),
    ],
)
def test_the_port_is_no_part_of_a_peer_address(peer: str, address: str) -> None:
    assert peer_address(peer) == address
