"""What must hold in every state of a hand-off, as `handoff_model` explores it.

owner     the blocks of a decode worker have one owner; an attempt has one decode worker, for ever
bytes     what counts as stored is in its place, written under that very ticket, and stays there
source    a leg has ended only if none of its reads (or one-sided writes) is in flight
outcome   Done means that D committed; Failed without "unknown" means that D did not and never will
patience  where nothing happens but that chunks and messages get lost or repeated, a hand-off does not fail
truth     an attempt that P has not given up and no newer one replaces is never called stale
credit    a link never has more out than its window
limit     nothing is repeated for ever
"""

from __future__ import annotations

from kv_transfer import decode_states as ds
from kv_transfer import prefill_states as ps
from pdserve.testing.handoff_model import Violation
from pdserve.testing.handoff_model_parties import Parties
from pdserve.testing.handoff_model_world import GONE, NOBODY, NOT_BEGUN, Flight, World


def is_over(parties: Parties, w: World, leg: int) -> bool:
    """Whether the prefill worker is done with a leg."""
    state = parties.p_state(w, leg)
    return w.p[leg] == GONE or isinstance(state, ps.Done | ps.Failed)


def check(parties: Parties, w: World) -> None:
    """Raises Violation."""
    for worker in range(parties.num_decode):
        _check_owner(parties, w, worker)
    for machine in range(len(w.d)):
        _check_bytes(parties, w, machine)
        _check_truth(parties, w, machine)
    for leg in range(len(w.p)):
        _check_leg(parties, w, leg)
    for flight in w.flying:
        if flight.one_sided and flight.generation:
            _check_write(parties, w, flight)
    attempts = [attempt for (_, attempt), nonce in zip(parties.machines, w.commits, strict=True) if nonce]
    if len(attempts) > len(set(attempts)):
        raise Violation("owner: two decode workers have taken the same attempt")
    if parties.scenario.credit_chunks is not None:
        for link in range(len(w.links)):
            _check_credit(parties, w, link, parties.scenario.credit_chunks)


def _check_owner(parties: Parties, w: World, worker: int) -> None:
    holding = ds.Reserved | ds.Committed | ds.Quarantined
    owners = [
        machine
        for machine, (its_worker, _) in enumerate(parties.machines)
        if its_worker == worker and isinstance(parties.d_state(w, machine), holding)
    ]
    if owners != ([] if w.owner[worker] == NOBODY else [w.owner[worker]]):
        raise Violation(f"owner: {w.owner[worker]} has the blocks of d{worker}, {owners} think they have")


def _check_bytes(parties: Parties, w: World, machine: int) -> None:
    state = parties.d_state(w, machine)
    content = w.content[parties.machines[machine][0]]
    num_held = parties.num_held(w, machine)
    match state:
        case ds.Committed(nonce=nonce):
            if any(place != nonce for place in content):
                raise Violation(f"bytes: ticket {nonce} is decoded from blocks written under {content}")
        case ds.Reserved(nonce=nonce):
            for place in range(len(content)):
                stored = place < num_held or state.stored >> place - num_held & 1
                if stored and content[place] != nonce:
                    raise Violation(f"bytes: chunk {place - num_held} of ticket {nonce} counts as stored in {content}")
            if any(count > parties.scenario.max_repeats for _, count in state.naks):
                raise Violation(f"limit: refused (chunk, times) {state.naks}")


def _check_truth(parties: Parties, w: World, machine: int) -> None:
    """Of what D will answer whoever asks about a ticket that is over."""
    state = parties.d_state(w, machine)
    if not isinstance(state, ds.Tomb) or state.committed or state.code != ds.STALE or not state.nonce:
        return
    _, attempt = parties.machines[machine]
    is_replaced = any(
        leg.attempt > attempt and number != NOT_BEGUN for leg, number in zip(parties.legs, w.p, strict=True)
    )
    legs = [leg for leg, its_machine in enumerate(parties.machine_of) if its_machine == machine]
    is_given_up = any(is_over(parties, w, leg) or isinstance(parties.p_state(w, leg), ps.Aborting) for leg in legs)
    if not is_replaced and not is_given_up:
        raise Violation(f"truth: machine {machine} calls ticket {state.nonce} stale, which nobody has given up")


def _check_write(parties: Parties, w: World, flight: Flight) -> None:
    """A write that may still land needs blocks that are reserved for it or in quarantine."""
    if w.links[parties.link_of[flight.leg]].fenced >> flight.generation & 1:
        return
    state = parties.d_state(w, parties.machine_of[flight.leg])
    if not isinstance(state, ds.Reserved | ds.Quarantined) or state.nonce != flight.nonce:
        raise Violation(
            f"write: chunk {flight.seq} of ticket {flight.nonce} may land in blocks of {type(state).__name__}"
        )


def _check_leg(parties: Parties, w: World, leg: int) -> None:
    state = parties.p_state(w, leg)
    machine = parties.machine_of[leg]
    committed = w.commits[machine] != 0
    if parties.scenario.must_succeed and isinstance(state, ps.Failed | ps.Aborting) and state.failure is not None:
        raise Violation(f"patience: leg {leg} ends because of what is no more than late")
    match state:
        case ps.Pushing(push=push) | ps.Committing(push=push):
            if any(count > parties.scenario.max_repeats for _, count in push.reposts + push.repeats):
                raise Violation(f"limit: posted again (chunk, times) {push.reposts}, {push.repeats}")
        case ps.Done():
            if not committed:
                raise Violation(f"outcome: leg {leg} is Done but D never committed it")
        case ps.Failed(failure=failure):
            # A later leg with the same id may have handed over what this one could not.
            later = any(w.p[other] != NOT_BEGUN for other in parties.legs_after(leg))
            if committed and not failure.outcome_unknown and not later:
                raise Violation(f"outcome: leg {leg} has failed for certain, but D committed it")
        case _:
            return
    if isinstance(state, ps.Done | ps.Failed) and any(flight.leg == leg for flight in w.flying):
        raise Violation(f"source: leg {leg} has ended with a transfer in flight")


def _check_credit(parties: Parties, w: World, link: int, window: int) -> None:
    """What is out: posted under the ticket that D holds, not stored, and not known to be lost."""
    num_out = 0
    for leg in range(len(w.p)):
        state = parties.p_state(w, leg)
        machine = parties.d_state(w, parties.machine_of[leg])
        if (
            parties.link_of[leg] == link
            and isinstance(state, ps.Pushing | ps.Committing)
            and isinstance(machine, ds.Reserved)
            and machine.nonce == state.push.nonce
        ):
            num_out += (state.push.posted & ~machine.stored).bit_count()
    if num_out > window:
        raise Violation(f"credit: {num_out} chunks are out on link {link}, the window is {window}")
