"""A draft model on paper, beside the decode scheduler: it finds the KV that it has written, whatever else happens, and
changes no output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker import scheduler
from decode_worker.draft_room import DraftRoom
from decode_worker.sequences import PlannedChunk, Sequence
from decode_worker.speculation.draft_planner import CHUNK_TOKENS, DraftOrder
from decode_worker.speculation.model_policy import KEEPS_UP, TRY_AGAIN, ModelPolicy
from pdserve.config import SpeculationSection
from pdserve.errors import InvalidRequestError
from pdserve.testing.decode_world import STOP, World, job, key
from pdserve.types import HandoffId

ALWAYS = SpeculationSection(method="draft", draft_model="a small one", max_draft_tokens=4)
VOCABULARY = 7


def next_token(context: list[int]) -> int:
    """Of the "model"."""
    mixed = (len(context) * 7919 + context[0] * 31 + context[-1] * 13) % 1000
    return STOP if mixed < 10 else mixed % VOCABULARY


@dataclass
class DraftWorld(World):
    """A draft model that is right except at every fifth place, and whose pool holds tokens in place of their KV."""

    speculation: SpeculationSection | None = ALWAYS
    max_draft_len: int = 2000
    draft_slots: dict[tuple[int, int], int] = field(default_factory=dict)
    num_computed: int = 0
    is_right: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.planner = self.scheduler.use_draft_model(self.max_draft_len)

    def draw(self, chunk: PlannedChunk, token: int) -> list[int]:
        """What the model says at each place."""
        table = self.blocks.ids(chunk.key)
        behind = chunk.start + len(chunk.token_ids)
        context = [self.slots[table[i // 16], i % 16] for i in range(behind + len(chunk.draft))]
        if chunk.forks:
            return [next_token(context)] * (1 + len(chunk.forks))
        return [next_token(context[:place]) for place in range(behind, behind + len(chunk.draft) + 1)]

    def compute(self, orders: list[DraftOrder]) -> None:
        """Carry out orders: they find their own KV, and nothing is computed that is there."""
        drafted: dict[HandoffId, tuple[int, ...]] = {}
        for order in orders:
            assert order.token_ids, "there is something to compute"
            tokens = list(order.sequence.tokens[: order.start + len(order.token_ids)])
            for i in range(order.start):
                slot = order.block_table[i // 16], i % 16
                assert self.draft_slots.get(slot) == tokens[i], f"{order.key} drafts from KV that is not its own"
            draft: list[int] = []
            for _ in range(order.num_tokens):
                token = next_token([*tokens, *draft])
                draft.append(token if self.is_right and (len(tokens) + len(draft)) % 5 else token + 1)
            written = [*tokens[order.start :], *draft[:-1]]
            for i, token in enumerate(written, start=order.start):
                self.draft_slots[order.block_table[i // 16], i % 16] = token
            self.num_computed += len(order.token_ids)
            assert order.start + len(written) <= self.max_draft_len
            if draft:
                drafted[order.key] = tuple(draft)
        self.planner.done(orders, drafted)

    def step_with_drafts(self) -> bool:
        """One turn of the worker. False if there was no step."""
        self.compute(self.planner.drafts(lambda _: True))
        if not self.plan():
            self.compute(self.planner.catch_up(idle=True))
            return False
        orders = self.planner.catch_up(idle=False)
        assert sum(len(order.token_ids) for order in orders) <= CHUNK_TOKENS
        self.finish_step()
        self.compute(orders)
        return True

    def output(self, name: str) -> list[int]:
        """What its router was told."""
        return [token for event in self.tokens_of(name) for token in event.token_ids]


def plain(token_ids: tuple[int, ...], first: int, max_new: int) -> list[int]:
    context = [*token_ids, first]
    while len(context) - len(token_ids) < max_new and context[-1] != STOP:
        context.append(next_token(context))
    return context[len(token_ids) + 1 :]


def test_prompt_has_draft_kv_before_its_own_has_come() -> None:
    w = DraftWorld(num_blocks=40)
    j = job("a", 300, max_new=20)
    w.reserve(j)
    assert not w.step_with_drafts() and w.num_computed == 256
    assert not w.step_with_drafts() and w.num_computed == 299, "the newest token comes with the first draft"
    w.commit(key("a"), 1)
    assert w.step_with_drafts() and w.step_with_drafts()
    assert max(len(event.token_ids) for event in w.tokens_of("a")) > 1


def test_outputs_that_begin_alike_share_draft_kv() -> None:
    w = DraftWorld(num_blocks=40)
    w.run(job("a", 160, max_new=20, family="f"))
    while w.step_with_drafts() or w.scheduler.num_sequences:
        pass
    before = w.num_computed
    w.run(job("b", 160, max_new=3, family="f"))
    while w.step_with_drafts() or w.scheduler.num_sequences:
        pass
    assert w.num_computed - before <= 16 + 3


def test_request_that_wants_no_drafts_costs_the_draft_model_nothing() -> None:
    w = DraftWorld(num_blocks=40)
    w.run(job("a", 100, max_new=20, max_draft_tokens=0))
    while w.step_with_drafts():
        pass
    assert w.num_computed == 0
    assert {len(event.token_ids) for event in w.tokens_of("a")} == {1}


def test_request_may_bound_its_drafts() -> None:
    w = DraftWorld(num_blocks=40)
    w.run(job("a", 50, max_new=40, max_draft_tokens=2))
    while w.step_with_drafts():
        pass
    assert max(len(event.token_ids) for event in w.tokens_of("a")) == 3


def test_there_are_no_drafts_beyond_what_the_draft_model_can_see() -> None:
    w = DraftWorld(num_blocks=40, max_draft_len=64)
    j = job("a", 58, max_new=40)
    w.run(j)
    w.run(job("b", 90, max_new=10))
    while w.step_with_drafts():
        pass
    assert w.output("a") == plain(j.token_ids, 1, 40)
    assert {len(event.token_ids) for event in w.tokens_of("b")} == {1}


def test_grammar_that_cannot_be_compiled_is_told_by_the_step() -> None:
    w = DraftWorld(num_blocks=40)
    w.run(job("a", 20))
    for _ in range(3):
        w.step_with_drafts()

    def refuse(_: object) -> bool:
        raise InvalidRequestError("grammar: no", field="grammar")

    assert w.planner.drafts(refuse) == []


def test_draft_model_that_failed_is_not_asked_again() -> None:
    w = DraftWorld(num_blocks=40)
    j = job("a", 40, max_new=30)
    w.run(j)
    for _ in range(3):
        w.step_with_drafts()
    w.scheduler.lose_draft_model()
    while w.plan():
        w.finish_step()
    assert w.output("a") == plain(j.token_ids, 1, 30)


def test_nothing_is_computed_for_more_sequences_than_may_have_drafts() -> None:
    w = DraftWorld(num_blocks=60, max_batch_size=8, speculation=ALWAYS.model_copy(update={"max_batch_size": 2}))
    jobs = [job(name, 40, max_new=max_new) for name, max_new in (("a", 60), ("b", 60), ("c", 30))]
    for j in jobs:
        w.run(j)
    while w.scheduler.num_sequences == 3:
        w.step_with_drafts()
    assert w.num_computed == 0
    while w.step_with_drafts():
        pass
    assert max(len(event.token_ids) for event in w.tokens_of("b")) > 1, "two may have some"
    for j in jobs:
        assert w.output(j.request_id) == plain(j.token_ids, 1, j.max_new_tokens)


def test_context_beyond_what_the_draft_model_can_see_costs_it_nothing() -> None:
    w = DraftWorld(num_blocks=40, max_draft_len=64)
    w.run(job("b", 90, max_new=10))
    while w.step_with_drafts():
        pass
    assert w.num_computed == 0


@pytest.mark.parametrize("number", [1, 3, 5])
def test_room_is_counted_once_for_a_batch_and_not_at_all_above_the_bound(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    counted: list[int] = []

    class Counting(DraftRoom):
        def of_all(self, sequences: Iterable[Sequence]) -> list[int]:
            rooms = super().of_all(sequences)
            counted.append(len(rooms))
            return rooms

    monkeypatch.setattr(scheduler, "DraftRoom", Counting)
    w = DraftWorld(num_blocks=80, max_batch_size=8, speculation=ALWAYS.model_copy(update={"max_batch_size": 3}))
    for i in range(number):
        w.run(job(f"q{i}", 20, max_new=40))
    for _ in range(3):
        w.step_with_drafts()
    # Once before the step is planned, and once for it.
    assert counted == ([number] * 6 if number <= 3 else [])


def test_nobody_asks_for_room_when_nothing_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[int]:
        raise AssertionError("asked in vain")

    monkeypatch.setattr(DraftRoom, "of_all", refuse)
    w = World(num_blocks=40)
    w.run(job("a", 20, max_new=10))
    w.plan()
    while w.step:
        w.follow()
        w.finish_step()
    assert sum(len(event.token_ids) for event in w.tokens_of("a")) == 9


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(2, 40), st.integers(0, 2), st.integers(1, 2)), max_size=5),
    st.integers(9, 14),
    st.integers(0, 40),
    st.data(),
)
def test_outputs_are_those_of_plain_decoding_whatever_else_happens(
    shapes: list[tuple[int, int, int, int]], num_blocks: int, reserve_tokens: int, data: st.DataObject
) -> None:
    """Shared prompts, forks, prompts computed here, preemptions and cancelled requests."""
    w = DraftWorld(num_blocks=num_blocks, reserve_tokens=reserve_tokens)
    waiting = [
        job(f"q{i}", num_tokens, max_new=max_new, family="f" if family else None, n=n)
        for i, (num_tokens, max_new, family, n) in enumerate(shapes)
    ]
    jobs, firsts, cancelled = list(waiting), dict[str, int](), set[str]()
    for _ in range(1000):
        if waiting:
            j = waiting[0]
            if data.draw(st.booleans()):
                w.submit(waiting.pop(0))
                firsts.update({b.request_id: next_token(list(j.token_ids)) for b in j.branches})
            elif isinstance(w.reserve(j), int):
                if data.draw(st.booleans()):
                    w.compute(w.planner.catch_up(idle=True))
                w.commit(key(j.request_id), *[1] * len(j.branches))
                firsts.update({b.request_id: 1 for b in waiting.pop(0).branches})
        if not data.draw(st.integers(0, 40)) and firsts:
            name = data.draw(st.sampled_from(sorted(firsts)))
            cancelled.add(name)
            w.scheduler.cancel(key(name))
            w.settle()
        if not w.step_with_drafts() and not waiting and not w.scheduler.num_sequences:
            break
    w.assert_empty()
    assert w.planner._ahead == {} and w.scheduler.speculation._followers == {}, "nothing is kept of who has left"
    for j in jobs:
        for branch in j.branches:
            name = branch.request_id
            wanted = [] if firsts[name] == STOP else plain(j.token_ids, firsts[name], j.max_new_tokens)
            output = w.output(name)
            assert output == (wanted[: len(output)] if name in cancelled else wanted)


# How many -------------------------------------------------------------------------------------------------------------


def run_policy(policy: ModelPolicy, num_steps: int, chance: float, cost: float) -> list[int]:
    """Tokens drafted in each step, where each costs so much of a plain step."""
    drafted = []
    for _ in range(num_steps):
        chances = [chance**i for i in range(1, 8)]
        number = policy.wanted(100, [chances], 1.04)
        policy.stepped(1, 100, number, 0.01 * (1 + cost * number))
        drafted.append(number)
    return drafted


def test_cheap_model_that_is_mostly_right_drafts_much_and_a_costly_one_little() -> None:
    cheap = run_policy(ModelPolicy(7, always=False), 60, 0.9, 0.1)
    costly = run_policy(ModelPolicy(7, always=False), 200, 0.9, 0.6)
    assert cheap[0] == 0, "nothing is known of plain steps"
    assert set(cheap[-20:]) == {7} and max(costly[-20:]) <= 3


def test_model_that_costs_more_than_it_saves_is_only_tried_now_and_then() -> None:
    policy = ModelPolicy(7, always=False)
    drafted = run_policy(policy, 1500, 0.5, 1.0)
    assert 0 < sum(number > 0 for number in drafted[100:]) < 0.03 * 1400
    assert max(drafted[100:]) <= 2


def test_kv_of_a_model_that_does_not_pay_is_not_kept_up() -> None:
    policy = ModelPolicy(4, always=False)
    for step in range(TRY_AGAIN + 1):
        assert policy.keeps_up == (step < KEEPS_UP or step >= TRY_AGAIN)
        policy.stepped(1, 100, 0, 0.01)
    assert policy.wanted(100, [[0.01] * 4], 1.04) == 2, "times may have changed"


def test_model_that_cannot_be_tried_is_not_kept_up_for_that_for_ever() -> None:
    policy = ModelPolicy(4, always=False)
    kept_up = []
    for _ in range(20 * TRY_AGAIN):
        kept_up.append(policy.keeps_up)
        policy.stepped(1, 100, 0, 0.01)
    assert sum(kept_up) < 0.08 * len(kept_up)
    assert any(kept_up[-TRY_AGAIN:]), "it may be possible again"


@pytest.mark.parametrize("rooms", [(3, 0), (2, 5)])
def test_every_sequence_may_have_room_of_its_own(rooms: tuple[int, int]) -> None:
    policy = ModelPolicy(4, always=True)
    assert policy.wanted(100, [[0.5] * room for room in rooms], 2.0) == min(4, max(rooms))
