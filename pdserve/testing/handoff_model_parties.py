"""One event at one side of a hand-off: the real table decides, and its actions are carried out on the model's world."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeVar

from kv_transfer import decode_states as ds
from kv_transfer import decode_table, prefill_table
from kv_transfer import prefill_states as ps
from kv_transfer.messages import (
    ENDED,
    AbortAck,
    ChunkAck,
    Commit,
    Grant,
    LinkId,
    RenewAck,
    Reserve,
    ToDecode,
    ToPrefill,
)
from kv_transfer.plan import ChunkPlan, Frontier
from pdserve.kv_layout import KvLayout
from pdserve.testing.handoff_model import Numbers, Violation
from pdserve.testing.handoff_model_parcels import (
    D_TIMERS,
    P_TIMERS,
    Parcel,
    Payload,
    Placed,
    ToD,
    ToP,
    plain_decode,
    plain_message,
    plain_prefill,
)
from pdserve.testing.handoff_model_world import NOBODY, NOT_BEGUN, Flight, Link, Scenario, World
from pdserve.types import Fork, GenerationJob, HandoffId

DAMAGED = -1
"""What a place holds after bytes whose checksum turned out to be wrong."""
NUM_BRANCHES = 3
"""Outputs of each job."""
LOST = ps.Failure(code="worker_lost", message="")
CANCEL = ps.Failure(code="cancelled", message="")
_LAYOUT = KvLayout(dtype="float32", block_size=1, num_layers=1, num_kv_heads=1, head_dim=1)


T = TypeVar("T")


class Parties:
    """Both sides of every hand-off of a scenario. `prefill` and `decode` apply an event and give the world after it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.legs = scenario.legs
        self.machines = scenario.machines
        self.links = scenario.links
        self.machine_of = [self.machines.index((leg.decode, leg.attempt)) for leg in self.legs]
        self.link_of = [self.links.index((leg.prefill, leg.decode)) for leg in self.legs]
        self.link_of_machine = [self.link_of[self.machine_of.index(m)] for m in range(len(self.machines))]
        self.num_decode = 1 + max(leg.decode for leg in self.legs)
        self.parcels: Numbers[Parcel] = Numbers()
        self.prefill_states: Numbers[ps.PrefillState] = Numbers()
        self.decode_states: Numbers[ds.DecodeState] = Numbers()
        self.plan = ChunkPlan.make(scenario.num_chunks, _LAYOUT, _LAYOUT.block_nbytes)
        self.masks: defaultdict[tuple[object, ...], int] = defaultdict(int)
        """Parcels by what `tidy` tells them apart by."""
        self._events: Numbers[object] = Numbers()
        self._p_steps: dict[tuple[int, int, float], tuple[int, tuple[ps.PrefillAction, ...]]] = {}
        self._d_steps: dict[tuple[int, int, float], tuple[int, tuple[ds.DecodeAction, ...]]] = {}

    def start(self) -> World:
        """Nobody has begun."""
        terms = [
            ds.Terms(id=HandoffId("r", attempt), timers=D_TIMERS, one_sided=self.scenario.one_sided)
            for _, attempt in self.machines
        ]
        return World(
            p=(NOT_BEGUN,) * len(self.legs),
            d=tuple(self.decode_states.of(decode_table.start(t)) for t in terms),
            links=(Link(),) * len(self.links),
            owner=(NOBODY,) * self.num_decode,
            content=((0,) * self.scenario.num_chunks,) * self.num_decode,
            num_grants=(0,) * self.num_decode,
            commits=(0,) * len(self.machines),
        )

    def p_state(self, w: World, leg: int) -> ps.PrefillState | None:
        """None before its beginning and after its process has crashed."""
        return None if w.p[leg] < 0 else self.prefill_states[w.p[leg]]

    def d_state(self, w: World, machine: int) -> ds.DecodeState:
        return self.decode_states[w.d[machine]]

    def in_flight(self, net: int) -> Iterator[tuple[int, Parcel]]:
        """The parcels of a mask, with their numbers."""
        while net:
            bit = net & -net
            number = bit.bit_length() - 1
            yield number, self.parcels[number]
            net ^= bit

    # Prefill side -----------------------------------------------------------------------------------------------------

    def begin(self, w: World, leg: int) -> World:
        """A new `Handoff`, given to its link, which is opened if it never was."""
        offer = ps.Offer(id=self._id(self.machine_of[leg]), plan=self.plan, timers=P_TIMERS)
        state = prefill_table.start(offer, 0.0)
        if not self.scenario.computes:
            first_tokens = self.first_tokens(self.machine_of[leg]) if self.scenario.commits else None
            state = replace(state, frontier=Frontier(self.scenario.num_chunks), first_tokens=first_tokens)
        w = w._replace(p=put(w.p, leg, self.prefill_states.of(state)))
        number = self.link_of[leg]
        link = w.links[number]
        if link.given_up:
            return self.prefill(w, leg, ps.DecodeLost(LOST))
        if not link.generation:
            w = w._replace(links=put(w.links, number, link._replace(generation=1, up=True, heard=1)))
        elif not link.up:
            return w
        return self.prefill(w, leg, ps.LinkUp(self.scenario.transports[w.links[number].transport]))

    def prefill(self, w: World, leg: int, event: ps.PrefillEvent, now: float = 0.0) -> World:
        """Apply an event to a leg."""
        key = (w.p[leg], self._events.of(event), now)
        known = self._p_steps.get(key)
        if known is None:
            after, actions = prefill_table.step(self.prefill_states[key[0]], event, now)
            known = self._p_steps[key] = self.prefill_states.of(plain_prefill(after)), actions
        number, actions = known
        if number != key[0]:
            w = w._replace(p=put(w.p, leg, number))
        for action in actions:
            match action:
                case ps.SendReserve():
                    machine = self.machine_of[leg]
                    w = self._send_to_decode(w, leg, self._reserve(machine))
                case ps.Send(message):
                    w = self._send_to_decode(w, leg, message)
                case ps.PostChunk(nonce, seq):
                    w = self._post(w, leg, nonce, seq)
        return w

    def _send_to_decode(self, w: World, leg: int, message: ToDecode) -> World:
        number = self.link_of[leg]
        link = w.links[number]
        if not link.up or link.heard != link.generation:
            return w
        return self.send(w, ToD(number, link.generation, self.machine_of[leg], message))

    def _post(self, w: World, leg: int, nonce: int, seq: int) -> World:
        number = self.link_of[leg]
        link = w.links[number]
        one_sided = self.scenario.transports[link.transport]
        w = w._replace(flying=w.flying | {Flight(leg, link.generation, nonce, seq, one_sided)})
        if one_sided:
            return w
        return self.send(w, Payload(number, link.generation, self.machine_of[leg], nonce, seq))

    def legs_after(self, leg: int) -> list[int]:
        """Later legs that share the machine of this one."""
        return [other for other in range(leg + 1, len(self.legs)) if self.machine_of[other] == self.machine_of[leg]]

    # Decode side ------------------------------------------------------------------------------------------------------

    def decode(self, w: World, machine: int, event: ds.DecodeEvent, now: float = 0.0) -> World:
        """Apply an event to a machine. Raises Violation for a promise that the state after it does not keep."""
        key = (w.d[machine], self._events.of(event), now)
        known = self._d_steps.get(key)
        if known is None:
            after, actions = decode_table.step(self.decode_states[key[0]], event, now)
            known = self._d_steps[key] = self.decode_states.of(plain_decode(after)), actions
        number, actions = known
        if number != key[0]:
            w = w._replace(d=put(w.d, machine, number))
        for action in actions:
            w = self._carry_out(w, machine, event, action)
        return w

    def _carry_out(self, w: World, machine: int, event: ds.DecodeEvent, action: ds.DecodeAction) -> World:
        worker, attempt = self.machines[machine]
        match action:
            case ds.Send(message):
                return self._send_to_prefill(w, machine, message)
            case ds.SupersedeOlder():
                for other, (its_worker, its_attempt) in enumerate(self.machines):
                    if its_worker == worker and its_attempt < attempt:
                        w = self.decode(w, other, ds.Superseded())
            case ds.Allocate(_, link):
                return self._allocate(w, machine, link)
            case ds.StoreChunk(seq, nbytes):
                assert isinstance(event, ds.ChunkArrived), "only a chunk has a payload at hand"
                return self.decode(self.land(w, machine, seq, event.nonce), machine, ds.Stored(seq, nbytes))
            case ds.ReleaseBlocks() | ds.StopDecode():
                if w.owner[worker] != machine:
                    raise Violation(f"owner: machine {machine} releases what {w.owner[worker]} owns")
                return w._replace(owner=put(w.owner, worker, NOBODY))
            case ds.StartDecode(first_tokens):
                if first_tokens != self.first_tokens(machine):
                    raise Violation(f"tokens: machine {machine} goes on from {first_tokens}, which nobody has drawn")
                return w._replace(commits=put(w.commits, machine, self._nonce_of(w, machine)))
            case ds.FenceLink(link):
                return self.fence(w, self.link_of_machine[machine], link.generation)
        return w

    def _allocate(self, w: World, machine: int, link: LinkId) -> World:
        worker = self.machines[machine][0]
        if w.draining:
            return self.decode(w, machine, ds.Unservable("unavailable", ""))
        if w.owner[worker] != NOBODY:
            return self.decode(w, machine, ds.NoRoom(0.1))
        count = w.num_grants[worker]
        nonce = 1 + worker + self.num_decode * count
        w = w._replace(owner=put(w.owner, worker, machine), num_grants=put(w.num_grants, worker, count + 1))
        for place in range(self.num_held(w, machine)):
            w = self._write(w, worker, place, nonce)
        plan = self._plan_of(w, machine)
        return self.decode(
            w,
            machine,
            ds.Allocated(nonce, link, plan.num_chunks, plan.first_token, plan.plan_hash, NUM_BRANCHES),
        )

    def first_tokens(self, machine: int) -> tuple[int, ...]:
        """What the prefill worker draws for an attempt: the last output ends with it."""
        return (10 + self.machines[machine][1], *(20,) * (NUM_BRANCHES - 2), ENDED)

    def _plan_of(self, w: World, machine: int) -> ChunkPlan:
        """What the decode worker asks to be sent."""
        return self.plan.after(self.num_held(w, machine))

    def num_held(self, w: World, machine: int) -> int:
        """Chunks that the decode worker has before any is sent; a crash loses them."""
        worker, attempt = self.machines[machine]
        return self.scenario.num_held_chunks if attempt > 1 and f"d{worker}" not in w.dead else 0

    def land(self, w: World, machine: int, seq: int, nonce: int) -> World:
        """The bytes of chunk `seq` are in their place, good or not."""
        return self._write(w, self.machines[machine][0], seq + self.num_held(w, machine), nonce)

    def is_in_place(self, w: World, machine: int, seq: int, nonce: int) -> bool:
        """Whether chunk `seq` of this ticket has landed, undamaged."""
        return w.content[self.machines[machine][0]][seq + self.num_held(w, machine)] == nonce

    def _write(self, w: World, worker: int, place: int, nonce: int) -> World:
        return w._replace(content=put(w.content, worker, put(w.content[worker], place, nonce)))

    def fence(self, w: World, number: int, generation: int) -> World:
        """The decode worker takes no more bytes of a generation of a link."""
        w = w._replace(flying=frozenset(self._stopped(f, number, generation) for f in w.flying))
        if not self.scenario.lasting_fence:
            return w
        link = w.links[number]
        return w._replace(links=put(w.links, number, link._replace(fenced=link.fenced | 1 << generation)))

    def _stopped(self, flight: Flight, number: int, generation: int) -> Flight:
        """A write that a fence of this generation keeps from landing; the prefill worker still sees it end."""
        is_hit = flight.one_sided and self.link_of[flight.leg] == number and flight.generation == generation
        return flight._replace(generation=0) if is_hit else flight

    def _send_to_prefill(self, w: World, machine: int, message: ToPrefill) -> World:
        if isinstance(message, Grant | RenewAck | ChunkAck):
            state = self.d_state(w, machine)
            if not isinstance(state, ds.Reserved | ds.Committed) or state.nonce != message.nonce:
                raise Violation(
                    f"promise: {type(message).__name__} for a ticket that {type(state).__name__} does not hold"
                )
        number = self.link_of_machine[machine]
        link = w.links[number]
        if isinstance(message, AbortAck) or not link.heard:  # P ignores AbortAck in every state
            return w
        return self.send(w, ToP(number, link.heard, machine, plain_message(message)))

    # Messages ---------------------------------------------------------------------------------------------------------

    def send(self, w: World, parcel: Parcel) -> World:
        """Put a parcel on its way."""
        number = len(self.parcels)
        bit = 1 << self.parcels.of(parcel)
        if len(self.parcels) > number:
            self.masks[type(parcel), parcel.link, parcel.generation] |= bit
            self.masks["machine", parcel.machine] |= bit
            if isinstance(parcel, ToP) and not isinstance(parcel.message, Grant):
                self.masks["useless to ended", parcel.machine] |= bit
        return w if w.net & bit else w._replace(net=w.net | bit)

    def arrival(self, w: World, machine: int, parcel: ToD) -> ds.DecodeEvent:
        """The event that a message becomes at the decode worker."""
        worker = self.machines[machine][0]
        link = LinkId(f"p{self.links[parcel.link][0]}", parcel.generation)
        match parcel.message:
            case Reserve() as message:
                heard = (
                    attempt
                    for other, (its_worker, attempt) in enumerate(self.machines)
                    if its_worker == worker and not isinstance(self.d_state(w, other), ds.Absent)
                )
                return ds.ReserveArrived(message, link, max(heard, default=0))
            case Commit() as message:
                return ds.CommitArrived(message, link)
            case message:
                return message

    def chunk_arrival(self, parcel: Payload | Placed, fault: str | None) -> ds.ChunkArrived:
        """The event that a chunk becomes; all are one byte long."""
        link = LinkId(f"p{self.links[parcel.link][0]}", parcel.generation)
        return ds.ChunkArrived(parcel.nonce, link, parcel.seq, 1, fault, in_place=isinstance(parcel, Placed))

    def _id(self, machine: int) -> HandoffId:
        return HandoffId("r", self.machines[machine][1])

    def _reserve(self, machine: int) -> Reserve:
        handoff = self._id(machine)
        job = GenerationJob(
            request_id=handoff.request_id,
            attempt=handoff.attempt,
            router_id="x",
            token_ids=(1,),
            num_prompt_tokens=1,
            max_new_tokens=2,
            forks=tuple(Fork(request_id=f"r-{i}", attempt=1, seed=i) for i in range(1, NUM_BRANCHES)),
        )
        return Reserve(handoff, job, self.plan.num_tokens, self.plan.plan_hash)

    def _nonce_of(self, w: World, machine: int) -> int:
        state = self.d_state(w, machine)
        assert isinstance(state, ds.Reserved | ds.Committed), f"machine {machine} holds nothing"
        return state.nonce


def put(things: tuple[T, ...], index: int, thing: T) -> tuple[T, ...]:
    """`things` with another thing at `index`."""
    return (*things[:index], thing, *things[index + 1 :])
