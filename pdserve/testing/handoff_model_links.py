"""How links of a modelled hand-off break and come back, and how processes end."""

from __future__ import annotations

from kv_transfer import decode_states as ds
from kv_transfer import decode_table
from kv_transfer import prefill_states as ps
from pdserve.testing.handoff_model_parties import LOST, Parties, put
from pdserve.testing.handoff_model_world import GONE, NOBODY, Flight, World


def lose(parties: Parties, w: World, number: int) -> World:
    """The prefill worker finds the stream broken and fences the transport, which ends every read."""
    w = w._replace(links=put(w.links, number, w.links[number]._replace(up=False)))
    w = _stop(parties, w, [flight for flight in w.flying if parties.link_of[flight.leg] == number])
    return _tell_legs(parties, w, number, ps.LinkLost())


def change_transport(parties: Parties, w: World, number: int) -> World:
    """The prefill worker gives up a transport and takes the next one of the link. Writes of a one-sided one have ended
    by then; a read of the source may go on."""
    w = _stop(parties, w, [f for f in w.flying if f.one_sided and parties.link_of[f.leg] == number])
    link = w.links[number]
    link = link._replace(transport=link.transport + 1)
    w = w._replace(links=put(w.links, number, link))
    return _tell_legs(parties, w, number, ps.TransportChanged(parties.scenario.transports[link.transport]))


def _stop(parties: Parties, w: World, flights: list[Flight]) -> World:
    w = w._replace(flying=w.flying.difference(flights))
    for flight in sorted(flights):
        if w.p[flight.leg] >= 0:
            w = parties.prefill(w, flight.leg, ps.SourceFree(flight.nonce, flight.seq))
    return w


def end(parties: Parties, w: World, number: int) -> World:
    """The decode worker finds the stream ended."""
    link = w.links[number]
    w = parties.fence(w, number, link.heard)
    w = w._replace(links=put(w.links, number, w.links[number]._replace(heard=0)))
    return tell_machines(parties, w, number, ds.LinkDown())


def reopen(parties: Parties, w: World, number: int) -> World:
    """The prefill worker opens the next generation, which ends the one before if the decode worker still has that."""
    if w.links[number].heard:
        w = end(parties, w, number)
    link = w.links[number]
    generation = link.generation + 1
    link = link._replace(generation=generation, transport=0, up=True, heard=generation)
    w = w._replace(links=put(w.links, number, link))
    return _tell_legs(parties, w, number, ps.LinkUp(parties.scenario.transports[0]))


def give_up(parties: Parties, w: World, number: int) -> World:
    """The decode worker counts as lost."""
    w = w._replace(links=put(w.links, number, w.links[number]._replace(given_up=True)))
    return _tell_legs(parties, w, number, ps.DecodeLost(LOST))


def _tell_legs(parties: Parties, w: World, number: int, event: ps.PrefillEvent) -> World:
    for leg, its_link in enumerate(parties.link_of):
        state = parties.p_state(w, leg)
        if its_link == number and state is not None and not isinstance(state, ps.Done | ps.Failed):
            w = parties.prefill(w, leg, event)
    return w


def tell_machines(parties: Parties, w: World, number: int, event: ds.DecodeEvent) -> World:
    """Apply an event to whatever of a link's hand-offs holds blocks without having committed."""
    for machine, its_link in enumerate(parties.link_of_machine):
        state = parties.d_state(w, machine)
        if its_link == number and isinstance(state, ds.Reserved | ds.Quarantined):
            w = parties.decode(w, machine, event)
    return w


def crash(parties: Parties, w: World, who: str) -> World:
    """A process ends, with all that it knows."""
    w = w._replace(dead=w.dead | {who})
    number = int(who[1:])
    return _crash_prefill(parties, w, number) if who.startswith("p") else _crash_decode(parties, w, number)


def _crash_prefill(parties: Parties, w: World, number: int) -> World:
    """One-sided writes may still be on their way."""
    p = tuple(GONE if leg.prefill == number else state for leg, state in zip(parties.legs, w.p, strict=True))
    flying = frozenset(f for f in w.flying if f.one_sided or parties.legs[f.leg].prefill != number)
    links = tuple(
        link._replace(up=False) if prefill == number else link
        for (prefill, _), link in zip(parties.links, w.links, strict=True)
    )
    return w._replace(p=p, links=links, flying=flying)


def _crash_decode(parties: Parties, w: World, number: int) -> World:
    """Another process takes its place at once; links that led to the old one never come back."""
    d = tuple(
        parties.decode_states.of(decode_table.start(parties.d_state(w, machine).terms))
        if worker == number
        else w.d[machine]
        for machine, (worker, _) in enumerate(parties.machines)
    )
    every_generation = (1 << parties.scenario.generations + 1) - 1
    links = tuple(
        link._replace(heard=0, severed=True, fenced=every_generation) if decode == number and link.generation else link
        for (_, decode), link in zip(parties.links, w.links, strict=True)
    )
    empty = (0,) * parties.scenario.num_chunks
    return w._replace(d=d, links=links, owner=put(w.owner, number, NOBODY), content=put(w.content, number, empty))
