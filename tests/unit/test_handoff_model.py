"""Explicit-state check of the hand-off protocol: the real tables, every interleaving, a hostile network.

Two attempts of one request, each at its own prefill worker, and one decode worker with room for one, which may hold the
first chunk's tokens when the second attempt comes and then gets the others only. Messages are lost,
repeated and reordered without bound (the network is the set of everything ever sent, from which anything is delivered
any number of times); callers cancel, leases and timers run out at any moment; a prefill worker and the decode worker
crash.

Checked in every reachable state:
  bytes     a committed request's blocks hold that attempt's bytes, all of them, and nothing else ever lands there;
  owner     the blocks have one owner, and each release belongs to it;
  source    P has ended only if none of its reads (or one-sided writes) is in flight;
  outcome   Done means that D committed; Failed without "unknown" means that D did not and never will;
  progress  a state with nothing held anywhere can still be reached.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest

from kv_transfer import decode_states as ds
from kv_transfer import decode_table, prefill_table
from kv_transfer import prefill_states as ps
from kv_transfer.messages import AbortAck, CommitAck, Grant, LinkId, Reserve
from kv_transfer.plan import ChunkPlan
from pdserve.kv_layout import KvLayout
from pdserve.types import GenerationJob, HandoffId

LATER = 1_000.0
"""After every timer but a quarantine that begins then."""
MUCH_LATER = 10_000.0
LAYOUT = KvLayout(dtype="float32", block_size=1, num_layers=1, num_kv_heads=1, head_dim=1)
P_TIMERS = ps.PrefillTimers(resend_s=1, reserve_timeout_s=5, stall_timeout_s=5, commit_timeout_s=5, renew_margin_s=3)
D_TIMERS = ds.DecodeTimers(lease_s=10, max_reservation_s=100, quarantine_s=10, tombstone_s=1e9, credit_bytes=1)
LOST = ps.Failure(code="worker_lost", message="crashed")
CANCEL = ps.Failure(code="cancelled", message="cancelled")


class World(NamedTuple):
    """One state of everything, in small numbers so that millions compare fast. Attempts are 0 and 1; a mask has a bit
    for each. `p`, `d` and `net` are numbers that the model gives to table states and messages."""

    p: tuple[int, int]
    """-1: not begun, or the process has crashed."""
    d: tuple[int, int]
    owner: int
    """Attempt whose reservation has the block; -1: free."""
    content: tuple[int, ...]
    """Attempt whose bytes each chunk of the block holds; -1: somebody else's."""
    net: int
    """Mask of messages."""
    flying: frozenset[tuple[int, int]]
    """(attempt, chunk): the transport still reads the source, or, one-sided, may still write the destination."""
    begun: int = 0
    p_dead: int = 0
    fenced: int = 0
    """Links that D has closed for good, or that ended with its crash."""
    d_crashed: bool = False
    committed: int = 0
    """Attempts that D has ever committed."""


class Numbers:
    """Gives equal things one number, and the thing for a number."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._things: list[Any] = []

    def of(self, thing: Any) -> int:
        number = self._numbers.setdefault(thing, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number

    def __getitem__(self, number: int) -> Any:
        return self._things[number]


class Violation(AssertionError):  # noqa: N818 (what a model checker calls it)
    """An invariant does not hold."""


@dataclass
class Model:
    """`one_sided`: the transport writes chunks by itself. Without `lasting_fence`, a fence only stops what flies."""

    one_sided: bool
    num_chunks: int = 1
    crashes: bool = True
    damage: bool = True
    cancels: bool = True
    lasting_fence: bool = True
    held: bool = False
    """The decode worker has the first chunk's tokens when attempt 1 reserves."""

    def __post_init__(self) -> None:
        self.memo: dict[Any, Any] = {}
        self.states = Numbers()
        self.messages = Numbers()
        """("p" | "d" | "chunk", attempt, message to that side or chunk number)."""

    def start(self) -> World:
        terms = [ds.Terms(id=HandoffId("r", a + 1), timers=D_TIMERS, one_sided=self.one_sided) for a in (0, 1)]
        d = self.states.of(decode_table.start(terms[0])), self.states.of(decode_table.start(terms[1]))
        return World((-1, -1), d, -1, (-1,) * self.num_chunks, 0, frozenset())

    def p_state(self, w: World, a: int) -> ps.PrefillState | None:
        return None if w.p[a] < 0 else self.states[w.p[a]]

    def d_state(self, w: World, a: int) -> ds.DecodeState:
        return self.states[w.d[a]]

    # One event at one side --------------------------------------------------------------------------------------------

    def _step(self, step: Any, number: int, event: Any, now: float) -> tuple[int, tuple[Any, ...]]:
        key = (number, event, now)
        if key not in self.memo:
            after, actions = step(self.states[number], event, now)
            self.memo[key] = self.states.of(_plain(after)), actions
        return self.memo[key]

    def prefill(self, w: World, a: int, event: ps.PrefillEvent, now: float = 0.0) -> World:
        state, actions = self._step(prefill_table.step, w.p[a], event, now)
        w = w._replace(p=(state, w.p[1]) if a == 0 else (w.p[0], state))
        for action in actions:
            match action:
                case ps.SendReserve():
                    job = GenerationJob(
                        request_id="r",
                        attempt=a + 1,
                        router_id="x",
                        token_ids=(1,),
                        num_prompt_tokens=1,
                        max_new_tokens=1,
                    )
                    w = self._send(w, "d", a, Reserve(HandoffId("r", a + 1), job, 1, 0))
                case ps.Send(message):
                    w = self._send(w, "d", a, message)
                case ps.PostChunk(_, seq):
                    w = w._replace(flying=w.flying | {(a, seq)})
                    if not self.one_sided:
                        w = self._send(w, "chunk", a, seq)
        return w

    def decode(self, w: World, a: int, event: ds.DecodeEvent, now: float = 0.0) -> World:
        state, actions = self._step(decode_table.step, w.d[a], event, now)
        w = w._replace(d=(state, w.d[1]) if a == 0 else (w.d[0], state))
        for action in actions:
            match action:
                case ds.Send(message):
                    w = self._send(w, "p", a, message)
                case ds.SupersedeOlder():
                    if a == 1:
                        w = self.decode(w, 0, ds.Superseded())
                case ds.Allocate(_, link):
                    if w.owner < 0:
                        w = self.decode(self._hold(w._replace(owner=a), a), a, self._allocated(w, a, link))
                    else:
                        w = self.decode(w, a, ds.NoRoom(0.1))
                case ds.StoreChunk(seq, nbytes):
                    w = self.decode(self._land(w, a, seq), a, ds.Stored(seq, nbytes))
                case ds.ReleaseBlocks() | ds.StopDecode():
                    if w.owner != a:
                        raise Violation(f"owner: attempt {a} releases what {w.owner} owns")
                    w = w._replace(owner=-1)
                case ds.StartDecode():
                    w = w._replace(committed=w.committed | 1 << a)
                case ds.FenceLink():
                    w = w._replace(flying=frozenset(x for x in w.flying if x[0] != a))
                    if self.lasting_fence:
                        w = w._replace(fenced=w.fenced | 1 << a, net=self._without(w.net, a))
        return w

    def _num_held(self, w: World, a: int) -> int:
        """Chunks that the decode worker has before attempt `a` sends any; a crash loses them."""
        return int(self.held and a == 1 and not w.d_crashed)

    def _hold(self, w: World, a: int) -> World:
        return self._land(w, a, -1) if self._num_held(w, a) else w

    def _allocated(self, w: World, a: int, link: LinkId) -> ds.Allocated:
        plan = self._plan().after(self._num_held(w, a))
        return ds.Allocated(self._nonce(w, a), link, plan.num_chunks, plan.first_token, plan.plan_hash)

    def _plan(self) -> ChunkPlan:
        return ChunkPlan.make(self.num_chunks, LAYOUT, LAYOUT.block_nbytes)

    def _nonce(self, w: World, a: int) -> int:
        return 1 + a + 2 * w.d_crashed

    def _send(self, w: World, to: str, a: int, message: Any) -> World:
        if w.fenced >> a & 1 or isinstance(message, AbortAck):  # P ignores AbortAck in every state
            return w
        return w._replace(net=w.net | 1 << self.messages.of((to, a, message)))

    def _in_flight(self, net: int) -> Iterator[tuple[str, int, Any]]:
        while net:
            yield self.messages[(net & -net).bit_length() - 1]
            net &= net - 1

    def _tidy(self, w: World) -> World:
        """Drop messages that cannot change anything any more, so that states differ only in what matters."""
        net = w.net
        for a in (0, 1):
            state = self.p_state(w, a)
            if isinstance(state, ps.Done | ps.Failed) or (state is None and w.begun >> a & 1):
                over = isinstance(self.d_state(w, a), ds.Tomb)
                net = sum(
                    1 << self.messages.of(m)
                    for m in self._in_flight(net)
                    if m[1] != a or (not over and (m[0] != "p" or isinstance(m[2], Grant)))
                )
        return w if net == w.net else w._replace(net=net)

    def _without(self, net: int, a: int) -> int:
        """What is left of the network when the link of attempt `a` is closed."""
        return sum(1 << self.messages.of(m) for m in self._in_flight(net) if m[1] != a)

    def _land(self, w: World, a: int, seq: int) -> World:
        """Chunk `seq` of what is sent is in its place; -1 is the one before it, which is held."""
        content = list(w.content)
        content[seq + self._num_held(w, a)] = a
        return w._replace(content=tuple(content))

    # Everything that may happen next ----------------------------------------------------------------------------------

    def successors(self, w: World) -> Iterator[World]:
        for to, a, message in self._in_flight(w.net):
            if to == "p":
                if w.p[a] >= 0:
                    yield self.prefill(w, a, message)
            elif to == "chunk":
                yield self.decode(w, a, ds.ChunkArrived(self._nonce(w, a), LinkId("p", a), message, 1, None))
                if self.damage:
                    yield self.decode(w, a, ds.ChunkArrived(self._nonce(w, a), LinkId("p", a), message, 1, "damaged"))
            else:
                yield self.decode(w, a, self._arrival(w, a, message))
        for a in (0, 1):
            yield from self._prefill_moves(w, a, self.p_state(w, a))
            yield from self._decode_moves(w, a, self.d_state(w, a))
        if self.crashes and not w.d_crashed:
            links = w.fenced | w.begun
            yield self.start()._replace(p=w.p, begun=w.begun, p_dead=w.p_dead, fenced=links, d_crashed=True)

    def _arrival(self, w: World, a: int, message: Any) -> ds.DecodeEvent:
        match type(message).__name__:
            case "Reserve":
                heard = [b + 1 for b in (0, 1) if not isinstance(self.d_state(w, b), ds.Absent)]
                return ds.ReserveArrived(message, LinkId("p", a), max(heard, default=0))
            case "Commit":
                return ds.CommitArrived(message, LinkId("p", a))
            case _:
                return message

    def _prefill_moves(self, w: World, a: int, state: ps.PrefillState | None) -> Iterator[World]:
        if state is None:
            if not w.begun >> a & 1 and (a == 0 or w.begun):
                offer = ps.Offer(id=HandoffId("r", a + 1), plan=self._plan(), timers=P_TIMERS)
                ready = replace(prefill_table.start(offer, 0.0), num_final_tokens=self.num_chunks, first_token=a)
                number = self.states.of(ready)
                begun = w._replace(p=(number, w.p[1]) if a == 0 else (w.p[0], number), begun=w.begun | 1 << a)
                yield self.prefill(begun, a, ps.LinkUp(self.one_sided))
            return
        flying = [seq for b, seq in sorted(w.flying) if b == a]
        for seq in flying:
            free = w._replace(flying=w.flying - {(a, seq)})
            if self.one_sided:
                yield self._write_lands(free, a, seq)
            else:
                yield self.prefill(free, a, ps.SourceFree(state_nonce(state), seq))
        if w.fenced >> a & 1:
            # The link is gone: the shell fences the transport, reports every read as over, and then the loss.
            lost = w._replace(flying=frozenset(x for x in w.flying if x[0] != a))
            for seq in flying:
                lost = self.prefill(lost, a, ps.SourceFree(state_nonce(state), seq))
            yield self.prefill(lost, a, ps.DecodeLost(LOST))
        elif isinstance(state, ps.Pushing):
            for seq in range(state.push.plan.num_chunks):
                if state.sendable(0.0) >> seq & 1:
                    yield self.prefill(w, a, ps.Window(seq))
        if isinstance(state, ps.Done | ps.Failed):
            return
        if self.cancels:
            yield self.prefill(w, a, ps.Cancelled(CANCEL))
        yield self.prefill(w, a, ps.Tick(), LATER)
        if self.crashes and not w.p_dead:
            yield w._replace(p=(-1, w.p[1]) if a == 0 else (w.p[0], -1), p_dead=w.p_dead | 1 << a)

    def _write_lands(self, w: World, a: int, seq: int) -> World:
        w = self._land(w, a, seq)
        state = self.p_state(w, a)
        if state is not None:
            w = self.prefill(w, a, ps.SourceFree(state_nonce(state), seq))
        # The notice of a write cannot be lost or repeated on its own; it is damaged at will like any chunk.
        return self._send(w, "chunk", a, seq)

    def _decode_moves(self, w: World, a: int, state: ds.DecodeState) -> Iterator[World]:
        if isinstance(state, ds.Reserved):
            yield self.decode(w, a, ds.Tick(), LATER)
            if self.cancels:
                yield self.decode(w, a, ds.LocalCancel())
        if isinstance(state, ds.Quarantined):
            yield self.decode(w, a, ds.Tick(), MUCH_LATER)
        if isinstance(state, ds.Committed):
            yield self.decode(w._replace(owner=-1), a, ds.DecodeFinished())
        if w.p_dead >> a & 1:
            if isinstance(state, ds.Reserved | ds.Quarantined):
                yield self.decode(w, a, ds.PeerDead())
            for b, seq in w.flying:
                if b == a and self.one_sided:
                    # A dead process's write may still be on its way through the network card.
                    yield self._write_lands(w._replace(flying=w.flying - {(b, seq)}), a, seq)

    # What must hold ---------------------------------------------------------------------------------------------------

    def check(self, w: World) -> None:
        holding = ds.Reserved | ds.Committed | ds.Quarantined
        owners = [a for a in (0, 1) if isinstance(self.d_state(w, a), holding)]
        if owners != ([] if w.owner < 0 else [w.owner]):
            raise Violation(f"owner: {w.owner} has the block, {owners} think they have")
        for a in (0, 1):
            if isinstance(self.d_state(w, a), ds.Committed) and set(w.content) != {a}:
                raise Violation(f"bytes: attempt {a} decodes from {w.content}")
            state = self.p_state(w, a)
            if isinstance(state, ps.Done | ps.Failed) and any(b == a for b, _ in w.flying):
                raise Violation(f"source: attempt {a} has ended with a transfer in flight")
            committed = bool(w.committed >> a & 1)
            if isinstance(state, ps.Done) and not committed and not w.d_crashed:
                raise Violation(f"outcome: attempt {a} is Done but D never committed it")
            if isinstance(state, ps.Failed) and not state.failure.outcome_unknown and committed:
                raise Violation(f"outcome: attempt {a} has failed for certain, but D committed it")

    def is_idle(self, w: World) -> bool:
        return w.owner < 0 and all(n < 0 or isinstance(self.states[n], ps.Done | ps.Failed) for n in w.p)

    def explore(self, limit: int | None = None) -> int:
        """Number of states reached. Raises Violation. `limit` ends the search early, without the progress check."""
        first = self.start()
        number = {first: 0}
        reached_from: defaultdict[int, list[int]] = defaultdict(list)
        idle = [0]
        todo = deque([first])
        while todo and (limit is None or len(number) < limit):
            w = todo.popleft()
            for after in map(self._tidy, self.successors(w)):
                if after not in number:
                    self.check(after)
                    number[after] = len(number)
                    todo.append(after)
                    if self.is_idle(after):
                        idle.append(number[after])
                reached_from[number[after]].append(number[w])
        if limit is None:
            can_end, back = set(idle), deque(idle)
            while back:
                for before in reached_from[back.popleft()]:
                    if before not in can_end:
                        can_end.add(before)
                        back.append(before)
            if len(can_end) < len(number):
                raise Violation(f"progress: {len(number) - len(can_end)} states can never let go of everything")
        return len(number)


def _plain(state: Any) -> Any:
    """The state without what no later transition depends on here: texts, and times that have passed either way."""
    match state:
        case ps.Failed(failure=failure):
            return replace(state, failure=ps.Failure(code="", message="", outcome_unknown=failure.outcome_unknown))
        case ps.Aborting(failure=ps.Failure() as failure):
            plain = ps.Failure(code="", message="", outcome_unknown=failure.outcome_unknown)
            return replace(state, failure=plain, resend_at=0.0)
        case ds.Tomb() | ds.Quarantined():
            return replace(state, since=0.0)
        case _:
            return state


def state_nonce(state: ps.PrefillState) -> int:
    match state:
        case ps.Pushing() | ps.Committing():
            return state.push.nonce
        case ps.Aborting():
            return state.nonce
        case _:
            return 0


@pytest.fixture(autouse=True)
def one_repeat_per_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on repeats, 3 in production, only multiplies states."""
    monkeypatch.setattr(decode_table, "MAX_NAKS", 1)
    monkeypatch.setattr(prefill_table, "MAX_REPOSTS", 1)


@pytest.mark.parametrize(
    ("model", "at_least"),
    [
        (Model(one_sided=False, damage=False), 40_000),
        (Model(one_sided=True), 10_000),
        (Model(one_sided=True, num_chunks=2, held=True, damage=False, cancels=False, crashes=False), 1_000),
    ],
    ids=["two-sided", "one-sided", "held prefix"],
)
def test_no_reachable_state_breaks_an_invariant_and_every_one_can_end(model: Model, at_least: int) -> None:
    """O-KVT-2, O-ABT-3."""
    assert model.explore() > at_least


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_with_every_kind_of_fault_at_once_no_early_state_breaks_an_invariant(num_chunks: int) -> None:
    """The full product is too large for every run; breadth first covers all short histories."""
    assert Model(one_sided=False, num_chunks=num_chunks).explore(limit=12_000) >= 12_000


# Mutants: the check must see that a broken table is broken. -----------------------------------------------------------


def _accept_incomplete(s: ds.Reserved, actions: Any) -> Any:
    if s.first_token is None:
        return s, actions
    return ds.Committed(terms=s.terms, nonce=s.nonce), (*actions, ds.StartDecode(s.first_token))


def _release_at_once(s: ds.Reserved, e: Any, now: float) -> Any:
    return ds.Tomb(terms=s.terms, nonce=s.nonce, committed=False, since=now), (ds.ReleaseBlocks(),)


def _abort_at_once(s: ps.Pushing, failure: ps.Failure, now: float) -> Any:
    return ps.Failed(offer=s.offer, failure=failure), (ps.NotifyEnded(),)


def _always_commit_ack(s: ds.Tomb, e: Any, now: float) -> Any:
    return s, (ds.Send(CommitAck(s.terms.id, s.nonce)),)


def _write_again(s: ps.Committing, seqs: tuple[int, ...], reason: str, now: float) -> Any:
    return ps.Pushing(offer=s.offer, push=replace(s.push, posted=0)), ()


def _mutate(monkeypatch: pytest.MonkeyPatch, table: Any, event: type, column: int, handler: Any) -> None:
    row = list(table.TABLE[event])
    row[column] = handler
    monkeypatch.setitem(table.TABLE, event, tuple(row))


def test_mutant_grant_that_claims_more_than_is_held_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode worker holds nothing, but grants as if it had the first chunk."""
    monkeypatch.setattr(Model, "_num_held", lambda self, w, a: 0)
    monkeypatch.setattr(Model, "_allocated", _allocate_less)
    with pytest.raises(Violation, match="bytes"):
        Model(one_sided=False, num_chunks=2, damage=False).explore(limit=50_000)


def _allocate_less(self: Model, w: World, a: int, link: LinkId) -> ds.Allocated:
    plan = self._plan().after(1)
    return ds.Allocated(self._nonce(w, a), link, plan.num_chunks, plan.first_token, plan.plan_hash)


def test_mutant_commit_without_every_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_table, "_commit_if_complete", _accept_incomplete)
    with pytest.raises(Violation, match="bytes"):
        Model(one_sided=False, num_chunks=2).explore(limit=50_000)


@pytest.mark.parametrize("event", [ds.Tick, ds.Superseded, ds.LocalCancel])
def test_mutant_release_without_quarantine_is_caught(monkeypatch: pytest.MonkeyPatch, event: type) -> None:
    _mutate(monkeypatch, decode_table, event, 1, _release_at_once)
    with pytest.raises(Violation, match="bytes"):
        Model(one_sided=True, damage=False, crashes=False).explore(limit=50_000)


def test_mutant_fence_that_only_flushes_is_caught() -> None:
    with pytest.raises(Violation, match="bytes"):
        Model(one_sided=True, damage=False, crashes=False, cancels=False, lasting_fence=False).explore(limit=50_000)


def test_mutant_source_freed_during_a_read_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_table, "_abort", _abort_at_once)
    with pytest.raises(Violation, match="source"):
        Model(one_sided=False).explore(limit=50_000)


def test_mutant_timed_out_commit_that_counts_as_settled_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_table, "_unless_settled", lambda failure, commit_sent: failure)
    with pytest.raises(Violation, match="outcome"):
        Model(one_sided=False, crashes=False).explore(limit=50_000)


def test_mutant_commit_acknowledged_after_an_abort_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    _mutate(monkeypatch, decode_table, ds.CommitArrived, 4, _always_commit_ack)
    with pytest.raises(Violation, match="outcome"):
        Model(one_sided=False, crashes=False).explore(limit=50_000)


def test_mutant_second_write_over_a_one_sided_transport_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_table, "_repost", _write_again)
    with pytest.raises(Violation, match="bytes"):
        Model(one_sided=True, damage=False, crashes=False, cancels=False).explore(limit=50_000)


def test_mutant_reservation_that_outlives_its_prefill_worker_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for event in (ds.Tick, ds.PeerDead, ds.Superseded):
        _mutate(monkeypatch, decode_table, event, 1, lambda s, e, now: (s, ()))
    with pytest.raises(Violation, match="progress"):
        Model(one_sided=True, damage=False, cancels=False).explore()
