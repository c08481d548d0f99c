"""Scenarios of the hand-off protocol, each small enough to be searched, together covering what can happen to one."""

from __future__ import annotations

from pdserve.testing.handoff_model_world import Leg, Scenario

ONE = (Leg(prefill=0, decode=0, attempt=1),)
RETRIED = (Leg(prefill=0, decode=0, attempt=1), Leg(prefill=1, decode=0, attempt=2))
"""The router begins a second attempt on another prefill worker, for the same decode worker."""
REHOMED = (Leg(prefill=0, decode=0, attempt=1), Leg(prefill=0, decode=1, attempt=1, instead_of=0))
"""The prefill worker gives up one decode worker and hands the same attempt to another."""
ASKED_AGAIN = (Leg(prefill=0, decode=0, attempt=1), Leg(prefill=0, decode=0, attempt=1, instead_of=0))
"""The prefill worker comes back to the decode worker that it has given up."""
REHOMED_AND_RETRIED = (*REHOMED, Leg(prefill=1, decode=0, attempt=2))

ONE_SIDED = (True,)

SMALL: dict[str, Scenario] = {
    "computing, with renewals": Scenario(
        legs=ONE, num_chunks=2, renewals=True, computes=True, cancels=True, max_repeats=1
    ),
    "damage up to the limit": Scenario(legs=ONE, damage=True, renewals=True),
    "damage over a one-sided transport": Scenario(legs=ONE, transports=ONE_SIDED, damage=True, renewals=True),
    "link comes back twice": Scenario(legs=ONE, generations=3, renewals=True),
    "link comes back, one-sided": Scenario(legs=ONE, generations=2, num_chunks=2, transports=ONE_SIDED),
    "link comes back, chunks late": Scenario(legs=ONE, generations=2, late_data=True),
    "held prefix, one-sided": Scenario(
        legs=RETRIED, num_chunks=2, num_held_chunks=1, transports=ONE_SIDED, timeouts=False, max_repeats=1
    ),
    "retried": Scenario(legs=RETRIED, crashes=frozenset({"p0"}), max_repeats=1),
    "retried, one-sided": Scenario(legs=RETRIED, transports=ONE_SIDED, max_repeats=1),
    "re-homed": Scenario(legs=REHOMED, crashes=frozenset({"d0"}), max_repeats=1),
    "re-homed, draining": Scenario(legs=REHOMED, drains=True),
    "asked again": Scenario(legs=ASKED_AGAIN, cancels=True, num_chunks=2, max_repeats=1),
    "credit": Scenario(legs=ONE, num_chunks=3, credit_chunks=2, timeouts=False, lost_acks=True, commits=False),
    "in place, damaged": Scenario(legs=ONE, damage=True, in_place=True, generations=2),
    "transport changes": Scenario(legs=ONE, num_chunks=2, transports=(False, False), in_place=True, max_repeats=1),
    "chunks that are swallowed": Scenario(
        legs=ONE, num_chunks=2, transports=(False, False), timeouts=False, max_repeats=1, must_succeed=True
    ),
    "transport and link change": Scenario(legs=ONE, transports=(True, False), generations=2),
    "transport and link change, one-sided last": Scenario(legs=ONE, transports=(False, True), generations=2),
}
"""Searched completely in every run."""

LARGE: dict[str, Scenario] = {
    "retried, with crashes": Scenario(legs=RETRIED, crashes=frozenset({"p0", "p1", "d0"}), max_repeats=1),
    "retried, one-sided, with every fault": Scenario(
        legs=RETRIED,
        transports=ONE_SIDED,
        damage=True,
        cancels=True,
        crashes=frozenset({"p0", "d0"}),
        max_repeats=1,
    ),
    "retried, one-sided, two chunks": Scenario(legs=RETRIED, num_chunks=2, transports=ONE_SIDED, max_repeats=1),
    "re-homed, then retried": Scenario(legs=REHOMED_AND_RETRIED, max_repeats=1),
    "re-homed, in place, with crashes": Scenario(
        legs=REHOMED, in_place=True, damage=True, crashes=frozenset({"d0", "p0"}), cancels=True, max_repeats=1
    ),
    "re-homed while links come back": Scenario(legs=REHOMED, generations=2, crashes=frozenset({"d0"}), max_repeats=1),
    "retried over changing transports": Scenario(legs=RETRIED, transports=(False, True), max_repeats=1),
    "link comes back, two chunks late": Scenario(legs=ONE, generations=2, num_chunks=2, late_data=True, max_repeats=1),
    "credit of a longer prompt": Scenario(
        legs=ONE, num_chunks=4, credit_chunks=2, timeouts=False, lost_acks=True, commits=False
    ),
}
"""Too large for every run, which searches only their short histories."""
