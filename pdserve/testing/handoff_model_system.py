"""Everything that may happen next in a hand-off, for `handoff_model.explore`."""

from __future__ import annotations

from collections.abc import Iterator

from kv_transfer import decode_states as ds
from kv_transfer import prefill_states as ps
from kv_transfer.messages import ChunkAck
from kv_transfer.plan import Frontier
from pdserve.testing import handoff_model_links as links
from pdserve.testing.handoff_model import Label
from pdserve.testing.handoff_model_invariants import check, is_over
from pdserve.testing.handoff_model_parcels import (
    LATER,
    MUCH_LATER,
    SOON,
    Parcel,
    Payload,
    Placed,
    ToD,
    ToP,
    words,
)
from pdserve.testing.handoff_model_parties import CANCEL, DAMAGED, Parties, put
from pdserve.testing.handoff_model_world import GONE, NOBODY, NOT_BEGUN, Flight, Scenario, World

Move = tuple[Label, World]


class HandoffModel:
    """The hand-offs of a scenario, as a System."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.parties = Parties(scenario)
        self._dropped: dict[tuple[object, ...], int] = {}
        self._leg_names = [f"p{leg.prefill} to d{leg.decode}, attempt {leg.attempt}" for leg in self.parties.legs]

    def start(self) -> World:
        """See System."""
        return self.parties.start()

    def check(self, world: World) -> None:
        """See System."""
        check(self.parties, world)

    def is_goal(self, world: World) -> bool:
        """Nothing is held anywhere or, if the scenario says so, every chunk is out."""
        states = [self.parties.p_state(world, leg) for leg in range(len(world.p))]
        if not self.scenario.commits:
            return all(isinstance(state, ps.Pushing) and state.push.all_posted for state in states)
        if any(owner != NOBODY for owner in world.owner):
            return False
        return all(state is None or isinstance(state, ps.Done | ps.Failed) for state in states)

    def describe(self, label: Label) -> str:
        """See System."""
        what, *rest = label
        match rest:
            case [int(parcel), str(how)]:
                return f"{what}: {words(self.parties.parcels[parcel])} {how}".rstrip()
            case ["leg", int(leg), *more]:
                return " ".join((f"{what}: {self._leg_names[leg]}", *map(str, more)))
            case _:
                return " ".join(map(str, label))

    def successors(self, world: World) -> Iterator[Move]:
        """See System."""
        for label, after in self._moves(world):
            if after is not world:
                yield label, self._tidy(after)

    def _moves(self, w: World) -> Iterator[Move]:
        for number, parcel in self.parties.in_flight(w.net):
            yield from self._deliver(w, number, parcel)
        for leg in range(len(w.p)):
            yield from self._leg_moves(w, leg)
        for flight in w.flying:
            yield from self._land(w, flight)
        for machine in range(len(w.d)):
            yield from self._machine_moves(w, machine)
        for link in range(len(w.links)):
            yield from self._link_moves(w, link)
        for who in self.scenario.crashes - w.dead:
            yield ("crash", who), links.crash(self.parties, w, who)
        if self.scenario.drains and not w.draining:
            yield ("drain",), w._replace(draining=True)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _deliver(self, w: World, number: int, parcel: Parcel) -> Iterator[Move]:
        parties, machine = self.parties, parcel.machine
        match parcel:
            case ToP():
                leg = self._latest_leg(w, machine)
                if leg is not None and w.p[leg] >= 0:
                    yield ("deliver", number, ""), parties.prefill(w, leg, parcel.message)
                if self.scenario.lost_acks and any(_is_later_ack(p, parcel) for _, p in parties.in_flight(w.net)):
                    yield ("lose", number, ""), w._replace(net=w.net & ~(1 << number))
            case ToD():
                yield ("deliver", number, ""), parties.decode(w, machine, parties.arrival(w, machine, parcel))
            case Placed():
                yield (
                    ("deliver", number, ""),
                    parties.decode(w, machine, parties.chunk_arrival(parcel, parcel.fault)),
                )
            case Payload() if self.scenario.in_place:
                yield from self._put_in_place(w, number, parcel)
            case Payload():
                yield ("deliver", number, ""), parties.decode(w, machine, parties.chunk_arrival(parcel, None))
                if self.scenario.damage:
                    yield (
                        ("deliver", number, "damaged"),
                        parties.decode(w, machine, parties.chunk_arrival(parcel, "damaged")),
                    )

    def _put_in_place(self, w: World, number: int, parcel: Payload) -> Iterator[Move]:
        """A thread of the decode worker has received all of a chunk. Its bytes have gone to their places meanwhile, if
        they were wanted; whether they are damaged is known afterwards."""
        link, generation, machine, nonce, seq = parcel
        parties, state = self.parties, self.parties.d_state(w, machine)
        is_open = isinstance(state, ds.Reserved) and state.nonce == nonce and state.link.generation == generation
        is_verified = parties.is_in_place(w, machine, seq, nonce)
        for fault in (None, "damaged") if self.scenario.damage else (None,):
            after = w
            if (is_open or not self.scenario.closes_tickets) and not (is_verified and self.scenario.keeps_verified):
                after = parties.land(w, machine, seq, nonce if fault is None else DAMAGED)
            if is_open:
                after = parties.send(after, Placed(link, generation, machine, nonce, seq, fault))
            yield ("deliver", number, fault or ""), after

    def _latest_leg(self, w: World, machine: int) -> int | None:
        """Which of the hand-offs with one id at one decode worker hears what that says."""
        legs = [leg for leg, m in enumerate(self.parties.machine_of) if m == machine and w.p[leg] != NOT_BEGUN]
        return legs[-1] if legs else None

    def _tidy(self, w: World) -> World:
        """Drop messages that nobody will hear or that can change nothing any more, so that worlds differ only in what
        matters."""
        key = (w.p, w.d, w.links, len(self.parties.parcels))
        dropped = self._dropped.get(key)
        if dropped is None:
            dropped = self._dropped[key] = self._useless_parcels(w)
        return w._replace(net=w.net & ~dropped) if w.net & dropped else w

    def _useless_parcels(self, w: World) -> int:
        useless, masks = 0, self.parties.masks
        for number, link in enumerate(w.links):
            for generation in range(1, link.generation + 1):
                if not (link.up and link.generation == generation):
                    useless |= masks[ToP, number, generation]
                if link.heard != generation:
                    useless |= masks[ToD, number, generation]
                late = link.heard != generation or link.fenced >> generation & 1
                if late and not self.scenario.late_data:
                    useless |= masks[Payload, number, generation] | masks[Placed, number, generation]
        for machine in range(len(w.d)):
            legs = (leg for leg, its_machine in enumerate(self.parties.machine_of) if its_machine == machine)
            if all(is_over(self.parties, w, leg) for leg in legs):
                ended = isinstance(self.parties.d_state(w, machine), ds.Tomb)
                useless |= masks["machine" if ended else "useless to ended", machine]
        return useless

    # Prefill workers --------------------------------------------------------------------------------------------------

    def _may_begin(self, w: World, leg: int) -> bool:
        spec = self.parties.legs[leg]
        if w.p[leg] != NOT_BEGUN or f"p{spec.prefill}" in w.dead:
            return False
        if spec.instead_of is not None:
            state = self.parties.p_state(w, spec.instead_of)
            return isinstance(state, ps.Failed) and not state.failure.outcome_unknown
        return spec.attempt == 1 or any(
            number != NOT_BEGUN and other.attempt == spec.attempt - 1
            for number, other in zip(w.p, self.parties.legs, strict=True)
        )

    def _leg_moves(self, w: World, leg: int) -> Iterator[Move]:
        parties, scenario = self.parties, self.scenario
        if self._may_begin(w, leg):
            yield ("begin", "leg", leg), parties.begin(w, leg)
        state = parties.p_state(w, leg)
        if state is None or isinstance(state, ps.Done | ps.Failed):
            return
        if scenario.computes:
            yield from self._compute(w, leg, state)
        seq = self._window(w, leg)
        if seq is not None:
            yield ("post", "leg", leg, f"chunk {seq}"), parties.prefill(w, leg, ps.Window(seq))
        if scenario.cancels:
            yield ("cancel", "leg", leg), parties.prefill(w, leg, ps.Cancelled(CANCEL))
        if scenario.renewals:
            yield ("clock", "leg", leg, "sends again"), parties.prefill(w, leg, ps.Tick(), SOON)
        if scenario.timeouts:
            yield ("clock", "leg", leg, "runs out"), parties.prefill(w, leg, ps.Tick(), LATER)

    def _compute(self, w: World, leg: int, state: ps.PrefillState) -> Iterator[Move]:
        match state:
            case ps.Reserving(frontier=Frontier(num_tokens=num_final), first_tokens=first_tokens):
                pass
            case ps.Pushing(push=ps.Push(frontier=Frontier(num_tokens=num_final), first_tokens=first_tokens)):
                pass
            case _:
                return
        if num_final < self.scenario.num_chunks:
            yield ("compute", "leg", leg), self.parties.prefill(w, leg, ps.Computed(Frontier(num_final + 1)))
        elif first_tokens is None:
            drawn = self.parties.first_tokens(self.parties.machine_of[leg])
            yield ("draw", "leg", leg), self.parties.prefill(w, leg, ps.CommitRequested(drawn))

    def _window(self, w: World, leg: int) -> int | None:
        """The chunk that the link lets go next, if it is one of this leg's: the oldest hand-off that has one goes
        first, and nothing overtakes it while it waits for credit."""
        number = self.parties.link_of[leg]
        if not w.links[number].up:
            return None
        pushing = [
            (other, state)
            for other in range(len(w.p))
            if self.parties.link_of[other] == number
            and isinstance(state := self.parties.p_state(w, other), ps.Pushing | ps.Committing)
        ]
        out = sum(state.push.outstanding.bit_count() for _, state in pushing)
        for other, state in pushing:
            sendable = state.sendable(0.0) if isinstance(state, ps.Pushing) else 0
            if sendable:
                has_credit = self.scenario.credit_chunks is None or out < self.scenario.credit_chunks
                return (sendable & -sendable).bit_length() - 1 if other == leg and has_credit else None
        return None

    def _land(self, w: World, flight: Flight) -> Iterator[Move]:
        """The transport is done with one chunk."""
        leg, generation, nonce, seq, one_sided = flight
        number = self.parties.link_of[leg]
        w = w._replace(flying=w.flying - {flight})
        if one_sided:
            if generation and not w.links[number].fenced >> generation & 1:
                w = self._write_lands(w, flight)
            elif w.p[leg] == GONE:
                return
        if w.p[leg] >= 0:
            w = self.parties.prefill(w, leg, ps.SourceFree(nonce, seq))
        yield ("done", "leg", leg, f"chunk {seq}"), w

    def _write_lands(self, w: World, flight: Flight) -> World:
        parties, machine = self.parties, self.parties.machine_of[flight.leg]
        w = parties.land(w, machine, flight.seq, flight.nonce)
        number = parties.link_of[flight.leg]
        w = parties.send(w, Placed(number, flight.generation, machine, flight.nonce, flight.seq))
        if self.scenario.damage:
            w = parties.send(w, Placed(number, flight.generation, machine, flight.nonce, flight.seq, "damaged"))
        return w

    # Decode workers ---------------------------------------------------------------------------------------------------

    def _machine_moves(self, w: World, machine: int) -> Iterator[Move]:
        parties = self.parties
        name = f"machine {machine}"
        match parties.d_state(w, machine):
            case ds.Reserved():
                if self.scenario.timeouts:
                    yield ("lease of", name, "runs out"), parties.decode(w, machine, ds.Tick(), LATER)
                if self.scenario.cancels:
                    yield ("cancel", name), parties.decode(w, machine, ds.LocalCancel())
            case ds.Quarantined():
                yield ("quarantine of", name, "ends"), parties.decode(w, machine, ds.Tick(), MUCH_LATER)
            case ds.Committed():
                freed = w._replace(owner=put(w.owner, parties.machines[machine][0], NOBODY))
                yield ("finish", name), parties.decode(freed, machine, ds.DecodeFinished())

    # Links ------------------------------------------------------------------------------------------------------------

    def _link_moves(self, w: World, number: int) -> Iterator[Move]:
        link = w.links[number]
        if not link.generation:
            return
        prefill, _ = self.parties.links[number]
        prefill_is_dead = f"p{prefill}" in w.dead
        name = f"link {number}/{link.generation}"
        breaks = link.generation < self.scenario.generations
        if link.up and (breaks or link.heard != link.generation or link.fenced >> link.generation & 1):
            yield ("lose", name), links.lose(self.parties, w, number)
        if link.up and link.transport + 1 < len(self.scenario.transports):
            yield ("change transport of", name), links.change_transport(self.parties, w, number)
        if link.heard and (breaks or not link.up or link.fenced >> link.heard & 1):
            yield ("end", name, "at the decode worker"), links.end(self.parties, w, number)
        if not link.heard:
            yield ("bury", name), links.tell_machines(self.parties, w, number, ds.PeerDead())
        if not link.up and not link.given_up and not prefill_is_dead:
            if breaks and not link.severed:
                yield ("reopen", name), links.reopen(self.parties, w, number)
            yield ("give up", name), links.give_up(self.parties, w, number)


def _is_later_ack(parcel: Parcel, than: ToP) -> bool:
    ack, other = than.message, parcel.message if isinstance(parcel, ToP) else None
    return (
        isinstance(ack, ChunkAck)
        and isinstance(other, ChunkAck)
        and other.nonce == ack.nonce
        and other.stored_nbytes > ack.stored_nbytes
    )
