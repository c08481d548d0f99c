"""Several outputs of one hand-off at the decode worker: room for all or none, shared blocks, and lives of their own."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.sequences import CancelReservation, Forget, NoRoom, SequenceState, follows
from kv_transfer.messages import ENDED
from pdserve.errors import InternalError, InvalidRequestError
from pdserve.testing.decode_world import STOP, World, job, key
from pdserve.types import Fork, GenerationJob, HandoffId
from pdserve.worker.events import JobFailed, StepTokens

ALL = [key("a"), key("a-1"), key("a-2")]


def begin(w: World, num_tokens: int = 40, *first_tokens: int, max_new: int = 8, **rest: object) -> None:
    """Three outputs of one prompt that run."""
    held = w.reserve(job("a", num_tokens, max_new=max_new, n=3, **rest))  # type: ignore[arg-type]
    assert isinstance(held, int)
    w.commit(key("a"), *(first_tokens or (1, 2, 3)))


def test_branches_share_the_full_blocks_and_copy_the_one_that_is_not() -> None:
    w = World(num_blocks=32)
    begin(w, 40)
    tables = [w.blocks.ids(k) for k in ALL]
    assert {table[:2] for table in tables} == {tables[0][:2]}, "two full blocks, the same ones"
    assert len({table[2] for table in tables}) == 3
    assert w.copies == [(tables[0][2], tables[1][2]), (tables[0][2], tables[2][2])], "one of them needs no copy"
    assert w.blocks.num_used == 2 + 3 * 1, "a shared block counts once"
    chunks = w.plan()
    assert [(c.key, c.token_ids, c.start, c.output_index) for c in chunks] == [
        (name, (token,), 40, 1) for name, token in zip(ALL, (1, 2, 3), strict=True)
    ]
    w.finish_step()
    w.run_steps(6)
    for name in ("a", "a-1", "a-2"):
        assert [t.first_index for t in w.tokens_of(name)] == list(range(1, 8))
        assert {t.local_prefill_tokens for t in w.tokens_of(name)} == {0}
    assert w.scheduler.num_held_tokens == 0 and sorted(w.finished) == ALL
    w.assert_empty()


def test_load_counts_the_full_blocks_of_the_prompt_once_while_any_output_runs() -> None:
    w = World(num_blocks=32)
    begin(w, 40)
    assert w.scheduler.num_running_tokens == 32 + 3 * 8
    w.run_steps(1)
    assert w.scheduler.num_running_tokens == 32 + 3 * 9
    w.scheduler.cancel(key("a"))
    assert w.scheduler.num_running_tokens == 32 + 2 * 9
    w.scheduler.cancel(key("a-2"))
    assert w.scheduler.num_running_tokens == 32 + 9
    w.run(job("other", 40, max_new=8))
    assert w.scheduler.num_running_tokens == 32 + 9 + 40, "another request is another prompt"
    w.run_steps(7)
    w.assert_empty()


def test_prompt_that_ends_with_a_block_is_shared_whole_and_nothing_is_copied() -> None:
    w = World(num_blocks=32, reserve_tokens=0)
    begin(w, 48)
    assert w.copies == [] and w.blocks.num_used == 3, "the outputs have no block yet"
    w.run_steps(1)
    assert w.blocks.num_used == 3 + 3
    w.run_steps(6)
    w.assert_empty()


def test_prefix_that_is_here_already_is_shared_too_and_counted_once() -> None:
    w = World(num_blocks=32)
    w.run(job("before", 64, family="f"))
    w.run_steps(7)
    assert w.reserve(job("a", 70, n=3, family="f")) == 64
    w.commit(key("a"), 1, 2, 3)
    assert w.scheduler.num_held_tokens == 64
    w.run_steps(7)
    w.assert_empty()


def test_room_is_given_for_all_outputs_or_for_none() -> None:
    w = World(num_blocks=5, reserve_tokens=0)
    w.run(job("other", 5, max_new=2))
    assert isinstance(w.reserve(job("a", 40, n=3)), NoRoom) and w.blocks.num_used == 1
    w.run_steps(1)
    assert w.reserve(job("a", 40, n=3)) == 0 and w.blocks.num_used == 5
    w.release(key("a"))
    w.assert_empty()
    w = World(num_blocks=32, max_batch_size=4)
    w.run(job("one"))
    w.run(job("two"))
    assert isinstance(w.reserve(job("a", n=3)), NoRoom), "three places in the batch"
    w.scheduler.cancel(key("one"))
    w.settle()
    assert isinstance(w.reserve(job("a", n=3)), int)
    assert isinstance(w.reserve(job("late")), NoRoom), "all four are taken, although nothing of it has come"


@pytest.mark.parametrize(("w", "n"), [(World(num_blocks=100, max_batch_size=4), 5), (World(num_blocks=5), 4)])
def test_more_outputs_than_ever_fit_together_are_refused_for_good_and_fit_alone(w: World, n: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"{n} outputs") as error:
        w.reserve(job("a", 40, n=n))
    assert error.value.field == "job.forks"
    w.assert_empty()
    for branch in job("a", 40, n=n).branches:
        w.run(branch)
        w.run_steps(7)
    w.assert_empty()


def test_name_that_is_here_already_is_refused() -> None:
    w = World(num_blocks=32)
    w.run(job("a-1"))
    with pytest.raises(InvalidRequestError, match="a-1 is here already"):
        w.reserve(job("a", n=3))
    assert w.scheduler.num_sequences == 1


def test_branch_that_its_first_token_has_ended_does_not_begin() -> None:
    for first_tokens in ((ENDED, 2, 3), (1, ENDED, 3), (1, 2, ENDED), (ENDED, ENDED, 3), (STOP, 2, STOP)):
        w = World(num_blocks=32)
        begin(w, 40, *first_tokens)
        alive = [name for name, token in zip(ALL, first_tokens, strict=True) if token not in (ENDED, STOP)]
        assert [c.key for c in w.plan()] == alive
        assert sorted(w.finished) == [name for name in ALL if name not in alive]
        w.finish_step()
        assert w.blocks.num_used == 2 + len(alive)
        w.run_steps(6)
        assert sorted(w.finished) == ALL
        w.assert_empty()


def test_first_token_that_does_not_exist_ends_its_output_and_no_step_of_others() -> None:
    w = World(num_blocks=32)
    begin(w, 40, 1, 1000, 3)
    assert [c.key for c in w.plan()] == [ALL[0], ALL[2]]
    (failure,) = w.of("a-1")
    assert isinstance(failure, JobFailed) and (failure.code, failure.retryable) == ("handoff_failed", True)
    assert w.finished == [ALL[1]]


def test_reservation_is_given_up_with_the_last_branch_that_is_unwanted() -> None:
    for order in permutations(ALL):
        w = World(num_blocks=32)
        w.reserve(job("a", 40, n=3))
        for name in order[:2]:
            w.scheduler.cancel(name)
            w.scheduler.cancel(name)
            w.settle()
        assert w.cancelled_reservations == set()
        assert key("a") in w.held, "the KV comes into its blocks, whoever wants it"
        assert w.blocks.num_used == 3 + (order[2] != key("a")), "the own blocks of an unwanted fork are free at once"
        w.scheduler.supersede(order[2])
        w.settle()
        assert w.cancelled_reservations == {key("a")}
        w.release(key("a"))
        assert w.events == [] and w.finished == []
        w.assert_empty()


def test_branches_dropped_before_the_commit_do_not_begin_and_the_others_do() -> None:
    for dropped in (ALL[:1], ALL[1:2], ALL[:2], ALL[1:]):
        w = World(num_blocks=32)
        w.reserve(job("a", 40, n=3))
        for name in dropped:
            w.scheduler.cancel(name)
        w.settle()
        w.commit(key("a"), 1, 2, 3)
        assert [c.key for c in w.plan()] == [name for name in ALL if name not in dropped]
        assert sorted(w.finished) == dropped
        w.finish_step()
        w.run_steps(6)
        w.assert_empty()


def test_all_branches_dropped_while_the_commit_is_on_its_way_decode_nothing() -> None:
    w = World(num_blocks=32)
    w.reserve(job("a", 40, n=3))
    w.scheduler.router_lost("r1")
    w.settle()
    assert w.cancelled_reservations == {key("a")}
    w.commit(key("a"), 1, 2, 3)
    assert w.plan() == [] and sorted(w.finished) == ALL
    w.assert_empty()


@pytest.mark.parametrize("order", list(permutations(ALL)))
def test_branches_end_in_any_order_and_what_they_share_goes_with_the_last(order: tuple[HandoffId, ...]) -> None:
    w = World(num_blocks=32)
    begin(w, 40, max_new=30)
    for i, name in enumerate(order):
        w.run_steps(2)
        w.scheduler.cancel(name)
        w.settle()
        assert w.blocks.num_used == (2 + (2 - i) * 3 if i < 2 else 0)
    w.assert_empty()
    assert w.run(job("next turn", 40, family="a")) == 32, "and can be found afterwards"


def test_next_turn_finds_the_answer_of_each_branch() -> None:
    w = World(num_blocks=64)
    begin(w, 40, 11, 12, 13, max_new=25)
    w.run_steps(24)
    w.assert_empty()
    for first_token in (11, 12, 13):
        said = (*job("a", 40).token_ids, first_token, *[7] * 24)
        again = replace(job("again"), token_ids=said, num_prompt_tokens=len(said))
        assert w.reserve(again) == 64
        w.release(key("again"))


def test_branch_gives_way_and_comes_back_beside_those_that_it_shares_blocks_with() -> None:
    """O-PRE-1."""
    w = World(num_blocks=8, reserve_tokens=0)
    begin(w, 40, max_new=40)
    assert w.blocks.num_used == 5
    states = set()
    for _ in range(200):
        w.run_steps(1)
        states.add(w.scheduler.state_of(key("a-2")))
        if not w.scheduler.num_sequences:
            break
    assert SequenceState.PREEMPTED in states and w.scheduler.num_preemptions >= 1
    for name in ("a", "a-1", "a-2"):
        assert [t.first_index for t in w.tokens_of(name)] == list(range(1, 40)), "each token once"
        assert {t.local_prefill_tokens for t in w.tokens_of(name)} == {0}
    w.assert_empty()


def test_kv_of_a_lossy_codec_is_shared_by_its_own_branches_only() -> None:
    w = World(num_blocks=32)
    w.reserve(job("a", 40, n=3))
    w.commit(key("a"), 1, 2, 3, exact=False)
    w.run_steps(7)
    w.assert_empty()
    assert w.reserve(job("other", 40, family="a")) == 0


def test_salted_prefix_is_found_by_equal_salt_alone() -> None:
    w = World(num_blocks=64)
    w.run(job("a", 64, family="f", cache_salt="x"))
    w.run_steps(7)
    held = {}
    for name, salt in (("none", ""), ("other", "y"), ("same", "x")):
        held[name] = w.reserve(job(name, 64, family="f", cache_salt=salt, n=2))
        w.release(key(name))
    assert held == {"none": 0, "other": 0, "same": 48}


# Priority -------------------------------------------------------------------------------------------------------------


def run_both(w: World, first: int, second: int) -> list[str]:
    """Two outputs, of these priorities, that do not fit together to their ends; gives who gave way."""
    w.run(job("first", 40, max_new=48, priority=first))
    w.run(job("second", 40, max_new=48, priority=second))
    preempted = []
    while w.scheduler.num_sequences:
        w.run_steps(1)
        for name in ("first", "second"):
            if w.scheduler.state_of(key(name)) is SequenceState.PREEMPTED and name not in preempted:
                preempted.append(name)
    for name in ("first", "second"):
        assert [t.first_index for t in w.tokens_of(name)] == list(range(1, 48))
    w.assert_empty()
    return preempted


@pytest.mark.parametrize(
    ("first", "second", "gives_way"), [(0, 0, "second"), (-1, 5, "second"), (5, -1, "first"), (1, 0, "first")]
)
def test_lowest_priority_gives_way_and_among_equals_the_youngest(first: int, second: int, gives_way: str) -> None:
    assert run_both(World(num_blocks=9, reserve_tokens=16), first, second) == [gives_way]


def test_step_never_computes_what_an_urgent_newcomer_has_pushed_out() -> None:
    w = World(num_blocks=10, max_batch_size=3, reserve_tokens=0)
    w.run(job("old", 48, max_new=40, priority=3))
    w.run(job("older", 32, max_new=40, priority=9))
    w.run(job("urgent", 48, max_new=40, priority=0))
    while w.scheduler.num_sequences:
        chunks = w.plan()
        assert all(w.scheduler.state_of(c.key) is SequenceState.RUNNING for c in chunks)
        w.finish_step()
    assert w.scheduler.num_preemptions > 0
    for name in ("old", "older", "urgent"):
        assert [t.first_index for t in w.tokens_of(name)] == list(range(1, 40))


# Any order ------------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "a-1", "a-2", "b", "b-1", "c"])
OPERATIONS = st.one_of(
    st.tuples(
        st.just("reserve"), st.sampled_from("abc"), st.integers(1, 60), st.integers(2, 40), st.integers(0, 2),
    ),
    st.tuples(
        st.just("commit"), st.sampled_from("abc"), st.tuples(*[st.sampled_from([1, 2, STOP, ENDED])] * 3)
    ),
    st.tuples(st.just("release"), st.sampled_from("abc")),
    st.tuples(st.just("retry alone"), st.sampled_from(["a-1", "b-1"]), st.integers(1, 60)),
    st.tuples(st.just("cancel"), NAMES),
    st.tuples(st.just("supersede"), NAMES),
    st.tuples(st.just("tick"), st.floats(0, 5)),
    st.tuples(st.just("plan")),
    st.tuples(st.just("follow")),
    st.tuples(st.just("step"), st.sampled_from([7, STOP])),
    st.tuples(st.just("steps"), st.integers(1, 40)),
    st.tuples(st.just("step_failed")),
)  # fmt: skip
NUM_OUTPUTS = {"a": 3, "b": 2, "c": 1}


class Driver:
    """Applies operations as a router and a transfer layer would, and knows what has to come of them."""

    def __init__(self, reserve_tokens: int) -> None:
        self.w = World(num_blocks=14, max_batch_size=6, reserve_tokens=reserve_tokens)
        self.attempts: dict[str, int] = {}
        """Of every branch."""
        self.handoffs: dict[str, HandoffId] = {}
        """Newest reservation of each job that is neither committed nor released."""
        self.committed: set[HandoffId] = set()
        self.unwanted: dict[HandoffId, int] = {}
        """Number of events at the moment since when no more may come."""

    def newest(self, name: str) -> HandoffId:
        return key(name, self.attempts.get(name, 0))

    def drop(self, *names: HandoffId) -> None:
        for name in names:
            self.unwanted.setdefault(name, len(self.w.events))

    def supersede(self, name: str) -> None:
        self.w.scheduler.supersede(self.newest(name))
        self.w.settle()
        self.drop(self.newest(name))

    def reserve(self, new: GenerationJob) -> None:
        try:
            fits = isinstance(self.w.reserve(new), int)
        except InvalidRequestError:
            fits = False
        if fits:
            self.handoffs[new.request_id] = key(new.request_id, new.attempt)

    def apply(self, kind: str, args: list[object]) -> None:
        w = self.w
        if kind == "reserve":
            name, num_tokens, max_new, priority = args
            names = [str(name), *(f"{name}-{i}" for i in range(1, NUM_OUTPUTS[str(name)]))]
            if str(name) in self.handoffs or any(n in self.handoffs for n in names):
                return
            for n in names:
                self.supersede(n)
                self.attempts[n] = self.attempts.get(n, 0) + 1
            forks = tuple(Fork(request_id=n, attempt=self.attempts[n], seed=0) for n in names[1:])
            new = job(
                str(name), int(str(num_tokens)), attempt=self.attempts[str(name)], max_new=int(str(max_new)),
                deadline=w.now + 20, priority=int(str(priority)), family="same",
            )  # fmt: skip
            self.reserve(replace(new, forks=forks))
        elif kind == "retry alone":
            name, num_tokens = str(args[0]), int(str(args[1]))
            if name not in self.handoffs and name in self.attempts:
                self.supersede(name)
                self.attempts[name] += 1
                self.reserve(job(name, num_tokens, attempt=self.attempts[name], deadline=w.now + 20, family="same"))
        elif kind == "commit":
            self.commit(str(args[0]), [int(str(t)) for t in args[1]])  # type: ignore[attr-defined]
        elif kind == "release":
            self.release(str(args[0]))
        elif kind == "cancel":
            w.scheduler.cancel(self.newest(str(args[0])))
            w.settle()
            self.drop(self.newest(str(args[0])))
        elif kind == "supersede":
            self.supersede(str(args[0]))
        elif kind == "tick":
            w.now += float(str(args[0]))
            w.scheduler.tick(w.now)
            w.settle()
        elif kind == "plan" and not w.step:
            assert len(w.plan()) <= w.max_batch_size
        elif kind == "follow" and w.step and not w.following:
            w.follow()
        elif kind == "step" and w.step:
            token = int(str(args[0]))
            goes_on = follows(w.following, [token] * len(w.following))
            w.finish_step(token)
            if w.step and not goes_on:
                w.skip_step()
        elif kind == "steps" and not w.step:
            w.run_steps(int(str(args[0])))
        elif kind == "step_failed" and w.step:
            w.step = w.following = []
            w.scheduler.step_failed(InternalError("boom"))
            w.settle()

    def commit(self, name: str, tokens: list[int]) -> None:
        handoff = self.handoffs.pop(name, None)
        if handoff is None:
            return
        branches = [s.key for s in self.w.scheduler._residents.handoffs[handoff]]
        self.w.commit(handoff, *tokens[: len(branches)])
        self.committed.update(branches)
        self.drop(*(k for k, t in zip(branches, tokens, strict=False) if t in (ENDED, STOP)))

    def release(self, name: str) -> None:
        handoff = self.handoffs.pop(name, None)
        if handoff is not None:
            branches = [s.key for s in self.w.scheduler._residents.handoffs[handoff]]
            self.w.release(handoff)
            self.drop(*branches)


@settings(max_examples=300, deadline=None)
@given(st.lists(OPERATIONS, max_size=50), st.sampled_from([0, 16, 64]))
def test_any_order_of_events_loses_nothing_and_ends_each_branch_once(
    operations: list[tuple[str, object]], reserve_tokens: int
) -> None:
    d = Driver(reserve_tokens)
    w = d.w
    for kind, *args in operations:
        d.apply(kind, args)
    for job_name in list(d.handoffs):
        d.release(job_name)
    while w.step:
        w.finish_step()
    w.run_steps(250)
    w.assert_empty()
    assert len(w.finished) == len(set(w.finished)) and set(w.finished) == d.committed
    for name in w.reserved:
        events = [(i, e) for i, (_, e) in enumerate(w.events) if e.id == name]
        assert all(i < d.unwanted.get(name, len(w.events)) for i, _ in events), f"{name} was given up and got more"
        tokens = [e for _, e in events if isinstance(e, StepTokens)]
        assert [t.first_index for t in tokens] == list(range(1, len(tokens) + 1)), "a gap or a repeat"
        ends = [e for _, e in events if isinstance(e, JobFailed) or e.finish_reason is not None]
        assert len(ends) <= 1 and (not ends or ends[0] == events[-1][1])
        assert ends or name in d.unwanted or name not in d.committed, f"{name} never ended"


def test_actions_of_a_dropped_branch_are_in_order() -> None:
    """The copy comes before the blocks that it reads are given back."""
    w = World(num_blocks=32)
    w.reserve(job("a", 40, n=3))
    w.scheduler.cancel(key("a"))
    w.scheduler.commit(key("a"), (1, 2, 3))
    kinds = [type(action) for action in w.scheduler.take_actions()]
    assert kinds.index(Forget) == 2 and CancelReservation not in kinds
